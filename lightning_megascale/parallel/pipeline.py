"""Pipeline parallelism: each stage is a structural copy of the model that shares this rank's own modules and has pass-throughs elsewhere.

The model's own forward runs on every stage with its own arguments, so no model code changes: a pass-through before the stage's modules
hands out the received hidden state, the first one after them ends the stage. The model itself keeps what this rank owns (the union of its
stages) under the original names, so optimizers and checkpoints see ordinary parameters.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_megascale.layout import ModelLayout
from lightning_megascale.parallel.pipeline_split import Stages

Call = tuple[tuple[Any, ...], dict[str, Any]]


class StageEnd(BaseException):
    """Carries the hidden state out of the model's forward. No Exception: the model's own ``except`` must not swallow it."""

    def __init__(self, hidden: Any) -> None:
        super().__init__("end of a pipeline stage")
        self.hidden = hidden


class Relay:
    """What the pass-throughs of one stage share during a forward.

    Args:
        is_first: nothing is received: the model starts from its arguments.
    """

    def __init__(self, is_first: bool) -> None:
        self.is_first = is_first
        self.tuple_length = 0  # of what blocks return; 0: a tensor
        self.running = False
        self.second_embedding: Tensor | None = None
        """What stands for a second embedding in place of 0, to see where it goes."""
        self._received: Tensor | None = None
        self._handed_out = False

    @contextmanager
    def run(self, received: Tensor | None) -> Any:
        self.running, self._received, self._handed_out = True, received, self.is_first
        try:
            yield
        finally:
            self.running, self._received = False, None

    def before(self, first_argument: Any, is_block: bool) -> Any:
        """The answer of a pass-through that stands before the stage's own modules."""
        if not self._handed_out:
            self._handed_out = True
            answer = self._received
        elif isinstance(first_argument, Tensor) and first_argument.is_floating_point():
            answer = first_argument
        else:  # a second embedding (positions, token types): it was added on the first stage
            assert self._received is not None
            answer = self._received.new_zeros(()) if self.second_embedding is None else self.second_embedding
        return (answer, *[None] * (self.tuple_length - 1)) if is_block and self.tuple_length else answer


class PassThrough(nn.Module):
    """Stands where another stage's module was.

    Args:
        name: of that module.
        relay: of the stage in whose copy it stands; None in the union, whose forward nobody may call.
        is_after: it comes after the stage's own modules.
        is_block: it stands for a repeated layer.
        absent: the module that was here, without the storage of its parameters.
    """

    def __init__(
        self,
        name: str,
        relay: Relay | None = None,
        is_after: bool = False,
        is_block: bool = False,
        absent: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.name, self.relay, self.is_after, self.is_block = name, relay, is_after, is_block
        self.__dict__["absent"] = absent  # not a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.relay is None or not self.relay.running:
            raise ValueError(
                f"module {self.name!r} lies on another pipeline stage and was called outside of the pipeline: with "
                "pipeline_parallel_size above 1 a step calls the whole model, once, as self.model(...)"
            )
        first = args[0] if args else next(iter(kwargs.values()), None)
        if self.is_after:
            raise StageEnd(first)
        return self.relay.before(first, self.is_block)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"module {self.__dict__.get('name')!r} lies on another pipeline stage, so this rank has no {name!r} of it"
            ) from None


class Chunk(nn.Module):
    """What a schedule calls: one stage's forward. It is FSDP2's root for the stage, and registered nowhere.

    Args:
        model: the structural copy.
        relay: of its pass-throughs.
        is_last: the model's own output leaves here.
        first_inputs: names of arguments that only the first stage is given.
    """

    def __init__(self, model: nn.Module, relay: Relay, is_last: bool, first_inputs: Sequence[str] = ()) -> None:
        super().__init__()
        self.model, self.relay, self.is_last, self.first_inputs = model, relay, is_last, tuple(first_inputs)
        self.rebuild: Callable[[Any], Any] = lambda output: output

    def forward(self, *received: Tensor, call: Call) -> Any:
        args, kwargs = call if self.relay.is_first or not self.first_inputs else self._without_first_inputs(*call)
        with self.relay.run(received[0] if received else None):
            try:
                output = self.model(*args, **kwargs)
            except StageEnd as end:
                return _sendable(end.hidden)
        if not self.is_last:
            raise ValueError(
                f"the forward of {type(self.model).__name__} ended without calling the modules of the next pipeline stage: "
                "the stages' modules must be called one after the other, in layout order"
            )
        leaves, spec = tree_flatten(output)
        self.rebuild = _rebuilder(leaves, spec)
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def _without_first_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        names = list(inspect.signature(self.model.forward).parameters)
        args = tuple(None if name in self.first_inputs else value for name, value in zip(names, args)) + args[len(names) :]
        return args, {name: None if name in self.first_inputs else value for name, value in kwargs.items()}


def _sendable(hidden: Any) -> Any:
    """Messages are contiguous, and zero-bubble schedules detach what has left in place, which a view does not allow."""
    if not isinstance(hidden, Tensor):
        return hidden
    hidden = hidden.contiguous()
    return hidden.clone() if hidden._is_view() else hidden


def _rebuilder(leaves: Sequence[Any], spec: TreeSpec) -> Callable[[Any], Any]:
    """Makes the model's output (a ModelOutput, say) again out of the tensors that the schedule has carried."""
    constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves]

    def rebuild(output: Any) -> Any:
        tensors = iter(output if isinstance(output, (tuple, list)) else (output,))
        return tree_unflatten([next(tensors) if constant is None else constant[0] for constant in constants], spec)

    return rebuild


@dataclass
class Pipeline:
    """This rank's part of a pipeline.

    Args:
        stages: the cut.
        rank: this rank's place on the pipeline axis.
        chunks: one for each of this rank's stages, first stage first.
        layout: the roles of this rank's own modules, as plain names.
        tied: groups of names, one parameter in the whole model, whose stages differ: one equal copy stands on each.
        trains: for each stage whether a gradient reaches its output.
    """

    stages: Stages
    rank: int
    chunks: list[Chunk]
    layout: ModelLayout
    tied: list[list[str]] = field(default_factory=list)
    trains: tuple[bool, ...] = ()

    @property
    def own_stages(self) -> tuple[int, ...]:
        return self.stages.of_rank(self.rank)

    @property
    def last_owner(self) -> int:
        """The pipeline-parallel rank of the last stage, where the loss is."""
        return self.stages.owners[-1]

    @property
    def has_last(self) -> bool:
        return self.last_owner == self.rank


def unowned_parameters(model: nn.Module, stages: Stages) -> list[str]:
    """A message for the parameters that no stage holds."""
    lost = [name for name, _ in model.named_parameters(remove_duplicate=False) if stages.stage_of(name) is None]
    if not lost:
        return []
    owners = {id(parameter): name for name, parameter in model.named_parameters()}
    shared = {name: owners[id(p)] for name, p in model.named_parameters(remove_duplicate=False) if name in lost and owners[id(p)] != name}
    if shared:
        name, first = next(iter(shared.items()))
        return [f"{name} is the parameter {first} at another depth: a module that is used twice cannot lie on two pipeline stages"]
    if bare := [name for name in lost if "." not in name]:
        return [f"{', '.join(bare)}: a parameter of the model itself lies on no pipeline stage: put it into a module named in layout.first"]
    message = (
        f"{', '.join(lost[:6])}{' and more' if len(lost) > 6 else ''}: no pipeline stage holds them: name their modules in the layout's "
        "first (called before the blocks) or last (called after them)"
    )
    return [message]


def split_into_stages(model: nn.Module, layout: ModelLayout, stages: Stages, rank: int) -> Pipeline:
    """Cuts ``model`` in place: it keeps this rank's modules, and the chunks to run are made. No communication.

    Args:
        model: the whole model, on any device, meta included.
        layout: of the whole model.
        stages: the cut; every parameter belongs to a stage.
        rank: this rank's place on the pipeline axis.
    """
    roles = layout.resolve([name for name, _ in model.named_modules()])
    trains = tuple(_trains(model, stages))
    tied = _untie(model, stages)
    modules = {name: model.get_submodule(name) for name in stages.order}
    blocks = frozenset(roles["blocks"])
    chunks = [_chunk(model, modules, stages, stage, blocks, layout.first_inputs) for stage in stages.of_rank(rank)]
    for name, module in modules.items():
        if stages.owners[stages.stage_of(name)] != rank:  # type: ignore[index]
            _replace(model, name, PassThrough(name, absent=module))
    _drop_storage(model)
    own = [name for name, _ in model.named_modules() if (stage := stages.stage_of(name)) is not None and stages.owners[stage] == rank]
    return Pipeline(stages, rank, chunks, layout.only(own), tied, trains)


def _trains(model: nn.Module, stages: Stages) -> Iterable[bool]:
    reached = False
    for units in stages.units:
        reached = reached or any(p.requires_grad for unit in units for p in model.get_submodule(unit).parameters())
        yield reached


def _untie(model: nn.Module, stages: Stages) -> list[list[str]]:
    """Gives each stage that holds a shared parameter an equal one of its own; returns the groups of names, first holder first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    groups = []
    for group in names.values():
        holders: dict[int, list[str]] = {}
        for name in group:
            holders.setdefault(stages.stage_of(name), []).append(name)  # type: ignore[arg-type]
        if len(holders) == 1:
            continue
        for held in list(holders.values())[1:]:
            parameter = model.get_parameter(held[0])
            own = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            for name in held:
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, own)
        groups.append([held[0] for held in holders.values()])
    return groups


def _chunk(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    stages: Stages,
    stage: int,
    blocks: frozenset[str],
    first_inputs: Sequence[str],
) -> Chunk:
    relay = Relay(is_first=stage == 0)
    own = set(stages.units[stage])
    last = max(stages.order.index(name) for name in own)
    shared: dict[str, nn.Module] = {}
    for place, name in enumerate(stages.order):
        shared[name] = modules[name] if name in own else PassThrough(name, relay, is_after=place > last, is_block=name in blocks)
    return Chunk(_structural_copy(model, shared), relay, stage == len(stages) - 1, first_inputs)


def _structural_copy(model: nn.Module, parts: Mapping[str, nn.Module], prefix: str = "") -> nn.Module:
    """The containers above ``parts`` anew, everything else shared: no tensor is copied, and a buffer that moves moves in both."""
    clone = copy.copy(model)
    clone.__dict__["_modules"] = dict(model._modules)
    for key, child in model._modules.items():
        name = prefix + key
        if name in parts:
            clone._modules[key] = parts[name]
        elif child is not None and any(part.startswith(name + ".") for part in parts):
            clone._modules[key] = _structural_copy(child, parts, name + ".")
    return clone


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, key = name.rpartition(".")
    model.get_submodule(parent)._modules[key] = module


@contextmanager
def standing_in(model: nn.Module) -> Iterator[set[int]]:
    """While an optimizer is made the modules of other stages stand in their places again, so that a selection by name, shape, module or
    module class finds the same groups on every rank, and one that finds nothing on this rank (the head only, what learns) does not fail.

    Yields:
        ids of their parameters, which have no storage to speak of and do not stay.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    places = _places(model)
    ids = {id(parameter) for place in places.values() for parameter in _hollow(place, device)}
    for name, place in places.items():
        _replace(model, name, place.absent)
    try:
        yield ids
    finally:
        for name, place in places.items():
            _replace(model, name, place)


def _places(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PassThrough) and module.absent is not None}


def _drop_storage(model: nn.Module) -> None:
    """Frees what absent modules hold, except where this rank's modules share it (a rotary embedding, say)."""
    kept = {id(module) for module in model.modules()}
    for place in _places(model).values():
        place.__dict__["parts"] = [part for part in place.absent.modules() if id(part) not in kept]
        _hollow(place, torch.device("meta"))
        for part in place.parts:
            part._buffers.update({key: buffer.to("meta") for key, buffer in part._buffers.items() if buffer is not None})


def _hollow(place: Any, device: torch.device) -> list[nn.Parameter]:
    """Gives an absent module parameters of the same shapes that hold one number each; shared ones stay shared."""
    made: dict[int, nn.Parameter] = {}
    for part in place.parts:
        for key, parameter in part._parameters.items():
            if parameter is not None:
                values = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
                part._parameters[key] = made.setdefault(id(parameter), nn.Parameter(values, parameter.requires_grad))
    return list(made.values())
