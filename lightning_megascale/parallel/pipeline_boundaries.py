"""What crosses each pipeline boundary, learnt by one forward of each stage; and the proof that nothing else would have to cross.

A stage sees the hidden state only. A model whose forward changes it between its parts (a factor after the embedding, a skip from the first
layer to the last) would give other numbers without an error, so the first forward of every shape looks: the stage's first module must get
exactly what was received, the hidden state must leave exactly as the last block made it, and no other argument of a block may follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 1:
            leaves = tree_leaves((args, kwargs))
            self.received = args[0] if args else next(iter(kwargs.values()), None)
            self.others = [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor) and leaf is not self.received]
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
        boundary, in_tuples, wrong = found[0]
        if wrong:
            raise ValueError(wrong)
        if in_tuples:
            for chunk in pipeline.chunks:
                chunk.relay.in_tuples = True
        boundaries.append(boundary)
    return boundaries[:-1]


def _run_stage(
    pipeline: Pipeline, stage: int, chunk: Chunk, boundary: Boundary | None, call: Call, device: torch.device
) -> tuple[Boundary | None, bool, str | None]:
    """(what leaves the stage, whether blocks answer in tuples, what is wrong)."""
    units = pipeline.stages.units[stage]
    blocks = frozenset(pipeline.layout.blocks)
    runs: list[tuple[list[Probe], Any]] = []
    for attempt in range(1 if boundary is None else 2):
        with torch.no_grad(), fork_seeded(attempt, device):
            received = () if boundary is None else (torch.randn(boundary.shape, device=device).to(boundary.dtype),)
            with _probes(chunk.model, units) as probes, fork_seeded(0, device):
                try:
                    output = chunk(*received, call=call)
                except Exception as error:  # noqa: BLE001 - told to all ranks, which would wait for ever
                    return None, False, f"pipeline stage {stage} cannot run: {type(error).__name__}: {error}"
        runs.append((probes, output))
        if received and (wrong := _changed_on_the_way_in(stage, probes, received[0])):
            return None, False, wrong
    probes, output = runs[0]
    last = next((probe for probe in reversed(probes) if probe.name in blocks and probe.calls), None)
    in_tuples = last is not None and isinstance(last.output, (tuple, list))
    if stage == len(pipeline.stages) - 1:
        return None, in_tuples, _depends_on_hidden(stage, runs, blocks)
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return None, in_tuples, f"pipeline stage {stage} ends in a {type(output).__name__}: only one floating tensor can cross to the next"
    if probes[-1].name in blocks and last is not None:
        made = last.output[0] if in_tuples else last.output
        if made is not output and not (isinstance(made, Tensor) and made.shape == output.shape and torch.equal(made, output)):
            return (
                None,
                in_tuples,
                (
                    f"the model changes the hidden state after {last.name!r}, the last block of pipeline stage {stage}, outside of any "
                    "module, which the pipeline would leave out or do twice: move it into a block, or choose another pipeline_split"
                ),
            )
    wrong = _depends_on_hidden(stage, runs, blocks) or _called_otherwise(stage, probes)
    return Boundary(tuple(output.shape), output.dtype), in_tuples, wrong


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


def _depends_on_hidden(stage: int, runs: list[tuple[list[Probe], Any]], blocks: frozenset[str]) -> str | None:
    if len(runs) < 2:
        return None
    for one, other in zip(runs[0][0], runs[1][0]):
        if one.name not in blocks:
            continue
        for a, b in zip(one.others, other.others):
            if a.shape != b.shape or not torch.equal(a.nan_to_num(), b.nan_to_num()):
                return (
                    f"block {one.name!r} of pipeline stage {stage} is given a second tensor that follows the hidden state (a skip from an "
                    "earlier layer, say): only one tensor crosses a pipeline boundary, so its numbers would be wrong. Use "
                    "pipeline_parallel_size=1 for this model"
                )
    return None


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
