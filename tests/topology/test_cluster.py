"""Clusters: the given ones, where GPUs meet, what they share, cuts, and every rule's message."""

import copy
import dataclasses

import numpy as np
import pytest

from lightning_megascale.topology.cluster import Cluster, Level, Nic, Node, Switch
from lightning_megascale.topology.describe import FOLDER, cluster_from, load_cluster
from lightning_megascale.topology.gpus import GPUS, Gpu, gpu_sheet


def small(**changes):
    """Four nodes of two GPUs; a and b on leaf x, c on leaf y, d on both; uplinks of 60 and 100 GB/s."""
    nic = {leaf: Nic(leaf, 50.0) for leaf in "xy"}
    fields = dict(
        name="small",
        gpu=GPUS["a100"],
        gpus_per_node=2,
        nodes=(
            Node("a", "a", (nic["x"],)),
            Node("b", "b", (nic["x"],)),
            Node("c", "c", (nic["y"],)),
            Node("d", "d", (nic["x"], nic["y"])),
        ),
        switches=(Switch("x", 0, "top", 60.0), Switch("y", 0, "top", 100.0), Switch("top", 1)),
        levels=(Level("nvlink", 3.0), Level("leaf", 9.0), Level("spine", 10.0)),
        storage_read_gb_per_s=10.0,
        storage_write_gb_per_s=5.0,
        node_storage_gb_per_s=2.0,
        failures_per_1000_node_days=6.0,
    )
    return Cluster(**{**fields, **changes})


@pytest.mark.parametrize(
    ("name", "gpus", "levels", "switches"),
    [
        ("h100_10240", 10240, ["nvlink", "leaf", "spine", "row", "data_center"], 40 * 8 + 10 + 2 + 1),
        ("h100_1024", 1024, ["nvlink", "leaf", "spine"], 4 * 8 + 1),
        ("gb200_nvl72", 576, ["nvlink", "leaf", "spine"], 8 * 4 + 1),
        ("local", 8, ["nvlink"], 0),
    ],
)
def test_the_given_clusters(name, gpus, levels, switches):
    cluster = load_cluster(name)
    assert (cluster.name, cluster.num_gpus, len(cluster.switches)) == (name, gpus, switches)
    assert [level.name for level in cluster.levels] == levels


def test_where_gpus_of_a_rail_optimised_cluster_meet():
    cluster = load_cluster("h100_10240")
    node, group, pod, row = 8, 32 * 8, 128 * 8, 640 * 8
    others = np.array([0, 7, node, node + 1, group, group + 1, pod, row, cluster.num_gpus - 1])
    assert cluster.levels_between(0, others).tolist() == [0, 0, 1, 2, 2, 2, 3, 4, 4]
    # With a hop over NVLink every GPU of the group is reached through the leaf of its own rail.
    assert cluster.levels_between(0, others, through_peers=True).tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 4]
    assert cluster.levels_between(others, 0).tolist() == cluster.levels_between(0, others).tolist()
    assert [cluster.level(name) for name in ("nvlink", "row")] == [0, 3]


def test_a_domain_of_racks_meets_in_nvlink():
    cluster = load_cluster("gb200_nvl72")
    assert cluster.levels_between(0, np.array([71, 72, 73])).tolist() == [0, 2, 2]
    assert cluster.levels_between(0, np.array([[4], [72]])).tolist() == [[0], [2]]


def test_levels_against_a_walk_up_the_tree():
    cluster = small()
    leaf = [nic.leaf for node in cluster.nodes for gpu in range(2) for nic in [node.nics[gpu * len(node.nics) // 2]]]
    for first in range(8):
        for second in range(8):
            expected = 0 if first // 2 == second // 2 else 1 if leaf[first] == leaf[second] else 2
            assert cluster.levels_between(first, second) == expected


def test_a_leaf_that_skips_a_tier_meets_the_rest_at_the_top():
    switches = (Switch("x", 0, "mid", 60.0), Switch("mid", 1, "top", 40.0), Switch("y", 0, "top", 20.0), Switch("top", 2))
    levels = (Level("nvlink", 3.0), Level("leaf", 9.0), Level("spine", 10.0), Level("row", 11.0))
    cluster = small(switches=switches, levels=levels)
    assert cluster.levels_between(0, np.array([2, 4])).tolist() == [1, 3]
    assert cluster.bandwidths_gb_per_s(3, np.array([0, 4])).tolist() == [40.0, 20.0]
    assert cluster.oversubscription(2) == 150 / 60 and cluster.oversubscription(3) == 100 / 20


def test_shares_of_nics_and_uplinks():
    cluster = small()
    everyone = np.arange(8)
    assert cluster.nic_sharers(everyone).tolist() == [2, 2, 2, 2, 2, 2, 1, 1]
    assert cluster.uplink_sharers(1, everyone).tolist() == [5, 5, 5, 5, 3, 3, 5, 3]
    assert cluster.bandwidths_gb_per_s(0).tolist() == [300.0] * 8
    assert cluster.bandwidths_gb_per_s(1).tolist() == [25.0] * 6 + [50.0] * 2
    assert cluster.bandwidths_gb_per_s(2) == pytest.approx([12, 12, 12, 12, 25, 25, 12, 100 / 3])
    # Fewer senders share less: one GPU of each of a, b, c.
    assert cluster.bandwidths_gb_per_s(2, np.array([0, 2, 4])).tolist() == [30.0, 30.0, 50.0]
    assert cluster.bandwidth_gb_per_s(2, gpu=0) == 50.0 and cluster.bandwidth_gb_per_s(0) == 300.0
    assert cluster.oversubscription(2) == pytest.approx(150 / 60) and cluster.oversubscription(1) == 1.0


def test_the_oversubscribed_level_halves_what_everyone_gets():
    cluster = load_cluster("h100_10240")
    assert [cluster.oversubscription(level) for level in range(5)] == [1, 1, 1, 1, 2]
    assert [set(cluster.bandwidths_gb_per_s(level)) for level in range(5)] == [{450}, {50}, {50}, {50}, {25}]
    assert cluster.bandwidth_gb_per_s(4) == 50.0  # alone


def test_storage_and_failures():
    cluster = small()
    assert [cluster.storage_gb_per_s(nodes, write=write) for nodes, write in [(1, True), (4, True), (4, False), (9, False)]] == [
        2,
        5,
        8,
        10,
    ]
    assert cluster.failures_per_hour() == pytest.approx(4 * 6 / 1000 / 24)
    assert load_cluster("h100_10240").failures_per_hour(1000) == pytest.approx(6.5 / 24)


def test_a_cut_keeps_whole_nodes_and_what_is_above_them():
    cluster = load_cluster("h100_10240").cut(gpus=64)
    assert (cluster.num_gpus, cluster.gpus_per_node, len(cluster.nodes)) == (64, 8, 8)
    assert len(cluster.switches) == 8 + 3  # the group's eight leaves, one spine, row and data center
    assert cluster.levels_between(0, np.array([8, 9])).tolist() == [1, 2]
    # The leaves keep all 32 nodes' uplinks; the data center's oversubscription does not bite eight nodes.
    assert cluster.bandwidths_gb_per_s(4).tolist() == [50.0] * 64
    assert cluster.storage_read_gb_per_s == 1000


def test_a_cut_inside_a_node_keeps_the_nics_of_its_gpus():
    cluster = load_cluster("h100_1024").cut(gpus=3)
    assert (cluster.num_gpus, len(cluster.nodes), len(cluster.nodes[0].nics), len(cluster.switches)) == (3, 1, 3, 4)
    shared = cluster_from(DESCRIPTION)  # two GPUs to a NIC
    assert [len(shared.cut(gpus=gpus).nodes[0].nics) for gpus in (1, 2, 3, 4)] == [1, 1, 2, 2]


def test_other_gpus_bring_their_nvlink():
    cluster = load_cluster("h100_1024").cut(gpus=16, gpu="A100")
    assert cluster.gpu is GPUS["a100"]
    assert set(cluster.bandwidths_gb_per_s(0)) == {300.0} and set(cluster.bandwidths_gb_per_s(1)) == {50.0}
    mine = dataclasses.replace(GPUS["h100"], name="mine", memory_gib=96)
    assert load_cluster("local").cut(gpu=mine).gpu.memory_gib == 96


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (dict(gpus=0), "gpus=0: cluster 'small' has 8; take a number from 1 to that, or a larger cluster"),
        (dict(gpus=9), "gpus=9: cluster 'small' has 8"),
        (dict(gpus=True), "gpus=True"),
        (dict(gpus=2.0), "gpus=2.0"),
        (dict(gpus=5), "gpus=5: above one node it must be a multiple of the 2 GPUs of a node; take 4 or 6"),
        (dict(gpu="h10"), "gpu='h10': must be one of a100_40gb, a100, h100, h800, h200, h100_96gb, b200, gb200, b300, gb300, cpu; "),
    ],
)
def test_a_cut_that_cannot_be_is_refused(cut, message):
    with pytest.raises(ValueError) as error:
        small().cut(**cut)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda cluster: cluster.level("rack"), "level='rack': cluster 'small' has nvlink, leaf, spine; choose one of these"),
        (lambda cluster: cluster.bandwidths_gb_per_s(3), "level=3: cluster 'small' has levels 0 to 2"),
        (lambda cluster: cluster.bandwidths_gb_per_s(-1), "level=-1"),
        (lambda cluster: cluster.bandwidth_gb_per_s(1, gpu=8), "gpu=8: cluster 'small' counts its GPUs from 0 to 7"),
        (lambda cluster: cluster.nic_sharers(np.array([0, -1])), "gpu=-1"),
        (lambda cluster: cluster.uplink_sharers(0, np.array([0])), "level=0: an NVLink domain has no uplink"),
        (lambda cluster: cluster.levels_between(0, 8), "gpu=8"),
        (lambda cluster: cluster.levels_between(np.array([-1]), 0), "gpu=-1"),
        (lambda cluster: load_cluster("local").nic_sharers(np.array([0])), "level=1: cluster 'local' has levels 0 to 0"),
        (lambda cluster: cluster.gpu.peak_flops_per_s("float8"), "dtype='float8': a100 has no peak for it; choose one of bfloat16"),
    ],
)
def test_a_question_without_an_answer_is_refused(ask, message):
    with pytest.raises(ValueError) as error:
        ask(small())
    assert message in str(error.value)


X, Y, TOP = Switch("x", 0, "top", 60.0), Switch("y", 0, "top", 100.0), Switch("top", 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(gpus_per_node=0), "gpus_per_node=0: must be above 0 and finite"),
        (dict(storage_read_gb_per_s=float("nan")), "storage_read_gb_per_s=nan"),
        (dict(failures_per_1000_node_days=-1), "failures_per_1000_node_days=-1: must be at least 0 and finite"),
        (dict(failures_per_1000_node_days="6"), "failures_per_1000_node_days='6': must be a number of at least 0"),
        (dict(storage_read_gb_per_s="6"), "storage_read_gb_per_s='6': must be a number above 0"),
        (dict(nodes=()), "nodes=(): a cluster needs at least one"),
        (dict(levels=(Level("nvlink", 3.0),)), "levels=['nvlink']: NVLink and 2 tiers of switches need 3 levels"),
        (dict(levels=(Level("a", 3.0), Level("a", 3.0), Level("b", 0.0))), "level 'a': named twice"),
        (dict(levels=(Level("a", 3.0), Level("c", 3.0), Level("b", 0.0))), "levels.b.latency_us=0.0: must be above 0 and finite"),
        (dict(switches=(X, X, Y, TOP)), "switch 'x': named twice"),
        (dict(switches=(X, Y)), "switch 'x': up='top' is no switch of this cluster"),
        (dict(switches=(X, Y, Switch("top", 0))), "switch 'x': tier 0 must lie below tier 0 of 'top'"),
        (dict(switches=(X, Switch("y", 0), TOP)), "switches: 2 have none above (y, top), so their nodes never meet"),
        (dict(switches=(Switch("x", 0, "top"), Y, TOP)), "switch 'x': uplink_gb_per_s=0.0: must be above 0 and finite"),
        (dict(nodes=(Node("a", "a", (Nic("z", 50.0),)),)), "node 'a': leaf='z' is no switch of this cluster"),
        (dict(nodes=(Node("a", "a", (Nic("x", 0.0),)),)), "node 'a': nic.gb_per_s=0.0"),
        (dict(nodes=(Node("a", "a", ()), Node("b", "b", ()))), "node 'b': has no NIC, so it reaches no other node"),
        (dict(nodes=(Node("a", "a", (Nic("x", 50.0),)),) * 2), "node 'a': named twice"),
    ],
)
def test_every_rule_of_a_cluster(changes, message):
    with pytest.raises(ValueError) as error:
        small(**changes)
    assert "cluster 'small':" in str(error.value) and message in str(error.value)


def test_all_violations_are_listed_and_many_are_counted():
    nodes = tuple(Node(f"n{number}", f"n{number}", (Nic("z", 50.0),)) for number in range(30))
    with pytest.raises(ValueError) as error:
        small(gpus_per_node=0, nodes=nodes)
    assert "gpus_per_node=0" in str(error.value) and "node 'n0'" in str(error.value) and "and 11 more" in str(error.value)


def test_a_sheet_is_found_by_any_spelling_and_checked():
    assert gpu_sheet("GB200") is GPUS["gb200"] and gpu_sheet("A100-40GB") is GPUS["a100_40gb"]
    assert gpu_sheet("h100").peak_flops_per_s("bfloat16") == 989.4e12
    with pytest.raises(ValueError, match=r"gpu x: peak_tflops\['bfloat16'\]=-1: must be above 0 and finite"):
        Gpu("x", {"bfloat16": -1}, 80, 2, 100, 300, "nowhere")
    with pytest.raises(ValueError, match="gpu x: memory_gib=0: must be above 0 and finite"):
        Gpu("x", {}, 0, 2, 100, 300, "nowhere")


DESCRIPTION = {
    "name": "tiny",
    "gpu": "h100",
    "nodes": 3,
    "node": {"gpus": 4, "nics": 2, "nic_gb_per_s": 25, "rails": 1},
    "nvlink": {"latency_us": 3},
    "levels": [{"name": "leaf", "nodes": 2, "latency_us": 9}, {"name": "spine", "nodes": 4, "latency_us": 10, "oversubscription": 4}],
    "storage": {"read_gb_per_s": 1, "write_gb_per_s": 1, "node_gb_per_s": 1},
    "failures_per_1000_node_days": 0,
}


def test_a_description_without_rails():
    cluster = cluster_from(DESCRIPTION)
    assert [{nic.leaf for nic in node.nics} for node in cluster.nodes] == [{"leaf0.rail0"}, {"leaf0.rail0"}, {"leaf1.rail0"}]
    assert cluster.switches[0].uplink_gb_per_s == 2 * 2 * 25 / 4
    assert cluster.bandwidths_gb_per_s(1).tolist() == [12.5] * 12  # two GPUs to a NIC
    assert cluster.oversubscription(2) == 4.0
    assert cluster.levels_between(0, np.array([3, 7, 8])).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodez": 3}, "cluster.nodez: no such key; cluster has name, gpu, nodes, node"),
        ({"nodes": 2.5}, "nodes=2.5: must be a whole number of at least 1"),
        ({"gpu": "h101"}, "did you mean 'h100'?"),
        ({"node": {"gpus": 4, "nics": 3, "nic_gb_per_s": 25, "rails": 2}}, "node.rails=2: the 3 NICs of a node must be dealt evenly"),
        ({"node": 8}, "node=8: must be a mapping with gpus, nics, nic_gb_per_s, rails"),
        ({"node": {"gpus": 4}}, "0 NICs a node; give both NICs and levels, or neither"),
        ({"levels": 3}, "levels=3: must be a list, the leaf first"),
        ({"levels": [{"name": "leaf", "nodes": 2, "latency_us": 9}]}, "levels.leaf.nodes=2: the last level must lie above all 3 nodes"),
        (
            {"levels": [{"name": "leaf", "nodes": 2, "latency_us": 9}, {"name": "spine", "nodes": 3, "latency_us": 9}]},
            "levels.spine.nodes=3: must be a multiple of the 2 nodes of a leaf",
        ),
        (
            {"levels": [{"name": "leaf", "nodes": 4, "latency_us": 9, "oversubscription": 2}]},
            "levels.leaf.oversubscription: the first level is a leaf",
        ),
        ({"levels": [{"name": "leaf", "nodes": 4, "latency_us": "9us"}]}, "levels.leaf.latency_us='9us': must be a number; YAML reads"),
        (
            {"node": {"gpus": 4, "nics": 2, "nic_gb_per_s": 25, "rails": 2}, "levels": [{"name": "leaf", "nodes": 4, "latency_us": 9}]},
            "levels: 2 rails meet at no leaf; add a level above",
        ),
        ({"storage": {"read_gb_per_s": 1}}, "storage: write_gb_per_s, node_gb_per_s missing; add it"),
        ({"storage": {**DESCRIPTION["storage"], "read_gb_per_s": "1e3"}}, "storage.read_gb_per_s='1e3': must be a number; YAML reads 1e12"),
    ],
)
def test_every_rule_of_a_description(changes, message):
    with pytest.raises(ValueError) as error:
        cluster_from({**DESCRIPTION, **changes})
    assert message in str(error.value)


def test_a_file_of_ones_own_and_the_errors_of_loading(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text((FOLDER / "local.yaml").read_text().replace("gpus: 8", "gpus: 2"))
    assert load_cluster(path).num_gpus == 2
    path.write_text("name: [")
    with pytest.raises(ValueError, match=r"mine.yaml: is no YAML: .*line [12]"):
        load_cluster(path)
    path.write_text("name: x")
    with pytest.raises(ValueError, match=r"mine.yaml: cluster: gpu, nodes, node, nvlink, storage"):
        load_cluster(path)
    with pytest.raises(ValueError, match=r"absent.yaml'.*: there is no such file"):
        load_cluster(tmp_path / "absent.yaml")
    with pytest.raises(ValueError, match=r"cluster='h100_1023': must be one of gb200_nvl72, .*; did you mean 'h100_1024'\?"):
        load_cluster("h100_1023")


def nested(path, value):
    """DESCRIPTION with ``value`` at ``path``, such as "node.nics" or "levels.1.nodes"."""
    changed = copy.deepcopy(DESCRIPTION)
    *folders, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = changed
    for key in folders:
        place = place[key]
    place[last] = value
    return changed


ABOVE = ["node.nic_gb_per_s", "nvlink.latency_us", "levels.0.latency_us", "levels.1.latency_us", "levels.1.oversubscription"]
ABOVE += [f"storage.{key}" for key in DESCRIPTION["storage"]]


@pytest.mark.parametrize("value", [0, -50, float("nan"), float("inf"), -float("inf"), 10**400, "nan", "-inf", "1e400"])
@pytest.mark.parametrize("path", ABOVE)
def test_a_figure_of_a_description_must_be_above_0_and_finite(path, value):
    shown = path.replace("levels.0", "levels.leaf").replace("levels.1", "levels.spine")
    with pytest.raises(ValueError) as error:
        cluster_from(nested(path, value))
    assert str(error.value).startswith(f"{shown}=") and "must be above 0 and finite; give" in str(error.value)
    assert "YAML" not in str(error.value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True])
@pytest.mark.parametrize("path", ["nodes", "node.gpus", "node.rails", "nvlink.nodes", "levels.0.nodes"])
def test_a_count_of_a_description_must_be_whole(path, value):
    if path == "nvlink.nodes":
        path, value = "nvlink", {"latency_us": 3, "nodes": value}
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        cluster_from(nested(path, value))


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "nan"])
def test_failures_are_at_least_0_and_finite(value):
    with pytest.raises(ValueError, match="^failures_per_1000_node_days=.*: must be at least 0 and finite; 3.8 to 6.5 are measured"):
        cluster_from(nested("failures_per_1000_node_days", value))


def test_failures_end_where_nothing_trains():
    assert cluster_from(nested("failures_per_1000_node_days", 1_000_000)).failures_per_hour() == pytest.approx(3 * 1000 / 24)
    for value in (1_000_001, 10**400):
        with pytest.raises(ValueError, match="must be at most 1,000,000, a failure of each node every 1.4 minutes"):
            cluster_from(nested("failures_per_1000_node_days", value))
    with pytest.raises(ValueError, match="='6e0': must be a number; YAML reads 1e12 as text"):
        cluster_from(nested("failures_per_1000_node_days", "6e0"))


def test_the_speed_of_nics_is_needed_and_read_even_without_them():
    with pytest.raises(ValueError, match="node: nic_gb_per_s missing, the speed of its 2 NICs; add it"):
        cluster_from({**DESCRIPTION, "node": {"gpus": 4, "nics": 2}})
    with pytest.raises(ValueError, match="node.nic_gb_per_s=-50: must be above 0"):
        cluster_from({**DESCRIPTION, "nodes": 1, "levels": [], "node": {"gpus": 4, "nic_gb_per_s": -50}})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes: 1\n", "nodes: 1\nnodes: 4\n", ":5: key 'nodes' is given in line 4 already; keep one"),
        ("{gpus: 8}", "\n  gpus: 8\n  gpus: 4", ":7: key 'gpus' is given in line 6 already; keep one"),
        ("{latency_us: 100}", "{latency_us: 1, latency_us: 2}", ":6: key 'latency_us' is given in line 6 already"),
        ("nodes: 1\n", "nodes: 1\nlevels:\n- {name: a}\n- {name: b,\n   name: c}\n", ":8: key 'name' is given in line 7 already"),
    ],
)
def test_a_key_given_twice_is_refused_with_its_line(tmp_path, old, new, message):
    path = tmp_path / "mine.yaml"
    text = (FOLDER / "local.yaml").read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError) as error:
        load_cluster(path)
    assert str(error.value).startswith(f"{path}{message}")


def test_merged_keys_marks_and_aliases_are_no_second_keys(tmp_path):
    path = tmp_path / "mine.yaml"
    text = (FOLDER / "local.yaml").read_text().partition("storage:")[0]
    path.write_text(
        "\ufeff" + text + "storage: {<<: &s {read_gb_per_s: 1, write_gb_per_s: 1, node_gb_per_s: 1}, read_gb_per_s: 3}\n"
        "failures_per_1000_node_days: 0\n",
        encoding="utf-8",
    )
    assert load_cluster(path).storage_read_gb_per_s == 3.0
    path.write_text("a: &a [*a]\n")
    with pytest.raises(ValueError, match="mine.yaml: cluster.a: no such key"):
        load_cluster(path)
    path.write_text("")
    with pytest.raises(ValueError, match="mine.yaml: cluster=None: must be a mapping"):
        load_cluster(path)
    path.write_text("nodes: 2024-99-99\n")
    with pytest.raises(ValueError, match="mine.yaml: is no YAML: month must be in 1..12"):
        load_cluster(path)


def test_no_path_and_a_folder_are_no_cluster(tmp_path, monkeypatch):
    for empty in ("", " "):
        with pytest.raises(ValueError, match=r"^cluster=' ?': is empty; give one of gb200_nvl72, .*, or the path of a .yaml file$"):
            load_cluster(empty)
    (tmp_path / "x.yaml").mkdir()
    for folder in (tmp_path, tmp_path / "x.yaml", "."):
        with pytest.raises(ValueError, match=r"^cluster='.+': is a folder; give one of gb200_nvl72, .*, or the path of a .yaml file$"):
            load_cluster(folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "local").mkdir()
    assert load_cluster("local").num_gpus == 8  # a name comes first
