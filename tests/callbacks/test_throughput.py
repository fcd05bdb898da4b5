"""ThroughputMonitor under a clock that only moves when the test says so: every value is exact."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_megascale.callbacks import throughput
from lightning_megascale.callbacks.throughput import ThroughputMonitor, count_tokens, peak_bf16_flops

READ, COMPUTE, VALIDATE, WRITE = 0.5, 2.0, 100.0, 1000.0  # seconds per batch, per batch, per validation, per checkpoint
ROWS, LENGTH = 4, 6


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


class Batches:
    """24 batches (ROWS, LENGTH); reading one takes READ seconds."""

    def __init__(self, clock: Clock, **extra: torch.Tensor) -> None:
        self.clock, self.extra = clock, extra

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(24):
            self.clock.now += READ
            yield {"input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.long), **self.extra}


class Module(LightningModule):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.model = torch.nn.Linear(3, 4)  # 16 parameters
        self.clock = clock
        self.shown: dict[str, float] = {}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock.now += COMPUTE if self.trainer.fit_loop.total_batch_idx else 500.0  # the first batch compiles
        return self.model(torch.ones(3)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.clock.now += VALIDATE

    def on_train_end(self) -> None:
        self.shown = dict(self.trainer.progress_bar_metrics)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Records(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name, version = "records", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, {key: value for key, value in metrics.items() if key.startswith("perf/")}))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class SlowDisk(TorchCheckpointIO):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.clock.now += WRITE
        super().save_checkpoint(*args, **kwargs)


class FourReplicas(SingleDeviceStrategy):
    """One process that believes it is one of eight: four data-parallel ranks of two tensor-parallel peers."""

    data_parallel_rank, data_parallel_size = 1, 4

    def __init__(self) -> None:
        super().__init__("cpu")
        self.world_size = 8


def fit(
    folder: Path, monitor: ThroughputMonitor, strategy: Any = None, extra: dict[str, torch.Tensor] | None = None, **arguments: Any
) -> tuple[list[tuple[int, dict[str, float]]], Module, Trainer]:
    clock = monitor.clock
    assert isinstance(clock, Clock)
    records, module = Records(), Module(clock)
    ckpt_path = arguments.pop("ckpt_path", None)
    callbacks = [*arguments.pop("callbacks", []), monitor]
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy or SingleDeviceStrategy("cpu", checkpoint_io=SlowDisk(clock)),
        callbacks=callbacks,
        enable_checkpointing=len(callbacks) > 1,
        logger=records,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "limit_val_batches": 0, **arguments},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, Batches(clock, **(extra or {})), Batches(clock), ckpt_path=ckpt_path)
    return [row for row in records.rows if row[1]], module, trainer


def monitor(window: int = 3, **arguments: Any) -> ThroughputMonitor:
    return ThroughputMonitor(window, clock=Clock(), **arguments)


def test_values_are_the_means_of_a_window_and_the_first_step_is_left_out(tmp_path: Path) -> None:
    rows, module, trainer = fit(tmp_path, watch := monitor(), max_steps=8)
    values = {"perf/tokens_per_second": 24 / 2.5, "perf/step_seconds": 2.5, "perf/data_wait_share": 0.2}
    assert rows == [(3, values), (6, values)]  # steps 2 to 4 and 5 to 7, numbered from 0; log_every_n_steps is 50
    assert watch.latest == values
    assert module.shown == {"perf/tokens_per_second": pytest.approx(9.6)}
    assert {key: float(value) for key, value in trainer.callback_metrics.items() if key in values} == pytest.approx(values)


def test_a_step_is_an_optimizer_step(tmp_path: Path) -> None:
    rows, _, _ = fit(tmp_path, monitor(2), accumulate_grad_batches=4)
    assert [step for step, _ in rows] == [2, 4]
    assert rows[0][1] == {"perf/tokens_per_second": 9.6, "perf/step_seconds": 10.0, "perf/data_wait_share": 0.2}


def test_validation_is_not_counted(tmp_path: Path) -> None:
    rows, _, _ = fit(tmp_path, monitor(4), max_steps=9, limit_val_batches=2, val_check_interval=3)
    # steps 2 to 5: validation after 3, and with it the reading of batch 4; steps 6 to 9: after 6
    assert [step for step, _ in rows] == [4, 8]
    for _, values in rows:
        assert values == {"perf/tokens_per_second": 96 / 9.5, "perf/step_seconds": 9.5 / 4, "perf/data_wait_share": 1.5 / 9.5}


@pytest.mark.parametrize("first", [True, False])
def test_writing_checkpoints_is_not_counted(tmp_path: Path, first: bool) -> None:
    """Wherever the monitor stands in the list: Lightning puts checkpoints last."""
    watch = monitor(4)
    checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    rows, _, _ = fit(tmp_path, watch, max_steps=9, callbacks=[checkpoint])
    assert watch.clock.now > 3 * WRITE  # type: ignore[attr-defined]
    assert [values["perf/step_seconds"] for _, values in rows] == [9.5 / 4, 9.5 / 4]


def test_a_checkpoint_inside_a_step_and_one_after_validation_are_not_counted(tmp_path: Path) -> None:
    class Saves(throughput.Callback):
        def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

        def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "after.ckpt")

    rows, _, _ = fit(
        tmp_path, monitor(4), max_steps=5, callbacks=[Saves()], limit_val_batches=1, val_check_interval=3, num_sanity_val_steps=0
    )
    assert [values["perf/step_seconds"] for _, values in rows] == [9.5 / 4]


def test_resume_starts_a_new_measurement(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="at", every_n_train_steps=5)
    fit(tmp_path, monitor(), max_steps=5, callbacks=[checkpoint])
    rows, _, _ = fit(tmp_path, monitor(), max_steps=12, ckpt_path=str(tmp_path / "at.ckpt"))
    assert [(step, values["perf/step_seconds"]) for step, values in rows] == [(8, 2.5), (11, 2.5)]  # step 6 warms up


def test_tokens_are_times_data_parallel_size_and_mfu_over_all_devices(tmp_path: Path) -> None:
    watch = monitor(flops_per_token=1000.0, peak_flops=4800.0)
    rows, _, _ = fit(tmp_path, watch, FourReplicas(), max_steps=4)
    assert rows[0][1]["perf/tokens_per_second"] == 9.6 * 4
    assert rows[0][1]["perf/mfu"] == 9.6 * 4 * 1000 / (4800 * 8)


def test_padding_is_no_token(tmp_path: Path) -> None:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1:, 2:] = 0
    rows, _, _ = fit(tmp_path, monitor(), extra={"attention_mask": mask}, max_steps=4)
    assert rows[0][1]["perf/tokens_per_second"] == 12 / 2.5


def test_much_waiting_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    with caplog.at_level("WARNING"):
        fit(tmp_path, monitor(), max_steps=10)  # 0.5 s of 2.5
        assert "reading data limits this run" not in caplog.text
        monkeypatch.setitem(globals(), "READ", 2.0)
        fit(tmp_path, monitor(), max_steps=10)
    assert caplog.text.count("50% of the time goes by between batches: reading data limits this run. Raise num_workers") == 1


def test_what_a_data_module_tells_is_logged(tmp_path: Path) -> None:
    class Told(ThroughputMonitor):
        pass

    class Data(LightningDataModule):
        def train_dataloader(self) -> Any:
            return Batches(clock)

        def metrics(self) -> dict[str, float]:
            return {"data/ratio/text": 0.25}

    clock, records = Clock(), Records()
    options: dict[str, Any] = dict(enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, max_steps=5)
    watch = Told(3, clock=clock)
    Trainer(accelerator="cpu", devices=1, logger=records, callbacks=[watch], **options).fit(Module(clock), datamodule=Data())
    assert watch.latest["data/ratio/text"] == 0.25 and "perf/step_seconds" in watch.latest


def test_flops_are_the_models_own_or_six_per_parameter(tmp_path: Path) -> None:
    def flops(method_of: str | None, **arguments: Any) -> float | None:
        module = Module(Clock())
        owner: Any = {"module": module, "model": module.model, None: Namespace()}[method_of]
        owner.flops_per_token = lambda sequence_length: 7.0 * sequence_length
        return monitor(**arguments)._flops_per_token(module, {"input_ids": torch.zeros(2, 5)})

    assert flops("module") == flops("model") == 35.0
    assert flops(None) == 6 * 16
    assert flops(None, flops_per_token=3.0) == 3.0 and flops("model", flops_per_token=None) is None
    rows, _, _ = fit(tmp_path, monitor(peak_flops=1000.0), max_steps=4)
    assert rows[0][1]["perf/mfu"] == pytest.approx(9.6 * 96 / 1000, rel=1e-12)
    rows, _, _ = fit(tmp_path, monitor(flops_per_token=5.0), max_steps=4)
    assert "perf/mfu" not in rows[0][1]  # a CPU has no peak here


def test_the_device_is_synchronized_at_window_ends_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(throughput, "_synchronize", lambda trainer: calls.append(trainer.global_step))
    fit(tmp_path, monitor(5), max_steps=12)
    assert calls == [1, 6, 6, 11, 11]
    calls.clear()
    fit(tmp_path, monitor(20), max_steps=12, limit_val_batches=1, val_check_interval=6)
    assert calls == [1, 6, 6, 12]


def test_synchronize_waits_for_cuda_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", devices.append)
    for name in ("cpu", "cuda:3"):
        throughput._synchronize(Namespace(strategy=Namespace(root_device=torch.device(name))))  # type: ignore[arg-type]
    assert devices == [torch.device("cuda:3")]


def test_counting() -> None:
    ids = torch.zeros(3, 5, dtype=torch.long)
    assert count_tokens({"input_ids": ids}) == 15
    masked = count_tokens({"input_ids": ids, "attention_mask": torch.eye(3, 5, dtype=torch.bool)})
    assert isinstance(masked, torch.Tensor) and masked.item() == 3  # stays where it is
    packed = torch.tensor([[0, 0, 1, -1, -1], [0, 1, 2, 2, -1], [-1] * 5])
    assert int(count_tokens({"input_ids": ids, "document_ids": packed})) == 7
    assert count_tokens({"name": "x", "image": torch.zeros(7, 3, 2)}) == 7
    assert count_tokens((torch.zeros(2, 9), torch.zeros(2))) == 2
    assert count_tokens([{"x": torch.zeros(4, 1)}]) == 4
    assert count_tokens("text") == count_tokens(None) == count_tokens({}) == 0
    assert count_tokens(torch.zeros(())) == 1


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181.05e12),
        ("NVIDIA L40S", 362.05e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA RTX A4000", None),
        ("Something else", None),
    ],
)
def test_peaks_by_name(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_bf16_flops(torch.device("cuda:0")) == peak
    assert peak_bf16_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window": 0}, "window=0: at least 1"),
        ({"flops_per_token": -1.0}, "flops_per_token=-1.0: a positive number"),
        ({"peak_flops": "h100"}, "peak_flops='h100': a positive number, \"auto\", or None"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ThroughputMonitor(**arguments)
