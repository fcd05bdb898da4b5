"""First values of experts: the same under every plan, and one expert in memory at a time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_megascale.mesh import build_mesh, expert_views
from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.moe import GroupedExperts
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.parallel.init import materialize
from lightning_megascale.parallel.parallelize import parallelize
from lightning_megascale.plan import ParallelPlan
from tests.harness import full, run_ranks, worst


def first_values(sizes: dict[str, int]) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The whole parameters of a model that was built on the meta device, and how many experts each draw held."""
    with torch.device("meta"):
        model = Decoder(PRESETS["tiny_moe"])
    if sizes:
        plan = ParallelPlan(**sizes).resolve(dist.get_world_size())
        views = build_mesh(plan, "cpu")
        holder = torch.nn.Module()
        holder.add_module("model", model)
        parallelize(holder, model, plan, views, model.megascale_layout)
    held: list[int] = []
    plain = GroupedExperts.reset_parameters

    def noted(self: GroupedExperts, *args: float) -> None:
        held.append(len(self.gate_up_proj))
        plain(self, *args)

    GroupedExperts.reset_parameters = noted  # type: ignore[assignment]
    try:
        materialize(model, "cpu", 7)
    finally:
        GroupedExperts.reset_parameters = plain  # type: ignore[method-assign]
    return {name: full(parameter) for name, parameter in model.named_parameters()}, held


@pytest.mark.parametrize(
    ("sizes", "own"),
    [
        (dict(data_parallel_shard_size=4, expert_parallel_size=4), 2),
        (dict(data_parallel_shard_size=4, expert_parallel_size=2), 2),
        (dict(data_parallel_shard_size=4), 2),
        (dict(data_parallel_replicate_size=2, data_parallel_shard_size=2, expert_parallel_size=2), 4),
    ],
    ids=str,
)
def test_the_same_under_every_plan(sizes: dict[str, int], own: int) -> None:
    alone, held = first_values({})
    config = PRESETS["tiny_moe"]
    layers = config.num_layers - config.num_dense_layers
    assert held == [1] * config.num_experts * layers
    experts = alone["layers.1.mlp.experts.gate_up_proj"]
    assert not torch.equal(experts[0], experts[1]) and 0.015 < float(experts.std()) < 0.025
    for values, drawn in run_ranks(first_values, 4, sizes):
        assert worst(alone, values)[0] == 0
        assert drawn == [1] * own * layers, "a rank draws the experts that it has a part of"


def test_views_of_experts_cover_the_ranks() -> None:
    def groups() -> tuple[list[int], list[int] | None]:
        views = build_mesh(ParallelPlan(tensor_parallel_size=2).resolve(4), "cpu")
        regrouped = expert_views(views, 2)
        assert regrouped.expert is not None
        return regrouped.shard.mesh.flatten().tolist(), regrouped.expert.mesh.tolist()

    found = run_ranks(groups, 4)
    assert found == [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]


def test_a_placement_that_turns_a_group_around_is_refused() -> None:
    """Its ranks would take each other's experts for their own."""

    def told() -> str:
        views = build_mesh(ParallelPlan(tensor_parallel_size=2).resolve(4), "cpu", [0, 2, 1, 3])
        try:
            expert_views(views, 4)
        except ValueError as error:
            return str(error)
        return "no error"

    for message in run_ranks(told, 4):
        assert (
            "placement gives expert_parallel_size=4 neighbours of the mesh the ranks [0, 2, 1, 3]: they must be in ascending order"
            in message
        )
