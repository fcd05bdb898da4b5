"""What ExpertBalanceMonitor costs: step time with and without it, taking turns inside one run, and the time spent in its own code.

Run: ``python -m tests.benchmarks.moe_monitor [models=ours,mixtral] [ranks=2] [rounds=9] [steps=20] [every=10]``. Heat maps are left out (a
picture takes its own time, printed once). A ratio is that of the means of a turn's steps, so intervals are in; figures are medians over
rounds with
their 95% bootstrap interval, once by the wall clock and once in processor time, which leaves out waiting and what other programs do to the
clock. "inside" is the time that hooks and methods of the callback took, over that of all steps: the figure with the least noise.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from lightning_megascale import ExpertBalanceMonitor, MegascaleStrategy
from lightning_megascale.callbacks.expert_heatmap import draw_loads
from lightning_megascale.callbacks.expert_routers import RouterWatch
from lightning_megascale.models.decoder import Decoder, DecoderConfig
from tests.benchmarks.overhead import interval
from tests.harness import run_ranks

WIDTH, INNER, LAYERS, EXPERTS, TOP_K, TOKENS, VOCABULARY = 256, 512, 4, 16, 2, 256, 1000


def model_of(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    shape = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=INNER, max_position_embeddings=TOKENS)
    if kind == "ours":
        config = DecoderConfig(**shape, num_layers=LAYERS, num_heads=8, num_experts=EXPERTS, num_experts_per_token=TOP_K)  # type: ignore[arg-type]
        return Decoder(config)
    from transformers import MixtralConfig, MixtralForCausalLM

    mixture = dict(num_hidden_layers=LAYERS, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    return MixtralForCausalLM(MixtralConfig(**shape, **mixture, num_attention_heads=8, num_key_value_heads=8))  # type: ignore[arg-type]


class Module(L.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = model_of(kind)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        out = self.model(batch["input_ids"])
        logits = (out if isinstance(out, torch.Tensor) else out.logits).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(L.Callback):
    """Seconds and processor seconds when steps ended; the last callback to hear of it."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def mean(self) -> tuple[float, float]:
        """Of a step after the first two."""
        first, last = self.ends[1], self.ends[-1]
        return tuple((b - a) / (len(self.ends) - 2) for a, b in zip(first, last))  # type: ignore[return-value]


class Timed:
    """Adds up the time inside functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def turn(module: Module, data: DataLoader, every: int | None, inside: Timed) -> tuple[float, float, float]:
    """(seconds, processor seconds, seconds in the callback) of a step."""
    callbacks: list[L.Callback] = []
    if every is not None:
        monitor = ExpertBalanceMonitor(every_n_steps=every, heatmap_every_n_steps=None)
        for name in ("on_train_batch_start", "on_train_batch_end"):
            setattr(monitor, name, inside.around(getattr(monitor, name)))
        callbacks = [monitor]
    clock, inside.seconds = Clock(), 0.0
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=MegascaleStrategy(label_alignment="aligned"),
        max_epochs=1,
        callbacks=[*callbacks, clock],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return *clock.mean(), inside.seconds / len(clock.ends)


def measure(kind: str, rounds: int, steps: int, every: int) -> list[tuple[tuple[float, float, float], ...]]:
    """On every rank: of each round, (without, with)."""
    inside, module = Timed(), Module(kind)
    RouterWatch._count = inside.around(RouterWatch._count)  # type: ignore[method-assign]
    ids = torch.randint(VOCABULARY, (steps, TOKENS), generator=torch.Generator().manual_seed(int(os.environ["RANK"])))
    data = DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=1)  # type: ignore[arg-type]
    found = []
    for number in range(rounds + 1):
        order: list[int | None] = [None, every] if number % 2 else [every, None]
        times = {key: turn(module, data, key, inside) for key in order}
        if number:  # the first round warms up
            found.append((times[None], times[every]))
    return found


def picture() -> float:
    """Seconds to draw one of 58 layers and 384 experts, the second of two."""
    loads = torch.rand(58, 384).mul(2).tolist()
    for _ in range(2):
        begin = time.perf_counter()
        draw_loads(loads, [str(number) for number in range(58)], "title").canvas.draw()
    return time.perf_counter() - begin


def main(arguments: list[str]) -> None:
    given = dict(argument.split("=", 1) for argument in arguments)
    rounds, steps, every, ranks = (int(given.get(key, value)) for key, value in (("rounds", 9), ("steps", 20), ("every", 10), ("ranks", 2)))
    title = f"{LAYERS} layers, {EXPERTS} experts, {TOKENS} tokens a rank; an interval every {every} steps"
    table = Table("model", "ranks", "ms a step", "time with / without", "processor time with / without", "inside, % of a step", title=title)
    for kind in given.get("models", "ours,mixtral").split(","):
        results = run_ranks(measure, ranks, kind, rounds, steps, every, timeout=3000)[0]
        ratios = ["{:.4f} [{:.4f}, {:.4f}]".format(*interval([w[at] / without[at] for without, w in results])) for at in (0, 1)]
        share = statistics.median(w[2] / w[0] for _, w in results)
        table.add_row(kind, str(ranks), f"{statistics.median(w[0] for w, _ in results) * 1000:.1f}", *ratios, f"{100 * share:.2f}")
    console = Console(width=150)
    console.print(table)
    console.print(f"a picture of 58 layers x 384 experts: {picture():.2f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
