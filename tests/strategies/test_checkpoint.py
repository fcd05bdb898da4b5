"""Checkpoints: bit-equal under every other plan, whole or not there, plain files of Lightning, and messages."""

from __future__ import annotations

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
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_megascale.strategies import checkpoint as checkpoints
from tests.harness import run_ranks

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
        # a tied tensor (42 elements) counts once, as does its optimizer state
        elements = 42 + 54 + 9 + 45 + 5 + 5 + 5 + 5 + 1 + 12 + 4 + 8 + 2
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
