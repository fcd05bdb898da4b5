"""Context parallelism: every attention of a model is sent through ``ops/context_attention.py``, over the tokens of all ranks.

Three seams, by what a model is: an attention module with a replaceable, parameter-free ``core`` gets ours; a transformers model comes
through its public attention registry (``context_huggingface.py``); any other attention module has its calls of
``F.scaled_dot_product_attention`` taken over while its forward runs (not around the whole model: a recomputed block would then
attend inside its shard). What none of them reaches is found by the probe (``context_probe.py``).

Shapes: B rows, N heads, G key/value heads, S tokens of this rank, H head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megascale.layout import ModelLayout
from lightning_megascale.mesh import MeshViews
from lightning_megascale.ops.attention import Kernel, choose_kernel
from lightning_megascale.ops.context_attention import exchanged_attention, gathered_attention, ring_attention
from lightning_megascale.ops.context_blocks import Pattern
from lightning_megascale.ops.sequence_layout import ring_step_ratio
from lightning_megascale.parallel.context_batch import SequenceShard
from lightning_megascale.parallel.context_probe import Probe
from lightning_megascale.parallel.layouts import block_names, is_published
from lightning_megascale.parallel.mixin import become
from lightning_megascale.plan import ParallelPlan

RING_TOKENS = 4096
"""Tokens of a rank from which a hop's transfer hides behind its products on an H100 over 400 Gbit/s with a quarter as many key heads:
2 x (G / N) x FLOP/s / bytes per second; the rule "one rank per 4,096 tokens" of Megatron-Bridge's guide says the same."""
RING_BALANCE = 1.25  # a ring waits for its slowest rank at every step; above this ratio the other methods, which wait once, win


def choose_method(heads: int, kv_heads: int, tokens: int, size: int, balance: float = 1.0) -> str:
    """The method that "auto" means.

    Args:
        heads, kv_heads: of this rank.
        tokens: of this rank.
        size: context-parallel ranks.
        balance: ``ring_step_ratio`` of the rows.
    """
    if tokens >= RING_TOKENS and balance <= RING_BALANCE:
        return "ring"
    return "ulysses" if heads % size == 0 and kv_heads % size == 0 else "allgather"


@dataclass(eq=False)
class Context:
    """What the attention of a run has to know: who holds which tokens of the microbatch that is computed.

    Args:
        views: the mesh.
        method, backend: of the plan.
        device: of the tensors.
    """

    views: MeshViews
    method: str
    backend: str
    device: torch.device
    whole: SequenceShard | None = None
    shard: SequenceShard | None = None
    probe: Probe | None = None
    expected: tuple[str, ...] = ()
    """Attention modules that have to come through; of a transformers model, whose names say little, the blocks that hold them."""
    reached: set[str] = field(default_factory=set)
    told: Callable[[str], None] | None = None
    doubts: list[str] | None = None
    """Where it is a list, what only this rank may see is noted there, for all ranks to raise, and not raised."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Context:
        return self

    @property
    def missing(self) -> list[str]:
        """What should have come through by now and has not."""
        return [name for name in self.expected if not any(reached == name or reached.startswith(name + ".") for reached in self.reached)]

    def begin(self, shard: SequenceShard) -> None:
        """A batch whose steps follow."""
        self.whole = self.shard = shard

    def end(self) -> None:
        """The step and its backward are over: attention that runs now belongs to no batch."""
        self.whole = self.shard = None

    def select(self, start: int, rows: int) -> None:
        """The microbatch whose forward or backward follows."""
        assert self.whole is not None
        self.shard = self.whole if rows == self.whole.rows else self.whole.part(start, rows)

    @property
    def laid(self) -> Tensor | None:
        """(B, S) positions of the rows that are computed; None outside of steps."""
        if self.probe is not None:
            return self.probe.positions
        return None if self.shard is None else self.shard.position_ids

    @property
    def gives_positions(self) -> bool:
        """Whether a model that is not given positions gets them."""
        return self.probe is None or self.probe.gives_positions

    def object_to(self, message: str) -> None:
        """Raises what is wrong, or notes it where all ranks raise together."""
        if self.doubts is None:
            raise ValueError(message)
        self.doubts.append(message)

    @property
    def spare(self) -> int:
        """Places at the end of those rows that hold no token: a step may cut them off."""
        if self.probe is not None:
            return self.probe.spare
        return 0 if self.shard is None else self.shard.spare

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, window: int | None, scale: float | None, name: str) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks; V, the values' head dim, may differ from H.

        Args:
            q: (B, N, S, H). k: (B, G, S, H). v: (B, G, S, V), V <= H.
            is_causal, window, scale: as in ``Pattern``.
            name: of the attention module, for messages.

        Returns:
            (B, N, S, V).

        Raises:
            ValueError: for lengths that are not those of the batch.
        """
        if window is not None and not is_causal:
            raise ValueError(
                f"{name}: a window of {window} tokens on both sides is not computed under context parallelism, only a causal one"
            )
        self.reached.add(name)
        if self.probe is not None:
            return self.probe.attend(q, k, v, is_causal, window, scale, name)
        if v.shape[-1] < q.shape[-1]:  # kernels have one head dim: values of 0 add nothing
            wide = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
            return self.attend(q, k, wide, is_causal=is_causal, window=window, scale=scale, name=name)[..., : v.shape[-1]]
        shard = self.shard
        if shard is None:
            raise ValueError(f"{name}: attention runs outside of a step, so nothing tells which tokens the other ranks hold")
        for what, tensor in (("queries", q), ("keys", k), ("values", v)):
            rows, tokens = tensor.shape[0], tensor.shape[2]
            if rows != shard.rows or tokens != q.shape[2] or not 0 <= shard.local_length - tokens <= shard.spare:
                raise ValueError(
                    f"{name}: {what} are (rows, tokens) = {(rows, tokens)} and this rank's part of the batch is "
                    f"{(shard.rows, shard.local_length)}: a cache, cross-attention, or a sequence made inside of the model cannot be "
                    "context parallel"
                )
        if q.device.type == "meta":
            return torch.empty_like(q)
        pattern = shard.pattern(is_causal, window, scale)
        kernel = choose_kernel(self.backend, q.device, q.dtype, q.shape[-1])
        return self._run(q.contiguous(), k.contiguous(), v.contiguous(), pattern, kernel)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, kernel: Kernel) -> Tensor:
        views = self.views
        if views.context is None:
            return ring_attention(q, k, v, pattern, kernel, None)
        group = views.context.get_group()
        method = self.method
        if method == "auto":
            balance = max(ring_step_ratio(tables) for tables in pattern.tables) if q.shape[2] >= RING_TOKENS else 1.0
            method = choose_method(q.shape[1], k.shape[1], q.shape[2], views.context.size(), balance)
        if self.told is not None:
            self.told(f"context_parallel_method={method!r} over {views.context.size()} ranks, attention kernel {kernel.name!r}")
            self.told = None
        if method == "ring":
            return ring_attention(q, k, v, pattern, kernel, group)
        if method == "allgather":
            return gathered_attention(q, k, v, pattern, kernel, group)
        if method == "ulysses":
            return exchanged_attention(q, k, v, pattern, kernel, group)
        assert views.context_heads is not None and views.context_ring is not None
        return exchanged_attention(q, k, v, pattern, kernel, views.context_heads.get_group(), views.context_ring.get_group())


# ---- the seams -----------------------------------------------------------------------------------------------------------------------


class ContextCore(nn.Module):
    """Takes the place of an attention module's ``core``."""

    def __init__(self, context: Context, name: str) -> None:
        super().__init__()
        self.context, self.name = context, name

    @torch.compiler.disable
    def forward(self, q_BNSH: Tensor, k_BGSH: Tensor, v_BGSH: Tensor, is_causal: bool = True) -> Tensor:
        return self.context.attend(q_BNSH, k_BGSH, v_BGSH, is_causal=is_causal, window=None, scale=None, name=self.name)


class _Taken(TorchFunctionMode):
    """While an attention module runs: its calls of ``F.scaled_dot_product_attention`` go over all ranks."""

    def __init__(self, context: Context, name: str, training: bool) -> None:
        super().__init__()
        self.context, self.name, self.training = context, name, training

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is F.multi_head_attention_forward:
            raise ValueError(
                f"{self.name}: nn.MultiheadAttention attends inside of torch, where other ranks' tokens cannot be brought in: call "
                "F.scaled_dot_product_attention on projected queries, keys and values"
            )
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ValueError(
                f"{self.name}: attn_mask of shape {tuple(attn_mask.shape)} cannot be honoured under context parallelism, where no rank has "
                "all keys: use is_causal=True, document_ids in the batch for packed documents, and a 2-D attention_mask there for padding"
            )
        if dropout_p:
            raise ValueError(f"{self.name}: dropout_p={dropout_p} in attention has no counterpart under context parallelism: set it to 0")
        if query.ndim != 4 or value.shape[-1] != query.shape[-1]:
            raise ValueError(
                f"{self.name}: queries {tuple(query.shape)} and values {tuple(value.shape)}: context parallelism takes (B, heads, tokens, "
                "head dim) with one head dim"
            )
        if not enable_gqa and key.shape[1] != query.shape[1]:
            key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))  # as torch broadcasts a single head
        return self.context.attend(query, key, value, is_causal=is_causal, window=None, scale=scale, name=self.name)


class ContextAttention:
    """Mixin of an attention module that calls ``F.scaled_dot_product_attention``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context, name = self.__dict__["_megascale_context"]
        with _Taken(context, name, self.training):  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)  # type: ignore[misc]


def attention_names(model: nn.Module, layout: ModelLayout | None) -> tuple[str, ...]:
    """The attention modules: by the layout, else those whose class says so, outermost first."""
    names = [name for name, _ in model.named_modules()]
    if layout is not None and layout.attention:
        return layout.resolve(names)["attention"]
    found = [name for name, module in model.named_modules() if "attention" in type(module).__name__.lower() or _is_attn(type(module))]
    return tuple(name for name in found if not any(name.startswith(other + ".") for other in found))


def _is_attn(kind: type) -> bool:
    return kind.__name__.lower().endswith("attn")


def check_context(model: nn.Module, layout: ModelLayout | None, plan: ParallelPlan) -> list[str]:
    """A message for every rule of context parallelism that a model violates."""
    if is_published(model):
        from lightning_megascale.parallel.context_huggingface import check_published

        return check_published(model)
    wrong = []
    if hasattr(model, "training_step"):
        wrong.append(
            f"context_parallel_size={plan.context_parallel_size}: the layers of {type(model).__name__} are its own attributes, so no call "
            "of a model can be given this rank's positions: put them into one child module with a forward of its own, and where it has "
            "several children name one, as in MegascaleStrategy(module='model')"
        )
    elif not attention_names(model, layout):
        wrong.append(
            f"context_parallel_size={plan.context_parallel_size}: no module of {type(model).__name__} is called attention by its class, so "
            "it is unknown where tokens of other ranks come in: name them with layout=ModelLayout(attention='...')"
        )
    multi = [name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)]
    if multi:
        wrong.append(
            f"{', '.join(multi[:4])}: nn.MultiheadAttention attends inside of torch, where other ranks' tokens cannot be brought in: call "
            "F.scaled_dot_product_attention on projected queries, keys and values"
        )
    return wrong


def apply_context(model: nn.Module, layout: ModelLayout | None, context: Context) -> None:
    """Sends the attention of a model, or of this rank's stages of it, through ``context``."""
    if is_published(model):
        from lightning_megascale.parallel.context_huggingface import apply_published

        apply_published(model, context)
        blocks = block_names(model, layout)
        context.expected = tuple(name for name in blocks if any(True for _ in model.get_submodule(name).parameters()))
    else:
        context.expected = tuple(n for n in attention_names(model, layout) if any(True for _ in model.get_submodule(n).parameters()))
        for name in attention_names(model, layout):
            module = model.get_submodule(name)
            core = getattr(module, "core", None)
            if isinstance(core, nn.Module) and not any(True for _ in core.parameters()):
                module.core = ContextCore(context, name)
            elif name in context.expected:
                become(module, ContextAttention).__dict__["_megascale_context"] = (context, name)


# ---- what a model is called with -----------------------------------------------------------------------------------------------------


def prepare_call(
    model: nn.Module, context: Context, args: tuple, kwargs: dict[str, Any], forward: Callable[..., Any] | None = None
) -> tuple[tuple, dict[str, Any]]:
    """A call of the model with what follows from the layout of the batch: positions, and no mask of the row's own shape.

    Args:
        model: the parallelized module.
        context: of the run.
        args, kwargs: what the step gave.
        forward: whose arguments count; None: the model's.

    Raises:
        ValueError: for positions that are not those of this rank's tokens.
    """
    laid = context.laid
    if laid is None:
        return args, kwargs
    signature = inspect.signature(forward or model.forward)
    try:
        given = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return args, kwargs  # the call itself says what is wrong
    names = list(signature.parameters)
    more = next((name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
    takes = {*names, *(["position_ids"] if more and is_published(model) else [])}
    everything = {**given, **given.get(more, {})} if more else given
    laid = _fitting(everything, laid, context)

    def put(name: str, value: Tensor | None) -> None:
        nonlocal args, kwargs
        if name in names and names.index(name) < len(args):
            args = tuple(value if place == names.index(name) else old for place, old in enumerate(args))
        else:
            kwargs = {**kwargs, name: value}

    own = everything.get("position_ids")
    if context.gives_positions and own is None and "position_ids" in takes:
        put("position_ids", laid)
    elif own is not None and own is not laid and context.probe is None and not _are_positions(own, laid):
        context.object_to(OWN_POSITIONS)
    mask = everything.get("attention_mask")
    if isinstance(mask, Tensor) and tuple(mask.shape) == tuple(laid.shape):
        put("attention_mask", None)
    elif mask is None and context.probe is None and context.shard is not None and context.shard.left_padded:
        context.object_to(LEFT_PADDED)
    if is_published(model):
        from lightning_megascale.parallel.context_huggingface import published_arguments

        kwargs = published_arguments(model, kwargs)
    return args, kwargs


def _fitting(given: dict[str, Any], positions: Tensor, context: Context) -> Tensor:
    """The positions of the tokens that are in the call: a step that shifts may have cut the last place off.

    Raises:
        ValueError: for another number of tokens.
    """
    tokens = next((x for x in given.values() if isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point()), None)
    if tokens is None or tuple(tokens.shape) == tuple(positions.shape):
        return positions
    if tokens.shape[0] == positions.shape[0] and 0 < positions.shape[1] - tokens.shape[1] <= context.spare:
        return positions[:, : tokens.shape[1]]
    raise ValueError(
        f"the model is called with (rows, tokens) = {tuple(tokens.shape)} and this rank's part of the batch is {tuple(positions.shape)}: "
        "under context parallelism a step passes the rows that it gets, whole (generation and rows made in the step cannot be cut)"
    )


def _are_positions(given: Any, positions: Tensor) -> bool:
    if not isinstance(given, Tensor) or given.ndim != 2 or given.shape[1] != positions.shape[1]:
        return False
    return torch.equal(given.to(positions).expand_as(positions), positions)


LEFT_PADDED = (
    "the batch's attention_mask leaves out tokens at the start of rows, and the step does not give it to the model, which on one device "
    "would attend to them: under context parallelism padding is never attended to. Give it to the model, or leave it out of the batch"
)
OWN_POSITIONS = (
    "training_step gives the model position_ids that are not those of this rank's tokens (counted from the length of what it got?): "
    "leave them out, or pass batch['position_ids']"
)
