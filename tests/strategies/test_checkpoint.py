"""Checkpoints: bit-equal under every other plan, whole or not there, plain files of Lightning, and messages."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
import warnings
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_megascale.strategies import checkpoint as checkpoints
from lightning_megascale.strategies.checkpoint import files, saving
from lightning_megascale.strategies.checkpoint.optimizer import regroup_scheduler
from tests.harness import RankFailure, run_ranks

WORLD = {"one": 1, "dp2": 2, "fsdp2": 2, "tp2": 2, "fsdp2tp2": 4}
TENSOR_PARALLEL_DIM = {"up": 0, "embed": 0, "down": 1}


class Net(nn.Module):
    """Uneven rows, two dtypes, tied embedding, buffers, a frozen layer, and a part for a second optimizer."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 9, dtype=torch.float64)
        self.down = nn.Linear(9, 5, bias=False)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(3, 4).requires_grad_(False)
        self.critic = nn.Linear(4, 2)
        self.head = nn.Linear(6, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def known(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The whole value of a tensor, by name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.replace("head.", "embed.").encode()))
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=generator, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=dtype)


def own_part(whole: Tensor, name: str, plan: str) -> Tensor:
    """This rank's piece by the definition of the plans (tp splits first, FSDP2 splits the rest by rows), not by DTensor's code."""
    layer = name.replace("head.", "embed.").split(".")[0]
    rank = dist.get_rank() if dist.is_initialized() else 0
    if "tp2" in plan and layer in TENSOR_PARALLEL_DIM and whole.ndim == 2:
        whole = _chunk(whole, TENSOR_PARALLEL_DIM[layer], 2, rank % 2)
    if plan.startswith("fsdp2"):
        whole = _chunk(whole, 0, 2, rank // (2 if "tp2" in plan else 1))
    return whole


def _chunk(whole: Tensor, dim: int, parts: int, part: int) -> Tensor:
    pieces = whole.chunk(parts, dim)
    return pieces[part] if part < len(pieces) else whole.narrow(dim, 0, 0)


def build(plan: str, *, tied: bool = True) -> tuple[Net, list[torch.optim.Optimizer]]:
    """The module as the plan shards it, and two stepped optimizers whose groups differ from plan to plan."""
    torch.manual_seed(3)
    model = Net(tied)
    if "tp2" in plan:
        mesh = init_device_mesh("cpu", (WORLD[plan] // 2, 2), mesh_dim_names=("dp_shard", "tp"))
        for layer, dim in TENSOR_PARALLEL_DIM.items():
            child = getattr(model, layer)
            child.weight = nn.Parameter(distribute_tensor(child.weight.data, mesh["tp"], [Shard(dim)]))
        if tied:
            model.head.weight = model.embed.weight
    if plan == "dp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "dp_shard")))
    elif plan.startswith("fsdp2"):
        mesh = mesh if "tp2" in plan else init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
        fully_shard(model.up, mesh=mesh["dp_shard"])
        fully_shard(model, mesh=mesh["dp_shard"])
    body = [(n, p) for n, p in model.named_parameters() if not n.startswith("critic")]
    decay = [p for n, p in body if p.ndim > 1]
    groups = [{"params": decay, "weight_decay": 0.3}, {"params": [p for n, p in body if p.ndim < 2], "weight_decay": 0.0, "lr": 0.5}]
    if "tp2" in plan:  # no operation takes parameters of two meshes or kinds at once: other groups than under dp
        parallel = [p for n, p in body if p.ndim > 1 and n.split(".")[0] in TENSOR_PARALLEL_DIM]
        rest = [p for p in decay if all(p is not q for q in parallel)]
        groups = [groups[1], {"params": rest, "weight_decay": 0.3}, {"params": parallel, "weight_decay": 0.3}]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=1.0, foreach=False),
        torch.optim.SGD(model.critic.parameters(), lr=2.0),
    ]
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    return model, optimizers


def entries(model: Net, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Every tensor a checkpoint holds, by a name of this test."""
    names = {id(p): n for n, p in model.named_parameters()}
    found = dict(model.state_dict(keep_vars=True))
    for index, optimizer in enumerate(optimizers):
        for parameter, state in optimizer.state.items():
            found.update({f"{names[id(parameter)]}/{index}/{k}": t for k, t in state.items() if isinstance(t, Tensor)})
    return found


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def set_known(model: Net, optimizers: list[torch.optim.Optimizer], plan: str) -> None:
    with torch.no_grad():
        for name, tensor in entries(model, optimizers).items():
            value = known(name, tensor.shape, tensor.dtype)
            local(tensor).copy_(own_part(value, name, plan) if isinstance(tensor, DTensor) else value)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = 0.25 * group["lr"]
            group["initial_lr"] = 10 * group["lr"]


def lightning_dict(data_parallel_rank: int = 0, equal_loaders: bool = False) -> dict:
    return {
        "epoch": 2,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {},
        "optimizer_states": [{}, {}],
        "hyper_parameters": {"width": 6, "names": ["a", "b"]},
        "loops": {"fit_loop": {"state_dict": {"combined_loader": [{"position": 5 if equal_loaders else 5 + data_parallel_rank}]}}},
    }


def data_rank(plan: str) -> int:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return rank // 2 if "tp2" in plan else rank


def save_under(plan: str, folder: str) -> None:
    model, optimizers = build(plan)
    set_known(model, optimizers, plan)
    content = lightning_dict(data_rank(plan))
    content["lr_schedulers"] = [{"base_lrs": [g["initial_lr"] for g in optimizers[0].param_groups], "last_epoch": 7}, {"last_epoch": 7}]
    first = "tp2" not in plan or dist.get_rank() % 2 == 0
    checkpoints.save(folder, content, model, optimizers, data_parallel_rank=data_rank(plan), is_first_of_data_rank=first)
    assert content["loops"]["fit_loop"]["state_dict"]["combined_loader"], "the caller's dict must stay as it was"


def load_under(plan: str, folders: dict[str, str]) -> list[str]:
    """Everything that is not bit-equal after a load of each folder."""
    wrong = []
    for saved_under, folder in folders.items():
        model, optimizers = build(plan)
        for optimizer in optimizers:  # nothing may survive from before
            optimizer.state.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            metadata = checkpoints.load(folder, model, optimizers, data_parallel_rank=data_rank(plan))
        found = entries(model, optimizers)
        reference, reference_optimizers = build("one")
        expected = entries(reference, reference_optimizers)
        if found.keys() != expected.keys():
            wrong.append(f"{saved_under}: names {sorted(found.keys() ^ expected.keys())}")
        for name, tensor in found.items():
            whole = known(name, expected[name].shape, expected[name].dtype)
            sharded = isinstance(tensor, DTensor)
            same = torch.equal(local(tensor), own_part(whole, name, plan) if sharded else whole)
            if not same or tensor.shape != whole.shape or tensor.dtype != whole.dtype:
                wrong.append(f"{saved_under}: {name}")
            if "/exp_avg" in name and sharded != isinstance(dict(model.named_parameters())[name.split("/")[0]], DTensor):
                wrong.append(f"{saved_under}: {name} is sharded otherwise than its parameter")
        lrs = {
            n: g["lr"] for o in optimizers for g in o.param_groups for n, p in model.named_parameters() if any(p is q for q in g["params"])
        }
        if lrs != {n: 0.5 if n.startswith("critic") else 0.125 if not n.endswith("weight") or n.startswith("norm") else 0.25 for n in lrs}:
            wrong.append(f"{saved_under}: lr {lrs}")
        if metadata["lr_schedulers"][0]["base_lrs"] != [g["initial_lr"] for g in optimizers[0].param_groups]:
            wrong.append(f"{saved_under}: base_lrs {metadata['lr_schedulers'][0]}")
        if optimizers[0].param_groups[0]["foreach"] is not False or metadata["hyper_parameters"] != {"width": 6, "names": ["a", "b"]}:
            wrong.append(f"{saved_under}: options or metadata")
        sizes = {"one": 1, "dp2": 2, "fsdp2": 2, "tp2": 1, "fsdp2tp2": 2}
        loaders = metadata["loops"]["fit_loop"]["state_dict"].get("combined_loader")
        same_size = sizes[plan] == sizes[saved_under]
        if loaders != ([{"position": 5 + data_rank(plan)}] if same_size else [{"position": 5}] if sizes[saved_under] == 1 else None):
            wrong.append(f"{saved_under}: loaders {loaders}")
        warned = any("loader states" in str(w.message) for w in caught)
        if warned != (not same_size and sizes[saved_under] > 1 and (not dist.is_initialized() or dist.get_rank() == 0)):
            wrong.append(f"{saved_under}: warned {warned}")
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("saved")
    folders = {plan: str(root / f"{plan}.ckpt") for plan in WORLD}
    for plan, folder in folders.items():
        if plan == "one":
            save_under(plan, folder)
        else:
            run_ranks(save_under, WORLD[plan], plan, folder)
    return folders


@pytest.mark.parametrize("plan", WORLD)
def test_saved_under_any_plan_loads_bit_equal_under_any_other(plan: str, saved: dict[str, str]) -> None:
    results = [load_under(plan, saved)] if plan == "one" else run_ranks(load_under, WORLD[plan], plan, saved)
    assert results == [[]] * WORLD[plan]


def files_of(folder: str) -> list[tuple[torch.Size, list[torch.Size]]]:
    """Shape of each saved tensor and of the pieces that the folder's files hold."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    written: dict[str, list[torch.Size]] = {}
    for index in metadata.storage_data:
        stored = metadata.state_dict_metadata[index.fqn]
        written.setdefault(index.fqn, []).extend(c.sizes for c in stored.chunks if c.offsets == index.offset)
    return [(metadata.state_dict_metadata[key].size, parts) for key, parts in written.items()]


def test_replicated_tensors_are_written_once_and_check_finds_everything_whole(saved: dict[str, str]) -> None:
    for plan, folder in saved.items():
        report = checkpoints.check(folder)
        assert report.problems == [] and report.complete
        assert (report.step, report.epoch, report.world_size, report.kind) == (7, 2, WORLD[plan], "megascale")
        # tied: under each name (2 x 42 elements); the optimizer's state once
        elements = 42 * 2 + 54 + 9 + 45 + 5 + 5 + 5 + 5 + 1 + 12 + 4 + 8 + 2
        assert report.parameters == elements
        exp_avgs = 2 * (4 * (42 + 45 + 5 + 5) + 8 * (54 + 9))
        assert report.optimizer_bytes == exp_avgs + 4 * 6  # and six steps
        pieces = files_of(folder)
        assert all(sum(piece.numel() for piece in parts) == whole.numel() for whole, parts in pieces), plan  # nothing twice


def test_listing_is_by_step_and_metadata_has_no_tensors(saved: dict[str, str], tmp_path: Path) -> None:
    reports = checkpoints.list_checkpoints(Path(saved["one"]).parent)
    assert [report.path.name for report in reports] == sorted(f"{plan}.ckpt" for plan in WORLD)
    metadata = checkpoints.read_metadata(saved["fsdp2"])
    assert metadata["global_step"] == 7 and "state_dict" not in metadata and "optimizer_states" not in metadata
    assert checkpoints.is_checkpoint(saved["fsdp2"]) and not checkpoints.is_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        checkpoints.list_checkpoints(tmp_path / "nothing")


def _save_after_validation(folder: str) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(2, 4))
    whole = not isinstance(model[1].weight, DTensor)  # the state this test is about: FSDP2 keeps the root's whole parameters
    checkpoints.save(folder, {}, model, [optimizer])
    expected = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    state = optimizer.state[model[1].weight]["exp_avg"].full_tensor()
    for parameter in model.parameters():
        local(parameter).zero_()
    optimizer.state.clear()
    model(torch.ones(2, 4).requires_grad_())  # unsharded again when the load begins
    checkpoints.load(folder, model, [optimizer])
    same = [torch.equal(parameter.full_tensor(), expected[name]) for name, parameter in model.named_parameters()]
    return [whole, all(same), torch.equal(optimizer.state[model[1].weight]["exp_avg"].full_tensor(), state)]


def test_save_and_load_while_fsdp2_holds_whole_parameters_after_a_forward(tmp_path: Path) -> None:
    assert run_ranks(_save_after_validation, 2, str(tmp_path / "x.ckpt")) == [[True, True, True]] * 2


def test_equal_loader_states_survive_a_change_of_their_number(tmp_path: Path) -> None:
    run_ranks(_save_equal_loaders, 2, str(tmp_path / "x.ckpt"))
    assert sorted(file.name for file in (tmp_path / "x.ckpt").glob("loader_*")) == ["loader_00000.pt", "loader_00001.pt"]
    metadata = checkpoints.load(tmp_path / "x.ckpt", nn.Linear(2, 2))
    assert metadata["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [{"position": 5}]


def _save_equal_loaders(folder: str) -> None:
    checkpoints.save(folder, lightning_dict(equal_loaders=True), nn.Linear(2, 2), data_parallel_rank=dist.get_rank())


# ------------------------------------------------------------------------------------------------------ tied, partial, other optimizers


def test_tied_and_untied_modules_load_each_other(tmp_path: Path, saved: dict[str, str]) -> None:
    untied, optimizers = build("one", tied=False)
    checkpoints.load(saved["fsdp2tp2"], untied, optimizers)
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


# -------------------------------------------------------------------------------------------------------------- whole or not there


def _fork(function: object, *args: object) -> int:
    process = multiprocessing.get_context("fork").Process(target=function, args=args)  # type: ignore[arg-type]
    process.start()
    process.join(60)
    return process.exitcode if process.exitcode is not None else 99


def _line(value: float) -> nn.Linear:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _die(*args: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _killed_before_rename(folder: Path) -> None:
    files.commit = _die  # type: ignore[assignment]
    checkpoints.save(folder, {"global_step": 2}, _line(2.0))


def _killed_between_renames(folder: Path) -> None:
    files._exchange = lambda one, other: False  # type: ignore[assignment]
    rename = os.rename

    def second_dies(source: Path, target: Path) -> None:
        if target == folder:
            _die()
        rename(source, target)

    files.os.rename = second_dies  # type: ignore[assignment]
    checkpoints.save(folder, {"global_step": 2}, _line(2.0))


@pytest.mark.parametrize("death", [_killed_before_rename, _killed_between_renames])
def test_torn_save_leaves_a_usable_checkpoint_and_the_next_save_cleans_up(death: object, tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    checkpoints.save(folder, {"global_step": 1}, _line(1.0))
    assert _fork(death, folder) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    model = _line(0.0)
    step = checkpoints.load(folder, model)["global_step"]
    assert torch.equal(model.weight, torch.full((2, 2), float(step)))  # one of the two, never a mixture
    assert step == 1 if death is _killed_before_rename else step in (1, 2)
    assert any(report.kind == "leftover" and not report.complete for report in checkpoints.list_checkpoints(tmp_path))
    checkpoints.save(folder, {"global_step": 3}, _line(3.0))
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"] and checkpoints.read_metadata(folder)["global_step"] == 3


@pytest.mark.parametrize("exchange", [True, False])
def test_replacing_a_folder_a_file_and_a_link(exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    checkpoints.save(tmp_path / "folder", {}, _line(1.0))
    checkpoints.save(tmp_path / "folder", {}, _line(2.0))
    (tmp_path / "file").write_text("old")
    checkpoints.save(tmp_path / "file", {}, _line(2.0))
    checkpoints.save(tmp_path / "target", {}, _line(1.0))
    (tmp_path / "link").symlink_to(tmp_path / "target")
    checkpoints.save(tmp_path / "link", {}, _line(2.0))
    for name, value in {"folder": 2.0, "file": 2.0, "target": 1.0, "link": 2.0}.items():
        model = _line(0.0)
        checkpoints.load(tmp_path / name, model)
        assert model.weight[0, 0] == value, name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link", "target"]


def _failing_save(folder: str, where: str) -> tuple[str, str, float]:
    rank = dist.get_rank()
    model = nn.Linear(40, 500)
    fully_shard(model)
    if where == "shard" and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))  # the disk is full for this rank: EFBIG
    if where == "meta" and rank == 0:
        saving.files.write_pickled = _no_space  # type: ignore[assignment]
    if where == "loader" and rank == 1:
        saving.files.write_pickled = _no_space  # type: ignore[assignment]
    begin = time.monotonic()
    try:
        checkpoints.save(folder, lightning_dict(rank), model, data_parallel_rank=rank)
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "saved", "", 0.0


def _no_space(content: object, path: Path) -> None:
    raise OSError(28, "No space left on device", str(path))


@pytest.mark.parametrize(
    ("where", "rank", "cause"), [("shard", 1, "File too large"), ("meta", 0, "No space left"), ("loader", 1, "No space left")]
)
def test_a_rank_that_cannot_write_fails_every_rank_and_leaves_the_old_checkpoint(where: str, rank: int, cause: str, tmp_path: Path) -> None:
    folder = tmp_path / "last.ckpt"
    checkpoints.save(folder, {"global_step": 1}, _line(1.0))
    for kind, message, seconds in run_ranks(_failing_save, 2, str(folder), where, timeout=30):
        assert kind == "RuntimeError" and seconds < 20
        assert f"checkpoint {folder} was not written: rank {rank}: " in message and cause in message
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"] and checkpoints.read_metadata(folder)["global_step"] == 1


def test_check_finds_missing_cut_and_unreadable_files(saved: dict[str, str], tmp_path: Path) -> None:
    import shutil

    shard = "__0_0.distcp"
    shutil.copytree(saved["fsdp2"], tmp_path / "cut")
    with open(tmp_path / "cut" / shard, "r+b") as file:
        file.truncate(2000)
    problems = checkpoints.check(tmp_path / "cut").problems
    assert any(f"{shard} has 2,000 bytes" in problem for problem in problems) and any("is unreadable" in problem for problem in problems)
    shutil.copytree(saved["fsdp2"], tmp_path / "gone")
    (tmp_path / "gone" / shard).unlink()
    assert f"{shard} is missing" in checkpoints.check(tmp_path / "gone").problems
    with pytest.raises(RuntimeError, match="was not loaded.*No such file"):
        checkpoints.load(tmp_path / "gone", Net())
    shutil.copytree(saved["fsdp2"], tmp_path / "torn")
    (tmp_path / "torn" / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"torn is no checkpoint: \.metadata missing, the save was not finished"):
        checkpoints.load(tmp_path / "torn", Net())
    model = _line(1.0)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    checkpoints.save(tmp_path / "nan", {}, model)
    assert checkpoints.check(tmp_path / "nan").problems == ["weight holds NaN"]


# ---------------------------------------------------------------------------------------------------------------------- messages


def _mismatched(folder: str) -> str:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(3, 2))
    model.add_module("secnd", nn.Linear(2, 2))
    fully_shard(model)
    before = model.first.weight.full_tensor().clone()
    try:
        checkpoints.load(folder, model)
    except ValueError as error:
        assert torch.equal(model.first.weight.full_tensor(), before), "nothing may be loaded"
        return str(error)
    return "loaded"


def test_names_and_shapes_that_do_not_fit_come_in_one_message_on_all_ranks(tmp_path: Path) -> None:
    model = nn.Sequential()
    model.add_module("first", nn.Linear(2, 2))
    model.add_module("second", nn.Linear(2, 2))
    checkpoints.save(tmp_path / "x.ckpt", {}, model)
    one, other = run_ranks(_mismatched, 2, str(tmp_path / "x.ckpt"))
    assert one == other
    assert "missing in the checkpoint: secnd.weight (nearest unused name there: second.weight)" in one
    assert "unexpected in the checkpoint: second.bias (nearest name without a value: secnd.bias)" in one
    assert "other shape: first.weight is (2, 3), the checkpoint has (2, 2)" in one

    partial = nn.Sequential()
    partial.add_module("first", nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match="unexpected in the checkpoint: second.weight\n.*second.bias\nbuild the saved model, or set strict_loading=False"
    ):
        checkpoints.load(tmp_path / "x.ckpt", partial)
    with pytest.warns(UserWarning, match="unexpected in the checkpoint: second.weight"):
        checkpoints.load(tmp_path / "x.ckpt", partial, strict=False)
    assert torch.equal(partial.first.weight, model.first.weight)


class Own:
    """A class that torch's default unpickler does not know."""


def test_paths_and_pickled_classes_are_explained(tmp_path: Path) -> None:
    checkpoints.save(tmp_path / "good.ckpt", {}, _line(1.0))
    with pytest.raises(ValueError, match=r"there is no checkpoint .*god\.ckpt; in that folder are: good\.ckpt"):
        checkpoints.load(tmp_path / "god.ckpt", _line(0.0))
    with pytest.raises(ValueError, match="s3://bucket/x.ckpt': only paths of a .shared. file system"):
        checkpoints.save("s3://bucket/x.ckpt", {}, _line(0.0))
    checkpoints.save(tmp_path / "own.ckpt", {"hyper_parameters": {"thing": Own()}}, _line(1.0))
    with pytest.raises(ValueError, match=r"meta\.pt holds an object of tests\.strategies\.test_checkpoint\.Own.*weights_only=False"):
        checkpoints.load(tmp_path / "own.ckpt", _line(0.0))
    assert isinstance(checkpoints.load(tmp_path / "own.ckpt", _line(0.0), weights_only=False)["hyper_parameters"]["thing"], Own)
    (tmp_path / "cut.ckpt").write_bytes(b"PK\x03\x04" + b"0" * 100)
    with pytest.raises(ValueError, match=r"cut\.ckpt is unreadable"):
        checkpoints.load(tmp_path / "cut.ckpt", _line(0.0))


def _save_sharded_metadata(folder: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    try:
        checkpoints.save(folder, {"callbacks": {"ema": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}}, _line(1.0))
    except ValueError as error:
        return str(error)
    return "saved"


def test_sharded_tensors_in_the_metadata_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(_save_sharded_metadata, 2, str(tmp_path / "x.ckpt")):
        assert "checkpoint['callbacks'] holds a DTensor: only rank 0's shard of it would be saved" in message
    assert list(tmp_path.iterdir()) == []


def _rank_dies(folder: str) -> None:
    if dist.get_rank() == 1:
        saving.dcp.save = _die  # type: ignore[assignment]
    checkpoints.save(folder, {}, _line(1.0))


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure):
        run_ranks(_rank_dies, 2, str(tmp_path / "x.ckpt"), timeout=30)
    assert time.monotonic() - begin < 25
    assert not (tmp_path / "x.ckpt").exists()
