"""Tied, frozen, partial and odd state; optimizers whose groups changed; loader states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_megascale.strategies import checkpoint as checkpoints
from lightning_megascale.strategies.checkpoint.optimizer import regroup_scheduler
from tests.harness import run_ranks
from tests.strategies.test_checkpoint import Net, build, known, save_under


def test_tied_and_untied_modules_load_each_other(tmp_path: Path) -> None:
    run_ranks(save_under, 4, "fsdp2tp2", str(tmp_path / "tied.ckpt"))
    untied, optimizers = build("one", tied=False)
    with pytest.warns(UserWarning, match="loader states of 2 data-parallel ranks, now there are 1"):
        checkpoints.load(tmp_path / "tied.ckpt", untied, optimizers)
    assert torch.equal(untied.head.weight, untied.embed.weight) and untied.head.weight is not untied.embed.weight
    adam = optimizers[0].state
    assert torch.equal(adam[untied.head.weight]["exp_avg"], known("embed.weight/0/exp_avg", torch.Size([7, 6]), torch.float32))

    checkpoints.save(tmp_path / "untied.ckpt", {}, untied, optimizers)
    tied, optimizers = build("one")
    checkpoints.load(tmp_path / "untied.ckpt", tied, optimizers)
    assert torch.equal(tied.head.weight, untied.head.weight)

    with torch.no_grad():
        untied.head.weight[0, 0] += 1
    checkpoints.save(tmp_path / "differ.ckpt", {}, untied)
    with pytest.raises(ValueError, match=r"embed\.weight and head\.weight are one tensor in the module, but differ in the checkpoint"):
        checkpoints.load(tmp_path / "differ.ckpt", Net())


def _save_own_buffers(folder: str) -> None:
    model = nn.Sequential(*(nn.BatchNorm1d(64, dtype=torch.float64) for _ in range(4)))
    for buffer in model.buffers():
        buffer.fill_(dist.get_rank() + 1)
    checkpoints.save(folder, {}, model)


def test_buffers_that_differ_between_ranks_are_all_rank_0s(tmp_path: Path) -> None:
    run_ranks(_save_own_buffers, 2, str(tmp_path / "x.ckpt"))
    model = nn.Sequential(*(nn.BatchNorm1d(64, dtype=torch.float64) for _ in range(4)))
    checkpoints.load(tmp_path / "x.ckpt", model)
    assert {float(buffer.double().mean()) for buffer in model.buffers()} == {1.0}


def test_parameters_without_saved_state_start_fresh_and_unfrozen_ones_join(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[1].parameters(), "lr": 0.25}])
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    checkpoints.save(tmp_path / "x.ckpt", {}, model, [optimizer])

    fresh = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    again = torch.optim.Adam([{"params": fresh[0].parameters()}, {"params": fresh[1].parameters()}], lr=9.0)
    checkpoints.load(tmp_path / "x.ckpt", fresh, [again])
    assert [group["lr"] for group in again.param_groups] == [0.5, 0.25]
    assert fresh[0].weight not in again.state and torch.equal(
        again.state[fresh[1].weight]["exp_avg"], optimizer.state[model[1].weight]["exp_avg"]
    )
    fresh(torch.ones(4, 2)).sum().backward()
    again.step()
    assert again.state[fresh[0].weight]["step"] == 1 and again.state[fresh[1].weight]["step"] == 2


def test_weights_only_checkpoint_has_no_optimizer_and_says_so(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    checkpoints.save(tmp_path / "x.ckpt", {"state_dict": {}}, model, [optimizer])
    checkpoints.load(tmp_path / "x.ckpt", nn.Linear(2, 2))
    with pytest.raises(ValueError, match="holds weights only, so training cannot resume"):
        checkpoints.load(tmp_path / "x.ckpt", model, [optimizer])


def _adam_pair(groups: list[list[int]], lrs: list[float]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    return model, torch.optim.Adam([{"params": [model[i].weight for i in group], "lr": lr} for group, lr in zip(groups, lrs)])


def test_groups_that_do_not_map_are_refused_by_parameter_name(tmp_path: Path) -> None:
    model, optimizer = _adam_pair([[0], [1, 2]], [0.5, 0.25])
    checkpoints.save(tmp_path / "x.ckpt", {}, model, [optimizer])
    other, merged = _adam_pair([[0, 1, 2]], [1.0])
    message = r"(?s)optimizer 0, group 0.*lr=0.5 and 0.25.*the first for 0\.weight, the second for 1\.weight, 2\.weight"
    with pytest.raises(ValueError, match=message):
        checkpoints.load(tmp_path / "x.ckpt", other, [merged])
    other, split = _adam_pair([[2], [0], [1]], [1.0, 1.0, 1.0])  # finer groups map
    checkpoints.load(tmp_path / "x.ckpt", other, [split])
    assert [group["lr"] for group in split.param_groups] == [0.25, 0.5, 0.25]
    with pytest.raises(ValueError, match="optimizer 0 is SGD, the checkpoint's is Adam"):
        checkpoints.load(tmp_path / "x.ckpt", other, [torch.optim.SGD(other.parameters(), lr=1.0)])
    with pytest.raises(ValueError, match="holds 1 optimizers, configure_optimizers gave 2"):
        checkpoints.load(tmp_path / "x.ckpt", other, [split, split])


def test_swapped_optimizers_and_foreign_parameters_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    both = [torch.optim.Adam(model[0].parameters()), torch.optim.Adam(model[1].parameters())]
    checkpoints.save(tmp_path / "x.ckpt", {}, model, both)
    with pytest.raises(ValueError, match=r"optimizer 0 holds 1\.weight, which the checkpoint has in optimizer 1: return the optimizers"):
        checkpoints.load(tmp_path / "x.ckpt", model, both[::-1])
    with pytest.raises(ValueError, match=r"optimizer 0, group 0: a parameter of shape \(3, 3\) is not a parameter of the module"):
        checkpoints.save(tmp_path / "y.ckpt", {}, model, [torch.optim.Adam([nn.Parameter(torch.ones(3, 3))])])
    assert not (tmp_path / "y.ckpt").exists()


def test_scheduler_lists_follow_their_groups() -> None:
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr, "initial_lr": lr} for lr in (1.0, 2.0, 3.0)])
    state = {"base_lrs": [5.0, 6.0], "_last_lr": [0.5, 0.6], "lr_lambdas": [None, None], "last_epoch": 4, "milestones": [1, 2, 3]}
    moved = regroup_scheduler(state, [1, None, 0], 2, optimizer)
    assert moved["base_lrs"] == [6.0, 2.0, 5.0] and moved["_last_lr"] == [0.6, 2.0, 0.5] and moved["lr_lambdas"] == [None] * 3
    assert moved["last_epoch"] == 4 and moved["milestones"] == [1, 2, 3]
    assert regroup_scheduler(state, [0, 1], 2, optimizer) is state


def _non_trivial_state(folder: str) -> list[bool]:
    """Adafactor keeps rows and columns; a plain tensor of another shape would not mix with a sharded parameter."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Linear(4, 6, bias=False)
    whole = model.weight.data.clone()
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.state[model.weight] = {"rows": torch.arange(6.0).view(6, 1), "note": "kept", "empty": None}
    checkpoints.save(folder, {}, model, [optimizer])
    optimizer.state.clear()
    checkpoints.load(folder, model, [optimizer])
    state = optimizer.state[model.weight]
    rows = state["rows"]
    return [
        rows.placements == (Replicate(),),
        torch.equal(rows.to_local(), torch.arange(6.0).view(6, 1)),
        state["note"] == "kept",
        state["empty"] is None,
    ]


def test_state_of_another_shape_and_state_that_is_no_tensor(tmp_path: Path) -> None:
    assert run_ranks(_non_trivial_state, 2, str(tmp_path / "x.ckpt")) == [[True] * 4] * 2


def test_compiled_and_checkpointed_modules_have_plain_names(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapped = nn.Sequential(torch.compile(plain[0]), checkpoint_wrapper(plain[1]))
    optimizer = torch.optim.Adam(wrapped.parameters())
    checkpoints.save(tmp_path / "x.ckpt", {}, wrapped, [optimizer])
    fresh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    checkpoints.load(tmp_path / "x.ckpt", fresh, [torch.optim.Adam(fresh.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), fresh.parameters()))


class WithExtraState(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.weight, self.value, self.total = nn.Parameter(torch.ones(2)), value, torch.tensor(float(value))

    def get_extra_state(self) -> dict:
        return {"value": self.value}

    def set_extra_state(self, state: dict) -> None:
        self.value = state["value"]

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "total"] = self.total.clone()  # as torchmetrics does with persistent states

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        self.total = state_dict.pop(prefix + "total", self.total)
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_extra_state_and_state_that_is_no_buffer_come_back(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "x.ckpt", {}, nn.Sequential(WithExtraState(3)))
    fresh = nn.Sequential(WithExtraState(4))
    checkpoints.load(tmp_path / "x.ckpt", fresh)
    assert fresh[0].value == 3 and fresh[0].total == 3.0
