"""One run of a copied block for the numeric proof: drawn weights, copied arguments, random cotangents, every output and gradient.

Nothing here changes the real block: its tensors are read, detached, and only the copies' gradients are computed.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from lightning_megascale.ops.tensor_parallel import TensorAxis, finish_gather, start_gather
from lightning_megascale.parallel.rng import derive_seed, fork_seeded

_Result = TypeVar("_Result")


# ---- copies ------------------------------------------------------------------------------------------------------------------------


class _TensorCopies(TorchFunctionMode):
    """Inside it a deepcopy takes tensors, non-leaf ones too, through ``convert``."""

    def __init__(self, convert: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convert = convert

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is Tensor.__deepcopy__:
            return self.convert(args[0])
        return function(*args, **(kwargs or {}))


def structure_of(block: nn.Module, model: nn.Module) -> nn.Module:
    """A copy of ``block`` whose parameters and buffers have no storage; what it refers to of ``model`` outside has none either."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    with _TensorCopies(lambda tensor: tensor.detach().clone()):
        return _without_hooks(copy.deepcopy(block, memo))


def _without_hooks(block: nn.Module) -> nn.Module:
    """Hooks belong to the user and may count calls."""
    for module in block.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
            hooks.clear()
    return block


def drawn(structure: nn.Module, real: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The copy with weights that are drawn alike on every rank, and with what the real block has: buffers, modes, frozen parameters.

    Args:
        structure: from ``structure_of``.
        real: the real block, split or not.
        device, dtype: of everything that is floating.
    """
    generator = torch.Generator(device).manual_seed(derive_seed("tensor proof"))
    memo: dict[int, Any] = {}
    trainable = {name: parameter.requires_grad for name, parameter in real.named_parameters()}
    for name, parameter in structure.named_parameters():
        if parameter.is_floating_point():
            value = _weights(name, parameter.shape, generator, device, dtype)
        else:
            value = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        memo[id(parameter)] = nn.Parameter(value, trainable.get(name, parameter.requires_grad))
    convert = _converter(device, dtype)
    values = dict(real.named_buffers())
    for name, buffer in structure.named_buffers():
        memo[id(buffer)] = convert(values[name])
    with _TensorCopies(convert):
        made = copy.deepcopy(structure, memo)
    modes = dict(real.named_modules())
    for name, module in made.named_modules():
        module.training = modes[name].training
    return made


def _weights(name: str, shape: torch.Size, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal numbers, of a size that keeps activations near 1; scales (a norm's weight) near 1."""
    noise = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    if len(shape) > 1:
        return noise / max(shape[1:].numel(), 1) ** 0.5
    return noise * 0.3 if "bias" in name.rpartition(".")[2] else 1 + noise * 0.2


def _converter(device: torch.device, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.detach().to(device, dtype if tensor.is_floating_point() else None, copy=True)


# ---- arguments ---------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Given:
    """The arguments of the first call, detached.

    Args:
        leaves, spec: the flattened (args, kwargs); kwargs in the order of the signature.
        names: of each leaf, for messages.
        hidden: index of the hidden state: the first floating tensor of three dims or more, else the first one.
        wanted: indices of the leaves whose gradients are compared.
        shards: of those leaves that are parts of a sequence, the gathered tensor.
    """

    leaves: list[Any]
    spec: Any
    names: list[str]
    hidden: int | None
    wanted: list[int]
    shards: dict[int, Tensor]

    @classmethod
    def of(cls, order: list[str], args: tuple, kwargs: dict[str, Any], axis: TensorAxis, has_shards: bool) -> Given:
        """Flattens a call. With ``has_shards`` the first floating tensor of three dims is this rank's part of the sequence, and so is
        every other one of the same rows and length that is not the same on all ranks."""
        kwargs = {key: kwargs[key] for key in sorted(kwargs, key=lambda key: order.index(key) if key in order else len(order))}
        leaves, spec = tree_flatten((args, kwargs))
        names = [name for key, value in (*zip(order, args), *kwargs.items()) for name in [key] * len(tree_leaves(value))]
        names += ["argument"] * (len(leaves) - len(names))
        floating = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        hidden = next((i for i in floating if leaves[i].ndim >= 3), floating[0] if floating else None)
        shards: dict[int, Tensor] = {}
        for i in floating if has_shards and hidden is not None else ():
            if leaves[i].ndim >= 3 and leaves[i].shape[:2] == leaves[hidden].shape[:2]:  # type: ignore[index]
                whole = finish_gather(start_gather(leaves[i].detach(), axis), axis, 1)
                first, *others = whole.chunk(axis.size, 1)
                if i == hidden or any(not torch.equal(first, other) for other in others):
                    shards[i] = whole
        wanted = [i for i in floating if leaves[i].requires_grad or i == hidden]
        return cls(leaves, spec, names, hidden, wanted, shards)

    def copied(self, device: torch.device, dtype: torch.dtype, whole: bool) -> tuple[tuple, dict[str, Any], dict[int, Tensor]]:
        """Fresh arguments for one run, and the leaves whose gradients are wanted. One tensor given twice stays one tensor."""
        convert, made = _converter(device, dtype), {}
        memo: dict[int, Any] = {}
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor):
                if id(leaf) not in memo:
                    memo[id(leaf)] = convert(self.shards[i] if whole and i in self.shards else leaf)
                made[i] = memo[id(leaf)]
            elif isinstance(leaf, nn.Module):
                made[i] = leaf
            else:
                with _TensorCopies(convert):
                    made[i] = copy.deepcopy(leaf, memo)
        inputs = {i: made[i].requires_grad_() for i in self.wanted}
        args, kwargs = tree_unflatten([made[i] for i in range(len(self.leaves))], self.spec)
        return args, kwargs, inputs


def parameter_names(block: nn.Module) -> list[str]:
    """Names of the arguments of a block's forward, in order."""
    return list(inspect.signature(block.forward).parameters)


# ---- a run -------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Ran:
    """What one run gave: outputs, gradients of the inputs by leaf, gradients of the trainable parameters by name (None: not reached)."""

    outputs: list[Tensor]
    inputs: dict[int, Tensor | None]
    parameters: dict[str, Tensor | None]


def forward(block: nn.Module, given: Given, device: torch.device, dtype: torch.dtype, whole: bool) -> tuple[list[Tensor], dict]:
    """The floating outputs of one run, attached, and the inputs."""
    args, kwargs, inputs = given.copied(device, dtype, whole)
    seed = derive_seed("tensor proof dropout")
    random.seed(seed)
    with fork_seeded(seed, device):
        return list(_floating(block(*args, **kwargs))), inputs


def backward(block: nn.Module, outputs: list[Tensor], cotangents: list[Tensor], inputs: dict[int, Tensor]) -> Ran:
    """Gradients of sum(output * cotangent)."""
    trainable = {name: parameter for name, parameter in block.named_parameters() if parameter.requires_grad}
    pairs = [(output, cotangent) for output, cotangent in zip(outputs, cotangents) if output.requires_grad]
    grads: list[Tensor | None] = [None] * (len(inputs) + len(trainable))
    leaves = [*inputs.values(), *trainable.values()]
    if pairs and leaves:
        grads = list(torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True))
    count = len(inputs)
    return Ran([output.detach() for output in outputs], dict(zip(inputs, grads[:count])), dict(zip(trainable, grads[count:])))


def random_like(outputs: list[Tensor]) -> list[Tensor]:
    """Cotangents, alike on all ranks."""
    if not outputs:
        return []
    generator = torch.Generator(outputs[0].device).manual_seed(derive_seed("tensor proof cotangents"))
    return [torch.randn(o.shape, generator=generator, dtype=o.dtype, device=o.device) for o in outputs]


def _floating(output: Any) -> Iterator[Tensor]:
    """Floating tensors of an output: of containers that torch knows, and of dataclasses."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            if leaf.is_floating_point():
                yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _floating([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


class DtypesSeen(TorchDispatchMode):
    """Collects the floating dtypes of what is computed inside it, single numbers left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.found.update(leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim)
        return result


# ---- isolation ---------------------------------------------------------------------------------------------------------------------


arithmetic: list[Callable[[], AbstractContextManager]] = []
"""Contexts that hold in an isolated run too: how a verification computes."""


def isolated(function: Callable[[], _Result], device: torch.device) -> _Result:
    """Runs ``function`` in a thread of its own, where no autocast, checkpoint, saved-tensor hook or dispatch mode of the caller holds."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> _Result:
        with ExitStack() as contexts:
            for context in arithmetic:
                contexts.enter_context(context())
            if stream is not None:
                torch.cuda.set_device(device)
                contexts.enter_context(torch.cuda.stream(stream))
            return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@contextmanager
def precise(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Full float32 products, ``dtype`` for new tensors; generators, Python's too, are put back afterwards."""
    default, state = torch.get_default_dtype(), random.getstate()
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision if device.type == "cuda" else None
    torch.set_default_dtype(dtype)
    if precision is not None:
        matmul.fp32_precision = "ieee"
    try:
        with fork_seeded(0, device):
            yield
    finally:
        torch.set_default_dtype(default)
        random.setstate(state)
        if precision is not None:
            matmul.fp32_precision = precision
