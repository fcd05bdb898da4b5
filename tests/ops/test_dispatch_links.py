"""What dispatchers send between nodes, counted by the nodes' devices: the formula's bytes, and the choice of "auto" by it."""

from __future__ import annotations

import pytest

from tests import links
from tests.benchmarks.moe_links import EACH, NAMES, expected_bytes, summary

REASON = links.missing()


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=f"no nodes on this machine: {REASON}")
@pytest.mark.parametrize("count", [2, 4])
def test_bytes_between_nodes_are_those_of_the_formula(count: int) -> None:
    with links.nodes(count, "1gbit") as nodes:
        results = nodes.run("tests.benchmarks.moe_links:measure", EACH, [2, 8], 3, 512, 512)
    for top_k in (2, 8):
        sent = {name: found[1] for name, found in summary(results, top_k).items()}
        for name in NAMES:
            assert sent[name] == pytest.approx(expected_bytes(top_k, count, 512, 512, name), rel=0.05), (top_k, name)
        assert sent["two_hop_dedup"] < sent["alltoall"]
    assert [result["8"]["auto"] for result in results] == ["two_hop_dedup"] * len(results)
    assert [result["2"]["auto"] for result in results] == ["alltoall" if count == 2 else "two_hop_dedup"] * len(results)
