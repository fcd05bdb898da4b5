"""float64 all the way: a norm or a loss that computes in float32 whatever it is given rounds otherwise on shares than on the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megascale.parallel.tensor_proof_run import arithmetic


class _Widened(TorchFunctionMode):
    """Makes float64 of every float32 that code asks for; ``used`` tells whether that changed a number."""

    used = False

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        asked = function is Tensor.float or any(value is torch.float32 for value in (*args, *kwargs.values()))
        if not asked:
            return function(*args, **kwargs)
        _Widened.used |= isinstance(args[0] if args else None, Tensor) and args[0].dtype == torch.float64
        function = Tensor.double if function is Tensor.float else function
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return function(*args, **{key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()})


def has_widened() -> bool:
    """Whether anything in this process would have lost digits otherwise."""
    return _Widened.used


@contextmanager
def widened() -> Iterator[None]:
    """Inside, ``x.float()``, ``x.to(torch.float32)`` and ``softmax(..., dtype=torch.float32)`` give float64. Eager code only.

    Autograd runs recomputations without the modes that were active in the forward, so these enter theirs again.
    """
    module, name = torch.utils.checkpoint, "_checkpoint_without_reentrant_generator"
    original = getattr(module, name)

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def again(*inputs: Any, **named: Any) -> Any:
            with _Widened():
                return function(*inputs, **named)

        return original(again, *args, **kwargs)

    setattr(module, name, generator)
    arithmetic.append(_Widened)
    try:
        with _Widened():
            yield
    finally:
        arithmetic.remove(_Widened)
        setattr(module, name, original)
