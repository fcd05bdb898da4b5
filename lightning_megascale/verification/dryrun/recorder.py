"""What one rank computes, sends and holds, seen by a dispatch mode above fake tensors: local tensors only, nothing is run."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_megascale.ops.all_to_all import SUM_ROWS_BACK
from lightning_megascale.ops.tensor_parallel import ROW_LINEAR, TensorAxis, start_reduce

_aten = torch.ops.aten
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)
PROPAGATION = "_propagate_tensor_meta_non_cached"
"""Private to torch: runs an operator at its global shape to learn the shape of a DTensor, which is no work of this rank."""

RECOMPUTATION = "_recomputation_hook"
"""Private to torch: the context in which a checkpoint runs its forward again."""
_again = [0]  # checkpoints that do so now


def _attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[int, int]:
    """FLOPs of q k^T and of the weights times v, over the pairs that causality leaves."""
    length, keys = q.shape[-2], k.shape[-2]
    pairs = q.shape[:-2].numel() * (length * (length + 1) // 2 if is_causal and length == keys else length * keys)
    return 2 * pairs * q.shape[-1], 2 * pairs * v.shape[-1]


def _flash(q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False, **_: Any) -> int:
    return sum(_attention(q, k, v, is_causal))


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dropout: float, is_causal: bool, **_: Any
) -> int:
    """Scores again, dV, dP, dQ and dK.

    Source: Dao et al. 2022, "FlashAttention", algorithm 4.
    """
    scores, values = _attention(q, k, v, is_causal)
    return 3 * scores + 2 * values


def _grouped(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Rows (T, D) by experts (E, D, F): each row meets one expert; the gradient of weights (D, T) by (T, F) likewise."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _flash,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_backward,
    _aten._grouped_mm: _grouped,
    _aten.addmm_: lambda total, a, b, **_: 2 * a.shape[0] * a.shape[1] * b.shape[1],
}
"""What torch's registry lacks: kernels of the CPU, and products added in place."""


def _flops(func: Any, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    packet = func._overloadpacket
    if packet in _FORMULAS:
        return _FORMULAS[packet](*args, **kwargs)
    return flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0


def nbytes(value: Any) -> int:
    """Of all tensors in a nest."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_leaves(value) if isinstance(tensor, Tensor))


# name of an operator -> (argument that names the group, which value is the payload, what it is called)
_COLLECTIVES: dict[str, tuple[int, Callable[[Any, Any], Any], str]] = {
    "c10d::_allgather_base_": (2, lambda args, out: args[0], "all_gather"),
    "c10d::allgather_": (2, lambda args, out: args[0], "all_gather"),
    "c10d::_reduce_scatter_base_": (2, lambda args, out: args[1], "reduce_scatter"),
    "c10d::allreduce_": (1, lambda args, out: args[0], "all_reduce"),
    "c10d::alltoall_base_": (2, lambda args, out: args[1], "all_to_all"),
    "c10d::send": (1, lambda args, out: args[0], "send"),
    "c10d::recv_": (1, lambda args, out: args[0], "recv"),
    "c10d::broadcast_": (1, lambda args, out: args[0], "broadcast"),
    "_c10d_functional::all_gather_into_tensor": (2, lambda args, out: out, "all_gather"),
    "_c10d_functional::reduce_scatter_tensor": (3, lambda args, out: args[0], "reduce_scatter"),
    "_c10d_functional::all_reduce": (2, lambda args, out: args[0], "all_reduce"),
    "_c10d_functional::all_reduce_": (2, lambda args, out: args[0], "all_reduce"),
    "_c10d_functional::all_to_all_single": (3, lambda args, out: args[0], "all_to_all"),
}
_SILENT = ("wait_tensor", "barrier", "monitored_barrier_")


class Recorder(TorchDispatchMode):
    """Counts what passes: ``flops`` by phase, ``traffic`` by (axis, operation, dtype), bytes of storages that live and their peak.

    Args:
        axis_of: name of a process group -> axis of the mesh.
        grouped_rows: share of the rows of a grouped product that belong to an expert.

    Attributes:
        flops: "forward", "backward" or "recomputed" -> FLOPs.
        traffic: (axis, operation, dtype) -> [calls, bytes].
        live, peak: bytes of storages born inside or adopted.
    """

    def __init__(self, axis_of: Mapping[str, str], grouped_rows: Fraction = Fraction(1)) -> None:
        super().__init__()
        self.axis_of, self.grouped_rows = axis_of, grouped_rows
        self.flops: Counter[str] = Counter()
        self.traffic: dict[tuple[str, str, str], list[int]] = {}
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, Any] = {}
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented  # comes again as local tensors
        if self.paused:
            return func(*args, **kwargs)
        if func in _OPENED:
            with self:  # as its kernel does it, so that the product and the message are seen
                return _OPENED[func](*args)
        out = func(*args, **kwargs)
        if flops := _flops(func, args, kwargs, out):
            share = self.grouped_rows if func._overloadpacket is _aten._grouped_mm else 1
            self.flops[_phase()] += int(flops * share)
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional", "_dtensor::")):
            self._note(name, args, out)
        for leaf in tree_leaves(out):
            if type(leaf) in _PLAIN:  # wrappers (asynchronous results) own storages that do not exist
                self.adopt(leaf)
        return out

    def _note(self, name: str, args: tuple, out: Any) -> None:
        if name.endswith(_SILENT):
            return
        if name not in _COLLECTIVES:
            raise NotImplementedError(f"the dry run does not know the collective {name}")
        place, payload, operation = _COLLECTIVES[name]
        group = args[place] if isinstance(args[place], str) else dist.ProcessGroup.unbox(args[place]).group_name
        value = payload(args, out)
        dtype = next(str(leaf.dtype) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)).removeprefix("torch.")
        entry = self.traffic.setdefault((self.axis_of[group], operation, dtype), [0, 0])
        entry[0] += 1
        entry[1] += nbytes(value)

    # ---- memory --------------------------------------------------------------------------------------------------------

    def adopt(self, tensor: Tensor) -> None:
        """Counts a tensor's storage from now until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            self._watched[key] = weakref.ref(storage, lambda _: self._gone(key))
        self._set(key, storage.nbytes())

    def resized(self, storage: Any) -> None:
        """A known storage has another size now (FSDP2 frees and fills those of gathered parameters)."""
        if storage._cdata in self._sizes:
            self._set(storage._cdata, storage.nbytes())

    def _gone(self, key: int) -> None:
        if key in self._sizes:
            self._set(key, 0)
            del self._sizes[key], self._watched[key]

    def _set(self, key: int, bytes_: int) -> None:
        self.live += bytes_ - self._sizes[key]
        self._sizes[key] = bytes_
        self.peak = max(self.peak, self.live)

    def __enter__(self) -> Any:
        _RECORDERS.append(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _RECORDERS.remove(self)
        super().__exit__(*error)


_RECORDERS: list[Recorder] = []  # that are entered; one that is entered again inside of itself stands here twice


def install() -> None:
    """Lets shape propagation pass uncounted, and shows recorders the storages that are resized and the forwards that checkpoints run
    again. For the rest of this process."""
    propagate, resize = getattr(ShardingPropagator, PROPAGATION), torch.UntypedStorage.resize_

    def quiet(propagator: Any, *args: Any, **kwargs: Any) -> Any:
        before = [recorder.paused for recorder in _RECORDERS]
        for recorder in _RECORDERS:
            recorder.paused = True
        try:
            return propagate(propagator, *args, **kwargs)
        finally:
            for recorder, paused in zip(_RECORDERS, before):
                recorder.paused = paused

    def resized(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        for recorder in _RECORDERS[:1]:
            recorder.resized(storage)
        return result

    setattr(ShardingPropagator, PROPAGATION, quiet)
    hook = getattr(checkpoint, RECOMPUTATION)
    for name, change in (("__enter__", 1), ("__exit__", -1)):
        setattr(hook, name, _counting(getattr(hook, name), change))
    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]


def _counting(inner: Callable[..., Any], change: int) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        _again[0] += change
        return inner(*args)

    return call


def _phase() -> str:
    """A function of autograd turns gradients off inside of itself, so whether they are on says nothing about recomputation."""
    if _again[0]:
        return "recomputed"
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


def _row_linear(x: Tensor, weight: Tensor, size: int, name: str, sequence: bool) -> Tensor:
    partial = torch.mm(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])
    summed = start_reduce(partial, TensorAxis(name, size, 0), x.ndim - 2, sequence)
    return torch.ops._c10d_functional.wait_tensor(summed)


def _sum_rows_back(rows: Tensor, places: Tensor, count: int, sends: list[int], receives: list[int], name: str, size: int) -> Tensor:
    returned = rows
    if size > 1:
        returned = torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), receives, sends, name)
        )
    return returned.new_zeros((count, *rows.shape[1:])).index_add_(0, places, returned)


_OPENED: dict[Any, Callable[..., Tensor]] = {ROW_LINEAR: _row_linear, SUM_ROWS_BACK: _sum_rows_back}
"""Operators of ours that are one to a dispatch mode, and what their kernels do."""
