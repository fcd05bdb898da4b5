"""The forwards of tensor-parallel modules: mixins that stand before a module's own class, each with its state in ``tp``.

Inside an attention or MLP module every gradient upstream of a row-parallel linear is a PARTIAL sum over the axis, completed once at the
module's input. Shapes: B batch, L sequence, D model, V vocabulary; tp: size of the axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from lightning_megascale.ops.cross_entropy import linear_cross_entropy
from lightning_megascale.ops.tensor_parallel import (
    TensorAxis,
    column_linears,
    copied_to_parts,
    gather_vocabulary,
    row_linear,
    sequence_dropout,
    vocabulary_embedding,
)
from lightning_megascale.parallel.tensor_guard import AttentionGuard, check_no_bypass
from lightning_megascale.parallel.tensor_roles import features, is_transposed


def _weight(module: Any) -> Tensor:
    """(out, in) this rank's part of a split weight.

    (Under FSDP2 the unsharded parameter is a DTensor on the tensor-parallel mesh again.)
    """
    transposed = is_transposed(module)
    if parts := module.__dict__.get("tp_parts"):
        weight = torch.cat([module.weight.narrow(int(transposed), start, size) for start, size in parts], int(transposed))
    else:
        weight = own_part(module, module.weight)
    return weight.t() if transposed else weight


def own_part(module: Any, parameter: DTensor) -> Tensor:
    """The local tensor of a parameter that FSDP2 has gathered.

    Raises:
        ValueError: while it is still sharded: the module was called apart from the forward that gathers, and would use other rows.
    """
    if not torch.compiler.is_compiling() and parameter.device_mesh.ndim > 1 and parameter.device_mesh.size() > module.tp.axis.size:
        raise ValueError(
            f"{type(module).__name__} of shape {tuple(parameter.shape)} was called outside of its model's forward (such as "
            "self.model.embed(ids), or get_input_embeddings()), where its parameters are still sharded: call the whole model, or move the "
            "call into its forward"
        )
    return parameter.to_local()


def _bias(module: Any) -> Tensor | None:
    """This rank's part of the bias of a column-parallel linear."""
    if (parts := module.__dict__.get("tp_parts")) and module.bias is not None:
        return torch.cat([module.bias.narrow(0, start, size) for start, size in parts])
    return own_part(module, module.bias) if isinstance(module.bias, DTensor) else None


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
    linears: dict[str, Any]
    first_check: bool
    whole: Tensor | None = None
    results: dict[str, Tensor] = field(default_factory=dict)

    def enter(self, x: Tensor) -> Tensor:
        """Computes the linears that fit ``x`` and returns the gathered input."""
        fit = {key: linear for key, linear in self.linears.items() if features(linear)[0] == x.shape[-1]}
        weights = [_weight(linear) for linear in fit.values()]
        biases = [_bias(linear) for linear in fit.values()]
        self.whole, *outputs = column_linears(x, weights, biases, self.axis, sequence=self.sequence, regather=self.regather)
        self.results = dict(zip(fit, outputs))
        return self.whole

    def others(self, arguments: Any) -> Any:
        """Further arguments that learn (the states a cross-attention looks at): inside, their gradients are partial too."""
        if self.sequence or not torch.is_grad_enabled():
            return arguments
        return tree_map_only(Tensor, lambda x: copied_to_parts(x, self.axis) if x.requires_grad else x, arguments)

    def leave(self) -> None:
        self.whole, self.results = None, {}


class ColumnLinear:
    """A column-parallel linear inside an attention or MLP module."""

    tp: ColumnState
    tp_key: str

    def forward(self: Any, x: Tensor) -> Tensor:
        if x is self.tp.whole and self.tp_key in self.tp.results:
            return self.tp.results.pop(self.tp_key)
        return F.linear(x, _weight(self), _bias(self))  # its gradient is partial, as all are inside the module


class LoneColumnLinear:
    """A column-parallel linear outside of any attention or MLP module: gathers for itself."""

    tp: ColumnState

    def forward(self: Any, x: Tensor) -> Tensor:
        state = self.tp
        return column_linears(x, [_weight(self)], [_bias(self)], state.axis, sequence=state.sequence, regather=state.regather)[1]


class ColumnModule:
    """An attention or MLP module: its first argument is gathered (or copied) for all of its column-parallel linears at once."""

    tp: ColumnState

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.tp
        if args:
            args, kwargs = (state.enter(args[0]), *state.others(args[1:])), state.others(kwargs)
        elif state.input_name in kwargs:
            hidden = kwargs.pop(state.input_name)
            kwargs = {state.input_name: state.enter(hidden), **state.others(kwargs)}
        else:
            raise ValueError(f"{state.name}: called without {state.input_name!r}, the hidden state: pass it first or by that name")
        try:
            if state.first_check and not torch.compiler.is_compiling():
                return self._first_call(super().forward, args, kwargs)  # type: ignore[misc]
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            state.leave()

    def _first_call(self: Any, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The first call with gradients: attention must see whole heads and the whole sequence, and the row sum must not be bypassed."""
        state, whole = self.tp, self.tp.whole
        with AttentionGuard(state.name, whole, state.axis.size, getattr(self, "head_dim", None)):
            output = forward(*args, **kwargs)
        if whole.grad_fn is None:
            return output  # no graph to look at: a validation before the training
        if not state.sequence:  # with it the shapes of a bypass do not fit
            check_no_bypass(state.name, whole, output)
        state.first_check = False
        return output


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
        if x.shape[-1] == features(self)[0]:  # whole features, from a linear that gathers: this rank takes its own
            size = x.shape[-1] // state.axis.size
            x = copied_to_parts(x, state.axis).narrow(-1, state.axis.rank * size, size)
        y = row_linear(x, _weight(self), state.axis, sequence=state.sequence, fused=state.fused)
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
        return vocabulary_embedding(ids, _weight(self), state.axis, sequence=state.sequence, padding_idx=self.padding_idx)


@dataclass(frozen=True)
class HeadState:
    axis: TensorAxis
    mesh: DeviceMesh
    sequence: bool
    whole_logits: bool


def _logits(head: Any, hidden: Tensor) -> Tensor:
    state = head.tp
    _, logits = column_linears(hidden, [_weight(head)], [_bias(head)], state.axis, sequence=state.sequence)
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
        return linear_cross_entropy(whole, _weight(self), labels, bias=_bias(self), group=state.mesh.get_group(), **chunk)


class SequenceDropout:
    """Dropout of a sequence shard: the mask is the one of the whole sequence."""

    tp: TensorAxis

    def forward(self: Any, x: Tensor) -> Tensor:
        return sequence_dropout(x, self.p, self.tp) if self.training and self.p > 0 else x
