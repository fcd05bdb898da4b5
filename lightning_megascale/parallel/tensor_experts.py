"""Experts under tensor parallelism: every rank runs whole experts of its own on all tokens, and the results are added up.

Splitting each expert's features (packed gate and up columns, down rows) costs the same memory and the same messages; whole experts keep
the matrices large, and their parameters contiguous parts of the logical tensor. Shapes: T tokens, D model, E experts, K experts a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_megascale.ops.tensor_parallel import TensorAxis, copied_to_parts, reduce_partial
from lightning_megascale.parallel.tensor_styles import own_part


@dataclass(frozen=True)
class ExpertState:
    axis: TensorAxis
    name: str


class DealtExperts:
    """Experts of which this rank has 1/tp. Called as (hidden (T, D), indices (T, K), weights (T, K)); the same tokens on every rank.

    The class's own forward runs with E/tp experts: indices are counted from this rank's first one, and those of other ranks become E/tp,
    which means no expert, with weight 0. Hidden states and weights get the sum of all ranks' gradients, so a router before the experts
    learns as on one device, by auxiliary losses too.
    """

    tp: ExpertState

    @torch.compiler.disable  # rows in numbers that no compiler knows
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        meanwhile = kwargs.pop("meanwhile", None)
        state, count = self.tp, self.num_experts // self.tp.axis.size
        bound = inspect.signature(super().forward).bind(*args, **kwargs)  # type: ignore[misc]
        hidden, indices, weights, *rest = bound.arguments
        values = bound.arguments
        local = values[indices] - state.axis.rank * count
        foreign = (local < 0) | (local >= count)
        values[hidden] = copied_to_parts(values[hidden], state.axis)
        values[indices] = local.masked_fill(foreign, count)
        values[weights] = copied_to_parts(values[weights], state.axis).masked_fill(foreign, 0)
        with own_experts(self, count) as parameters:
            output = super().forward(*bound.args, **bound.kwargs)  # type: ignore[misc]
            for parameter in parameters:  # in the graph even where no token came: every rank has every gradient
                output = output + parameter.flatten()[:0].sum().to(output.dtype)
        output = reduce_partial(output, state.axis, sequence=False)
        return output if meanwhile is None else (output, meanwhile())


@contextmanager
def own_experts(module: Any, count: int) -> Iterator[list[Tensor]]:
    """The module as one of ``count`` experts, with its parameters as plain local tensors."""
    kept, whole = dict(module._parameters), module.num_experts
    local = {key: own_part(module, value) if isinstance(value, DTensor) else value for key, value in kept.items() if value is not None}
    module._parameters.update(local)
    module.num_experts, module._is_expert_parallel = count, True  # transformers' kernels then expect indices that mean no expert
    try:
        yield list(local.values())
    finally:
        module._parameters.update(kept)
        module.num_experts, module._is_expert_parallel = whole, False
