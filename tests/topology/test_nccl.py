"""NCCL's topology file: real ones of two clouds, who is near whom, and what a cluster says otherwise."""

import pytest

from lightning_megascale.topology.describe import load_cluster
from lightning_megascale.topology.nccl import read_nccl_node
from tests.topology.real_files import real

NODE = """<system version="1">
  <cpu numaid="0">
    <pci busid="a:0" class="0x060400" link_speed="16 GT/s" link_width="16">
      <pci busid="g0" class="0x030200" link_speed="16 GT/s" link_width="16"/>
      <pci busid="n0" class="0x020700" link_speed="16 GT/s" link_width="16"/>
    </pci>
    <pci busid="g1" class="0x030200" link_speed="16 GT/s" link_width="16"/>
  </cpu>
  <cpu numaid="1">
    <pci busid="g2" class="0x030200"/>
    <pci busid="n1" class="0x020000"/>
  </cpu>
</system>
"""


def written(tmp_path, text):
    (tmp_path / "topo.xml").write_text(text)
    return tmp_path / "topo.xml"


def test_a_gpu_is_near_the_nic_below_its_switch_else_of_its_cpu(tmp_path):
    node = read_nccl_node(written(tmp_path, NODE))
    assert node.gpus == ("g0", "g1", "g2") and node.nics == ("n0", "n1")
    assert node.near == ((0,), (0,), (1,))
    assert node.nic_gb_per_s == (pytest.approx(16 * 16 * 128 / 130 / 8), float("inf"))


@pytest.mark.parametrize(("name", "slot"), [("azure_ndv4-topo.xml", 31.5), ("azure_ndv5-topo.xml", 63.0)])
def test_nodes_of_a_cloud_have_eight_gpus_each_with_a_nic_at_hand(name, slot):
    node = read_nccl_node(real(name))
    assert len(node.gpus) == len(node.nics) == 8 and all(near for near in node.near)
    assert node.nic_gb_per_s == pytest.approx([slot] * 8, abs=0.05)


def test_a_cluster_of_such_nodes_says_the_same():
    assert read_nccl_node(real("azure_ndv5-topo.xml")).differences(load_cluster("h100_1024")) == []
    slow = read_nccl_node(real("azure_ndv4-topo.xml")).differences(load_cluster("h100_1024"))
    assert slow[0] == "node.nic_gb_per_s=50 of NIC 0: its slot carries 31.5 GB/s" and len(slow) == 8


def eight(nic_of=range(8)):
    """A node whose GPU i stands with a NIC below switch i; ``nic_of`` says in which order the NICs come, None that there is none."""
    ports = ["" if number is None else f'<pci busid="n{number}" class="0x0207"/>' for number in nic_of]
    pairs = [f'<pci busid="s{i}"><pci busid="g{i}" class="0x0302"/>{port}</pci>' for i, port in enumerate(ports)]
    return f"<system><cpu>{''.join(pairs[:4])}</cpu><cpu>{''.join(pairs[4:])}</cpu></system>"


def test_another_node_is_told_apart(tmp_path):
    cluster = load_cluster("h100_1024")
    assert read_nccl_node(written(tmp_path, eight())).differences(cluster) == []
    assert read_nccl_node(written(tmp_path, NODE)).differences(cluster) == ["node.gpus=8: the file has 3 GPUs"]
    seven = read_nccl_node(written(tmp_path, eight([0, 1, 2, 3, 4, 5, 6, None])))
    assert seven.differences(cluster) == ["node.nics=8: the file has 7 NICs"] and seven.near[7] == (4, 5, 6)  # those of its CPU


def test_a_gpu_that_is_near_another_nic_is_named(tmp_path):
    text = eight([None, 1, 2, 3, 4, 5, 6, 7]).replace("</system>", '<cpu><pci busid="n8" class="0x0207"/></cpu></system>')
    found = read_nccl_node(written(tmp_path, text)).differences(load_cluster("h100_1024"))
    assert found[0] == "GPU 1 uses NIC 1 in the cluster, and NIC 0 is nearest in the file" and len(found) == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<system>\n<cpu>\n</system>", r"topo.xml:3: is no XML at column"),
        ("<graphs/>", "expected <system>"),
        ("<system><cpu/></system>", "has no GPU"),
        (NODE.replace("16 GT/s", "fast"), "link_speed='fast' link_width='16'; expected such as '16 GT/s'"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        read_nccl_node(written(tmp_path, text))
