"""Steps through a pipeline as people write them: logs, metrics, hooks, evaluation, restarts; every rank has what one device has."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_megascale import MegascaleStrategy
from lightning_megascale.parallel.rng import seed_step
from lightning_megascale.strategies import guards
from tests import parity
from tests.harness import full, run_ranks, worst
from tests.strategies.test_existing_code import CLASSES, LENGTH, WIDTH, Layer

ROWS, STEPS, MICRO = 8, 3, 2
PLAN: dict[str, Any] = dict(
    pipeline_parallel_size=2,
    microbatch_size=MICRO,
    label_alignment="aligned",
    layout=dict(first=["embed"], blocks="layers.*", last=["head"]),
)
LOOPED = {**PLAN, "pipeline_schedule": "Interleaved1F1B", "pipeline_stages_per_rank": 2}
FOUR_STAGES = {**LOOPED, "pipeline_split": ["layers.0", "layers.1", "last"]}
SLOW = (pytest.mark.slow, pytest.mark.timeout(300))
EACH = [pytest.param(FOUR_STAGES, id="interleaved"), pytest.param(PLAN, id="1F1B", marks=SLOW)]
QUIET: dict[str, Any] = dict(
    use_distributed_sampler=False,  # it would shuffle, and all ranks here see the same rows
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)


class Net(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Rows(Dataset):
    """Rows with unequally masked labels; ``lengths`` of one row per batch, all equal inside a batch."""

    def __init__(self, count: int = STEPS * ROWS, lengths: tuple[int, ...] = (LENGTH,), seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for index in range(count):
            length = lengths[index // ROWS % len(lengths)]
            labels = torch.randint(CLASSES, (length,), generator=generator)
            labels[2:][torch.rand(length - 2, generator=generator) < 0.6 * (index % ROWS < 4)] = -100
            ids = torch.randint(CLASSES, (length,), generator=generator)
            self.rows.append({"input_ids": ids, "labels": labels, "number": torch.tensor(index)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Module(L.LightningModule):
    """What the cases below have in common."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Net(layers)
        self.double()

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-6)


def trainer_for(plan: dict[str, Any] | None, **arguments: Any) -> L.Trainer:
    """One device with Lightning's own strategy (None), or these ranks with ours."""
    ranks = 1 if plan is None else torch.distributed.get_world_size()
    strategy: Any = "auto" if plan is None else MegascaleStrategy(**plan)
    return L.Trainer(**{**QUIET, "max_epochs": 1, **arguments}, devices=ranks, strategy=strategy)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(value) for name, value in module.named_parameters()}


def floats(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def union(results: list[dict[str, Any]], key: str) -> dict[str, torch.Tensor]:
    """What all stages hold together."""
    return {name: value for result in results for name, value in result[key].items()}


def assert_same_state(reference: dict[str, Any], results: list[dict[str, Any]], key: str = "state") -> None:
    off, name = worst(reference[key], union(results, key))
    assert off < 1e-10, f"{key}: {name} is off by {off:.2e}"


def assert_alike(reference: Any, results: list[Any], what: str) -> None:
    """Every rank has the reference's numbers, and all ranks the very same."""
    for rank, result in enumerate(results):
        assert result == pytest.approx(reference, abs=1e-10, nan_ok=True), f"{what} of rank {rank} differs from one device"
        assert result == pytest.approx(results[0], abs=0, nan_ok=True), f"{what} differs between ranks"


# ---- logs ----------------------------------------------------------------------------------------------------------------


class Logs(Module):
    """All the ways in which values are logged. Metrics are torchmetrics' float32."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.stepwise = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
        self.updated = torchmetrics.SumMetric()
        accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        recall = torchmetrics.Recall("multiclass", num_classes=CLASSES, average="macro")
        self.group = torchmetrics.MetricCollection([accuracy, recall], prefix="metric/")

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        rows = logits.detach().sum((1, 2))
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("default", loss)
        self.log("sum", rows.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("max", rows.max(), on_step=True, on_epoch=True, reduce_fx=torch.max)
        self.log("min", rows.min(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("sized", rows.mean(), on_step=False, on_epoch=True, batch_size=len(rows))
        self.log("positional", rows.max(), True, True, False, True, "max")
        self.log_dict({"one": loss * 2, "two": loss * 3}, on_step=False, on_epoch=True)
        self.log_dict({f"many/{i}": loss * i for i in range(61)}, on_step=False, on_epoch=True)
        self.log("rounded", float(loss.detach()), on_epoch=True)  # a Python float has torch's default dtype, as in Lightning
        self.log("whole", batch_idx, on_epoch=True, on_step=True)
        if batch_idx == 1:
            self.log("sometimes", loss, on_step=True, on_epoch=True)
        self.mean(rows)
        self.stepwise(rows)
        self.updated.update(rows)
        self.group(logits.flatten(0, 1), batch["labels"].flatten().clamp(min=0))
        self.log("metric/mean", self.mean, on_step=False, on_epoch=True)
        self.log("metric/steps", self.stepwise, on_step=True, on_epoch=True)
        self.log("metric/updated", self.updated, on_step=False, on_epoch=True)
        self.log_dict(self.group, on_step=True, on_epoch=True)
        return loss


class Watch(L.Callback):
    """What is logged and known after each training batch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []
        self.bars: list[dict[str, float]] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.seen.append(floats(trainer.callback_metrics))
        self.bars.append(floats(trainer.progress_bar_metrics))
        self.losses.append(float(outputs["loss"]))


def logged(plan: dict[str, Any] | None) -> dict[str, Any]:
    module, watch = Logs(), Watch()
    trainer = trainer_for(plan, max_epochs=2, callbacks=[watch])
    trainer.fit(module, DataLoader(Rows(), batch_size=ROWS))
    return {"seen": watch.seen, "bars": watch.bars, "final": [floats(trainer.callback_metrics)], "losses": watch.losses}


def assert_same_logs(mine: dict[str, float], theirs: dict[str, float], where: str) -> None:
    assert mine.keys() == theirs.keys(), where
    for name, value in theirs.items():
        tolerance = 2e-6 if name.startswith(("rounded", "metric/")) else 1e-10
        assert mine[name] == pytest.approx(value, abs=tolerance, rel=tolerance), f"{where}: {name}"


@pytest.mark.parametrize("plan", EACH)
def test_logged_values_on_every_rank_equal_one_device(plan: dict[str, Any]) -> None:
    reference, results = logged(None), run_ranks(logged, 2, plan)
    assert len(reference["final"][0]) > 70 and "sometimes" not in reference["seen"][0] and "sometimes" in reference["seen"][1]
    for key in ("seen", "bars", "final"):
        assert results[0][key] == results[1][key], f"{key} differs between ranks"
        assert len(results[0][key]) == len(reference[key])
        for step, (mine, theirs) in enumerate(zip(results[0][key], reference[key])):
            assert_same_logs(mine, theirs, f"{key} {step}")
    assert_alike(reference["losses"], [result["losses"] for result in results], "the loss that callbacks get")


# ---- validation, checkpoints, early stopping -----------------------------------------------------------------------------


class Evaluated(Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("val/loss", loss, batch_size=int((batch["labels"] != -100).sum()))
        return loss

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        logits = self.model(batch["input_ids"])
        self.accuracy(logits.flatten(0, 1), batch["labels"].flatten().clamp(min=0))
        self.log("test/accuracy", self.accuracy)
        self.log("test/largest", logits.max(), reduce_fx="max")
        self.log("test/rows", float(len(logits)), reduce_fx="sum")


def stopped(plan: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    """Learns on rows that are not those of the validation until it gets worse there; the last validation batch is ragged."""
    module = Evaluated()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.1, eps=1e-6)
    best, stop = ModelCheckpoint(folder, filename="{epoch}", monitor="val/loss"), EarlyStopping("val/loss", patience=2)
    trainer = trainer_for(plan, max_epochs=8, num_sanity_val_steps=2, enable_checkpointing=True, callbacks=[best, stop])
    trainer.fit(module, DataLoader(Rows(), batch_size=ROWS), DataLoader(Rows(ROWS + 5, seed=8), batch_size=ROWS))
    return {
        "numbers": [float(best.best_model_score), float(stop.best_score), stop.stopped_epoch, trainer.current_epoch, trainer.global_step],
        "metrics": floats(trainer.callback_metrics),
        "path": best.best_model_path.replace(folder, ""),
        "state": state_of(module),
    }


@pytest.mark.parametrize("plan", EACH)
def test_monitors_choose_and_stop_as_on_one_device(plan: dict[str, Any], tmp_path: Any) -> None:
    reference = stopped(None, str(tmp_path / "one"))
    results = run_ranks(stopped, 2, plan, str(tmp_path / "two"))
    assert 0 < reference["numbers"][2] < 7, "nothing stopped early, so this proves nothing"
    for key in ("numbers", "metrics"):
        assert_alike(reference[key], [result[key] for result in results], key)
    assert {result["path"].split(".")[0] for result in results} == {reference["path"].split(".")[0]}
    assert_same_state(reference, results)


class Predicts(Evaluated):
    """Predicts in the form that ``kind`` names."""

    kind = "tensor"

    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        classes = self.model(batch["input_ids"]).argmax(-1)
        numbers = batch["number"].tolist()
        words = [f"{number}: {row}" for number, row in zip(numbers, classes.tolist())]
        return {"tensor": classes, "strings": words, "dict": {"classes": classes, "words": words, "pair": (classes + 1, numbers)}}[
            self.kind
        ]


def evaluated(plan: dict[str, Any] | None) -> dict[str, Any]:
    module, loader = Predicts(), DataLoader(Rows(2 * ROWS + 3, seed=9), batch_size=ROWS)
    trainer = trainer_for(plan)
    found: dict[str, Any] = {
        "validated": trainer.validate(module, loader, verbose=False),
        "tested": trainer.test(module, loader, verbose=False),
    }
    for module.kind in ("tensor", "strings", "dict"):
        found[module.kind] = trainer_for(plan).predict(module, loader, return_predictions=True)
    return found


@dataclass
class Pair:
    classes: torch.Tensor
    rows: list[str]


class Odd:
    """Nothing that two of it could be put together from; comparing two fails."""

    def __eq__(self, other: object) -> bool:
        raise TypeError("an Odd cannot be compared")

    __hash__ = None  # type: ignore[assignment]


class Objects(Predicts):
    def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        found = super().predict_step(batch, batch_idx)
        if self.kind == "strings":
            return Odd()
        return Pair(found["classes"], found["words"])


def objects(plan: dict[str, Any] | None, kind: str) -> Any:
    module = Objects()
    module.kind = kind
    try:
        pairs = trainer_for(plan).predict(module, DataLoader(Rows(ROWS + 3, seed=9), batch_size=ROWS))
    except ValueError as error:
        return str(error)
    return [(pair.classes.tolist(), pair.rows) for pair in pairs]


def test_predicted_dataclasses_are_put_together_and_what_cannot_be_is_refused_on_every_rank() -> None:
    pairs = objects(None, "dict")
    assert run_ranks(objects, 2, PLAN, "dict") == [pairs, pairs]
    for message in run_ranks(objects, 2, PLAN, "strings"):
        assert "cannot be put together: TypeError: an Odd cannot be compared" in message


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("plan", EACH)
def test_evaluation_and_predictions_on_every_rank_equal_one_device(plan: dict[str, Any]) -> None:
    reference, results = evaluated(None), run_ranks(evaluated, 2, plan)
    for rank, result in enumerate(results):
        assert_same_logs(result["validated"][0], reference["validated"][0], f"rank {rank}")
        assert result["tested"][0] == pytest.approx(reference["tested"][0], abs=2e-6)
        assert [plain(batch) for batch in result["tensor"]] == [plain(batch) for batch in reference["tensor"]]
        assert result["strings"] == reference["strings"] and len(result["strings"]) == 3 and len(result["strings"][2]) == 3
        for mine, theirs in zip(result["dict"], reference["dict"], strict=True):
            assert mine.keys() == theirs.keys() and mine["words"] == theirs["words"] and mine["pair"][1] == theirs["pair"][1]
            assert torch.equal(mine["classes"], theirs["classes"]) and torch.equal(mine["pair"][0], theirs["pair"][0])


# ---- gradients -----------------------------------------------------------------------------------------------------------


class Hooks(L.Callback):
    """Gradients as each hook sees them, step by step."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}
        self.counts: dict[str, int] = {}

    def note(self, hook: str, module: Any) -> None:
        count = self.counts[hook] = self.counts.get(hook, 0) + 1
        for name, parameter in module.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.gradients[f"{hook} {count}: {name}"] = full(gradient)

    def on_before_zero_grad(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.note("on_before_zero_grad", module)

    def on_after_backward(self, trainer: L.Trainer, module: Any) -> None:
        if (trainer.fit_loop.epoch_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.note("on_after_backward", module)

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.note("on_before_optimizer_step", module)


class Hooked(Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = Hooks()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.own.note("module's on_before_zero_grad", self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.own.note("module's on_before_optimizer_step", self)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def hooked(plan: dict[str, Any] | None, arguments: dict[str, Any]) -> dict[str, Any]:
    module, hooks, rates = Hooked(), Hooks(), L.pytorch.callbacks.LambdaCallback
    seen: list[list[float]] = []

    def note(trainer: L.Trainer, *_: Any) -> None:
        mine = isinstance(trainer.strategy, MegascaleStrategy)
        numbers = (trainer.strategy.step_loss, trainer.strategy.grad_norm) if mine else ()
        seen.append([trainer.optimizers[0].param_groups[0]["lr"], *(float(number) for number in numbers if number is not None)])

    trainer = trainer_for(plan, callbacks=[hooks, rates(on_train_batch_end=note)], **arguments)
    trainer.fit(module, DataLoader(Rows(4 * ROWS), batch_size=ROWS))
    return {"state": state_of(module), "gradients": {**hooks.gradients, **module.own.gradients}, "seen": seen}


CLIPPING = {
    "by norm": dict(gradient_clip_val=0.05),
    "by value": dict(gradient_clip_val=1e-3, gradient_clip_algorithm="value"),
}


@pytest.mark.parametrize("clipping", CLIPPING)
def test_hooks_clipping_and_learning_rates_equal_one_device(clipping: str) -> None:
    arguments = CLIPPING[clipping]
    reference, results = hooked(None, arguments), run_ranks(hooked, 2, PLAN, arguments)
    assert_same_state(reference, results, "gradients")
    assert_same_state(reference, results)
    assert results[0]["seen"] == results[1]["seen"], "learning rate, step_loss or grad_norm differs between ranks"
    assert [row[0] for row in results[0]["seen"]] == [row[0] for row in reference["seen"]]
    assert len(results[0]["seen"][0]) == (3 if clipping == "by norm" else 2)


def lengths(plan: dict[str, Any] | None) -> dict[str, Any]:
    """A length of its own for every batch, so that schedules are built inside of windows, and thrown away."""
    module = Module()
    trainer = trainer_for(plan, accumulate_grad_batches=2 if plan else 1, max_epochs=2)
    rows = Rows(8 * ROWS, lengths=(6, 5, 4, 6, 7, 8, 9, 5))
    if plan is None:
        return reference_loop(module, [batch for _ in range(2) for batch in DataLoader(rows, batch_size=ROWS)], window=2)
    trainer.fit(module, DataLoader(rows, batch_size=ROWS))
    return {"state": state_of(module), "losses": [float(trainer.strategy.step_loss)]}


def reference_loop(
    module: Module, batches: list[dict[str, torch.Tensor]], window: int, step: Callable[..., torch.Tensor] | None = None
) -> dict[str, Any]:
    """Exact token means over ``window`` batches, microbatch after microbatch, on one device."""
    optimizer = module.configure_optimizers()
    losses = []
    for begin in range(0, len(batches), window):
        optimizer.zero_grad()
        total, tokens = torch.zeros(()), 0
        for index in range(begin, begin + window):
            for part in range(ROWS // MICRO):
                batch = {key: value[part * MICRO : (part + 1) * MICRO] for key, value in batches[index].items()}
                seed_step(parity.SEED, "microbatch", index * (ROWS // MICRO) + part, 0)
                count = int((batch["labels"] != -100).sum())
                total, tokens = total + (step or module.loss)(batch) * count, tokens + count
        (total / tokens).backward()
        losses.append(float(total / tokens))
        optimizer.step()
    return {"state": state_of(module), "losses": losses}


def test_new_lengths_inside_a_window_lose_no_gradient() -> None:
    reference, results = lengths(None), run_ranks(lengths, 2, PLAN)
    assert_same_state(reference, results)
    assert_alike(reference["losses"][-1:], [result["losses"] for result in results], "step_loss")


# ---- random numbers ------------------------------------------------------------------------------------------------------


class Masks(Module):
    """Draws before the model call, which the second run of the step has to draw again; and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[torch.Tensor] = []

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = torch.rand(batch["input_ids"].shape) < 0.3 * random.random() + 0.3 * np.random.random()
        logits = self.model(batch["input_ids"].masked_fill(hidden, 0))
        noise = torch.rand(logits.shape, dtype=torch.float64)
        return F.cross_entropy((logits * noise).flatten(0, 1), batch["labels"].masked_fill(hidden, 1).flatten())

    def on_train_batch_start(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.batches.append(batch["input_ids"].clone())


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Shuffles and replaces words in the loader, in this process, with torch's own generator."""
    batch = torch.utils.data.default_collate(rows)
    noise = torch.randint(CLASSES, batch["input_ids"].shape)
    return {**batch, "input_ids": torch.where(torch.rand(noise.shape) < 0.3, noise, batch["input_ids"])}


def masked(plan: dict[str, Any] | None, fitted: list[torch.Tensor] | None = None) -> dict[str, Any]:
    module = Masks()
    if plan is None:
        assert fitted is not None
        batches = [dict(batch) for _ in range(2) for batch in DataLoader(Rows(), batch_size=ROWS)]
        return reference_loop(module, [{**batch, "input_ids": ids} for batch, ids in zip(batches, fitted, strict=True)], window=1)
    os.environ["PL_GLOBAL_SEED"] = str(parity.SEED)
    trainer, watch = trainer_for(plan, max_epochs=2), Watch()
    trainer.callbacks.append(watch)
    trainer.fit(module, DataLoader(Rows(), batch_size=ROWS, collate_fn=collate))
    return {"state": state_of(module), "losses": watch.losses, "batches": module.batches}


def test_random_numbers_of_a_step_and_of_the_loader_agree_between_stages() -> None:
    results = run_ranks(masked, 2, {**PLAN, "loss_weight": "labels"})
    for step, (one, other) in enumerate(zip(results[0]["batches"], results[1]["batches"])):
        assert torch.equal(one, other), f"step {step}: the loader drew other numbers on the stages' ranks"
    changed = [not torch.equal(results[0]["batches"][i], results[0]["batches"][i + STEPS]) for i in range(STEPS)]
    assert all(changed), "the second epoch drew the numbers of the first again"
    reference = masked(None, results[0]["batches"])
    assert_same_state(reference, results)
    assert_alike(reference["losses"], [result["losses"] for result in results], "loss")


# ---- the order of zeroing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("Interleaved1F1B", marks=SLOW)])
def test_zeroing_after_the_step_as_lightning_does_is_noticed(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own order, zeroing between the step and its backward, wipes the gradients of a pipelined step."""

    def late(self: MegascaleStrategy, module: L.LightningModule) -> None:
        loop = module.trainer.fit_loop.epoch_loop
        loop.automatic_optimization.__dict__.pop("_make_zero_grad_fn", None)
        module.__dict__["optimizer_zero_grad"] = lambda epoch, index, optimizer: optimizer.zero_grad(set_to_none=False)
        if loop.batch_idx % module.trainer.accumulate_grad_batches == 0:
            self.numbers.begin_window(module)

    case = parity.default_case(axes="pp2", schedule=schedule, accumulation="accumulate 2, reduce last")
    monkeypatch.setattr(MegascaleStrategy, "_zero_early", late)
    monkeypatch.setattr(guards, "check_zeroed", lambda module: None)
    with pytest.raises(AssertionError, match="gradient of .* is off by"):
        parity.check(case)
    monkeypatch.undo()
    parity.check(case)


# ---- frozen parts, restarts ----------------------------------------------------------------------------------------------


class Frozen(Module):
    """Parts that do not learn; the optimizer gets what learns, as people write it."""

    def __init__(self, frozen: tuple[str, ...], filtered: bool) -> None:
        super().__init__(layers=6)
        for name in frozen:
            self.model.get_submodule(name).requires_grad_(False)
        self.filtered = filtered

    def configure_optimizers(self) -> Any:
        parameters = [p for p in self.parameters() if p.requires_grad] if self.filtered else self.parameters()
        return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6)


FIRST, MIDDLE, LAST = (
    ("embed", "layers.0", "layers.1", "layers.2"),
    ("layers.1", "layers.2", "layers.3"),
    ("layers.3", "layers.4", "layers.5", "head"),
)
SPLIT = {**PLAN, "pipeline_split": ["layers.3"]}
SPLIT4 = {**LOOPED, "pipeline_split": ["layers.1", "layers.3", "layers.4"]}


def frozen_fit(plan: dict[str, Any] | None, frozen: tuple[str, ...], filtered: bool) -> dict[str, Any]:
    module = Frozen(frozen, filtered)
    trainer = trainer_for(plan, gradient_clip_val=0.05)
    trainer.fit(module, DataLoader(Rows(), batch_size=ROWS))
    return {"state": state_of(module), "norm": float(trainer.strategy.grad_norm) if plan else 0.0}


@pytest.mark.parametrize("filtered", [False, True], ids=["all parameters", "those that learn"])
@pytest.mark.parametrize(
    ("plan", "frozen"),
    [(SPLIT, FIRST), (SPLIT, MIDDLE), (SPLIT, LAST), (SPLIT4, FIRST), (SPLIT4, MIDDLE)],
    ids=["first stage", "middle", "last stage", "first of 4 stages", "middle of 4 stages"],
)
def test_frozen_parts_stay_and_the_rest_learns_as_on_one_device(plan: dict[str, Any], frozen: tuple[str, ...], filtered: bool) -> None:
    reference, results = frozen_fit(None, frozen, filtered), run_ranks(frozen_fit, 2, plan, frozen, filtered)
    assert_same_state(reference, results)
    assert results[0]["norm"] == results[1]["norm"] > 0


class Zeroes(Frozen):
    """Keeps zeroed gradients instead of dropping them, and freezes all of the first stage."""

    def __init__(self) -> None:
        super().__init__(FIRST, filtered=False)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def zeroes_fit(plan: dict[str, Any] | None) -> dict[str, Any]:
    module = Zeroes()
    trainer_for(plan).fit(module, DataLoader(Rows(), batch_size=ROWS))
    return {"state": state_of(module)}


def test_gradients_that_one_stage_keeps_and_another_has_not_stop_nobody() -> None:
    assert_same_state(zeroes_fit(None), run_ranks(zeroes_fit, 2, SPLIT))


class Probe(Module):
    """Learns a head alone, in the two groups of parameters that its schedule counts on."""

    def configure_optimizers(self) -> Any:
        self.model.layers.requires_grad_(False)
        self.model.embed.requires_grad_(False)
        groups = [{"params": self.model.head.parameters(), "lr": 2e-2}, {"params": self.model.layers[0].parameters(), "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda epoch: 0.5, lambda epoch: 0.1])]


def probe_fit(plan: dict[str, Any] | None) -> dict[str, Any]:
    module = Probe()
    trainer = trainer_for(plan)
    trainer.fit(module, DataLoader(Rows(), batch_size=ROWS))
    optimizer = trainer.optimizers[0]
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert held <= {id(parameter) for parameter in module.parameters()}
    return {"state": state_of(module), "lrs": [group["lr"] for group in optimizer.param_groups]}


def test_an_optimizer_of_the_last_stage_alone_has_its_groups_on_every_rank() -> None:
    reference, results = probe_fit(None), run_ranks(probe_fit, 2, PLAN)
    assert_same_state(reference, results)
    assert [result["lrs"] for result in results] == [reference["lrs"]] * 2 == [[1e-2, 1e-4]] * 2


def refitted(plan: dict[str, Any] | None) -> dict[str, Any]:
    """Fit, validate and test with one Trainer, then fit and test with another."""
    module, rows, more = Evaluated(), DataLoader(Rows(), batch_size=ROWS), DataLoader(Rows(ROWS + 3, seed=8), batch_size=ROWS)
    numbers = []
    for _ in range(2):
        trainer = trainer_for(plan)
        trainer.fit(module, rows, more)
        numbers.append(floats(trainer.callback_metrics))
        numbers += [*trainer.validate(module, more, verbose=False), *trainer.test(module, more, verbose=False)]
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, rows, more)
        numbers.append(floats(trainer.callback_metrics))
    return {"state": state_of(module), "numbers": numbers}


@pytest.mark.parametrize("plan", EACH)
def test_fit_validate_test_and_fit_again_with_a_new_trainer(plan: dict[str, Any]) -> None:
    reference, results = refitted(None), run_ranks(refitted, 2, plan)
    assert_same_state(reference, results)
    for rank, result in enumerate(results):
        for number, (mine, theirs) in enumerate(zip(result["numbers"], reference["numbers"], strict=True)):
            assert mine == pytest.approx(theirs, abs=2e-6 if "test/accuracy" in theirs else 1e-10), f"rank {rank}, call {number}"
    assert results[0]["numbers"] == results[1]["numbers"]
