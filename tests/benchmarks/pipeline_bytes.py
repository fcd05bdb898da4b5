"""Bytes per rank of pp2 x fsdp2 in each mode, counted while a schedule runs, against the formula of ``parallel/pipeline_bytes.py``.

Run: ``python -m tests.benchmarks.pipeline_bytes [precisions=bf16-mixed,32-true] [microbatches=4]``. Real gloo ranks on this machine; bytes
are counted at every operator, not sampled. Counted are shards, optimizer state, receive buffers, gathered parameters, gradients, and the
inputs and outputs of collectives; activations are not. Where none are alive (after the last backward, before the reduction) all tensors
that exist are added up as well: what the named ones leave out is the column "other".
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import Any
from unittest import mock

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.parallel.pipeline_bytes import StageBytes, stage_bytes
from lightning_megascale.parallel.pipeline_schedule import CallStage
from lightning_megascale.strategies import pipeline_steps
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests.harness import run_ranks

LENGTH, SHARDS, PIPELINE, STEPS = 16, 2, 2, 2
CONFIG = DecoderConfig(vocab_size=256, hidden_size=32, num_layers=5, num_heads=4, intermediate_size=64, max_position_embeddings=LENGTH)
SPLIT = ["layers.3"]  # three blocks and the embedding; two blocks, norm and head
MODES = [(reduce, reshard) for reduce in ("last", "every") for reshard in ("auto", True)]
NAMES = tuple(field.name for field in fields(StageBytes))


class StateBytes(TorchDispatchMode):
    """Adds up, after every operator, the live bytes of what a rank's stages hold besides activations; keeps the largest sum."""

    def __init__(self, stages: Iterable[CallStage], optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.stages, self.optimizer = list(stages), optimizer
        self.groups = [
            group
            for stage in self.stages
            for unit in stage.submod.modules()
            if isinstance(unit, FSDPModule)
            for group in fully_shard.state(unit)._fsdp_param_groups  # type: ignore[attr-defined]
        ]
        self.known: dict[int, tuple[str, Any]] = {}
        self.peak = dict.fromkeys(NAMES, 0)
        self.at_end: tuple[int, int] | None = None

    def note(self, name: str, tensor: Any) -> None:
        """Counts the tensor's storage until it is gone; a collective's output that becomes the gradient is that from then on."""
        if tensor is None:
            return
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage._cdata
        if key not in self.known or (name, self.known[key][0]) == ("gradients", "working"):
            self.known[key] = (name, weakref.ref(storage, lambda _: self.known.pop(key, None)))

    def note_lasting(self) -> None:
        """What neither comes nor goes within a schedule's call."""
        for group in self.groups:
            for parameter in group.fsdp_params:
                self.note("shards", parameter._sharded_param_data)
        for stage in self.stages:
            for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values()):
                for info in infos:
                    self.note("receive", info.buffer)
        for state in self.optimizer.state.values():
            for value in state.values():
                self.note("optimizer", value if isinstance(value, Tensor) else None)

    def now(self) -> dict[str, int]:
        every = self.stages[0]._reduce_every
        for group in self.groups:
            for parameter in group.fsdp_params:
                self.note("gradients", parameter.sharded_param.grad)
                self.note("gradients", parameter.unsharded_accumulated_grad)
                for gathered in parameter.all_gather_outputs:
                    self.note("gathered", gathered)
                grad = getattr(getattr(parameter, "_unsharded_param", None), "grad", None)
                self.note("working" if every or parameter.reduce_dtype is not None else "gradients", grad)
        total = dict.fromkeys(NAMES, 0)
        for name, reference in list(self.known.values()):
            storage = reference()
            total[name] += 0 if storage is None else storage.nbytes()  # a freed all-gather output is a storage of no bytes
        return total

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        found = self.now()
        if sum(found.values()) > sum(self.peak.values()):
            self.peak = found
        return out

    def before_reduction(self) -> None:
        """All activations are gone: compares what is named with all tensors that exist."""
        gc.collect()
        storages = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                tensor = thing.to_local() if isinstance(thing, DTensor) else thing
                if tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = storage.nbytes()
        self.at_end = (sum(self.now().values()), sum(storages.values()))


@contextmanager
def counted(module: L.LightningModule, found: list[StateBytes]) -> Iterator[None]:
    """Counts in the schedule's calls of all steps but the first."""
    run, reduce = pipeline_steps.run_schedule, CallStage.perform_reduce_grad
    allocators = {kind: kind.allocate for kind in (DefaultAllGather, DefaultReduceScatter)}

    def run_counted(schedule: Any, stages: Any, *rest: Any) -> None:
        optimizer = module.optimizers().optimizer  # type: ignore[union-attr]
        if not optimizer.state:  # the first step, which sets up all that lasts
            return run(schedule, stages, *rest)
        counter = StateBytes(stages, optimizer)
        counter.note_lasting()
        found.append(counter)
        with counter:
            return run(schedule, stages, *rest)

    def allocate_counted(kind: type) -> Callable[..., Tensor]:
        def allocate(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            tensor = allocators[kind](self, *args, **kwargs)
            if found:
                found[-1].note("working", tensor)
            return tensor

        return allocate

    def reduce_counted(stage: CallStage, factor: int) -> None:
        if found:
            found[-1].before_reduction()
        reduce(stage, factor)

    with (
        mock.patch.object(pipeline_steps, "run_schedule", run_counted),
        mock.patch.object(CallStage, "perform_reduce_grad", reduce_counted),
        mock.patch.object(DefaultAllGather, "allocate", allocate_counted(DefaultAllGather)),
        mock.patch.object(DefaultReduceScatter, "allocate", allocate_counted(DefaultReduceScatter)),
    ):
        yield


class Module(L.LightningModule):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Decoder(config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss_sum, num_tokens = self.model(batch["input_ids"], labels=batch["labels"])
        return {"loss_sum": loss_sum, "num_tokens": num_tokens}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def measure(precision: str, reduce: str, reshard: Any, microbatches: int, config: DecoderConfig, split: list[str]) -> dict[str, Any]:
    """Runs on each rank: bytes at the peak of the last step's schedule, the formula's, and the check before the reduction."""
    gc.freeze()  # what the fork inherited is none of this rank's
    module = Module(config)
    strategy = MegascaleStrategy(
        pipeline_parallel_size=PIPELINE,
        microbatch_size=1,
        pipeline_split=split,
        reduce_gradients=reduce,
        reshard_after_forward=reshard,
        label_alignment="aligned",
    )
    ids = torch.randint(config.vocab_size, (microbatches * STEPS, LENGTH))
    found: list[StateBytes] = []
    with counted(module, found):
        L.Trainer(
            accelerator="cpu",
            devices=PIPELINE * SHARDS,
            strategy=strategy,
            precision=precision,  # type: ignore[arg-type]
            max_steps=STEPS,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(module, DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=microbatches))  # type: ignore[arg-type]
    counter = found[-1]
    assert counter.at_end is not None
    return {
        "rank": strategy._done.pipeline.rank,  # type: ignore[union-attr]
        "measured": counter.peak,
        "formula": asdict(formula(counter, precision, reduce, reshard, microbatches, config)),
        "other": counter.at_end[1] - counter.at_end[0],
    }


def formula(counter: StateBytes, precision: str, reduce: str, reshard: Any, microbatches: int, config: DecoderConfig) -> StageBytes:
    """What the formula says of this rank, from the numbers of parameters in its units."""
    stage = counter.stages[0]
    compute = 2 if precision == "bf16-mixed" else 4
    counts = [sum(p.sharded_param.numel() for p in group.fsdp_params) for group in counter.groups]
    hidden = LENGTH * config.hidden_size * compute
    return stage_bytes(
        counts[0],
        counts[1:],
        is_last=stage.is_last,
        shard_size=SHARDS,
        microbatches=microbatches,
        received=0 if stage.is_first else hidden,
        sent=0 if stage.is_last else hidden,
        compute=compute,
        reduce_gradients=reduce,
        reshard_after_forward=reshard is True,
    )


def compare(precision: str, reduce: str, reshard: Any, microbatches: int = 4) -> list[dict[str, Any]]:
    """One result for each pipeline stage."""
    results = run_ranks(measure, PIPELINE * SHARDS, precision, reduce, reshard, microbatches, CONFIG, SPLIT, timeout=120)
    return [next(result for result in results if result["rank"] == rank) for rank in range(PIPELINE)]


def main(arguments: list[str]) -> None:
    options = dict(argument.split("=") for argument in arguments)
    table = Table(*("precision", "reduce", "reshard", "stage", *NAMES, "bytes", "formula", "measured / formula", "other"))
    for precision in options.get("precisions", "bf16-mixed,32-true").split(","):
        for reduce, reshard in MODES:
            for stage, result in enumerate(compare(precision, reduce, reshard, int(options.get("microbatches", 4)))):
                measured, wanted = sum(result["measured"].values()), sum(result["formula"].values())
                cells = [f"{result['measured'][name]:,}\n{result['formula'][name]:,}" for name in NAMES]
                ratio = measured / wanted
                verdict = f"{ratio:.4f}{'' if abs(ratio - 1) <= 0.05 else ' MISSED'}"
                table.add_row(
                    precision, reduce, str(reshard), str(stage), *cells, f"{measured:,}", f"{wanted:,}", verdict, f"{result['other']:,}"
                )
    console = Console(width=200)
    console.print(f"{CONFIG}, {LENGTH} tokens, cut at {SPLIT}; pp2 x fsdp2; upper line measured, lower line the formula's", style="dim")
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
