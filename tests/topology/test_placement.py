"""Placements: times by hand and by a slow model, the best order against all orders, bounds, files for launchers, refusals."""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest

from lightning_megascale.topology.cluster import Cluster, Level, Nic, Node, Switch
from lightning_megascale.topology.describe import cluster_from, load_cluster
from lightning_megascale.topology.gpus import GPUS
from lightning_megascale.topology.infiniband import read_ibnetdiscover
from lightning_megascale.topology.placement import evaluate, place
from lightning_megascale.topology.placement_bounds import Bounds, _grid_cut
from lightning_megascale.topology.placement_groups import AXES, Mesh, Traffic
from lightning_megascale.topology.placement_links import Links
from lightning_megascale.topology.placement_packing import packings
from lightning_megascale.topology.placement_search import arranged, arrangements
from tests.topology.placement_model import slow_seconds
from tests.topology.real_files import real

GB = 1e9
NVLINK = GPUS["h100"].scale_up_gb_per_s


def symmetric(nodes=8, leaf=4, *, gpus=2, rails=1, nics=None, over=1.0, domain=1):
    nics = gpus if nics is None else nics
    return cluster_from(
        dict(
            name="symmetric",
            gpu="h100",
            nodes=nodes,
            node=dict(gpus=gpus, nics=nics, nic_gb_per_s=50.0, rails=rails),
            nvlink=dict(nodes=domain, latency_us=3.0),
            levels=[dict(name="leaf", nodes=leaf, latency_us=9.0), dict(name="spine", nodes=nodes, latency_us=9.0, oversubscription=over)],
            storage=dict(read_gb_per_s=1.0, write_gb_per_s=1.0, node_gb_per_s=1.0),
            failures_per_1000_node_days=1.0,
        )
    )


def irregular(draw, nodes, gpus, *, domains=False):
    """Leaves of other sizes and uplinks, some nodes with two NICs or slow ones, two spines; with ``domains`` some share NVLink."""
    leaves = [Switch(f"l{i}", 0, f"s{i % 2}", draw.choice([10.0, 25.0, 50.0, 100.0])) for i in range(draw.randint(2, 4))]
    spines = [Switch(f"s{i}", 1, "top", draw.choice([20.0, 50.0])) for i in range(2)]
    built = []
    for number in range(nodes):
        nics = tuple(Nic(draw.choice(leaves).name, draw.choice([50.0, 50.0, 25.0])) for _ in range(draw.randint(1, min(2, gpus))))
        built.append(Node(f"n{number}", f"d{draw.randint(0, 2)}" if domains else f"d{number}", nics))
    levels = tuple(Level(name, 1.0) for name in ("nvlink", "leaf", "spine", "top"))
    return Cluster("irregular", GPUS["h100"], gpus, tuple(built), (*leaves, *spines, Switch("top", 2)), levels, 1.0, 1.0, 1.0, 1.0)


def drawn_mesh(draw, world):
    """(sizes, ep, traffic) whose product is ``world``."""
    sizes, left = {}, world
    for axis in draw.sample(AXES, len(AXES)):
        sizes[axis] = draw.choice([size for size in range(1, left + 1) if left % size == 0])
        left //= sizes[axis]
    sizes[axis] *= left
    inner = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
    ep = draw.choice([None, *[size for size in range(1, inner + 1) if inner % size == 0]])
    names = [*AXES, "batch", "loss", "fsdp"] + (["ep", "expert_shard"] if ep else [])
    kinds = ("ring", "alltoall", "chain")
    sent = [Traffic(name, draw.choice(kinds), draw.choice([0.1, 1.0, 5.0]) * GB) for name in draw.sample(names, draw.randint(1, 4))]
    return sizes, ep, sent


def times(placement):
    return pytest.approx(placement.seconds_by_traffic, rel=1e-12)


def test_a_ring_in_a_node_and_over_nodes_by_hand():
    cluster = symmetric(nodes=4, leaf=4, gpus=8, nics=8)
    sent = [Traffic("tp", "ring", 9 * GB), Traffic("dp_shard", "ring", 5 * GB)]
    # tp in the node: NVLink alone. dp: one GPU of each node, each its own NIC.
    assert times(evaluate(cluster, {"dp_shard": 4, "tp": 8}, sent)) == [9 / NVLINK, 5 / 50]
    # tp over two nodes: 8 channels of 9/8 GB, the rest over NVLink; dp over 2 nodes.
    assert times(evaluate(cluster, {"dp_shard": 2, "tp": 16}, sent)) == [9 / 8 / 50, 5 / 50]
    # Two GPUs share a NIC: twice the time of the second, and eight channels through four NICs in the first.
    shared = symmetric(nodes=4, leaf=4, gpus=8, nics=4)
    assert times(evaluate(shared, {"dp_shard": 2, "tp": 16}, sent)) == [9 / 4 / 50, 10 / 50]


def test_all_to_all_and_chain_by_hand():
    cluster = symmetric(nodes=2, leaf=2, gpus=4)
    sent = [Traffic("ep", "alltoall", 7 * GB), Traffic("pp", "chain", 2 * GB)]
    # Four of seven peers are in the other node; each of four NICs carries 4 GB.
    assert times(evaluate(cluster, {"dp_shard": 8}, sent, ep=8)) == [4 / 50, 0]
    # Stages 0 to 7 in a row: one pair crosses, and the busiest GPU sends both ways over NVLink.
    chain = [Traffic("pp", "chain", 2 * GB)]
    assert times(evaluate(cluster, {"pp": 8}, chain)) == [2 / 50]
    assert times(evaluate(load_cluster("local").cut(gpu="h100"), {"pp": 8}, chain)) == [4 / NVLINK]


def test_uplinks_carry_the_sum_of_all_groups_and_a_rail_stays_on_its_leaf():
    sent = [Traffic("dp_shard", "ring", 5 * GB)]
    apart = (0, 4, 1, 5, 2, 6, 3, 7)  # neighbours on two leaves
    cluster = symmetric(gpus=2, over=4)  # a leaf's uplink: 4 nodes x 100 / 4 GB/s
    assert times(evaluate(cluster, {"dp_shard": 8, "tp": 2}, sent, node_order=apart)) == [4 * 2 * 5 / 100]
    assert times(evaluate(cluster, {"dp_shard": 8, "tp": 2}, sent)) == [2 * 5 / 100]
    # Of the all-to-all of GPU 0 and GPU 1, what is for the other rail goes there over NVLink first.
    rails = symmetric(nodes=4, leaf=4, gpus=2, rails=2, over=1000)
    exchange = [Traffic("ep", "alltoall", 7 * GB)]
    assert evaluate(rails, {"dp_shard": 8}, exchange, ep=8).seconds == pytest.approx(6 / 50)
    assert evaluate(rails, {"dp_replicate": 2, "dp_shard": 4}, [Traffic("dp_replicate", "ring", GB)]).seconds == pytest.approx(1 / 50)


def test_a_domain_of_many_nodes_is_one_part_of_a_ring():
    cluster = load_cluster("gb200_nvl72")
    ring = [Traffic("dp_shard", "ring", 36 * GB)]
    assert evaluate(cluster, {"dp_shard": 72, "pp": 8}, ring).seconds == pytest.approx(36 / 900)
    assert evaluate(cluster, {"dp_shard": 144, "pp": 4}, ring).seconds == pytest.approx(max(36 * 71 / 72 / 900, 36 / 72 / 50))
    # Every other tray of two racks: the groups of 18 trays fall into two parts of 9.
    apart = [tray + 18 * rack for tray in range(18) for rack in range(2)]
    mixed = evaluate(cluster, {"dp_shard": 72, "pp": 2}, ring, node_order=apart)
    assert mixed.seconds == pytest.approx(max(36 * 35 / 36 / 900, 36 / 36 / 50))
    assert place(cluster.cut(gpus=144), {"dp_shard": 72, "pp": 2}, ring).seconds <= mixed.seconds


@pytest.mark.parametrize("seed", range(40))
def test_times_are_those_of_a_model_in_plain_loops(seed):
    draw = random.Random(seed)
    gpus, nodes = draw.choice([1, 2, 4]), draw.randint(1, 5)
    cluster = irregular(draw, nodes + draw.randint(0, 1), gpus, domains=draw.random() < 0.5)
    sizes, ep, sent = drawn_mesh(draw, nodes * gpus)
    mesh = Mesh(sizes, ep)
    axis_order = draw.choice(mesh.axis_orders)
    node_order = draw.sample(range(len(cluster.nodes)), nodes)
    found = evaluate(cluster, sizes, sent, ep=ep, axis_order=axis_order, node_order=node_order)
    assert slow_seconds(cluster, mesh, sent, axis_order, node_order) == times(found)


@pytest.mark.parametrize("seed", range(60))
def test_the_search_is_as_good_as_all_orders_of_axes_and_nodes(seed):
    draw = random.Random(1000 + seed)
    gpus, nodes = draw.choice([1, 2, 4]), draw.choice([2, 3, 4, 5, 5, 6])
    cluster = irregular(draw, nodes, gpus, domains=seed % 3 == 0)
    sizes, ep, sent = drawn_mesh(draw, nodes * gpus)
    found = place(cluster, sizes, sent, ep=ep)
    links = Links(cluster, Mesh(sizes, ep), sent)
    every = np.array(list(itertools.permutations(range(nodes))))
    bounds = Bounds(links)
    least = math.inf
    for axis_order in links.mesh.axis_orders:
        here = links.seconds(axis_order, every)[0].sum(1).min()
        assert bounds.seconds(axis_order) <= here * (1 + 1e-9)
        least = min(least, here)
    assert (found.seconds, found.quality) == (pytest.approx(least, rel=1e-9), "exact")
    assert found.seconds == pytest.approx(evaluate_again(cluster, sizes, sent, ep, found).seconds)


def evaluate_again(cluster, sizes, sent, ep, found):
    return evaluate(cluster, sizes, sent, ep=ep, axis_order=found.axis_order, node_order=found.node_order)


def test_seven_different_nodes_against_all_their_orders():
    draw = random.Random(7)
    cluster = irregular(draw, 7, 2)
    sent = [Traffic("pp", "chain", 2 * GB), Traffic("dp_shard", "ring", 3 * GB), Traffic("tp", "alltoall", GB)]
    sizes = {"pp": 7, "dp_shard": 2}
    found = place(cluster, sizes, sent)
    every = np.array(list(itertools.permutations(range(7))))
    links = Links(cluster, Mesh(sizes), sent)
    least = min(links.seconds(order, every)[0].sum(1).min() for order in links.mesh.axis_orders)
    assert (found.seconds, found.quality) == (pytest.approx(least), "exact")
    assert found.seconds < evaluate(cluster, sizes, sent).seconds


@pytest.mark.parametrize("seed", range(30))
def test_no_order_of_a_symmetric_fabric_goes_below_the_bound(seed):
    draw = random.Random(seed)
    nodes, leaf = draw.choice([(8, 4), (8, 2), (6, 2), (6, 3), (9, 3), (12, 6)])
    gpus = draw.choice([1, 2])
    cluster = symmetric(nodes, leaf, gpus=gpus, rails=draw.choice([1, gpus]), over=draw.choice([1, 2, 4, 8]))
    sizes, ep, sent = drawn_mesh(draw, nodes * gpus)
    links = Links(cluster, Mesh(sizes, ep), sent)
    leaves = [list(range(start, start + leaf)) for start in range(0, nodes, leaf)]
    every = np.array(list(arranged(leaves, nodes)))
    assert len(every) == arrangements(leaves, nodes)
    bounds = Bounds(links)
    for axis_order in links.mesh.axis_orders:
        assert bounds.seconds(axis_order) <= links.seconds(axis_order, every)[0].sum(1).min() * (1 + 1e-9)


def test_a_symmetric_fabric_is_proven_at_scale():
    sent = [Traffic("tp", "ring", 40 * GB), Traffic("fsdp", "ring", 4 * GB), Traffic("pp", "chain", GB)]
    found = place(load_cluster("h100_10240"), {"pp": 16, "dp_shard": 80, "tp": 8}, sent)
    assert (found.quality, found.axis_order, found.node_order) == ("exact", AXES, tuple(range(1280)))
    assert times(found) == [40 / 450, 4 / 50, 2 / 50]  # an inner stage's NIC sends both ways
    # A thin spine: boxes of 8 x 2 positions under a leaf halve what crosses, and no order does better.
    thin = symmetric(64, 16, gpus=8, over=8)
    sizes = {"pp": 4, "dp_shard": 16, "tp": 8}
    best, plain = place(thin, sizes, sent), evaluate(thin, sizes, sent)
    assert best.quality == "exact" and best.seconds < 0.6 * plain.seconds


def test_where_nothing_is_proven_the_gap_is_said():
    sent = [
        Traffic("tp", "ring", 40 * GB),
        Traffic("pp", "chain", GB),
        Traffic("ep", "alltoall", 5 * GB),
        Traffic("expert_shard", "ring", 2 * GB),
    ]
    found = place(load_cluster("gb200_nvl72"), {"pp": 2, "dp_shard": 64, "tp": 4}, sent, ep=64)
    # A rack of 72 cannot hold whole groups of both ep and expert_shard: what they need together proves the first.
    assert found.quality == "exact" and found.seconds == pytest.approx(40 / 900 + 1 / 50 + 5 / 900 + 2 / 50)
    more = [*sent, Traffic("fsdp", "ring", 2 * GB)]
    found = place(load_cluster("gb200_nvl72"), {"pp": 2, "dp_shard": 64, "tp": 4}, more, ep=64)
    assert 1 < found.gap < 1.01 and found.quality == f"at most {found.gap:.3f} times the least possible"
    assert found.lower_bound_seconds == pytest.approx(found.seconds / found.gap)
    assert evaluate(load_cluster("gb200_nvl72"), {"dp_shard": 64}, sent, ep=64).quality == "no bound"


def test_the_bound_of_rows_and_columns_against_all_sets_of_cells():
    across, down = 4, 3
    cells = np.array(list(itertools.product((False, True), repeat=across * down))).reshape(-1, down, across)
    cut = [((hit := cells.sum(axis)) > 0) & (hit < cells.shape[axis]) for axis in (2, 1)]
    rows, columns = cut[0].sum(1), cut[1].sum(1)
    tight = 0
    for count, (row, column) in itertools.product(range(1, 12), [(1.0, 1.0), (3.0, 1.0), (1.0, 3.0), (1.0, 0.1)]):
        costs = np.maximum(2.0, row * np.arange(down + 1)), np.maximum(2.0, column * np.arange(across + 1))
        true = (costs[0][rows] + costs[1][columns])[cells.sum((1, 2)) == count].min()
        bound = _grid_cut(count, across, down, *costs)
        assert bound <= true
        tight += bound == true
    assert tight >= 40  # of 44


def test_packings_keep_whole_groups_below_one_leaf():
    cluster = symmetric(nodes=16, leaf=4, gpus=1)
    homes = [0] * 5 + [1] * 5 + [2] * 6  # leaves of 5, 5 and 6 nodes
    nodes = tuple(Node(f"n{number}", f"n{number}", (Nic(f"leaf{home}.rail0", 50.0),)) for number, home in enumerate(homes))
    links = Links(dataclasses.replace(cluster, nodes=nodes), Mesh({"pp": 4, "dp_shard": 4}), [])
    leaf = np.array(homes)[packings(links, AXES)].reshape(-1, 4, 4)
    along_dp, along_pp = ((leaf == leaf.take([0], axis)).all(axis).sum(1).max() for axis in (2, 1))
    assert (along_dp, along_pp) == (3, 3)  # groups of 4 nodes below one leaf: one a leaf, and the fourth of what remains
    assert (leaf[0] == np.array(homes).reshape(4, 4)).all()


def test_more_nodes_than_needed_are_chosen_and_packed():
    cluster = dataclasses.replace(symmetric(nodes=8, leaf=4, gpus=2, over=8), nodes=symmetric(nodes=8, leaf=4, gpus=2).nodes[1:])
    found = place(cluster, {"dp_shard": 4, "tp": 2}, [Traffic("dp_shard", "ring", GB), Traffic("tp", "ring", 9 * GB)])
    assert sorted(found.hosts) == ["node4", "node5", "node6", "node7"]  # the whole leaf, not node1 to node4
    assert found.quality == "exact" and found.gap == 1.0


def test_without_traffic_the_order_stays_as_it_is():
    found = place(symmetric(), {"pp": 2, "dp_shard": 4, "tp": 2}, [])
    assert (found.axis_order, found.node_order, found.seconds) == (AXES, tuple(range(8)), 0.0)


def test_files_for_launchers_and_the_strategy():
    cluster = symmetric(nodes=3, leaf=3, gpus=2)
    found = evaluate(cluster, {"pp": 3, "dp_shard": 2}, [], node_order=[2, 0, 1])
    assert found.slurm_hostfile() == "node2\nnode2\nnode0\nnode0\nnode1\nnode1\n"
    assert found.torchrun_nodes() == [(0, "node2"), (1, "node0"), (2, "node1")]
    assert found.gpus.tolist() == [4, 5, 0, 1, 2, 3]
    assert found.strategy_placement == [0, 1, 2, 3, 4, 5]
    swapped = evaluate(
        cluster, {"pp": 3, "dp_shard": 2}, [], axis_order=("dp_replicate", "cp", "tp", "dp_shard", "pp"), node_order=[2, 0, 1]
    )
    assert swapped.strategy_placement == [0, 3, 1, 4, 2, 5]
    assert swapped.mesh_gpus.reshape(3, 2).tolist() == [[4, 1], [5, 2], [0, 3]]


def test_the_strategy_takes_every_order_of_axes_and_no_other():
    """The rule is mesh.py's: an order that Mesh offers passes it, and one that it leaves out does not."""
    torch = pytest.importorskip("torch")
    from lightning_megascale.mesh import _check_ascending

    sizes = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}
    mesh = Mesh(sizes)
    cluster = symmetric(nodes=24, leaf=24)
    offered = 0
    for order in itertools.permutations(AXES):
        grid = torch.tensor(mesh.grid(order).tolist())
        if order in mesh.axis_orders:
            flat = evaluate(cluster, sizes, [], axis_order=order).strategy_placement
            _check_ascending(torch.tensor(flat).reshape(tuple(sizes.values())), AXES)
            offered += 1
        else:
            with pytest.raises(ValueError, match="must ascend"):
                _check_ascending(grid, AXES)
    assert offered == 20  # dp_replicate, dp_shard, cp in this order; pp and tp anywhere: 5 x 4


def test_experts_keep_tp_inside():
    mesh = Mesh({"pp": 2, "dp_shard": 4, "tp": 2}, ep=4)
    assert {tuple(axis for axis in order if mesh.sizes[axis] > 1) for order in mesh.axis_orders} == {
        ("pp", "dp_shard", "tp"),
        ("dp_shard", "pp", "tp"),
        ("dp_shard", "tp", "pp"),
    }
    assert mesh.groups(AXES, "ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert mesh.groups(AXES, "expert_shard").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"dp_shard": 32}, {}, r"dp_shard 32 = 32 ranks: .* has 16 GPUs; shrink"),
        ({"dp_shard": 5}, {}, r"= 5 ranks: above one node they must fill nodes of 2 GPUs; take 4"),
        ({"dp_shard": 0}, {}, r"dp_shard=0: .* at least 1"),
        ({"dp_shard": 2.0}, {}, r"dp_shard=2.0: .* whole number"),
        ({"ep": 2}, {}, r"sizes\['ep'\]: no such axis"),
        ({"dp_shard": 4, "tp": 2}, {"ep": 6}, r"ep=6: must divide dp_shard x cp x tp = 8; take 2"),
        ({"dp_shard": 16}, {"axis_order": ("pp", "tp")}, r"axis_order=.*: must name each of"),
        ({"dp_shard": 8, "cp": 2}, {"axis_order": ("pp", "dp_replicate", "cp", "dp_shard", "tp")}, r"ranks of the loss groups would not"),
        ({"dp_shard": 16}, {"node_order": [0, 1, 2, 3, 4, 5, 6, 6]}, r"node_order=.*: must name 8 of the nodes 0 to 7 once"),
        ({"dp_shard": 16}, {"node_order": [0, 1]}, r"node_order=\[0, 1\]: must name 8"),
    ],
)
def test_impossible_requests_say_why(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(symmetric(), sizes, [], **options)


def test_traffic_that_is_none():
    with pytest.raises(ValueError, match="traffic.groups='dp': must be one of pp"):
        Traffic("dp", "ring", 1.0)
    with pytest.raises(ValueError, match="traffic.kind='tree'"):
        Traffic("tp", "tree", 1.0)
    with pytest.raises(ValueError, match="traffic.bytes_=nan"):
        Traffic("tp", "ring", math.nan)
    with pytest.raises(ValueError, match="ep=None: traffic of expert groups"):
        place(symmetric(), {"dp_shard": 16}, [Traffic("ep", "alltoall", 1.0)])


def test_an_all_to_all_of_the_world_is_refused_where_its_pairs_are_too_many():
    with pytest.raises(ValueError, match="traffic dp_shard: all pairs of groups of 10240 are 104847360, more than"):
        place(load_cluster("h100_10240"), {"dp_shard": 10240}, [Traffic("dp_shard", "alltoall", GB)])


def test_without_nics_one_domain_is_placed_and_several_are_refused():
    local = load_cluster("local")
    found = place(local, {"dp_shard": 4, "tp": 2}, [Traffic("tp", "ring", GB), Traffic("dp_shard", "alltoall", 3 * GB)])
    assert (found.quality, found.seconds) == ("exact", pytest.approx(4 / local.gpu.scale_up_gb_per_s))
    with pytest.raises(ValueError, match="has no NIC, so it reaches no other node"):
        dataclasses.replace(local, nodes=(Node("a", "a", ()), Node("b", "b", ())))
    assert place(local, {"tp": 3}, [Traffic("tp", "ring", GB)]).slurm_hostfile() == f"{local.nodes[0].name}\n" * 3
    assert place(local, {}, [Traffic("tp", "ring", GB)]).seconds == 0.0


def test_on_a_real_fabric_never_worse_than_the_order_of_slurm():
    fabric = read_ibnetdiscover(real("topograph_example.out"), nodes="*-dgx-*")
    assert [sum(len(node.ports) == count for node in fabric.nodes) for count in (4, 3)] == [109, 10]
    like, draw = load_cluster("gb200_nvl72"), random.Random(0)
    names = sorted(fabric.nodes, key=lambda node: node.name)
    sent = [Traffic("fsdp", "ring", 5 * GB), Traffic("ep", "alltoall", 5 * GB), Traffic("pp", "chain", GB)]
    gained = []
    for count in (16, 16, 24, 32, 32):
        some = dataclasses.replace(fabric, nodes=tuple(sorted(draw.sample(names, count), key=lambda node: node.name)))
        cluster = some.cluster(like, domains={node.name: node.name.rsplit("-", 1)[0] for node in some.nodes})
        sizes = {"pp": 2, "dp_shard": count * 2}
        best, slurm = place(cluster, sizes, sent, ep=16), evaluate(cluster, sizes, sent, ep=16)
        assert best.lower_bound_seconds <= best.seconds <= slurm.seconds
        gained.append(slurm.seconds / best.seconds)
    assert max(gained) > 1.02  # racks hold no whole number of expert groups: it matters which of them are split
