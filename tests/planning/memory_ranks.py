"""All bytes of tensors that a rank holds at its fullest while a real run trains here, and what the planner says of the same run."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.planning.candidates import Candidates
from lightning_megascale.planning.memory import memory_by_rank
from lightning_megascale.planning.model_config import from_decoder_config
from lightning_megascale.planning.stack import Precision, Stack
from lightning_megascale.planning.workload import Workload
from lightning_megascale.strategies.trainer import MegascaleStrategy
from lightning_megascale.topology.describe import load_cluster
from tests.harness import run_ranks

LENGTH, ROWS, STEPS = 256, 4, 2
# A CPU's root-mean-square norm and rotations are made of many operators that keep tensors in float32; layer norms and tables are not.
CONFIG = DecoderConfig(
    vocab_size=512, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=384, max_position_embeddings=LENGTH,
    norm="layer", positions="learned", loss_chunk_tokens=64,
)  # fmt: skip
PRECISIONS = {"bf16-mixed": Precision("bf16-mixed"), "32-true": Precision("32-true", "float32", compute_bytes=4, gather_bytes=4)}


class AllBytes(TorchDispatchMode):
    """Adds up all tensors that operators have made and that are still alive, after every operator; keeps the largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[int, Any] = {}
        self.peak = 0

    def note(self, value: Any) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                storage = (leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage()
                key = storage._cdata
                if key not in self.known:
                    self.known[key] = weakref.ref(storage, lambda _, key=key: self.known.pop(key, None))

    def now(self) -> int:
        alive = [reference() for reference in list(self.known.values())]
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.note(out)
        self.peak = max(self.peak, self.now())
        return out


class Module(L.LightningModule):
    """Counts in the last step, from the batch to before the optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(CONFIG)
        self.counter: AllBytes | None = None

    def training_step(self, batch, batch_idx):
        loss_sum, num_tokens = self.model(batch["input_ids"], labels=batch["labels"])
        return {"loss_sum": loss_sum, "num_tokens": num_tokens}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == STEPS - 1:
            self.counter = AllBytes()
            gc.collect()
            for thing in gc.get_objects():
                if issubclass(type(thing), Tensor) and thing.device.type == "cpu":
                    self.counter.note(thing)
            self.counter.__enter__()

    def on_before_optimizer_step(self, optimizer):
        if self.counter is not None:
            self.counter.__exit__(None, None, None)


def train(plan: ParallelPlan, precision: str, world: int) -> tuple[int, int]:
    """On each rank: (its pipeline rank, bytes at the peak)."""
    gc.freeze()
    module = Module()
    options = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if getattr(plan, field.name) != field.default}
    for derived in ("data_parallel_size", "global_batch_size"):
        options.pop(derived, None)
    strategy = MegascaleStrategy(**options)
    ids = torch.randint(CONFIG.vocab_size, (ROWS * STEPS * 8, LENGTH))
    L.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, precision=precision, max_steps=STEPS, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=ROWS))  # fmt: skip
    pipeline = strategy._done.pipeline
    return (0 if pipeline is None else pipeline.rank), module.counter.peak


def compare(plan: ParallelPlan, precision: str, world: int) -> list[tuple[int, float, dict[str, float]]]:
    """(bytes at the peak, bytes that the planner expects, those by kind) of each pipeline rank."""
    found = dict(run_ranks(train, world, plan, precision, world, timeout=120))
    resolved = plan.resolve(world)
    workload = Workload(from_decoder_config(dataclasses.asdict(CONFIG)), LENGTH, ROWS * resolved.data_parallel_size)
    stack = Stack("megascale", PRECISIONS[precision], loss_chunk=CONFIG.loss_chunk_tokens, reserve_bytes=0)
    candidates = Candidates.from_plan(resolved)
    if resolved.microbatch_size is None:
        candidates = dataclasses.replace(candidates, microbatch_size=candidates.microbatch_size * ROWS)
    expected = memory_by_rank(workload, load_cluster("local"), stack, candidates)
    return [(found[rank], float(each.total[0]), each.row()) for rank, each in enumerate(expected)]
