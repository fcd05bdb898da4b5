"""The mesh: who shares what with whom, on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from lightning_megascale.mesh import build_mesh, compatible_mesh
from lightning_megascale.plan import ParallelPlan
from tests.harness import run_ranks

HSDP_TP = dict(data_parallel_replicate_size=2, tensor_parallel_size=2)


def views(sizes: dict[str, Any], ranks: list[int] | None, keep: tuple[str, ...]) -> dict[str, Any]:
    plan = ParallelPlan(**sizes).resolve(dist.get_world_size())
    made = build_mesh(plan, "cpu", ranks, keep)
    found = {
        "share": made.data_parallel_rank,
        "shares": made.data_parallel_size,
        "batch": made.batch.mesh.tolist(),
        "loss": made.loss.mesh.tolist(),
        "data": made.data.mesh.tolist(),
        "tensor": None if made.tensor is None else made.tensor.mesh.tolist(),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }
    if keep:
        mesh = compatible_mesh(made)
        found["names"] = {name: mesh[name].mesh.tolist() for name in ("data_parallel", "tensor_parallel")}
        found["groups after"] = len(dist.distributed_c10d._world.pg_map)
    return found


def test_hsdp_times_tensor_parallel_on_8_ranks() -> None:
    results = run_ranks(views, 8, HSDP_TP, None, ("tp",))
    assert [result["share"] for result in results] == [0, 0, 1, 1, 2, 2, 3, 3]
    fifth = results[5]  # replicate 1, shard 0, tp 1
    assert fifth["shares"] == 4
    assert fifth["batch"] == fifth["loss"] == [1, 3, 5, 7]
    assert fifth["data"] == [[1, 3], [5, 7]]
    assert fifth["tensor"] == [4, 5]
    assert fifth["names"] == {"data_parallel": [5, 7], "tensor_parallel": [4, 5]}
    assert fifth["groups after"] == fifth["groups"], "the stock-style view must not make groups"


def test_axes_of_size_one_own_no_group() -> None:
    result = run_ranks(views, 2, {}, None, ())[0]
    assert result["groups"] == 1 and result["tensor"] is None  # dp_shard is the world, and shares its group


def test_placement_moves_ranks() -> None:
    results = run_ranks(views, 4, dict(tensor_parallel_size=2), [0, 2, 1, 3], ())
    assert results[0]["tensor"] == [0, 2] and results[1]["tensor"] == [1, 3]
    assert [result["share"] for result in results] == [0, 1, 0, 1]


def turned_around(plan: dict[str, Any], placement: list[int]) -> str:
    try:
        build_mesh(ParallelPlan(**plan).resolve(4), "cpu", placement)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plan", "placement", "told"),
    [
        (dict(pipeline_parallel_size=2), [0, 3, 2, 1], "ranks [3, 1] along pp"),  # ranks 0 and 1 would both be stage 0 of replica 0
        (dict(pipeline_parallel_size=2), [3, 1, 2, 0], "ranks [3, 2] along pp"),
        (dict(), [1, 0, 2, 3], "ranks [1, 0, 2, 3] along dp_shard"),
        (dict(data_parallel_replicate_size=2), [0, 2, 1, 3], "ranks [0, 2, 1, 3] along dp_replicate x dp_shard"),
        (dict(context_parallel_size=2, label_alignment="shift"), [0, 2, 1, 3], "ranks [0, 2, 1, 3] along dp_shard x cp"),
        (dict(pipeline_parallel_size=2), [0, 2, 1, 3], ""),
    ],
)
def test_a_placement_that_turns_a_group_around_is_refused(plan: dict[str, Any], placement: list[int], told: str) -> None:
    for message in run_ranks(turned_around, 4, plan, placement):
        assert (told in message and "must ascend" in message) if told else message == ""


def wrong_placement() -> str:
    with pytest.raises(ValueError, match="each of the 2 ranks once") as caught:
        build_mesh(ParallelPlan().resolve(2), "cpu", [0, 0])
    return str(caught.value)


def test_a_placement_that_is_no_permutation_is_refused() -> None:
    assert len(set(run_ranks(wrong_placement, 2))) == 1
