"""What a pipeline must know of an autograd graph: functions that own a weight, and losses that use a parameter past the model's output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction


def weight_functions(outputs: Iterable[Any], parameters: Iterable[Tensor]) -> list[str]:
    """Names of the ``torch.autograd.Function``s above ``outputs`` that take a parameter and something else that needs a gradient.

    One whose class says ``backward_only_scales = True`` (its gradients were made in the forward) may run twice and is left out.

    Args:
        outputs: of a forward; what is no tensor is skipped.
        parameters: the weights, as autograd knows them.
    """
    weights = {id(parameter) for parameter in parameters}
    open_ = [output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None]
    seen: set[Any] = set(open_)
    found: dict[str, None] = {}
    while open_:
        node = open_.pop()
        nexts = [following for following, _ in node.next_functions if following is not None]
        owned = [following for following in nexts if id(getattr(following, "variable", None)) in weights]
        costs = isinstance(node, BackwardCFunction) and not getattr(type(node)._forward_cls, "backward_only_scales", False)  # type: ignore[attr-defined]
        if costs and owned and len(nexts) > len(owned):
            found[type(node).__name__.removesuffix("Backward")] = None
        fresh = [following for following in nexts if following not in seen]
        seen.update(fresh)
        open_ += fresh
    return list(found)


def uses_parameters(loss: Tensor, outputs: Iterable[Any]) -> bool:
    """Whether a loss depends on a leaf that needs a gradient other than through the model's outputs.

    Args:
        loss: of one microbatch.
        outputs: what the model returned; what is no tensor is skipped.
    """
    ends = {output.grad_fn for output in outputs if isinstance(output, Tensor) and output.grad_fn is not None}
    leaves = {id(output) for output in outputs if isinstance(output, Tensor)}
    open_ = [] if loss.grad_fn is None or loss.grad_fn in ends else [loss.grad_fn]
    seen: set[Any] = set(open_)
    while open_:
        node = open_.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in leaves:
            return True
        fresh = [following for following, _ in node.next_functions if following is not None and following not in seen | ends]
        seen.update(fresh)
        open_ += fresh
    return False
