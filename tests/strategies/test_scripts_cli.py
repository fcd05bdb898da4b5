"""LightningCLI: the strategy is a block of a YAML file, and every field of a plan is an argument with a type and a default."""

from __future__ import annotations

import inspect
import os
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_megascale import MegascaleStrategy, ParallelPlan
from tests.harness import full, run_ranks, worst

ROWS, WIDTH = 8, 6


class Regressor(L.LightningModule):
    def __init__(self, width: int = WIDTH, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


class Table(L.LightningDataModule):
    """One batch holds all rows, so the order in which a sampler deals them out does not matter."""

    def __init__(self, batch_size: int = ROWS) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(4)
        x, y = (torch.randn(ROWS, columns, generator=generator, dtype=torch.float64) for columns in (WIDTH, 1))
        return DataLoader(TensorDataset(x, y), batch_size=self.batch_size)


def cli(config: dict[str, Any], folder: str, *arguments: str) -> L.LightningModule:
    from lightning.pytorch.cli import LightningCLI

    file = Path(folder) / f"given_{os.environ.get('RANK', 'one')}.yaml"
    file.write_text(yaml.safe_dump(config))
    return LightningCLI(Regressor, Table, args=["fit", "--config", str(file), *arguments]).model


def config(folder: str, devices: int, strategy: Any) -> dict[str, Any]:
    quiet = dict(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, logger=False)
    trainer = dict(accelerator="cpu", devices=devices, max_epochs=3, default_root_dir=folder, strategy=strategy, **quiet)
    return {"trainer": trainer, "model": {"learning_rate": 0.02}, "data": {"batch_size": ROWS // devices}}


STRATEGIES: dict[str, Any] = {
    "fsdp2": {
        "class_path": "lightning_megascale.MegascaleStrategy",
        "init_args": {"data_parallel_shard_size": 2, "reduce_gradients": "every"},
    },
    "layout": {
        "class_path": "lightning_megascale.MegascaleStrategy",
        "init_args": {"module": "auto", "layout": {"blocks": ["1"]}, "timeout": "0:10:00"},
    },
    "plan": {"class_path": "lightning_megascale.MegascaleStrategy", "init_args": {"plan": {"data_parallel_shard_size": 2}}},
    "name": "megascale",
}


def trained(folder: str) -> dict[str, Any]:
    """Parameters after the command, by strategy; and what a wrong name is told."""
    found: dict[str, Any] = {}
    for name, strategy in STRATEGIES.items():
        module = cli(config(f"{folder}/{name}", 2, strategy), folder)
        found[name] = {key: full(value) for key, value in module.named_parameters()}
        found[name + " plan"] = module.trainer.strategy.plan.summary()
    block = {"class_path": "lightning_megascale.MegascaleStrategy"}
    module = cli(config(f"{folder}/command", 2, block), folder, "--trainer.strategy.init_args.data_parallel_replicate_size=2")
    found["command line plan"] = module.trainer.strategy.plan.summary()
    return found


def test_a_yaml_block_trains_as_one_device(tmp_path: Path) -> None:
    reference = dict(cli(config(str(tmp_path), 1, "auto"), str(tmp_path)).named_parameters())
    plans = {"fsdp2": "dp_shard 2", "layout": "dp_shard 2", "plan": "dp_shard 2", "name": "dp_shard 2"}
    for result in run_ranks(trained, 2, str(tmp_path), timeout=90):
        for name, plan in plans.items():
            off, where = worst({key: value.detach() for key, value in reference.items()}, result[name])
            assert off < 1e-10, f"{name}: {where} is off by {off:.2e}"
            assert result[name + " plan"] == plan
        assert result["command line plan"] == "dp_replicate 2"
    saved = yaml.safe_load((tmp_path / "fsdp2" / "config.yaml").read_text())["trainer"]["strategy"]
    assert saved["init_args"]["reduce_gradients"] == "every" and saved["init_args"]["tensor_parallel_size"] == 1


def test_a_wrong_name_in_yaml_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = {"class_path": "lightning_megascale.MegascaleStrategy", "init_args": {"tensor_paralel_size": 2}}
    with pytest.raises(SystemExit):
        cli(config(str(tmp_path), 1, block), str(tmp_path))
    assert "tensor_paralel_size" in capsys.readouterr().err


def test_the_signature_shows_every_field_of_a_plan_once() -> None:
    shown = inspect.signature(MegascaleStrategy).parameters
    hints = typing.get_type_hints(ParallelPlan)
    assert [name for name in shown if name in hints] == [field.name for field in fields(ParallelPlan)]
    for field in fields(ParallelPlan):
        parameter = shown[field.name]
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default == field.default
        assert parameter.annotation == hints[field.name]
    assert all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in shown.values())
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in shown.values())


def test_a_configuration_that_spells_out_all_defaults_may_give_a_plan() -> None:
    defaults = {field.name: field.default for field in fields(ParallelPlan)}
    plan = {"data_parallel_shard_size": 2, "reduce_gradients": "every"}
    assert MegascaleStrategy(plan=plan, **defaults).plan == ParallelPlan(**plan)
    with pytest.raises(ValueError, match="not both: plan=... and reduce_gradients"):
        MegascaleStrategy(plan=plan, **{**defaults, "reduce_gradients": "every"})
    with pytest.raises(ValueError, match="no argument 'reduce_gradient'; did you mean 'reduce_gradients'"):
        MegascaleStrategy(plan={"reduce_gradient": "every"})
