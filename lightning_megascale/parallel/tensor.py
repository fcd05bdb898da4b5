"""Tensor and sequence parallelism by layout: own styles on local tensors, on modules whose code is not changed.

A parallel module keeps its class as a base and its names; its forward is that of one of the classes below. Split parameters are
DTensors on the 1-D tensor-parallel mesh, so checkpoints and optimizers see logical shapes and FSDP2 can shard them further.

Inside an attention or MLP module every gradient upstream of a row-parallel linear is a PARTIAL sum over the axis, completed once at the
module's input. Shapes: B batch, L sequence, D model, V vocabulary; tp: size of the axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from lightning_megascale.layout import ModelLayout
from lightning_megascale.ops.cross_entropy import linear_cross_entropy
from lightning_megascale.ops.tensor_parallel import (
    TensorAxis,
    column_linears,
    gather_vocabulary,
    row_linear,
    sequence_dropout,
    tensor_axis,
    vocabulary_embedding,
)
from lightning_megascale.parallel.tensor_check import Roles, check_tensor_parallel

__all__ = ["apply_tensor_parallel", "check_tensor_parallel"]

Recompute = str | Collection[type] | None


def apply_tensor_parallel(
    model: nn.Module,
    mesh_tp: DeviceMesh,
    layout: ModelLayout,
    *,
    sequence_parallel: bool,
    recompute: Recompute,
    loss_parallel: bool = False,
    compiled: bool = False,
) -> list[str]:
    """Splits ``model`` over ``mesh_tp`` in place. No communication: every rank keeps its part of the values it has.

    Args:
        model: an ordinary model, on any device, meta included.
        mesh_tp: 1-D mesh of the tensor-parallel ranks.
        layout: which module plays which role.
        sequence_parallel: norms, dropout and the residual stream are split over the sequence (Megatron-LM).
        recompute: what ``apply_recompute`` will be told: modules that are recomputed keep no shard to gather again.
        loss_parallel: the head returns (B, L, V/tp) logits instead of (B, L, V).
        compiled: the blocks will be compiled: leaves out the checks of the first forward that a compiler cannot trace.

    Returns:
        names of the parameters whose local gradients are partial sums over tp. The caller adds them over the axis once per step.

    Raises:
        ValueError: listing every violated rule.
    """
    wrong = check_tensor_parallel(model, layout, mesh_tp.size(), sequence_parallel)
    if wrong:
        raise ValueError("tensor parallelism cannot be applied:\n" + "\n".join(f"- {line}" for line in wrong))
    roles = Roles.of(model, layout)
    axis = tensor_axis(mesh_tp.get_group())
    _split_parameters(model, mesh_tp, roles)
    for owner, names in roles.columns_by_owner().items():
        _make_columns(model, owner, names, roles, axis, sequence_parallel, recompute, not compiled)
    for name in roles.rowwise:
        module = _become(model.get_submodule(name), RowLinear)
        module.tp = RowState(axis, sequence_parallel, fused=recompute == "selective")
    for name in roles.embedding:
        module = _become(model.get_submodule(name), VocabularyEmbedding)
        module.tp = EmbeddingState(axis, sequence_parallel, name)
    for name in roles.head:
        module = model.get_submodule(name)
        takes_labels = "labels" in inspect.signature(module.forward).parameters
        module = _become(module, LossHead if takes_labels else Head)
        module.tp = HeadState(axis, mesh_tp, sequence_parallel, whole_logits=not loss_parallel)
    if sequence_parallel:
        for name in roles.sharded_dropouts():
            module = _become(model.get_submodule(name), SequenceDropout)
            module.tp = axis
    return _partial_names(model, roles, sequence_parallel)


def _partial_names(model: nn.Module, roles: Roles, sequence_parallel: bool) -> list[str]:
    """Norms and row biases see a part of the sequence under sequence parallelism, ``replicated`` modules a part of the heads always."""
    names = []
    for name, module in model.named_modules():
        for key, _ in module.named_parameters(recurse=False):
            shard_of_sequence = name in roles.norms or (name in roles.rowwise and key == "bias")
            if name in roles.replicated or (sequence_parallel and shard_of_sequence):
                names.append(f"{name}.{key}")
    return names


def _split_parameters(model: nn.Module, mesh: DeviceMesh, roles: Roles) -> None:
    """Replaces parameters by DTensors; a parameter that several modules share stays one object."""
    dims = {name: 0 for name in (*roles.colwise, *roles.embedding, *roles.head)} | {name: 1 for name in roles.rowwise}
    made: dict[int, nn.Parameter] = {}
    for name, dim in dims.items():
        module = model.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            if dim == 1 and key == "bias":
                continue  # added once, after the sum
            if id(parameter) not in made:
                local = parameter.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
                split = nn.Parameter(DTensor.from_local(local, mesh, [Shard(dim)], run_check=False), parameter.requires_grad)
                made[id(parameter)] = split
            module.register_parameter(key, made[id(parameter)])


def _become(module: nn.Module, mixin: type) -> Any:
    """Gives ``module`` the forward of ``mixin``; its class stays a base, so isinstance and ``super().forward`` still work."""
    module.__class__ = _mixed(mixin, type(module))
    return module


@cache
def _mixed(mixin: type, base: type) -> type:
    return type(base.__name__, (mixin, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def _local(parameter: Tensor | None) -> Tensor | None:
    """This rank's part of a split parameter. (Under FSDP2 the unsharded parameter is a DTensor on the tensor-parallel mesh again.)"""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# ---- columns -----------------------------------------------------------------------------------------------------------------------


@dataclass
class ColumnState:
    """What an attention or MLP module knows of its column-parallel linears, and the results of the call in progress.

    The linears are computed when the module is entered, over one gather; each hands out its own result when it is called with that very
    gathered tensor, and computes as usual when it is called with another one.
    """

    axis: TensorAxis
    sequence: bool
    regather: bool
    name: str
    input_name: str
    linears: dict[str, nn.Linear]
    first_check: bool
    whole: Tensor | None = None
    results: dict[str, Tensor] = field(default_factory=dict)

    def enter(self, x: Tensor) -> Tensor:
        """Computes the linears that fit ``x`` and returns the gathered input."""
        fit = {key: linear for key, linear in self.linears.items() if linear.in_features == x.shape[-1]}
        weights = [_local(linear.weight) for linear in fit.values()]
        biases = [_local(linear.bias) for linear in fit.values()]
        self.whole, *outputs = column_linears(x, weights, biases, self.axis, sequence=self.sequence, regather=self.regather)
        self.results = dict(zip(fit, outputs))
        return self.whole

    def leave(self) -> None:
        self.whole, self.results = None, {}


class ColumnLinear:
    """A column-parallel linear inside an attention or MLP module."""

    tp: ColumnState
    tp_key: str

    def forward(self: Any, x: Tensor) -> Tensor:
        if x is self.tp.whole and self.tp_key in self.tp.results:
            return self.tp.results.pop(self.tp_key)
        return F.linear(x, _local(self.weight), _local(self.bias))  # its gradient is partial, as all are inside the module


class LoneColumnLinear:
    """A column-parallel linear outside of any attention or MLP module: gathers for itself."""

    tp: ColumnState

    def forward(self: Any, x: Tensor) -> Tensor:
        state = self.tp
        bias = [_local(self.bias)]
        return column_linears(x, [_local(self.weight)], bias, state.axis, sequence=state.sequence, regather=state.regather)[1]


class ColumnModule:
    """An attention or MLP module: its first argument is gathered (or copied) for all of its column-parallel linears at once."""

    tp: ColumnState

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.tp
        if args:
            args = (state.enter(args[0]), *args[1:])
        elif state.input_name in kwargs:
            kwargs[state.input_name] = state.enter(kwargs[state.input_name])
        else:
            raise ValueError(f"{state.name}: called without {state.input_name!r}, the hidden state: pass it first or by that name")
        try:
            if state.first_check and not torch.compiler.is_compiling():
                return _checked_call(super().forward, state, args, kwargs, getattr(self, "head_dim", None))
            return super().forward(*args, **kwargs)
        finally:
            state.leave()


def _make_columns(
    model: nn.Module,
    owner: str,
    names: list[str],
    roles: Roles,
    axis: TensorAxis,
    sequence: bool,
    recompute: Recompute,
    first_check: bool,
) -> None:
    """Makes ``owner`` gather for the linears ``names``; ``owner`` is the linear itself when no attention or MLP module holds it."""
    module = model.get_submodule(owner)
    # keys relative to the owner: alike in every block, so that compiled blocks share one graph
    linears = {name.removeprefix(owner).lstrip("."): model.get_submodule(name) for name in names}
    input_name = next(iter(inspect.signature(module.forward).parameters), "hidden_states")
    regather = not _is_recomputed(model, owner, roles, recompute)
    state = ColumnState(axis, sequence, regather, owner, input_name, linears, first_check)
    if owner in names:
        _become(module, LoneColumnLinear).tp = state
        return
    for key, linear in linears.items():
        linear = _become(linear, ColumnLinear)
        linear.tp, linear.tp_key = state, key
    _become(module, ColumnModule).tp = state


def _is_recomputed(model: nn.Module, name: str, roles: Roles, recompute: Recompute) -> bool:
    """Whether ``apply_recompute`` will run ``name`` again in the backward, by itself or as a part of something larger."""
    if recompute is None:
        return False
    parts = name.split(".")
    above = [".".join(parts[: i + 1]) for i in range(len(parts))]
    block = next((path for path in above if path in roles.blocks), None)
    if block is None:
        return False
    if isinstance(recompute, str):
        return True
    return any(isinstance(model.get_submodule(path), tuple(recompute)) for path in above[above.index(block) :])


# ---- checks of the first forward ---------------------------------------------------------------------------------------------------


def _checked_call(forward: Callable[..., Any], state: ColumnState, args: tuple, kwargs: dict, head_dim: int | None) -> Any:
    """The first call of a module: its attention must see whole heads and the whole sequence, its input must not bypass the row sum."""
    with _AttentionCheck(state, head_dim):
        output = forward(*args, **kwargs)
    tensors = output if isinstance(output, (tuple, list)) else (output,)
    roots = [t.grad_fn for t in tensors if isinstance(t, Tensor) and t.grad_fn is not None]
    whole = None if state.whole is None else state.whole.grad_fn
    if whole is not None and not state.sequence and _bypasses(roots, whole):
        raise ValueError(
            f"{state.name}: its input reaches its output without a row-parallel linear, as a residual added inside the module does; "
            "the gradient would be counted once per tensor-parallel rank. Add the residual outside of the module the layout names"
        )
    if roots:
        state.first_check = False
    return output


def _bypasses(roots: list[Any], columns: Any) -> bool:
    """Whether a path of the autograd graph leads from ``roots`` to the whole input, output 0 of ``columns``, around every row sum."""
    seen: set[Any] = set()
    todo = [(root, 0) for root in roots]
    while todo:
        node, output = todo.pop()
        if node is columns:
            if output == 0:
                return True
            continue
        if node in seen or type(node).__name__ in ("_ReduceBackward", "GeneratedBackwardFor_lightning_megascale_row_linear_defaultBackward"):
            continue
        seen.add(node)
        todo += [(before, index) for before, index in node.next_functions if before is not None]
    return False


class _AttentionCheck(TorchFunctionMode):
    """Looks at the first attention core: local heads x tp = heads, and as many positions as the gathered input has."""

    def __init__(self, state: ColumnState, head_dim: int | None) -> None:
        super().__init__()
        self.state, self.head_dim = state, head_dim

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            whole, name, tp = self.state.whole, self.state.name, self.state.axis.size
            if whole is not None and query.shape[0] * query.shape[-2] != whole.shape[:-1].numel():
                raise ValueError(
                    f"{name}: attention sees queries of shape {tuple(query.shape)} (batch, heads, length, head_dim) for "
                    f"{tuple(whole.shape[:-1])} positions; the length must be read from a projected tensor, not from the module's input "
                    f"outside of it, which holds 1/{tp} of the sequence under sequence_parallel"
                )
            if self.head_dim is not None and query.shape[-1] != self.head_dim:
                raise ValueError(
                    f"{name}: local heads x tensor_parallel_size must be the heads, but attention sees {query.shape[1]} heads of size "
                    f"{query.shape[-1]} instead of head_dim={self.head_dim}; reshape by unflatten(-1, (-1, head_dim))"
                )
        return func(*args, **kwargs)


# ---- rows, embeddings, head, dropout -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowState:
    axis: TensorAxis
    sequence: bool
    fused: bool


class RowLinear:
    """A row-parallel linear: its output is summed over the axis, and scattered over the sequence."""

    tp: RowState

    def forward(self: Any, x: Tensor) -> Tensor:
        state = self.tp
        y = row_linear(x, _local(self.weight), state.axis, sequence=state.sequence, fused=state.fused)
        return y if self.bias is None else y + self.bias.to(y.dtype)


@dataclass(frozen=True)
class EmbeddingState:
    axis: TensorAxis
    sequence: bool
    name: str


class VocabularyEmbedding:
    """An embedding split by rows; its output is the sequence shard under sequence parallelism."""

    tp: EmbeddingState

    def forward(self: Any, ids: Tensor) -> Tensor:
        state = self.tp
        length, tp = ids.shape[-1], state.axis.size
        if state.sequence and length % tp:  # on every rank alike and before any collective
            raise ValueError(
                f"{state.name}: sequence length L={length} is not divisible by tensor_parallel_size={tp}, as sequence_parallel needs; "
                f"pad or cut the rows to {length - length % tp} or {length - length % tp + tp}, or set sequence_parallel=False"
            )
        return vocabulary_embedding(ids, _local(self.weight), state.axis, sequence=state.sequence, padding_idx=self.padding_idx)


@dataclass(frozen=True)
class HeadState:
    axis: TensorAxis
    mesh: DeviceMesh
    sequence: bool
    whole_logits: bool


def _logits(head: Any, hidden: Tensor) -> Tensor:
    state = head.tp
    _, logits = column_linears(hidden, [_local(head.weight)], [_local(head.bias)], state.axis, sequence=state.sequence)
    return gather_vocabulary(logits, state.axis) if state.whole_logits else logits


class Head:
    """The output projection, split by vocabulary."""

    tp: HeadState

    def forward(self: Any, hidden: Tensor) -> Tensor:
        return _logits(self, hidden)


class LossHead:
    """An output projection that makes the summed loss itself when it is given labels."""

    tp: HeadState

    def forward(self: Any, hidden: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if labels is None:
            return _logits(self, hidden)
        state = self.tp
        (whole,) = column_linears(hidden, [], [], state.axis, sequence=state.sequence)  # its backward sums the partial gradients
        chunk = {"chunk_tokens": self.chunk_tokens} if hasattr(self, "chunk_tokens") else {}
        return linear_cross_entropy(whole, _local(self.weight), labels, bias=_local(self.bias), group=state.mesh.get_group(), **chunk)


class SequenceDropout:
    """Dropout of a sequence shard: the mask is the one of the whole sequence."""

    tp: TensorAxis

    def forward(self: Any, x: Tensor) -> Tensor:
        return sequence_dropout(x, self.p, self.tp) if self.training and self.p > 0 else x
