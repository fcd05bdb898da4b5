"""Memory of long context: the loss and the feed-forward in chunks against the plain ones, and a step on 131,072 tokens inside a limit.

Run: ``python -m tests.benchmarks.long_context [parts=loss,mlp,step] [tokens=131072] [limit_mib=1536] [timeout=3000]``. Bytes of loss and
feed-forward are counted, not sampled, so those tables repeat. The step runs on 4 ranks under RLIMIT_DATA: private writable memory as
the kernel counts it when it is asked for, without what the ranks share (libraries) and without reserved addresses, which RLIMIT_AS
would count; so an allocation beyond it fails on the spot, and no rank can push others out of memory. The peak of resident memory
stands beside it. Shapes: T tokens, D model, F feed-forward, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.models.layers import FeedForward
from lightning_megascale.ops.cross_entropy import linear_cross_entropy
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests.benchmarks.activation_bytes import LiveBytes
from tests.harness import RankFailure, run_ranks

MIB = 2**20
RANKS = 4


class PeakBytes(LiveBytes):
    """The most bytes that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def adopt(self, tensor: Tensor) -> None:
        super().adopt(tensor)
        self.peak = max(self.peak, self.live)


def peak_of(work: Any, *given: Tensor) -> int:
    """Bytes alive at once during ``work()`` beyond the tensors given."""
    counter = PeakBytes()
    for tensor in given:
        counter.adopt(tensor)
    before = counter.live
    with counter:
        work()
    return counter.peak - before


# ---- the loss ------------------------------------------------------------------------------------------------------------------------


def loss_peak(tokens: int, width: int, vocabulary: int, chunk: int | None) -> int:
    """Peak of head, loss and their backward on this rank, which holds its share of the vocabulary if there are several; float32."""
    torch.manual_seed(0)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary // ranks, width, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))

    def plain() -> None:
        F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum").backward()

    def chunked() -> None:
        group = dist.group.WORLD if ranks > 1 else None
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk or 0, group=group)[0].backward()

    return peak_of(plain if chunk is None else chunked, hidden, weight, labels)


def loss_formula(tokens: int, width: int, vocabulary: int, chunk: int | None, ranks: int = 1) -> int:
    """Plain: log-softmax (kept), the gradient of the targets and that of the logits. In chunks: the logits of two chunks, of which the
    older is still named when the newer are made, and the gradients of hidden and weight, once when made and once when scaled."""
    if chunk is None:
        return 4 * 3 * tokens * vocabulary
    rows = vocabulary // ranks
    gradients = tokens * width + rows * width
    return 4 * max(2 * chunk * rows + gradients, 2 * gradients)


def loss_table(console: Console) -> None:
    table = Table(
        "tokens", "width", "vocabulary", "chunk", "ranks", "MiB by formula", "MiB measured", "plain / this", title="peak of the loss"
    )
    for tokens, width, vocabulary in ((4096, 128, 32768), (8192, 128, 32768)):
        plain = loss_peak(tokens, width, vocabulary, None)
        rows: list[tuple[int | None, int]] = [(None, 1), (1024, 1), (256, 1), (256, 2)]
        for chunk, ranks in rows:
            measured = loss_peak(tokens, width, vocabulary, chunk) if ranks == 1 else 0
            if ranks > 1:
                measured = max(run_ranks(loss_peak, ranks, tokens, width, vocabulary, chunk, timeout=300))
            formula = loss_formula(tokens, width, vocabulary, chunk, ranks)
            cells = (tokens, width, vocabulary, chunk or "plain", ranks, f"{formula / MIB:.1f}", f"{measured / MIB:.1f}")
            table.add_row(*map(str, cells), f"{plain / measured:.1f}")
    console.print(table)


# ---- the feed-forward ----------------------------------------------------------------------------------------------------------------


def mlp_peak(tokens: int, width: int, inner: int, chunk: int | None, layers: int) -> int:
    """Peak of ``layers`` residual feed-forwards (swiglu) and their backward, without the gradients of the weights; float32."""
    torch.manual_seed(0)
    stack = [FeedForward(width, inner, chunk_tokens=chunk) for _ in range(layers)]
    parameters = [parameter for module in stack for parameter in module.parameters()]
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    for tensor in (*parameters, hidden):
        tensor.grad = torch.zeros_like(tensor)

    def work() -> None:
        out = hidden
        for module in stack:
            out = out + module(out)
        out.sum().backward()

    return peak_of(work, hidden, *parameters, *(tensor.grad for tensor in (*parameters, hidden) if tensor.grad is not None))


def mlp_formula(tokens: int, width: int, inner: int, chunk: int | None, layers: int) -> int:
    """Of a layer gate, up, silu(gate) and their product are kept, F wide, of all tokens or of one chunk of one layer; in the backward two
    gradients F wide join them. D wide are the hidden states, one a layer, and the gradients of the chunks before they are joined."""
    kept = layers * 4 * tokens * inner if chunk is None else 4 * chunk * inner
    working = 2 * (tokens if chunk is None else chunk) * inner
    return 4 * (kept + working + (layers + (chunk is not None)) * tokens * width)


def mlp_table(console: Console) -> None:
    table = Table(
        "tokens", "width", "F", "layers", "chunk", "MiB by formula", "MiB measured", "plain / this", title="peak of the feed-forward"
    )
    for tokens, width, inner, layers in ((16384, 128, 512, 2), (16384, 128, 512, 8)):
        plain = mlp_peak(tokens, width, inner, None, layers)
        for chunk in (None, 4096, 1024):
            measured = mlp_peak(tokens, width, inner, chunk, layers)
            cells = (tokens, width, inner, layers, chunk or "plain", f"{mlp_formula(tokens, width, inner, chunk, layers) / MIB:.1f}")
            table.add_row(*map(str, cells), f"{measured / MIB:.1f}", f"{plain / measured:.1f}")
    console.print(table)


# ---- a step on a long row ------------------------------------------------------------------------------------------------------------


def config(tokens: int, mlp_chunk_tokens: int | None = 2048) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=32768,
        hidden_size=128,
        num_layers=2,
        num_heads=2,
        intermediate_size=384,
        max_position_embeddings=tokens,
        loss_chunk_tokens=256,
        mlp_chunk_tokens=mlp_chunk_tokens,
    )


def rows(tokens: int, count: int = 1) -> list[dict[str, Tensor]]:
    """Rows of random tokens, with the next token as the label; the last has none."""
    ids = torch.randint(32768, (count, tokens), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([ids[:, 1:], torch.full((count, 1), -100)], 1)
    return [{"input_ids": row, "labels": target} for row, target in zip(ids, labels)]


class LongModule(L.LightningModule):
    """An ordinary module; the loss in chunks or from whole logits."""

    def __init__(self, shape: DecoderConfig, chunked_loss: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.chunked_loss = Decoder(shape), chunked_loss
        self.gradients: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        if self.chunked_loss:
            loss_sum, num_tokens = self.model(batch["input_ids"], labels=batch["labels"])
            return {"loss_sum": loss_sum, "num_tokens": num_tokens}
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def status(name: str) -> int:
    """Bytes that the kernel counts under this name for the process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def long_step(tokens: int, chunked_loss: bool, limit: int) -> dict[str, Any]:
    """One forward, backward and optimizer step on every rank, inside ``limit`` bytes beyond what the started rank has."""
    module = LongModule(config(tokens), chunked_loss)
    data = DataLoader(rows(tokens), batch_size=1)  # type: ignore[arg-type]
    strategy = MegascaleStrategy(context_parallel_size=RANKS, label_alignment="aligned")
    quiet: dict[str, Any] = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = L.Trainer(accelerator="cpu", devices=RANKS, strategy=strategy, max_steps=1, use_distributed_sampler=False, **quiet)
    data_before, resident_before = status("VmData"), status("VmRSS")
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_before + limit, hard))
    started, worked = time.perf_counter(), time.process_time()
    trainer.fit(module, data)
    return {
        "loss": float(strategy.step_loss),
        "seconds": time.perf_counter() - started,
        "processor seconds": time.process_time() - worked,
        "resident": status("VmHWM") - resident_before,
    }


def step_table(console: Console, tokens: int, limit: int, timeout: float) -> None:
    table = Table(
        "tokens", "the loss", "limit MiB", "peak resident MiB a rank", "s", "processor s a rank", "loss, or how",
        title=f"one step of {RANKS} context-parallel ranks, width 128, 2 layers, vocabulary 32,768",
    )  # fmt: skip
    plain = tokens // RANKS * 32768 * 4 / MIB
    for chunked in (True, False):
        name = "in chunks" if chunked else f"plain (logits of a rank: {plain:.0f} MiB)"
        try:
            results = run_ranks(long_step, RANKS, tokens, chunked, limit, timeout=timeout)
        except RankFailure as failure:
            asked = re.search(r"tried to allocate (\d+) bytes", str(failure))
            if asked is None:
                raise
            table.add_row(f"{tokens:,}", name, str(limit // MIB), "exceeded", "", "", f"asked for {int(asked[1]) / MIB:.0f} MiB at once")
            continue
        losses = {result["loss"] for result in results}
        assert len(losses) == 1 and losses.pop() < 20, "ranks disagree, or the loss is not finite"
        worst = {key: max(result[key] for result in results) for key in results[0]}
        cells = (f"{worst['resident'] / MIB:.0f}", f"{worst['seconds']:.0f}", f"{worst['processor seconds']:.0f}", f"{worst['loss']:.6f}")
        table.add_row(f"{tokens:,}", name, str(limit // MIB), *cells)
    console.print(table)


def main(arguments: list[str]) -> None:
    options = dict(argument.split("=") for argument in arguments)
    parts, console = options.get("parts", "loss,mlp,step").split(","), Console(width=160)
    torch.set_num_threads(1)
    if "loss" in parts:
        loss_table(console)
    if "mlp" in parts:
        mlp_table(console)
    if "step" in parts:
        step_table(
            console, int(options.get("tokens", 131072)), int(options.get("limit_mib", 1024)) * MIB, float(options.get("timeout", 3000))
        )


if __name__ == "__main__":
    main(sys.argv[1:])
