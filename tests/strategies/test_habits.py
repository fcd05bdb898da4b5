"""Habits of Lightning code show on every rank what one device shows, or are refused by name with the reason and the remedy."""

from __future__ import annotations

import csv
import os
from typing import Any
from unittest.mock import ANY

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader, grad_norm
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_megascale.strategies.checkpoint import export
from tests.harness import full
from tests.strategies.habit_runs import PLANS, ROWS, Habit, Habits, Learner, Run, Words

Shown = dict[str, Any]


def options(**given: Any) -> Any:
    """A fit with these options of the Trainer."""
    return lambda run: run.end(*run.fitted(**{key: value() if callable(value) else value for key, value in given.items()}))


# ---- finders ---------------------------------------------------------------------------------------------------------------


def lr_find(run: Run) -> Shown:
    module, trainer = Learner(), run.trainer(max_epochs=1)
    finder = Tuner(trainer).lr_find(module, run.loader(), min_lr=1e-4, max_lr=1.0, num_training=12, early_stop_threshold=None)
    shown = {"results": finder.results, "suggestion": finder.suggestion(skip_begin=2), "lr": module.lr}
    trainer.fit(module, run.loader())
    return {**shown, **run.end(module, trainer)}


def lr_finder_callback(run: Run) -> Shown:
    finder = callbacks.LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=15)
    module, trainer = run.fitted(callbacks=[finder])
    return {"results": finder.optimal_lr.results, "lr": module.lr, **run.end(module, trainer)}


class OwnLoader(Learner):
    batch_size = 2

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Words(), batch_size=self.batch_size)


def batch_size_finder(run: Run) -> Shown:
    run.trainer(callbacks=[callbacks.BatchSizeFinder(max_trials=2)]).fit(OwnLoader())
    return {}


def scale_batch_size(run: Run) -> Shown:
    return {"size": Tuner(run.trainer()).scale_batch_size(OwnLoader(), max_trials=2)}


# ---- averages --------------------------------------------------------------------------------------------------------------


class OwnAverage(Learner):
    """What the refusal of Lightning's averages advises."""

    def on_fit_start(self) -> None:
        for name, parameter in self.named_parameters():
            self.register_buffer(f"average_{name.replace('.', '_')}", parameter.detach().clone())

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.named_parameters():
            self.get_buffer(f"average_{name.replace('.', '_')}").lerp_(parameter.detach(), 0.1)


def own_average(run: Run) -> Shown:
    """Ranks stop after an epoch and resume; one device does not (Lightning's own strategies load before the buffers are there)."""
    module, trainer = run.fitted(OwnAverage(), max_epochs=2 if run.devices == 1 else 1)
    if run.devices > 1:
        trainer.save_checkpoint(run.folder / "average.ckpt")
        module, trainer = OwnAverage(), run.trainer(max_epochs=2)
        trainer.fit(module, run.loader(), run.loader(2), ckpt_path=str(run.folder / "average.ckpt"))
    return {**run.end(module, trainer), **{f"parameter {name}": full(value).tolist() for name, value in module.named_buffers()}}


# ---- the loop --------------------------------------------------------------------------------------------------------------


def overfit(run: Run) -> Shown:
    module, trainer = Learner(), run.trainer(overfit_batches=2, use_distributed_sampler=True)
    loader = DataLoader(Words(), batch_size=ROWS // run.shares)
    trainer.fit(module, loader, loader)
    return run.end(module, trainer)


class Counter(L.Callback):
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        name = "sanity" if trainer.sanity_checking else "validation"
        self.counts[name] = self.counts.get(name, 0) + 1


def counted(**given: Any) -> Any:
    def run_counted(run: Run) -> Shown:
        counter = Counter()
        return {**run.end(*run.fitted(callbacks=[counter], **given)), "counts": counter.counts}

    return run_counted


def early_stopping(run: Run) -> Shown:
    stopping = callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.2)
    module, trainer = run.fitted(max_epochs=9, callbacks=[stopping])
    return {**run.end(module, trainer), "stopped": stopping.stopped_epoch, "best": float(stopping.best_score)}


def best_checkpoints(run: Run) -> Shown:
    keeper = callbacks.ModelCheckpoint(run.folder / "best", "{epoch}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True)
    _, trainer = run.fitted(max_epochs=3, enable_checkpointing=True, callbacks=[keeper])
    trainer.strategy.barrier()
    return {"best": os.path.basename(keeper.best_model_path), "files": sorted(os.listdir(run.folder / "best"))}


def deterministic(run: Run) -> Shown:
    try:
        return run.end(*run.fitted(deterministic=True, max_epochs=1))
    finally:
        torch.use_deterministic_algorithms(False)


# ---- gradients -------------------------------------------------------------------------------------------------------------


class LogsNorms(Learner):
    """Lightning's own recipe, of the whole module and of a part."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        self.log_dict({f"layer {key}": value for key, value in grad_norm(self.model.layers[1], norm_type="inf").items()})


class LogsByHand(Learner):
    """A sharded gradient's norm given to self.log as it is."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            self.log(f"norm/{name}", parameter.grad.norm(), sync_dist=True)
            self.log(f"mean/{name}", parameter.detach().abs().mean())


class LogsAlone(Learner):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", self.model.head.weight.grad.norm(), rank_zero_only=True)


class ReadsByHand(Learner):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", sum(parameter.grad.norm().item() ** 2 for parameter in self.parameters()))


class ClipsByHand(Learner):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


def module(kind: type[Learner], **given: Any) -> Any:
    return lambda run: run.end(*run.fitted(kind(), **given))


# ---- frozen and unfrozen ---------------------------------------------------------------------------------------------------


class Finetuning(callbacks.BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.model.layers, train_bn=False)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.model.layers, optimizer, train_bn=False)


class OptimizesTrainable(Learner):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for parameter in self.parameters() if parameter.requires_grad], lr=self.lr)


class Unfreezes(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.model.layers[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.model.layers[0].requires_grad_(self.current_epoch > 0)


class Freezes(Learner):
    def on_train_epoch_start(self) -> None:
        self.model.layers[0].requires_grad_(self.current_epoch == 0)


class RunningCenter(Learner):
    """A statistic over rows that a buffer keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.center.mul_(0.9).add_(0.1 * batch[0].double().mean())
        return super().training_step(batch, batch_idx)


# ---- watching --------------------------------------------------------------------------------------------------------------


class Seen(callbacks.ModelSummary):
    rows: Any = None

    @staticmethod
    def summarize(summary_data: Any, total_parameters: int, trainable_parameters: int, model_size: float, modes: Any, **_: Any) -> None:
        Seen.rows = [dict(summary_data), total_parameters, trainable_parameters, model_size, modes]


class Example(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 3, dtype=torch.long)
        self.model.embed.requires_grad_(False)


def summaries(run: Run) -> Shown:
    """Rank 0 prints them; the sizes that an example shows are known where a rank runs the whole model."""
    shown: Shown = {}
    for depth, kind in ((-1, Learner), (1, Learner), (2, Example)):
        trainer, Seen.rows = run.trainer(max_epochs=1, limit_train_batches=1, callbacks=[Seen(max_depth=depth)]), None
        trainer.fit(kind(), run.loader())
        columns, *totals = Seen.rows or [{}]
        sizes = {key: columns.pop(key) for key in ("In sizes", "Out sizes", "FLOPs") if key in columns}
        are_unknown = run.peers > 1 and all(size in ("?", "0  ") for column in sizes.values() for size in column)
        shown |= {f"{kind.__name__} {depth}": [columns, totals], f"sizes {depth}": ANY if are_unknown else sizes}
    trainer.test(trainer.lightning_module, run.loader(1), verbose=False)
    trainer.fit(trainer.lightning_module, run.loader())  # a second run of a module that is parallel already
    shown["again"] = Seen.rows and Seen.rows[1:]
    return shown if run.rank == 0 else dict.fromkeys(shown, ANY)


def loggers(run: Run) -> Shown:
    outs = [CSVLogger(run.folder, name=name, version=0) for name in ("one", "two")]
    watching = [callbacks.LearningRateMonitor("step"), callbacks.RichModelSummary(), callbacks.RichProgressBar()]
    module, trainer = run.fitted(logger=outs, log_every_n_steps=1, callbacks=watching, enable_progress_bar=True, max_epochs=1)
    shown = run.end(module, trainer)
    trainer.strategy.barrier()
    for name in ("one", "two"):
        with open(run.folder / name / "version_0" / "metrics.csv") as file:
            shown[name] = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return shown


def device_stats(run: Run) -> Shown:
    out = CSVLogger(run.folder, name="stats", version=0)
    monitor = callbacks.DeviceStatsMonitor(cpu_stats=True)
    module, trainer = run.fitted(logger=out, log_every_n_steps=1, callbacks=[monitor], max_epochs=1)
    trainer.strategy.barrier()
    with open(run.folder / "stats" / "version_0" / "metrics.csv") as file:
        return {**run.end(module, trainer), "shown": any("cpu_percent" in key for key in next(csv.DictReader(file)))}


def profilers(run: Run) -> Shown:
    simple = SimpleProfiler(dirpath=str(run.folder), filename="simple")
    shown = run.end(*run.fitted(profiler=simple))
    shown["batches"] = len(simple.recorded_durations["run_training_batch"])
    for kind in (AdvancedProfiler, PyTorchProfiler):
        more = dict(export_to_chrome=False) if kind is PyTorchProfiler else {}
        run.fitted(max_epochs=1, limit_train_batches=1, profiler=kind(dirpath=str(run.folder), filename=kind.__name__, **more))
    return shown


def timer(run: Run) -> Shown:
    clock = callbacks.Timer(duration=dict(hours=1))
    shown = run.end(*run.fitted(callbacks=[clock], max_epochs=1))
    _, trainer = run.fitted(max_epochs=100, max_time={"seconds": 0})
    return {**shown, "ran": clock.time_elapsed("train") > 0, "out of time": trainer.should_stop, "taken": trainer.global_step}


# ---- the trainer's verbs ---------------------------------------------------------------------------------------------------


def verbs_alone(run: Run) -> Shown:
    module = Learner()
    shown: Shown = {"validate": run.trainer().validate(module, run.loader(), verbose=False)}
    shown["test"] = run.trainer().test(module, run.loader(), verbose=False)
    trainer = run.trainer()
    predictions = torch.cat(trainer.predict(module, run.loader()))
    counts = torch.tensor([float(len(predictions)), float(predictions.sum())])
    return {**shown, "predict": (trainer.strategy.reduce(counts, reduce_op="sum") if run.devices > 1 else counts).tolist()}


def fit_twice(run: Run) -> Shown:
    module, trainer = run.fitted(max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, run.loader(), run.loader(2))
    first = run.end(module, trainer)
    again = run.trainer(max_epochs=1)
    again.fit(module, run.loader())
    return {**run.end(module, again), "first": run.rest(first)}


def save_by_hand(run: Run) -> Shown:
    module, trainer = run.fitted(max_epochs=1)
    trainer.save_checkpoint(run.folder / "mine.ckpt")
    trainer.save_checkpoint(run.folder / "weights.ckpt", weights_only=True)
    other, again = Learner(lr=0.5), run.trainer(max_epochs=2)
    again.fit(other, run.loader(), run.loader(2), ckpt_path=str(run.folder / "mine.ckpt"))
    tested = run.trainer().test(Learner(), run.loader(), ckpt_path=str(run.folder / "weights.ckpt"), verbose=False)
    return {**run.end(other, again), "tested": tested, "saved lr": module.hparams.lr}


def load_export(run: Run) -> Shown:
    """``load_from_checkpoint`` reads an export, with its hyper-parameters; on one device the checkpoint itself."""
    module, trainer = run.fitted(Learner(lr=0.02), max_epochs=1)
    path = run.folder / "run.ckpt"
    trainer.save_checkpoint(path)
    trainer.strategy.barrier()
    if run.devices > 1 and run.rank == 0:
        export(path, run.folder / "export.ckpt", weights_only=False)
    trainer.strategy.barrier()
    loaded = Learner.load_from_checkpoint(path if run.devices == 1 else run.folder / "export.ckpt", weights_only=False)
    return {f"whole {name}": value.tolist() for name, value in loaded.named_parameters()} | {"lr": loaded.hparams.lr}


class Gathers(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(float(self.all_gather(torch.stack(self.losses)).mean()))
        self.losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.outputs.append(self.model(batch[0]).argmax(-1).double().sum(1))

    def on_validation_epoch_end(self) -> None:
        everybody = self.all_gather(torch.cat(self.outputs)).flatten()
        self.outputs.clear()
        self.print("rows", len(everybody))
        self.log("rows", float(len(everybody)))
        self.seen.append(float(everybody.sum()))


def gathered_outputs(run: Run) -> Shown:
    module, trainer = run.fitted(Gathers())
    return {**run.end(module, trainer), "seen": module.seen}


# ---- data ------------------------------------------------------------------------------------------------------------------


class Reloads(Learner):
    loads = 0

    def train_dataloader(self) -> DataLoader:
        self.loads += 1
        return self.__dict__["run"].loader(1 + self.loads)


def reloads(run: Run) -> Shown:
    module, trainer = Reloads(), run.trainer(reload_dataloaders_every_n_epochs=1)
    module.__dict__["run"] = run
    trainer.fit(module)
    return {**run.end(module, trainer), "loads": module.loads}


class Stream(IterableDataset):
    def __init__(self, run: Run) -> None:
        self.run = run

    def __iter__(self) -> Any:
        yield from (Words()[index] for index in range(self.run.rank // self.run.peers, 3 * ROWS, self.run.shares))


def stream(run: Run) -> Shown:
    module, trainer = Learner(), run.trainer()
    trainer.fit(module, DataLoader(Stream(run), batch_size=ROWS // run.shares))
    return run.end(module, trainer)


class TwoLoaders(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss([torch.cat([batch["a"][part], batch["b"][part]]) for part in range(2)])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), sync_dist=True)


def combined(run: Run) -> Shown:
    module, trainer = TwoLoaders(), run.trainer()
    loaders = {"a": run.loader(4), "b": run.loader(2)}
    trainer.fit(module, CombinedLoader(loaders, "max_size_cycle"), CombinedLoader([run.loader(1), run.loader(2)], "sequential"))
    return run.end(module, trainer)


# A pipeline's rank logs and reads the norms of its own stage, as the README says, so habits of that kind are not run there.
def everywhere(*parts: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(PLANS, parts)


SLOW = tuple(PLANS)
NOT_AVERAGED = "averages whole copies of the module, which sharded parameters do not allow: in on_fit_start"
BOTH = ("tp2", "pp2")
HABITS = Habits(
    {
        "lr_find": Habit(lr_find, slow=BOTH),
        "LearningRateFinder": Habit(lr_finder_callback, slow=BOTH),
        "BatchSizeFinder": Habit(
            batch_size_finder,
            everywhere("callback BatchSizeFinder", "until a rank runs out of memory", "devices=1"),
        ),
        "scale_batch_size": Habit(scale_batch_size, everywhere("batch size", "not supported with distributed strategies")),
        "EMAWeightAveraging": Habit(
            options(callbacks=callbacks.EMAWeightAveraging), everywhere("callback EMAWeightAveraging " + NOT_AVERAGED)
        ),
        "WeightAveraging": Habit(options(callbacks=callbacks.WeightAveraging), everywhere("callback WeightAveraging " + NOT_AVERAGED)),
        "StochasticWeightAveraging": Habit(
            lambda run: run.end(*run.fitted(callbacks=[callbacks.StochasticWeightAveraging(1e-2)])),
            everywhere("callback StochasticWeightAveraging " + NOT_AVERAGED),
        ),
        "own average": Habit(own_average, slow=BOTH),
        "GradientAccumulationScheduler": Habit(
            lambda run: run.end(*run.fitted(callbacks=[callbacks.GradientAccumulationScheduler({0: 1, 1: 2})])), slow=()
        ),
        "overfit_batches": Habit(overfit),
        "overfit_batches, own sampler": Habit(
            options(overfit_batches=2), {"fsdp2": ("overfit_batches=2 with use_distributed_sampler=False", "would train on the same rows")}
        ),
        "fast_dev_run": Habit(options(fast_dev_run=True), slow=BOTH),
        "limits": Habit(options(limit_train_batches=3, limit_val_batches=0.5), slow=BOTH),
        "val_check_interval": Habit(counted(val_check_interval=0.5, num_sanity_val_steps=1), slow=BOTH),
        "check_val_every_n_epoch": Habit(counted(max_epochs=3, check_val_every_n_epoch=2), slow=BOTH),
        "EarlyStopping": Habit(early_stopping, slow=BOTH),
        "ModelCheckpoint": Habit(best_checkpoints, slow=SLOW),
        "Timer": Habit(timer, slow=SLOW),
        "clip by norm": Habit(options(gradient_clip_val=0.05)),
        "clip by value": Habit(options(gradient_clip_val=1e-3, gradient_clip_algorithm="value"), slow=BOTH),
        "grad_norm": Habit(module(LogsNorms, max_epochs=1), slow=()),
        "norms given to self.log": Habit(module(LogsByHand, max_epochs=1), plans=("fsdp2", "tp2")),
        "norms logged by rank 0": Habit(
            module(LogsAlone, max_epochs=1),
            {"fsdp2": ("self.log('norm', rank_zero_only=True) was given a value of a sharded tensor", "log it on all ranks")},
            plans=("fsdp2",),
        ),
        "norms read by hand": Habit(
            module(ReadsByHand, max_epochs=1),
            dict.fromkeys(("fsdp2", "tp2"), ("a number was read (.item(), float(), int()) off a norm", ".full_tensor()")),
            plans=("fsdp2", "tp2"),
        ),
        "clips by hand": Habit(
            module(ClipsByHand, max_epochs=1),
            {
                "tp2": ("sharded in different ways", "Trainer(gradient_clip_val=...)"),
                "pp2": ("a hook scaled the gradients of pipeline stages",),
            },
        ),
        "detect_anomaly": Habit(options(detect_anomaly=True, max_epochs=1), slow=("pp2",)),
        "deterministic": Habit(deterministic, slow=BOTH),
        "BaseFinetuning": Habit(
            lambda run: run.end(*run.fitted(OptimizesTrainable(), callbacks=[Finetuning()])),
            dict.fromkeys(BOTH, ("callback Finetuning compares parameters", "set requires_grad in on_train_epoch_start")),
        ),
        "unfreezes by hand": Habit(
            module(Unfreezes), {"pp2": ("unfrozen since the model was cut into pipeline stages", "pipeline_parallel_size=1")}, slow=()
        ),
        "freezes by hand": Habit(module(Freezes), slow=BOTH),
        "ModelPruning": Habit(
            lambda run: run.end(*run.fitted(callbacks=[callbacks.ModelPruning("l1_unstructured", amount=0.5)])),
            everywhere("callback ModelPruning rewrites parameters", "prune an exported checkpoint"),
        ),
        "buffer of rows": Habit(
            module(RunningCenter), {"fsdp2": ("center: a buffer that training changes, and by each rank's own rows", "self.all_gather(x)")}
        ),
        "ModelSummary": Habit(summaries, slow=()),
        "loggers": Habit(loggers, slow=BOTH),
        "DeviceStatsMonitor": Habit(device_stats, slow=SLOW),
        "profilers": Habit(profilers, slow=SLOW),
        "validate, test, predict": Habit(verbs_alone),
        "fit twice": Habit(fit_twice, slow=BOTH),
        "save_checkpoint": Habit(save_by_hand),
        "load_from_checkpoint": Habit(load_export, slow=BOTH),
        "gathered outputs": Habit(gathered_outputs),
        "reload_dataloaders_every_n_epochs": Habit(reloads, slow=BOTH),
        "IterableDataset": Habit(stream, slow=SLOW),
        "CombinedLoader": Habit(combined, slow=BOTH),
        "barebones": Habit(lambda run: run.end(*run.fitted(barebones=True, default_root_dir=None)), slow=SLOW),
        "CheckpointIO": Habit(options(plugins=AsyncCheckpointIO), everywhere("plugin AsyncCheckpointIO", "leave it out")),
    }
)


@pytest.mark.parametrize(("name", "plan"), HABITS.cases())
def test_habit(name: str, plan: str) -> None:
    HABITS.check(name, plan)
