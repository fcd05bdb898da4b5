"""What only a running forward shows of a tensor-parallel module: its heads, its length, and a way around its row-parallel linear."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_ROW_SUMS = ("_ReduceBackward", "GeneratedBackwardFor_lightning_megascale_row_linear_defaultBackward")


class AttentionGuard(TorchFunctionMode):
    """Inside it, attention must see whole heads, so that local heads x tp = heads, and as many positions as the gathered input has.

    Args:
        name: of the module, for the message.
        whole: (B, L, D) its gathered input.
        tp: size of the axis.
        head_dim: the module's attribute of that name, or None.
    """

    def __init__(self, name: str, whole: Tensor, tp: int, head_dim: int | None) -> None:
        super().__init__()
        self.name, self.positions, self.tp, self.head_dim = name, tuple(whole.shape[:-1]), tp, head_dim

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self._check(args[0] if args else kwargs["query"])
        return function(*args, **kwargs)

    def _check(self, query: Tensor) -> None:
        seen = f"{self.name}: attention sees queries of shape {tuple(query.shape)} (batch, heads, length, head_dim)"
        if query.shape[0] * query.shape[-2] != self.positions[0] * self.positions[-1]:
            raise ValueError(f"{seen} for an input of {self.positions} positions: the length must be read from a projected tensor")
        if self.head_dim is not None and query.shape[-1] != self.head_dim:
            raise ValueError(
                f"{seen} instead of head_dim={self.head_dim}: local heads x tensor_parallel_size={self.tp} must be the heads; "
                "reshape by unflatten(-1, (-1, head_dim))"
            )


def check_no_bypass(name: str, whole: Tensor, output: Any) -> None:
    """Refuses a module whose input reaches its output around every row-parallel linear.

    Args:
        name: of the module, for the message.
        whole: (B, L, D) its input, output 0 of the node of its column-parallel linears.
        output: whatever it returned.

    Raises:
        ValueError: naming the module. The sum over the axis at its input would count that gradient once per rank.
    """
    columns, seen = whole.grad_fn, set()
    todo = [(leaf.grad_fn, leaf.output_nr) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    while todo:
        node, index = todo.pop()
        if node is columns and index == whole.output_nr:
            raise ValueError(
                f"{name}: its input reaches its output without a row-parallel linear, as a residual added inside the module does; "
                "the gradient would be counted once per tensor-parallel rank. Add the residual outside of the module the layout names"
            )
        if node is None or node is columns or node in seen or type(node).__name__ in _ROW_SUMS:
            continue
        seen.add(node)
        todo += node.next_functions
