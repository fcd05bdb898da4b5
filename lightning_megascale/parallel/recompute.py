"""Activation recomputation (checkpointing) of blocks: full, selective, or of chosen module classes; what full recomputation keeps may
wait in host memory. Names of parameters never change.

The checkpoint is the outermost thing a module's call does: hooks, FSDP2's and a compiled call are inside, so it can be applied before
``fully_shard`` and after ``block.compile()``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_megascale.ops.all_to_all import ALL_TO_ALL, SUM_ROWS_BACK
from lightning_megascale.ops.tensor_parallel import ROW_LINEAR
from lightning_megascale.parallel.mixin import become

MODES = (None, "selective", "full")

_SAVED = (  # schemas of a library that is not loaded are left out
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
)


def apply_recompute(blocks: Sequence[nn.Module], mode: str | Collection[type[nn.Module]] | None, *, offload: bool = False) -> None:
    """Runs parts of ``blocks`` again in the backward instead of keeping their activations. In place; random numbers repeat.

    Args:
        blocks: the repeated layers.
        mode: None keeps everything. "full" keeps a block's input, and what came from experts of other ranks. "selective" keeps what is
            dear to compute and small: the outputs of column-parallel (or all) matmuls and of the attention core, and the sums of
            row-parallel linears, never the partial products they are made of. A set of classes: every module of these classes inside
            the blocks is recomputed fully.
        offload: what a fully recomputed module keeps, its hidden state, goes to host memory until the backward.

    Raises:
        ValueError: for another mode, a class that no block holds, or an offload of what is not recomputed fully.

    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost"; Korthikanti et al. 2022, "Reducing activation
        recomputation in large transformer models", section 5.
    """
    if offload and mode in (None, "selective"):
        raise ValueError(f"activation_offload=True with activation_checkpointing={mode!r}: use 'full', which keeps inputs of blocks only")
    if mode is None:
        return
    fully = OffloadedRecompute if offload else FullRecompute
    if isinstance(mode, str):
        if mode not in MODES:
            raise ValueError(f"activation_checkpointing={mode!r}: must be None, 'selective', 'full' or a set of module classes")
        for block in blocks:
            _recompute(block, SelectiveRecompute if mode == "selective" else fully)
        return
    classes = tuple(mode)
    modules = [module for block in blocks for module in block.modules()]
    for kind in classes:
        if not _is_module_class(kind):
            raise ValueError(f"activation_checkpointing holds {kind!r}: must be None, 'selective', 'full' or a set of module classes")
        if not any(isinstance(module, kind) for module in modules):
            inside = sorted({type(module).__name__ for module in modules})
            found = ", ".join(inside)
            raise ValueError(f"activation_checkpointing holds {kind.__name__}, but no block has such a module; they have {found}")
    for module in modules:
        if isinstance(module, classes):
            _recompute(module, fully)


def _is_module_class(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Module)


def _recompute(module: nn.Module, mixin: type) -> None:
    if isinstance(module, FullRecompute):  # a block that stands in the list twice is wrapped once
        return
    become(module, mixin)
    if mixin is not SelectiveRecompute and any(hasattr(child, "ep") for child in module.modules()):
        module.contexts = partial(_keeping, _arrived_policy)  # type: ignore[assignment]


class FullRecompute:
    """A module that keeps its arguments and runs again in the backward."""

    contexts: Callable[[], tuple[AbstractContextManager, AbstractContextManager]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        args, kwargs = _without_cache(self, args, kwargs)
        options: dict[str, Any] = {} if self.contexts is None else {"context_fn": self.contexts}
        # both as positional arguments: torch looks in there for the devices whose random state it must keep
        return checkpoint(partial(_unpacked, call), args, kwargs, use_reentrant=False, **options)


def _without_cache(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments without transformers' cache of keys and values, in which a second forward would append the same tokens once more.

    A model with ``config.use_cache=True`` makes an empty one for every call; nobody reads it in training.

    Raises:
        ValueError: for a cache that holds tokens already, which the layers have to see.
    """

    def kept(value: Any) -> Any:
        if not hasattr(value, "get_seq_length"):
            return value
        if length := value.get_seq_length():
            raise ValueError(
                f"{type(module).__name__} gets a {type(value).__name__} of {length} tokens and is recomputed in the backward, which would "
                "append its own once more: call the model without a cache, or use activation_checkpointing=None"
            )
        return None

    return tuple(map(kept, args)), {key: kept(value) for key, value in kwargs.items()}


class OffloadedRecompute(FullRecompute):
    """A module whose hidden state waits in host memory for the backward, in which it runs again.

    What goes there are the arguments that need a gradient: what the layer before has made. Masks, positions and rotary angles are one
    tensor for all layers, so copies of them would cost more than they free; they stay where they are, and so does every parameter.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super(FullRecompute, self).__call__  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        args, kwargs = _without_cache(self, args, kwargs)
        moved: list[Tensor] = []
        rest = _set_apart((args, kwargs), moved)
        options: dict[str, Any] = {} if self.contexts is None else {"context_fn": self.contexts}
        with HostMemory():  # reaches the checkpoint's own arguments only: inside of it, its hooks are the innermost
            return checkpoint(partial(_joined, call), rest, *moved, use_reentrant=False, **options)


class HostMemory(saved_tensors_hooks):
    """Inside it what autograd keeps waits in host memory: ``torch.autograd.graph.save_on_cpu``, which leaves a tensor of the CPU alone."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: (tensor.device, to_host(tensor)), lambda packed: from_host(*packed))


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, pinned where it comes from an accelerator: the copy then runs in its stream, and nothing waits for it."""
    away = tensor.device.type != "cpu"
    return torch.empty_like(tensor, device="cpu", pin_memory=away).copy_(tensor, non_blocking=away)


def from_host(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor again on ``device``; the backward runs in the stream of its forward, so after the copy to the host."""
    return tensor.to(device, non_blocking=device.type != "cpu")


class _Place(int):
    """Stands in arguments for a tensor that travels apart."""


def _set_apart(value: Any, moved: list[Tensor]) -> Any:
    """``value`` with a place for each tensor in ``moved``: those that need a gradient and are no parameter, in tuples and keywords too."""
    if isinstance(value, Tensor) and value.requires_grad and not isinstance(value, nn.Parameter):
        moved.append(value)
        return _Place(len(moved) - 1)
    if type(value) is tuple:
        return tuple(_set_apart(part, moved) for part in value)
    return {key: _set_apart(part, moved) for key, part in value.items()} if type(value) is dict else value


def _put_back(value: Any, moved: Sequence[Tensor]) -> Any:
    if type(value) is _Place:
        return moved[value]
    if type(value) is tuple:
        return tuple(_put_back(part, moved) for part in value)
    return {key: _put_back(part, moved) for key, part in value.items()} if type(value) is dict else value


def _joined(call: Callable[..., Any], rest: Any, *moved: Tensor) -> Any:
    args, kwargs = _put_back(rest, moved)
    return call(*args, **kwargs)


def _unpacked(call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    return call(*args, **kwargs)


@cache
def _saved_operators() -> frozenset[Any]:
    found = set()
    for schema in _SAVED:
        namespace, name = schema.split("::")
        packet = getattr(getattr(torch.ops, namespace), name, None)
        if packet is not None:
            found.add(packet.default)
    return frozenset(found | {ROW_LINEAR, *ARRIVED})


ARRIVED = frozenset((ALL_TO_ALL, SUM_ROWS_BACK))
"""What comes from experts of other ranks: no token is sent twice."""


def _arrived_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in ARRIVED else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _saved_operators() else CheckpointPolicy.PREFER_RECOMPUTE


class _Choices(TorchDispatchMode):
    """Who was chosen, of a forward for its recomputation: no token gets other experts the second time.

    The selective contexts of torch cannot keep it: they keep the tensor itself, and routers divide what ``topk`` gave them in place.
    """

    def __init__(self, kept: list[Any], repeat: bool) -> None:
        super().__init__()
        self.kept, self.repeat = kept, repeat

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            # FSDP2 gathers parameters inside of the block, the second time maybe more of them: not to be counted against the first
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.topk.default:
            return func(*args, **(kwargs or {}))
        if self.repeat:
            return self.kept.pop(0)
        values, indices = func(*args, **(kwargs or {}))
        self.kept.append((values.clone(), indices.clone()))
        return values, indices


class _Both(AbstractContextManager):
    """Two contexts, the second inside of the first."""

    def __init__(self, *contexts: AbstractContextManager) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)


def _keeping(policy: Callable[..., CheckpointPolicy]) -> tuple[AbstractContextManager, AbstractContextManager]:
    kept: list[Any] = []
    forward, again = create_selective_checkpoint_contexts(policy)
    return _Both(forward, _Choices(kept, False)), _Both(again, _Choices(kept, True))


class SelectiveRecompute(FullRecompute):
    """A module of which only the listed operators' outputs are kept."""

    contexts = staticmethod(partial(_keeping, _selective_policy))
