"""Slurm's topology.conf, ibnetdiscover's dump, Kubernetes labels: fabrics read, fabrics made clusters, and every malformed line named."""

import json
from collections import Counter

import numpy as np
import pytest

from lightning_megascale.topology.describe import load_cluster
from lightning_megascale.topology.fabric import FabricPort, FabricSwitch
from lightning_megascale.topology.infiniband import read_ibnetdiscover
from lightning_megascale.topology.kubernetes import read_node_labels
from lightning_megascale.topology.readers import read_fabric
from lightning_megascale.topology.slurm import read_slurm
from tests.topology.real_files import real


def written(tmp_path, text, name="topology.conf"):
    path = tmp_path / name
    path.write_text(text)
    return path


TREE = """\
# two leaves below one spine, a third beside it
SwitchName=core Switches=spine,leaf3
switchname=spine switches=leaf[1-2] LinkSpeed=100  # any case
SwitchName=leaf1 Nodes=n[001-002],n[004]
SwitchName=leaf2 \\
    Nodes=n[005-006]

SwitchName=leaf3 Nodes=n007
SwitchName=spare
"""


def test_a_tree_with_holes_comments_and_continued_lines(tmp_path):
    fabric = read_slurm(written(tmp_path, TREE))
    assert [(node.name, node.ports) for node in fabric.nodes] == [
        ("n001", (FabricPort("leaf1"),)),
        ("n002", (FabricPort("leaf1"),)),
        ("n004", (FabricPort("leaf1"),)),
        ("n005", (FabricPort("leaf2"),)),
        ("n006", (FabricPort("leaf2"),)),
        ("n007", (FabricPort("leaf3"),)),
    ]
    assert fabric.switches == (
        FabricSwitch("core", 2),
        FabricSwitch("spine", 1, "core"),
        FabricSwitch("leaf1", 0, "spine"),
        FabricSwitch("leaf2", 0, "spine"),
        FabricSwitch("leaf3", 0, "core"),
    )
    assert fabric.notes == ("1 switches without nodes or switches left out: spare",)


def test_a_tree_becomes_a_cluster_with_the_speeds_of_another(tmp_path):
    fabric = read_slurm(written(tmp_path, TREE))
    cluster = fabric.cluster(load_cluster("h100_10240"))
    assert cluster.num_gpus == 48 and [level.name for level in cluster.levels] == ["nvlink", "leaf", "spine", "row"]
    assert cluster.levels_between(0, np.array([7, 8, 24, 40])).tolist() == [0, 1, 2, 3]
    uplinks = {switch.name: switch.uplink_gb_per_s for switch in cluster.switches}
    assert uplinks == {"core": 0, "spine": 5 * 400, "leaf1": 3 * 400, "leaf2": 2 * 400, "leaf3": 400}
    part = fabric.only("n00[1-5]").cluster(load_cluster("h100_1024"))
    assert [switch.name for switch in part.switches] == ["core", "spine", "leaf1", "leaf2"]
    assert [level.name for level in part.levels] == ["nvlink", "leaf", "spine", "tier2"]
    with pytest.raises(ValueError, match=r"nodes='x\*': matches none of the 6 nodes of .*, such as n001, n002, n004"):
        fabric.only("x*")
    with pytest.raises(ValueError, match="like='local': its nodes have no NICs"):
        fabric.cluster(load_cluster("local"))
    with pytest.raises(ValueError, match="domains: node 'n001' has none"):
        fabric.cluster(load_cluster("h100_1024"), domains={})


def test_an_unknown_uplink_has_the_oversubscription_of_its_level(tmp_path):
    chain = "SwitchName=d Switches=c\nSwitchName=c Switches=b\nSwitchName=b Switches=a\nSwitchName=a Nodes=n[1-2]\n"
    cluster = read_slurm(written(tmp_path, chain)).cluster(load_cluster("h100_10240"))
    assert {switch.name: switch.uplink_gb_per_s for switch in cluster.switches} == {"d": 0, "c": 400, "b": 800, "a": 800}


BLOCKS = """\
BlockName=rack1 Nodes=a[1-2]
BlockName=rack2 Nodes=b[1-2]
BlockName=rack3 Nodes=c[1-2]
BlockSizes=2,4,8
"""


def test_blocks_are_nvlink_domains_below_their_aggregates(tmp_path):
    fabric = read_slurm(written(tmp_path, BLOCKS))
    assert fabric.switches == (
        FabricSwitch("rack1", 0, "aggregated4.0"),
        FabricSwitch("rack2", 0, "aggregated4.0"),
        FabricSwitch("rack3", 0, "aggregated4.1"),
        FabricSwitch("aggregated4.0", 1, "all"),
        FabricSwitch("aggregated4.1", 1, "all"),
        FabricSwitch("all", 2),
    )
    others = np.array([4, 8, 16])
    assert fabric.cluster(load_cluster("gb200_nvl72")).levels_between(0, others).tolist() == [0, 2, 3]
    # Nodes of eight H100 have an NVLink domain each, whatever Slurm calls a block.
    assert fabric.cluster(load_cluster("h100_1024")).levels_between(0, 2 * others).tolist() == [1, 2, 3]
    named = {node.name: "one" for node in fabric.nodes}
    assert fabric.cluster(load_cluster("gb200_nvl72"), domains=named).levels_between(0, others).tolist() == [0, 0, 0]


def test_one_block_is_a_cluster(tmp_path):
    fabric = read_slurm(written(tmp_path, "BlockName=rack1 Nodes=a[1-2]\n"))
    assert fabric.switches == (FabricSwitch("rack1", 0),)
    assert fabric.cluster(load_cluster("gb200_nvl72")).levels_between(0, 4) == 0


@pytest.mark.parametrize(
    ("text", "number", "line", "expected"),
    [
        ("# c\nSwitchName=a Nodes\n", 2, "SwitchName=a Nodes", "KEY=VALUE, not 'Nodes'"),
        ("SwitchName=a Nodes=\n", 1, "SwitchName=a Nodes=", "KEY=VALUE, not 'Nodes='"),
        ("\nSwitch=a Nodes=n1\n", 2, "Switch=a Nodes=n1", "SwitchName=NAME with Nodes=HOSTLIST or Switches=HOSTLIST"),
        ("SwitchName=a Node=n1\n", 1, "SwitchName=a Node=n1", "SwitchName=NAME with"),
        ("SwitchName=a Nodes=n1 nodes=n2\n", 1, "SwitchName=a Nodes=n1 nodes=n2", "nodes once"),
        ("SwitchName=a Nodes=n[1-\n", 1, "SwitchName=a Nodes=n[1-", "a hostlist such as node[001-016,018]: hostlist='n[1-': a bracket"),
        ("# c\nSwitchName=a\\\n Nodes=n[1-\n", 2, "SwitchName=a  Nodes=n[1-", "a hostlist such as"),
        ("SwitchName=a Nodes=n1 Switches=b\n", 1, "SwitchName=a Nodes=n1 Switches=b", "Nodes (a leaf) or Switches, not both"),
        ("SwitchName=a Nodes=n1\n\nSwitchName=a Nodes=n2\n", 3, "SwitchName=a Nodes=n2", "'a' is declared in line 1"),
        ("SwitchName=a Nodes=n[1-3]\nSwitchName=b Nodes=n3\n", 2, "SwitchName=b Nodes=n3", "'n3' below one parent; line 1 names it too"),
        ("SwitchName=a Nodes=n1\nSwitchName=b Switches=a,c\n", 2, "SwitchName=b Switches=a,c", "no line says SwitchName=c"),
        ("SwitchName=a Switches=b\nSwitchName=b Switches=a\n", 1, "SwitchName=a Switches=b", "a tree: 'a' lies above itself"),
        ("SwitchName=a Nodes=n1\nBlockName=b Nodes=n2\n", 2, "BlockName=b Nodes=n2", "of switches (tree) or of blocks, not both"),
        ("BlockSizes=2\nSwitchName=a Nodes=n1\n", 2, "SwitchName=a Nodes=n1", "of switches (tree) or of blocks, not both"),
        ("BlockName=a\n", 1, "BlockName=a", "BlockName=NAME Nodes=HOSTLIST"),
        ("BlockName=a Nodes=n1\nBlockName=b Nodes=n1\n", 2, "BlockName=b Nodes=n1", "'n1' below one parent"),
        ("BlockName=a Nodes=n1\nBlockSizes=4,12\n", 2, "BlockSizes=4,12", "each N a power of two times the one before"),
        ("BlockName=a Nodes=n1\nBlockSizes=4,x\n", 2, "BlockSizes=4,x", "each N a power of two times the one before"),
        ("BlockSizes=4\nBlockName=a Nodes=n1\nBlockSizes=8\n", 3, "BlockSizes=8", "one BlockSizes, the first is in line 1"),
    ],
)
def test_a_malformed_line_of_slurm_is_named(tmp_path, text, number, line, expected):
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_slurm(path)
    assert str(error.value).startswith(f"{path}:{number}: {line!r}\n  expected: ") and expected in str(error.value)


def test_a_slurm_file_that_declares_nothing(tmp_path):
    with pytest.raises(ValueError, match="declares no switch and no block; expected: SwitchName=NAME"):
        read_slurm(written(tmp_path, "# nothing\nBlockSizes=4\n"))


def section(kind, guid, name, *ports):
    """A section of a dump; a port is (number, peer, peer's name, speed)."""
    lines = [f'vendid=0x2c9\n{kind}\t65 "{guid}"\t\t# "{name}" lid 1 lmc 0']
    lines += [f'[{number}]\t"{peer}"[1]({peer[2:]}) \t\t# "{called}" lid 7 {speed}' for number, peer, called, speed in ports]
    return "\n".join(lines) + "\n\n"


def dump():
    """Two leaves of two spines and a third leaf of one; node a on both leaves, b on the first, c on the third, a manager on a spine."""
    up = [(20, "S-p", "MF0;spine-1:MQM9701/U1", "4xNDR"), (21, "S-q", "MF0;spine-2:MQM9701/U1", "4xHDR")]
    down = [(number, f"S-{leaf}", f"MF0;leaf-{leaf}:MQM9701/U1", "4xNDR") for number, leaf in enumerate("xyz", start=1)]
    nameless = (9, "H-4", "MT4129 ConnectX7   Mellanox Technologies", "4xNDR")
    return (
        "#\n# Topology file\n#\n\nNon-Chassis Nodes\n"
        + section("Switch", "S-x", "MF0;leaf-x:MQM9701/U1", (1, "H-1", "a mlx5_10", "4xNDR"), (2, "H-2", "b HCA-1", "4xNDR"), nameless, *up)
        + section("Switch", "S-y", "MF0;leaf-y:MQM9701/U1", (1, "H-3", "a mlx5_9", "2xHDR"), *up)
        + section("Switch", "S-z", "MF0;leaf-z:MQM9701/U1", (1, "H-6", "c HCA-1", "4xEDR"), up[0], up[0])
        + section("Switch", "S-p", "MF0;spine-1:MQM9701/U1", (30, "H-5", "manager mlx5_0", "4xHDR"), *down)
        + section("Switch", "S-q", "MF0;spine-2:MQM9701/U1", *down[:2])
        + section("Ca", "H-1", "a mlx5_10", (1, "S-x", "MF0;leaf-x:MQM9701/U1", "4xNDR"))
    )


def test_a_dump_with_rails_spines_that_act_as_one_and_what_is_no_node(tmp_path):
    fabric = read_ibnetdiscover(written(tmp_path, dump()), nodes="?")
    assert [(node.name, node.ports) for node in fabric.nodes] == [
        ("a", (FabricPort("leaf-y", 12.5, "mlx5_9"), FabricPort("leaf-x", 50.0, "mlx5_10"))),  # 9 before 10
        ("b", (FabricPort("leaf-x", 50.0, "HCA-1"),)),
        ("c", (FabricPort("leaf-z", 12.5, "HCA-1"),)),
    ]
    assert fabric.switches == (
        FabricSwitch("leaf-x", 0, "spine-1 and 1 more", 75.0),
        FabricSwitch("leaf-y", 0, "spine-1 and 1 more", 75.0),
        FabricSwitch("leaf-z", 0, "spine-1 and 1 more", 100.0),
        FabricSwitch("spine-1 and 1 more", 1),
    )
    assert fabric.notes == (
        "1 ports without a host's name left out: 'MT4129 ConnectX7 Mellanox Technologies'",
        "1 hosts that do not match '?' left out: manager",
    )
    cluster = fabric.cluster(load_cluster("gb200_nvl72"))
    assert [[nic.gb_per_s for nic in node.nics] for node in cluster.nodes] == [[12.5, 50.0], [50.0], [12.5]]
    assert cluster.levels_between(0, np.array([3, 4, 8])).tolist() == [0, 2, 2]  # GPU 0 hangs on leaf-y
    assert cluster.levels_between(3, np.array([4])).tolist() == [1]


def test_pods_below_cores(tmp_path):
    def link(number, peer):
        return number, f"S-{peer}", f"MF0;{peer}:MQM/U1", "4xNDR"

    text = ""
    for pod in "12":
        text += section("Switch", f"S-l{pod}", f"MF0;l{pod}:MQM/U1", (1, f"H-{pod}", f"n{pod} HCA-1", "4xNDR"), link(2, f"s{pod}"))
        text += section("Switch", f"S-s{pod}", f"MF0;s{pod}:MQM/U1", link(1, f"l{pod}"), link(2, "c1"), link(3, "c2"))
    text += section("Switch", "S-c1", "MF0;c1:MQM/U1", link(1, "s1"), link(2, "s2"))
    text += section("Switch", "S-c2", "MF0;c2:MQM/U1", link(1, "s1"), link(2, "s2"))
    text += section("Switch", "S-far", "MF0;far:MQM/U1")
    fabric = read_ibnetdiscover(written(tmp_path, text))
    assert {(switch.name, switch.tier, switch.up, switch.uplink_gb_per_s) for switch in fabric.switches} == {
        ("l1", 0, "s1", 50.0),
        ("l2", 0, "s2", 50.0),
        ("s1", 1, "c1 and 1 more", 100.0),
        ("s2", 1, "c1 and 1 more", 100.0),
        ("c1 and 1 more", 2, None, None),
    }
    assert fabric.notes == ("1 switches that no node reaches left out: far",)


@pytest.mark.parametrize(
    ("text", "number", "expected"),
    [
        ("# c\nhello\n", 2, 'Switch PORTS "S-GUID" # "NAME"'),
        ('[1] "H-1"[1](1) # "a HCA-1" lid 1 4xNDR\n', 1, "a section first"),
        (section("Switch", "S-1", "s") + '[1] "H-1" # "a HCA-1" lid 1 4xNDR\n', 4, '[PORT] "PEER"[PORT] # "NAME"'),
        (section("Switch", "S-1", "s") + '[1] "H-1"[1](1) # "a HCA-1" lid 1 4xFOO\n', 4, "WIDTHxSPEED"),
        (section("Switch", "S-1", "s") + section("Switch", "S-1", "s"), 5, "each switch once; S-1 has a section already"),
        (section("Switch", "S-1", "s", (1, "S-2", "t", "4xNDR")), 3, "S-2 has none, so the dump is cut off"),
        (section("Ca", "H-1", "a HCA-1"), 3, "at least one switch before the file ends"),
    ],
)
def test_a_malformed_line_of_a_dump_is_named(tmp_path, text, number, expected):
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_ibnetdiscover(path)
    assert str(error.value).startswith(f"{path}:{number}: ") and expected in str(error.value).partition("expected: ")[2]


def test_a_dump_without_the_nodes_asked_for(tmp_path):
    with pytest.raises(ValueError, match=r"nodes='dgx\*' matches no host of a switch \(a, b, c\)"):
        read_ibnetdiscover(written(tmp_path, dump()), nodes="dgx*")


def hosts_on_one_leaf(**ports):
    """A leaf with hosts of so many ports."""
    links = [(host.replace("_", "-"), card) for host, count in ports.items() for card in range(count)]
    return section("Switch", "S-x", "leaf", *((at, f"H-{at}", f"{host} mlx5_{card}", "4xNDR") for at, (host, card) in enumerate(links)))


def test_hosts_with_half_the_ports_or_a_default_name_are_no_nodes(tmp_path):
    path = written(tmp_path, hosts_on_one_leaf(n1=4, n2=4, localhost=4, n3=3, n4=4, manager=2, Ubuntu=4, ubuntu_7=4, login=1))
    fabric = read_fabric(path)
    assert [node.name for node in fabric.nodes] == ["n1", "n2", "n3", "n4", "ubuntu-7"]
    assert fabric.left_out == ("Ubuntu", "localhost", "login", "manager")
    (note,) = fabric.notes
    assert note == (
        "4 hosts that look like no nodes left out: Ubuntu (a system's default name); localhost (a system's default name); "
        "login (ports: 1, of the median host: 4); manager (ports: 2, of the median host: 4)"
    )
    assert fabric.only("n*").left_out == fabric.left_out
    chosen = read_ibnetdiscover(path, nodes="*")  # who says which hosts are nodes is obeyed
    assert len(chosen.nodes) == 9 and chosen.left_out == ()
    assert len(read_fabric(written(tmp_path, hosts_on_one_leaf(a=1, b=1))).nodes) == 2
    with pytest.raises(ValueError, match="hosts=localhost: every host has a system's default name, so nodes cannot be told apart"):
        read_fabric(written(tmp_path, hosts_on_one_leaf(localhost=4)))


def test_a_switch_of_managers_only_is_no_leaf(tmp_path):
    up = [(20, "S-p", "spine", "4xNDR")]
    nodes = [(number, f"H-{number}", f"n{number % 2} mlx5_{number}", "4xNDR") for number in range(8)]
    text = section("Switch", "S-x", "leaf", *nodes, *up)
    text += section("Switch", "S-p", "spine", (1, "H-m", "manager mlx5_0", "4xNDR"), (2, "S-x", "leaf", "4xNDR"))
    fabric = read_fabric(written(tmp_path, text))
    assert fabric.left_out == ("manager",)
    assert fabric.switches == (FabricSwitch("leaf", 0, "spine", 50.0), FabricSwitch("spine", 1))


@pytest.mark.parametrize("make", [lambda: TREE, dump, lambda: labelled(("a", new("1")), ("b", new("1"))), lambda: BLOCKS])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, make):
    plain, marked = written(tmp_path, make(), "plain"), tmp_path / "marked"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert read_fabric(marked).nodes == read_fabric(plain).nodes
    for text in (b"SwitchName=a Nodes=n1", b"# c\nBlockName=a Nodes=n1"):  # on the first line, too
        marked.write_bytes(b"\xef\xbb\xbf" + text)
        assert [node.name for node in read_slurm(marked).nodes] == ["n1"]
    marked.write_bytes(b"\xef\xbb\xbf\xff")
    with pytest.raises(ValueError, match="byte 3 is no UTF-8"):
        read_fabric(marked)


def test_the_format_is_found(tmp_path):
    assert len(read_fabric(written(tmp_path, TREE)).nodes) == 6
    assert len(read_fabric(written(tmp_path, dump())).nodes) == 4  # the manager too, when nothing is said
    assert len(read_fabric(written(tmp_path, "  blockname=x nodes=a[1-9]\n")).nodes) == 9
    path = written(tmp_path, "\n<system version='1'>\n")
    with pytest.raises(ValueError) as error:
        read_fabric(path)
    assert str(error.value).startswith(f"{path}:1: \"<system version='1'>\"\n  expected: a Slurm topology.conf")
    with pytest.raises(ValueError, match="there is no such file"):
        read_fabric(tmp_path / "absent")
    path.write_bytes(b"SwitchName=\xff")
    with pytest.raises(ValueError, match="byte 11 is no UTF-8"):
        read_fabric(path)


def labelled(*nodes):
    return json.dumps({"items": [{"metadata": {"name": name, "labels": labels}} for name, labels in nodes]}, indent=1)


def old(leaf, *above, accelerator=None):
    names = ("leaf", "spine", "core")
    labels = {f"network.topology.nvidia.com/{name}": value for name, value in zip(names, (leaf, *above))}
    return {**labels, **({"network.topology.nvidia.com/accelerator": accelerator} if accelerator else {})}


def new(*tiers, domain=None):
    labels = {f"fabric.topograph.run/tier-{tier}": value for tier, value in enumerate(tiers)}
    return {**labels, **({"accelerator.topograph.run/domain": domain} if domain else {})}


def test_labels_of_kubernetes_nodes(tmp_path):
    nodes = [("a", old("1", "1", accelerator="r1")), ("b", new("1", "1", domain="r1")), ("c", new("2", "1")), ("master", {})]
    nodes.append(("odd", {"fabric.topograph.run/tier-1": "1"}))
    fabric = read_node_labels(written(tmp_path, labelled(*nodes)))
    assert [(node.name, node.ports[0].leaf, node.block) for node in fabric.nodes] == [
        ("a", "tier0.1", "r1"),
        ("b", "tier0.1", "r1"),
        ("c", "tier0.2", None),
    ]
    assert fabric.switches == (FabricSwitch("tier0.1", 0, "tier1.1"), FabricSwitch("tier1.1", 1), FabricSwitch("tier0.2", 0, "tier1.1"))
    assert fabric.notes == ("2 nodes without a leaf's label left out: master, odd",) and fabric.left_out == ("master", "odd")
    assert fabric.cluster(load_cluster("gb200_nvl72")).levels_between(0, np.array([4, 8])).tolist() == [0, 2]


def test_labels_without_a_common_switch_get_one(tmp_path):
    fabric = read_fabric(written(tmp_path, labelled(("a", new("1")), ("b", new("2")))))
    assert fabric.switches == (FabricSwitch("tier0.1", 0, "all"), FabricSwitch("tier0.2", 0, "all"), FabricSwitch("all", 1))
    assert fabric.cluster(load_cluster("h100_1024")).levels_between(0, 8) == 2


@pytest.mark.parametrize(
    ("text", "number", "expected"),
    [
        ('{\n"items": [\n', 3, "JSON (Expecting value): the output of kubectl get nodes -o json"),
        ('{"nodes": []}', 1, "items with metadata.name and metadata.labels"),
        ('{"items": [{"metadata": {}}]}', 1, "items with metadata.name and metadata.labels"),
        ('{"items": []}', 1, "the output of kubectl get nodes -o json"),
        (labelled(("a", {**new("1"), "fabric.topograph.run/tier-2": "3"})), 5, "node 'a': one label for every tier from the leaf up"),
        (labelled(("a", new("1", "x")), ("b", new("1", "y"))), 14, "node 'b': one switch above '1'; an earlier node says another"),
    ],
)
def test_malformed_labels_are_named(tmp_path, text, number, expected):
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as error:
        read_node_labels(path)
    assert str(error.value).startswith(f"{path}:{number}: ") and expected in str(error.value).partition("expected: ")[2]


# What the following hold was counted in the files with other means (grep, and a program of twenty lines).


def test_the_real_dump_of_nvidia_topograph():
    fabric = read_ibnetdiscover(real("topograph_example.out"), nodes="*-dgx-*")
    assert len(fabric.nodes) == 119
    assert Counter(len({port.leaf for port in node.ports}) for node in fabric.nodes) == {4: 109, 3: 10}
    assert Counter(switch.tier for switch in fabric.switches) == {0: 31, 1: 1}  # nine spines act as one
    assert sum(switch.uplink_gb_per_s for switch in fabric.switches if switch.up) == 50 * 532
    assert {port.gb_per_s for node in fabric.nodes for port in node.ports} == {50.0}  # 4xNDR
    cluster = fabric.cluster(load_cluster("gb200_nvl72"))
    assert cluster.num_gpus == 476
    assert len(set(np.unique(cluster.levels_between(np.arange(476)[:, None], np.arange(476))).tolist())) == 3


def test_the_real_dump_read_without_a_pattern_has_the_same_nodes():
    fabric = read_fabric(real("topograph_example.out"))
    assert fabric.left_out == ("B11-P1-CUFM-02", "localhost", "ubuntu")
    assert all("-dgx-" in node.name for node in fabric.nodes)
    assert Counter(len(node.ports) for node in fabric.nodes) == {4: 109, 3: 10}
    assert fabric.nodes == read_ibnetdiscover(real("topograph_example.out"), nodes="*-dgx-*").nodes


def test_the_real_broken_dump():
    with pytest.raises(ValueError, match=r"example-bad.out:10: .*\n.*at least one switch"):
        read_ibnetdiscover(real("topograph_example-bad.out"))


def test_the_real_slurm_files_of_nvidia_topograph():
    tree = read_fabric(real("topograph_expected.slinky-oci-sim-tree.conf"))
    assert len(tree.nodes) == 96 and Counter(switch.tier for switch in tree.switches) == {0: 12, 1: 6, 2: 1}
    cluster = tree.cluster(load_cluster("h100_10240"))
    assert cluster.levels_between(0, np.array([63, 64, 128, 767])).tolist() == [1, 2, 3, 3]
    block = read_fabric(real("topograph_expected.slinky-dra-block.conf"))
    assert len(block.nodes) == 96 and Counter(switch.tier for switch in block.switches) == {0: 12, 1: 6, 2: 3, 3: 1}
    assert block.cluster(load_cluster("gb200_nvl72")).levels_between(0, np.array([31, 32, 64, 128])).tolist() == [0, 2, 3, 4]
