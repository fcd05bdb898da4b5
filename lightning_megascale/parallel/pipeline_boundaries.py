"""What crosses each pipeline boundary, learnt by one forward of each stage; and the proof that nothing else would have to cross.

A stage sees the hidden state only. A model whose forward changes it between its parts (a factor after the embedding, a skip from the first
layer to the last) would give other numbers without an error, so the first forward of every shape looks: the stage's first module must get
exactly what was received, the hidden state must leave exactly as the last block made it, no other argument of a block may follow it, and
with the first module's input held fixed nothing that the stage computes may change when what was received does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_megascale.parallel.pipeline import Call, Chunk, Pipeline
from lightning_megascale.parallel.pipeline_schedule import Boundary
from lightning_megascale.parallel.rng import fork_seeded


class Probe(nn.Module):
    """Stands before one of the stage's own modules and notes what goes in and out."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name, self.module = name, module
        self.received: Any = None
        self.others: list[Tensor] = []
        self.output: Any = None
        self.calls = 0
        self.held: Tensor | None = None
        """Given to the module's first call in place of what comes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            key = next(iter(kwargs), None)
            self.received = args[0] if args else kwargs.get(key)  # type: ignore[arg-type]
            rest = (args[1:], {name: value for name, value in kwargs.items() if args or name != key})
            self.others = [leaf.detach().clone() for leaf in tree_leaves(rest) if isinstance(leaf, Tensor)]
            if self.held is not None and args:
                args = (self.held, *args[1:])
            elif self.held is not None:
                kwargs = {**kwargs, key: self.held}  # type: ignore[dict-item]
        output = self.module(*args, **kwargs)
        self.output = output
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)  # such as a layer's attention_type


def infer_boundaries(pipeline: Pipeline, call: Call, device: torch.device, group: dist.ProcessGroup) -> list[Boundary]:
    """Runs every stage once, one after the other, without gradients. Collective over the pipeline axis and every data-parallel group.

    Args:
        pipeline: this rank's stages.
        call: what the step called the model with, for one microbatch.
        device, group: of the pipeline axis.

    Returns:
        What leaves each stage but the last.

    Raises:
        ValueError: on all ranks of the axis, when the model is no chain over these stages.
    """
    boundaries: list[Boundary] = []
    own = dict(zip(pipeline.own_stages, pipeline.chunks))
    for stage in range(len(pipeline.stages)):
        found: list[Any] = [None]
        if stage in own:
            received = boundaries[-1] if boundaries else None
            found = [_run_stage(pipeline, stage, own[stage], received, call, device)]
        dist.broadcast_object_list(found, group_src=pipeline.stages.owners[stage], group=group, device=device)
        boundary, tuple_length, wrong = found[0]
        if wrong:
            raise ValueError(wrong)
        if tuple_length:
            for chunk in pipeline.chunks:
                chunk.relay.tuple_length = tuple_length
        boundaries.append(boundary)
    return boundaries[:-1]


def _run_stage(
    pipeline: Pipeline, stage: int, chunk: Chunk, boundary: Boundary | None, call: Call, device: torch.device
) -> tuple[Boundary | None, int, str | None]:
    """(what leaves the stage, the length of the tuples that blocks answer in, what is wrong)."""
    blocks = frozenset(pipeline.layout.blocks)
    runs: list[_Run] = []
    for attempt in range(1 if boundary is None else 3):
        with torch.no_grad(), fork_seeded(attempt, device), _kept_buffers(chunk):
            received: tuple[Tensor, ...] = () if boundary is None else (torch.randn(boundary.shape, device=device).to(boundary.dtype),)
            with _probes(chunk.model, pipeline.stages.units[stage]) as probes, fork_seeded(0, device):
                if attempt == 2:
                    chunk.relay.second_embedding = received[0][(0,) * (received[0].ndim - 1)]
                    probes[runs[0].first].held = runs[0].probes[runs[0].first].received
                try:
                    output = chunk(*received, call=call)
                except Exception as error:  # noqa: BLE001 - told to all ranks, which would wait for ever
                    return None, 0, f"pipeline stage {stage} cannot run: {type(error).__name__}: {error}"
                finally:
                    chunk.relay.second_embedding = None
        runs.append(_Run(probes, output))
        if received and attempt < 2 and (wrong := _changed_on_the_way_in(stage, probes, received[0])):
            return None, 0, wrong
    probes, output = runs[0].probes, runs[0].output
    last = next((probe for probe in reversed(probes) if probe.name in blocks and probe.calls), None)
    tuple_length = len(last.output) if last is not None and isinstance(last.output, (tuple, list)) else 0
    wrong = _depends_on_hidden(stage, runs, blocks) or _passes_by(stage, runs)
    if stage == len(pipeline.stages) - 1:
        return None, tuple_length, wrong
    wrong = _called_otherwise(stage, probes) or _changed_on_the_way_out(stage, probes, output, last) or wrong
    wrong = wrong or _changed_between(chunk, probes, blocks)
    return None if wrong else Boundary(tuple(output.shape), output.dtype), tuple_length, wrong


@contextmanager
def _kept_buffers(chunk: Chunk) -> Iterator[None]:
    """A counter or a running mean in a layer counts steps, not these forwards."""
    kept = [(buffer, buffer.clone()) for buffer in chunk.buffers() if not buffer.is_meta]
    try:
        yield
    finally:
        for buffer, value in kept:
            buffer.copy_(value)


@dataclass
class _Run:
    """One forward of a stage."""

    probes: list[Probe]
    output: Any

    @property
    def first(self) -> int:
        """Place of the first probe that was called."""
        return next(place for place, probe in enumerate(self.probes) if probe.calls)


def _called_otherwise(stage: int, probes: list[Probe]) -> str | None:
    unused = [probe.name for probe in probes if probe.calls == 0]
    if unused:
        return (
            f"the model did not call {', '.join(map(repr, unused))} of pipeline stage {stage} before the next stage's modules: the "
            "layout's first, blocks and last must stand in the order of the calls"
        )
    return None


def _changed_on_the_way_in(stage: int, probes: list[Probe], received: Tensor) -> str | None:
    first = next((probe for probe in probes if probe.calls), None)
    got = None if first is None else first.received
    if got is received or (isinstance(got, Tensor) and got.shape == received.shape and torch.equal(got, received)):
        return None
    where = "never reaches a module" if first is None else f"is not what {first.name!r} is given"
    return (
        f"the hidden state that pipeline stage {stage} receives {where}: the model changes it on its way (a factor or a dropout after the "
        "embedding, a slice of a block's output), which would happen once on every stage. Put that into a module and name it in the "
        "layout's first, or into the first block"
    )


def _changed_on_the_way_out(stage: int, probes: list[Probe], output: Any, last: Probe | None) -> str | None:
    if not isinstance(output, Tensor) or not output.is_floating_point():
        kind = f"{output.dtype} tensor" if isinstance(output, Tensor) else type(output).__name__
        return (
            f"pipeline stage {stage} ends in a {kind}: only one floating tensor crosses a pipeline boundary, the first argument of the "
            "next stage's first module. Use pipeline_parallel_size=1 for this model"
        )
    if last is None or probes[-1] is not last:
        return None
    made = last.output[0] if isinstance(last.output, (tuple, list)) else last.output
    if made is output or (isinstance(made, Tensor) and made.shape == output.shape and torch.equal(made, output)):
        return None
    return (
        f"the model changes the hidden state after {last.name!r}, the last block of pipeline stage {stage}, outside of any "
        "module, which the pipeline would leave out or do twice: move it into a block, or choose another pipeline_split"
    )


def _changed_between(chunk: Chunk, probes: list[Probe], blocks: frozenset[str]) -> str | None:
    """What an encoder's inputs add between the layers of the first stage, later stages, which do not get them, would leave out."""
    called = [probe for probe in probes if probe.name in blocks and probe.calls]
    for one, other in pairwise(called if chunk.relay.is_first and chunk.first_inputs else []):
        made = one.output[0] if isinstance(one.output, (tuple, list)) else one.output
        if not (isinstance(other.received, Tensor) and isinstance(made, Tensor) and torch.equal(made, other.received)):
            return (
                f"the model changes the hidden state between {one.name!r} and {other.name!r}, as with features that an image adds to "
                f"several layers: stages after the first are not given {', '.join(chunk.first_inputs)} and would leave that out. Use "
                "pipeline_parallel_size=1 for this model"
            )
    return None


def _depends_on_hidden(stage: int, runs: list[_Run], blocks: frozenset[str]) -> str | None:
    if len(runs) < 2:
        return None
    for one, other in zip(runs[0].probes, runs[1].probes):
        if one.name in blocks and any(_differ(a, b) for a, b in zip(one.others, other.others)):
            return (
                f"block {one.name!r} of pipeline stage {stage} is given a second tensor that follows the hidden state (a skip from an "
                "earlier layer, say): only one tensor crosses a pipeline boundary, so its numbers would be wrong. Use "
                "pipeline_parallel_size=1 for this model"
            )
    return None


def _passes_by(stage: int, runs: list[_Run]) -> str | None:
    """The third run received something else, and its first module was given what it had in the first: all must come out alike."""
    if len(runs) < 3:
        return None
    leaves = [[leaf for leaf in tree_leaves(run.output) if isinstance(leaf, Tensor)] for run in (runs[0], runs[2])]
    if len(leaves[0]) == len(leaves[1]) and not any(_differ(a, b) for a, b in zip(*leaves)):
        return None
    first = runs[0].probes[runs[0].first].name
    return (
        f"what pipeline stage {stage} computes follows an earlier layer past {first!r}, its first module (a skip to a later block or to "
        "the head, a second embedding that is used at several blocks): only one tensor crosses a pipeline boundary, so its numbers would "
        "be wrong. Use pipeline_parallel_size=1 for this model"
    )


def _differ(a: Tensor, b: Tensor) -> bool:
    """More than the order of a sum can make."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if not a.is_floating_point():
        return not torch.equal(a, b)
    eps = torch.finfo(a.dtype).eps
    a, b = a.nan_to_num().double(), b.nan_to_num().double()
    return bool((a - b).abs().max() > 8 * eps * b.abs().max()) if a.numel() else False


@contextmanager
def _probes(model: nn.Module, units: tuple[str, ...]) -> Iterator[list[Probe]]:
    """Probes in place of the stage's own modules, in order."""
    made = []
    for name in units:
        parent, _, key = name.rpartition(".")
        holder = model.get_submodule(parent)
        probe = Probe(name, holder._modules[key])  # type: ignore[arg-type]
        holder._modules[key] = probe
        made.append((holder, key, probe))
    try:
        yield [probe for _, _, probe in made]
    finally:
        for holder, key, probe in made:
            holder._modules[key] = probe.module
