"""Seconds of collectives over levels, by hand."""

import numpy as np
import pytest

from lightning_megascale.planning.collectives import Links
from lightning_megascale.planning.stack import Precision, Stack
from lightning_megascale.topology.describe import cluster_from

STACK = Stack("s", Precision("p"), nvlink_efficiency=1.0, network_efficiency=1.0)
GB = 1e9


def cluster(nodes=16, oversubscription=1, leaf=4, rails=8):
    return cluster_from(
        {
            "name": "c",
            "gpu": "h100",
            "nodes": nodes,
            "node": {"gpus": 8, "nics": 8, "nic_gb_per_s": 50, "rails": rails},
            "nvlink": {"latency_us": 1},
            "levels": [
                {"name": "leaf", "nodes": leaf, "latency_us": 10},
                {"name": "spine", "nodes": nodes, "latency_us": 20, "oversubscription": oversubscription},
            ],
            "storage": {"read_gb_per_s": 1, "write_gb_per_s": 1, "node_gb_per_s": 1},
            "failures_per_1000_node_days": 1,
        }
    )


LINKS = Links.of(cluster(), STACK)


def test_levels_are_read_from_the_cluster():
    assert LINKS.sizes.tolist() == [8, 32, 128]
    assert LINKS.bytes_per_s.tolist() == pytest.approx([450e9, 50e9, 50e9])
    assert LINKS.seconds.tolist() == pytest.approx([1e-6, 10e-6, 20e-6])


def test_a_ring_in_a_node():
    assert LINKS.ring_seconds(8 * GB, 8) == pytest.approx(7 / 8 * 8 / 450 + 7e-6)
    assert LINKS.all_reduce_seconds(8 * GB, 8) == pytest.approx(2 * (7 / 8 * 8 / 450 + 7e-6))
    assert LINKS.ring_seconds(8 * GB, 1) == 0


def test_a_ring_over_nodes_has_all_their_nics():
    """Two whole nodes: eight NICs of 50 GB/s are less than NVLink's 450; of the ring's 16 hops two cross the leaf."""
    assert LINKS.ring_seconds(16 * GB, 16) == pytest.approx(15 / 16 * (16 / 400 + 14e-6 + 2 * 10e-6))


def test_rings_of_one_gpu_in_each_node_have_a_nic_each():
    assert LINKS.ring_seconds(4 * GB, 4, 8) == pytest.approx(3 / 4 * (4 / 50 + 4 * 10e-6))
    assert LINKS.ring_seconds(4 * GB, 8, 4) == pytest.approx(7 / 8 * (4 / 100 + 4 * 1e-6 + 4 * 10e-6))


def test_uplinks_are_shared_by_what_crosses_them():
    """A ring in order leaves each leaf once, so 4:1 uplinks of four nodes carry it; one that leaves with every hop is four times slower."""
    thin = Links.of(cluster(oversubscription=4), STACK)
    assert thin.bytes_per_s.tolist() == pytest.approx([450e9, 50e9, 12.5e9])
    ordered, crossing = thin.ring_seconds(128 * GB, 128), thin.ring_seconds(4 * GB, 4, 32)
    assert ordered == pytest.approx(LINKS.ring_seconds(128 * GB, 128))
    assert crossing == pytest.approx(3 / 4 * (4 / 12.5 + 4 * 20e-6))


def test_a_tree_saves_steps_of_small_all_reduces():
    ring = 2 * LINKS.ring_seconds(0, 16, 8)
    assert LINKS.all_reduce_seconds(0, 16, 8) == pytest.approx(2 * 4 * 20e-6)
    assert LINKS.all_reduce_seconds(0, 16, 8) < ring


def test_a_tree_below_one_leaf_takes_the_leafs_latency():
    """Four nodes of one leaf: two steps there and two back, of 10 us each; a ring takes 2 x 3 of them."""
    assert LINKS.all_reduce_seconds(0, 4, 8) == pytest.approx(4 * 10e-6)


def test_all_to_all_counts_what_leaves_the_node():
    inside = LINKS.all_to_all_seconds(8 * GB, 8)
    assert inside == pytest.approx(7 / 450 + 1e-6 + 0.7e-6)
    across = LINKS.all_to_all_seconds(16 * GB, 16)
    assert across == pytest.approx(8 / 50 + 10e-6 + 1.5e-6)


def test_two_hops_send_a_token_once_to_each_node():
    """16 ranks in two nodes, many experts of a token: nearly each token goes to both nodes, once instead of K times."""
    choices = 8
    nodes = 2 * (1 - 0.5**choices)
    first = LINKS.all_to_all_seconds(8 * GB * nodes / choices, 2, 8)
    assert LINKS.two_hop_seconds(8 * GB, choices, 16) == pytest.approx(first + LINKS.all_to_all_seconds(8 * GB, 8))
    one = LINKS.all_to_all_seconds(8 * GB / choices, 2, 8) + LINKS.all_to_all_seconds(8 * GB, 8)
    assert LINKS.two_hop_seconds(8 * GB, choices, 16, most=1) == pytest.approx(one)
    assert LINKS.two_hop_seconds(8 * GB, choices, 16) < LINKS.all_to_all_seconds(8 * GB, 16)
    assert LINKS.two_hop_seconds(8 * GB, choices, 8) == LINKS.all_to_all_seconds(8 * GB, 8)


def test_sends_take_the_level_of_their_distance():
    assert LINKS.send_seconds(GB, np.array([4, 16, 64])).tolist() == pytest.approx([1 / 450 + 1e-6, 1 / 50 + 10e-6, 1 / 50 + 20e-6])


def test_columns_are_as_single_calls():
    sizes, strides = np.array([8, 16, 4]), np.array([1, 1, 8])
    for name in ("ring_seconds", "all_reduce_seconds", "all_to_all_seconds"):
        together = getattr(LINKS, name)(GB, sizes, strides)
        assert together.tolist() == [float(getattr(LINKS, name)(GB, *pair)) for pair in zip(sizes, strides, strict=True)]
