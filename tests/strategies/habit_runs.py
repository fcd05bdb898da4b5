"""Habits of Lightning code: the same few lines on one device and on ranks under several plans, with everything they show compared."""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from lightning_megascale import MegascaleStrategy
from tests.harness import full, run_ranks

ROWS, BATCHES, WIDTH, WORDS, LENGTH = 8, 4, 8, 6, 5
LAYOUT = dict(first=["embed"], blocks="layers.*", last=["head"], colwise=["layers.*.up"], rowwise=["layers.*.down"])
PLANS: dict[str, dict[str, Any]] = {
    "fsdp2": dict(),
    "tp2": dict(tensor_parallel_size=2, layout=LAYOUT),
    "pp2": dict(pipeline_parallel_size=2, microbatch_size=4, layout=LAYOUT),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Words(Dataset):
    """(words, the words that follow)."""

    def __init__(self, count: int = BATCHES * ROWS) -> None:
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(WORDS, (count, LENGTH), generator=generator)
        self.rows = list(zip(ids, (3 * ids + 1) % WORDS))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index]


class Learner(L.LightningModule):
    """An ordinary LightningModule with everything a habit may call on."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        torch.manual_seed(3)
        self.model = Net().double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).argmax(-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Run:
    """Where a habit runs.

    Args:
        plan: arguments of the strategy; None: one device and Lightning's own strategy.
        folder: for what it writes; the same for all ranks.
    """

    def __init__(self, plan: Mapping[str, Any] | None, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.rank = 0 if plan is None else int(os.environ["RANK"])
        self.devices = 1 if plan is None else int(os.environ["WORLD_SIZE"])
        self.peers = 1 if plan is None else plan.get("tensor_parallel_size", 1) * plan.get("pipeline_parallel_size", 1)
        self.shares = self.devices // self.peers

    def trainer(self, **options: Any) -> L.Trainer:
        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        strategy: Any = "auto" if self.plan is None else MegascaleStrategy(**self.plan)
        return L.Trainer(
            **{
                **dict(accelerator="cpu", devices=self.devices, strategy=strategy, max_epochs=2, use_distributed_sampler=False),
                **dict(default_root_dir=str(self.folder)),
                **quiet,
                **options,
            }
        )

    def loader(self, batches: int = BATCHES, rows: Dataset | None = None) -> DataLoader:
        """This rank's share of each batch of one device."""
        data = Subset(rows or Words(), range(batches * ROWS))
        sampler = DistributedSampler(data, num_replicas=self.shares, rank=self.rank // self.peers, shuffle=False)
        return DataLoader(data, batch_size=ROWS // self.shares, sampler=sampler)

    def fitted(self, module: L.LightningModule | None = None, **options: Any) -> tuple[L.LightningModule, L.Trainer]:
        """A module (a ``Learner``) after training."""
        module, trainer = module or Learner(), self.trainer(**options)
        trainer.fit(module, self.loader(), self.loader(2))
        return module, trainer

    def end(self, module: L.LightningModule, trainer: L.Trainer | None = None) -> dict[str, Any]:
        """Parameters, and what callbacks see."""
        shown: dict[str, Any] = {f"parameter {name}": full(value).tolist() for name, value in module.named_parameters()}
        if trainer is not None:
            shown |= {f"metric {name}": float(value) for name, value in trainer.callback_metrics.items()}
            shown |= {"steps": trainer.global_step, "epochs": trainer.current_epoch}
        return shown

    def rest(self, shown: dict[str, Any]) -> dict[str, Any]:
        """Without the parameters, of which pipeline stages hold some each."""
        return {key: value for key, value in shown.items() if not key.startswith("parameter ")}


@dataclass(frozen=True)
class Habit:
    """What people do, and how it fares.

    Args:
        run: does it; returns what it shows.
        refused: plan -> parts of what every rank is told there.
        slow: plans under which only the second tier runs it.
        plans: under which it is run at all.
    """

    run: Callable[[Run], dict[str, Any]]
    refused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    slow: Collection[str] = ("tp2",)
    plans: Collection[str] = tuple(PLANS)


def _run_all(habits: Mapping[str, Habit], plan: Mapping[str, Any] | None, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, habit in habits.items():
        print("habit", name, flush=True)  # a hang shows the log's last lines
        place = Path(folder) / name.replace(" ", "_")
        place.mkdir(exist_ok=True)
        try:
            found[name] = habit.run(Run(plan, place))
        except Exception as error:  # noqa: BLE001 - it is the result
            found[name] = f"{type(error).__name__}: {error}"
    return found


class Habits:
    """Habits that share ranks: those of a plan and a tier run one after the other, when the first is asked for.

    Args:
        habits: by name.
        timeout: seconds for all habits of a plan and a tier.
    """

    def __init__(self, habits: Mapping[str, Habit], timeout: float = 120) -> None:
        self.habits, self._timeout = habits, timeout
        self.on_ranks, self.on_one_device = functools.cache(self._on_ranks), functools.cache(self._on_one_device)

    def cases(self) -> list[Any]:
        """(name, plan) for pytest."""
        return [
            pytest.param(name, plan, marks=[pytest.mark.slow] * (plan in habit.slow or plan != "fsdp2"), id=f"{name}-{plan}")
            for plan in PLANS
            for name, habit in self.habits.items()
            if plan in habit.plans
        ]

    def check(self, name: str, plan: str, tolerance: float = 1e-10) -> None:
        """The habit shows what one device shows, or every rank is told why not."""
        habit = self.habits[name]
        results = [shown[name] for shown in self.on_ranks(plan, plan in habit.slow)]
        if plan in habit.refused:
            assert all(isinstance(shown, str) for shown in results), "it ran"
            assert results[0] == results[1], results
            for part in habit.refused[plan]:
                assert part in results[0], results[0]
        else:
            wrong = differences(self.on_one_device(name), results, tolerance)
            assert not wrong, "\n".join(wrong[:6])

    def _on_ranks(self, plan: str, slow: bool) -> list[dict[str, Any]]:
        """What each rank showed, by habit."""
        habits = {name: habit for name, habit in self.habits.items() if plan in habit.plans and (plan in habit.slow) == slow}
        with tempfile.TemporaryDirectory(prefix="habits_") as folder:
            return run_ranks(_run_all, 2, habits, PLANS[plan], folder, timeout=self._timeout)

    def _on_one_device(self, name: str) -> Any:
        with tempfile.TemporaryDirectory(prefix="habits_") as folder:
            return _run_all({name: self.habits[name]}, None, folder)[name]


def differences(reference: Any, results: Sequence[Any], tolerance: float) -> list[str]:
    """In what ranks differ from one device. The ranks' parameters count together: pipeline stages hold some each."""
    if any(isinstance(shown, str) for shown in (reference, *results)):
        return [str(shown) for shown in (reference, *results) if isinstance(shown, str)]
    held = {key for shown in results for key in shown}
    wrong = [f"{key}: nobody shows it" for key in reference if key not in held]
    for rank, shown in enumerate(results):
        wrong += [f"rank {rank}: {key} is not shown" for key in reference if key not in shown and not key.startswith("parameter ")]
        wrong += [f"rank {rank}: {where}" for key in shown for where in _unequal(key, reference.get(key), shown[key], tolerance)]
    return wrong


def _unequal(where: str, wanted: Any, got: Any, tolerance: float) -> list[str]:
    if isinstance(wanted, Mapping) and isinstance(got, Mapping):
        keys = dict.fromkeys([*wanted, *got])
        return [line for key in keys for line in _unequal(f"{where}[{key!r}]", wanted.get(key), got.get(key), tolerance)]
    if isinstance(wanted, (list, tuple)) and isinstance(got, (list, tuple)) and len(wanted) == len(got):
        return [line for place, pair in enumerate(zip(wanted, got)) for line in _unequal(f"{where}[{place}]", *pair, tolerance)][:3]
    if isinstance(wanted, float) and isinstance(got, float):
        near = abs(wanted - got) <= tolerance * max(1.0, abs(wanted)) or (math.isnan(wanted) and math.isnan(got))
        return [] if near else [f"{where} is {got}, one device has {wanted}"]
    return [] if wanted == got else [f"{where} is {str(got)[:300]}, one device has {str(wanted)[:300]}"]
