"""Checkpoints that Lightning's own strategies wrote, made here by running them, load into plain and sharded modules."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    OptimStateKeyType,
    StateDictType,
    fully_shard,
)
from torch.utils.data import DataLoader, TensorDataset

from lightning_megascale.strategies import checkpoint as checkpoints
from tests.harness import full, run_ranks

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


class Small(L.LightningModule):
    """Groups in another order than the module's parameters, a frozen first layer, buffers."""

    def __init__(self, width: int = 8, frozen: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.trained = (3, 1) if frozen else (3, 2, 1, 0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.model[0].requires_grad_(not frozen)

    def configure_model(self) -> None:
        if self._trainer is not None and isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.model[1], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _decay)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def optimizer(self, names: bool = False) -> torch.optim.AdamW:
        layers = [(f"model.{i}", self.model[i]) for i in self.trained]
        pick = lambda kind: [(f"{n}.{kind}", getattr(m, kind)) if names else getattr(m, kind) for n, m in layers]  # noqa: E731
        return torch.optim.AdamW([{"params": pick("weight"), "lr": 1e-2}, {"params": pick("bias"), "weight_decay": 0.0}], lr=1e-3)


def _decay(step: int) -> float:
    return 0.9**step


def _fit(strategy: Any) -> tuple[L.Trainer, Small]:
    torch.manual_seed(0)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    trainer = L.Trainer(accelerator="cpu", devices=ranks, strategy=strategy, max_steps=3, **QUIET)
    module = Small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1))), batch_size=4))
    return trainer, module


def contents(module: Small, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(p): n for n, p in module.named_parameters()}
    found = {n: full(t) for n, t in module.state_dict().items()}
    for parameter, state in optimizer.state.items():
        found.update({f"{names[id(parameter)]}/{k}": full(t) for k, t in state.items()})
    return found


def _train(path: str, kind: str) -> dict[str, Tensor]:
    """Trains with one of Lightning's strategies, saves, and returns what was in memory."""
    strategy: Any = {
        "plain": lambda: "auto",
        "ddp": lambda: "ddp",
        "folder": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        "file": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False),
    }[kind]()
    trainer, module = _fit(strategy)
    trainer.save_checkpoint(path)
    return contents(module, trainer.optimizers[0])


def _load(path: str, sharded: bool, frozen: bool = True) -> tuple[dict[str, Tensor], dict[str, Any], list[float]]:
    torch.manual_seed(9)
    module = Small(frozen=frozen)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(module.model[1], mesh=mesh)
        fully_shard(module.model, mesh=mesh)
    optimizer = module.optimizer()
    metadata = checkpoints.load(path, module, [optimizer])
    return contents(module, optimizer), metadata, [group["lr"] for group in optimizer.param_groups]


def _same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert len(found) == 11 + 4 * 3  # six weights and biases, five of the norm's; three states for four trained parameters
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("kind", ["plain", "ddp", "folder", "file"])
def test_checkpoints_of_lightnings_strategies_load(kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "x.ckpt")
    expected = run_ranks(_train, 1 if kind == "plain" else 2, path, kind)[0]
    for found, metadata, lrs in [_load(path, False), *run_ranks(_load, 2, path, True)]:
        _same(found, expected)
        assert (
            metadata["global_step"] == 3
            and metadata["hyper_parameters"] == {"width": 8, "frozen": True}
            and "optimizer_states" not in metadata
        )
        assert lrs == pytest.approx([1e-2 * 0.9**3, 1e-3 * 0.9**3], rel=1e-12)
        assert metadata["lr_schedulers"][0]["base_lrs"] == [1e-2, 1e-3]
    report = checkpoints.check(path)
    assert report.complete and report.step == 3 and report.kind == ("ModelParallelStrategy" if kind == "folder" else "file")


def _fsdp(path: str, by_name: bool) -> dict[str, Tensor]:
    """What FSDPStrategy(state_dict_type="full") writes, by the calls of its methods: the strategy itself refuses a CPU, and its offloading
    crashes there."""
    torch.manual_seed(0)
    module, reference = Small(frozen=False), Small(frozen=False)  # FSDP1 cannot save an optimizer that leaves a parameter out
    reference.load_state_dict(module.state_dict())
    optimizer = reference.optimizer()
    batch = torch.randn(4, 4)
    reference.training_step([batch], 0).backward()
    optimizer.step()
    wrapped = FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))
    sharded = module.optimizer()
    module.forward = lambda x: module.model(x).pow(2).mean()  # type: ignore[method-assign]
    wrapped(batch).backward()
    sharded.step()
    options = FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, *options):
        weights, state = wrapped.state_dict(), FullyShardedDataParallel.optim_state_dict(wrapped, sharded)
    if not by_name:
        state = FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, wrapped)
    if dist.get_rank() == 0:
        torch.save({"state_dict": weights, "optimizer_states": [state], "global_step": 1, "loops": {}}, path)
    dist.barrier()
    return contents(reference, optimizer)


@pytest.mark.parametrize("by_name", [False, True])
def test_full_checkpoints_of_fsdp_load(by_name: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "x.ckpt")
    expected = run_ranks(_fsdp, 2, path, by_name)[0]
    for found, metadata, _ in [_load(path, False, False), *run_ranks(_load, 2, path, True, False)]:
        assert found.keys() == expected.keys()
        for name in found:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
        assert metadata["global_step"] == 1


def test_numbered_state_in_other_groups_is_refused_and_names_in_the_file_help(tmp_path: Path) -> None:
    module = Small()
    for names in (False, True):
        optimizer = module.optimizer(names)
        module.training_step([torch.randn(3, 4)], 0).backward()
        optimizer.step()
        torch.save({"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}, tmp_path / f"{names}.ckpt")
    other = Small()
    finer = torch.optim.AdamW([{"params": [p]} for p in other.parameters() if p.requires_grad])
    with pytest.raises(
        ValueError, match=r"numbers its parameters instead of naming.*groups of \[2, 2\] parameters; now they are \[1, 1, 1, 1, 1, 1\]"
    ):
        checkpoints.load(tmp_path / "False.ckpt", other, [finer])
    checkpoints.load(tmp_path / "True.ckpt", other, [finer])
    assert torch.equal(finer.state[other.model[3].weight]["exp_avg"], optimizer.state[module.model[3].weight]["exp_avg"])
    swapped = torch.optim.AdamW(
        [{"params": [other.model[1].weight, other.model[3].weight]}, {"params": [other.model[1].bias, other.model[3].bias]}]
    )
    with pytest.raises(ValueError, match=r"state number 0 has shape \(2, 8\), but counts to model\.1\.weight of shape \(8, 4\)"):
        checkpoints.load(tmp_path / "False.ckpt", other, [swapped])


def _single_file(path: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Small()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(module.model[1], mesh=mesh)
    fully_shard(module.model, mesh=mesh)
    optimizer = module.optimizer()
    module.training_step([torch.randn(4, 4)], 0).backward()
    optimizer.step()
    progress = {"epoch": 0, "global_step": 1, "pytorch-lightning_version": L.__version__, "hyper_parameters": {"width": 8}}
    checkpoints.save_single_file(path, progress, module, [optimizer])
    return contents(module, optimizer)


def test_single_file_of_sharded_ranks_opens_everywhere(tmp_path: Path) -> None:
    path = str(tmp_path / "x.ckpt")
    Path(path).write_text("an older one")
    expected = run_ranks(_single_file, 2, path)[0]
    assert [file.name for file in tmp_path.iterdir()] == ["x.ckpt"]
    module = Small.load_from_checkpoint(path)
    optimizer = module.optimizer()
    optimizer.load_state_dict(torch.load(path)["optimizer_states"][0])
    _same(contents(module, optimizer), expected)
    _same(_load(path, False)[0], expected)


def test_a_run_resumes_in_the_plain_trainer_from_a_single_file(tmp_path: Path) -> None:
    """The strategy's dict plus ours is what Lightning expects: a plain Trainer resumes from it."""
    path = tmp_path / "x.ckpt"
    trainer, module = _fit("auto")
    content = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    checkpoints.save_single_file(path, content, module, trainer.optimizers)
    resumed = L.Trainer(accelerator="cpu", devices=1, max_steps=5, **QUIET)
    again = Small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed.fit(again, DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4), ckpt_path=str(path))
    assert resumed.global_step == 5
    assert resumed.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**5, rel=1e-12)
    assert next(iter(resumed.optimizers[0].state.values()))["step"] == 5
