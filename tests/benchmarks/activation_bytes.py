"""Bytes one layer keeps between forward and backward under tensor and sequence parallelism: ours, torch's own styles, the formula.

Run: python -m tests.benchmarks.activation_bytes. Real gloo ranks on this machine; bytes are counted, not sampled, so the table repeats.
Shapes: B batch, L sequence, D model, N heads, G key/value heads, H head dim, F feed-forward.
"""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.parallel.recompute import apply_recompute
from lightning_megascale.parallel.tensor import apply_tensor_parallel
from tests.harness import run_ranks

BATCH, LENGTH = 2, 32
SIZES = dict(vocab_size=64, hidden_size=32, num_heads=8, num_kv_heads=4, intermediate_size=96, max_position_embeddings=32)
KINDS = {"gelu": dict(mlp="gelu", bias=True), "swiglu": dict(mlp="swiglu")}
MODES = (None, "selective", "full")
TARGETS = {("swiglu", 4, None): 0.78, ("swiglu", 4, "selective"): 0.61}


def build(kind: str, layers: int, dtype: torch.dtype) -> Decoder:
    config = DecoderConfig(num_layers=layers, norm="layer", positions="learned", **SIZES, **KINDS[kind])  # type: ignore[arg-type]
    return Decoder(config).to(dtype)


def formula(kind: str, mode: str | None, tp: int, dtype: torch.dtype) -> int:
    """Bytes kept per layer and microbatch, on CPU.

    The attention core takes grouped heads as they are, so keys and values are kept once per group. The flash kernel of the CPU keeps its
    log-sum-exp in float32, for float64 inputs in float64; layer norm its two statistics in the type of the input.
    """
    e, d, n, g, f = dtype.itemsize, SIZES["hidden_size"], SIZES["num_heads"], SIZES["num_kv_heads"], SIZES["intermediate_size"]
    tokens, h = BATCH * LENGTH, d // n
    part, q, kv, ffn = (tokens * width * e // tp for width in (d, n * h, g * h, f))
    lse = tokens * n * max(e, 4) // tp
    statistics = 2 * 2 * tokens * e // tp
    gated = kind == "swiglu"
    if mode == "full":
        return part
    if mode == "selective":
        return part + 2 * q + 2 * kv + lse + (2 if gated else 1) * ffn + 2 * part
    return 4 * part + statistics + 2 * q + 2 * kv + lse + (4 if gated else 2) * ffn


# ---- counting ----------------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Bytes of the distinct storages that operators have made and that are still alive; FLOPs and collectives by name."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.calls: dict[str, int] = {}
        self.paused = False
        self._known: dict[int, Any] = {}

    def adopt(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self.live += size
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))

    def _gone(self, key: int, size: int) -> None:
        self.live -= size
        del self._known[key]

    def settled(self) -> int:
        """``live`` once it has stood still: a worker thread of gloo lets go of a collective's tensors a moment after the wait for it."""
        gc.collect()
        last, still = self.live, 0
        while still < 10:
            time.sleep(0.02)
            still = still + 1 if self.live == last else 0
            last = self.live
        return last

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            return NotImplemented  # counted as the local operators it becomes
        out = func(*args, **kwargs)
        if not self.paused:
            name = func._schema.name
            self.calls[name] = self.calls.get(name, 0) + 1
            for leaf in tree_leaves(out):
                if type(leaf) is Tensor:
                    self.adopt(leaf)
        return out

    def __enter__(self) -> LiveBytes:
        self._undo = _quiet_propagation(self)
        self._undo.__enter__()
        return super().__enter__()

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._undo.__exit__(*details)


@contextmanager
def _quiet_propagation(counter: LiveBytes):  # type: ignore[no-untyped-def]
    """DTensor works out shapes by running operators at global size, which are no memory of the model. (Private to torch.)"""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    original = ShardingPropagator._propagate_tensor_meta_non_cached

    def quiet(self: Any, *args: Any, **kwargs: Any) -> Any:
        counter.paused, before = True, counter.paused
        try:
            return original(self, *args, **kwargs)
        finally:
            counter.paused = before

    ShardingPropagator._propagate_tensor_meta_non_cached = quiet  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = original  # type: ignore[method-assign]


# ---- the two ways ------------------------------------------------------------------------------------------------------------------


def ours(model: Decoder, mesh: DeviceMesh, mode: str | None) -> None:
    apply_tensor_parallel(model, mesh, model.megascale_layout, sequence_parallel=True, recompute=mode)
    apply_recompute(list(model.layers), mode)


def torchs(model: Decoder, mesh: DeviceMesh, mode: str | None) -> None:
    """torch.distributed.tensor.parallel with sequence parallelism, as torch's tutorial writes it."""
    shard, whole = Shard(1), Replicate()
    embedding = RowwiseParallel(input_layouts=whole, output_layouts=shard)
    plan: dict[str, Any] = {"embed_tokens": embedding, "embed_positions": embedding, "norm": SequenceParallel(use_local_output=True)}
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, {"head": ColwiseParallel(input_layouts=shard, output_layouts=whole)})
    for index, block in enumerate(model.layers):
        layer: dict[str, Any] = {name: SequenceParallel(use_local_output=True) for name in ("attention_norm", "mlp_norm")}
        layer["attention"] = PrepareModuleInput(input_layouts=(shard, None), desired_input_layouts=(whole, None))
        layer["mlp"] = PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(whole,))
        columns = [f"attention.{x}_proj" for x in "qkv"] + ["mlp.up_proj"] + (["mlp.gate_proj"] if block.mlp.gate_proj is not None else [])
        layer |= {name: ColwiseParallel() for name in columns}
        layer |= {name: RowwiseParallel(output_layouts=shard) for name in ("attention.o_proj", "mlp.down_proj")}
        parallelize_module(block, mesh, layer)
        if mode is not None:
            model.layers[index] = _Checkpointed(block, mode)


class _Checkpointed(nn.Module):
    """The usual policies: everything again, or matmuls, attention core and reduce-scatters kept."""

    def __init__(self, block: nn.Module, mode: str) -> None:
        super().__init__()
        self.block = block
        self.options = {"context_fn": partial(create_selective_checkpoint_contexts, _usual_policy)} if mode == "selective" else {}

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, preserve_rng_state=False, **self.options)


def _usual_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    aten, c10d = torch.ops.aten, torch.ops._c10d_functional
    core = aten._scaled_dot_product_flash_attention_for_cpu.default
    saved = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default, core, c10d.reduce_scatter_tensor.default}
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE


STYLES = {"ours": ours, "torch": torchs}


def kept_per_layer(kind: str, style: str, mode: str | None, dtype: torch.dtype = torch.float64) -> tuple[int, dict[str, int]]:
    """On each rank: bytes a layer keeps after the forward, and calls of the backward of a layer; two layers minus one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % SIZES["vocab_size"]
    gc.freeze()  # what the fork inherited need not be searched at every collection
    kept, calls = [], []
    for layers in (1, 2):
        model = build(kind, layers, dtype)
        STYLES[style](model, mesh, mode)
        for _ in range(2 if style == "torch" else 1):  # the first pass fills the caches of DTensor
            counter = LiveBytes()
            for parameter in model.parameters():
                counter.adopt(parameter.to_local() if isinstance(parameter, DTensor) else parameter)
            before = counter.live
            with counter:
                out = model(ids)
            live, counter.calls = counter.settled() - before, {}
            with counter:
                out.sum().backward()
            model.zero_grad()
            del out
        kept.append(live)
        calls.append(counter.calls)
    return kept[1] - kept[0], {name: count - calls[0].get(name, 0) for name, count in calls[1].items()}


def main() -> None:
    print(f"Bytes kept per layer: B={BATCH} L={LENGTH} {SIZES}, float64, tensor parallel + sequence parallel")
    print(f"{'mlp':8}{'tp':>3} {'recompute':10}{'ours':>9}{'formula':>9}{'torch':>9}{'ratio':>7}  target")
    for kind in KINDS:
        for tp in (2, 4):
            for mode in MODES:
                sizes = {style: run_ranks(kept_per_layer, tp, kind, style, mode, timeout=120)[0][0] for style in STYLES}
                ratio, target = sizes["ours"] / sizes["torch"], TARGETS.get((kind, tp, mode))
                verdict = "" if target is None else f"<= {target}: {'met' if ratio <= target else 'MISSED'}"
                wanted = formula(kind, mode, tp, torch.float64)
                row = f"{kind:8}{tp:>3} {mode or 'none':10}{sizes['ours']:>9}{wanted:>9}{sizes['torch']:>9}{ratio:>7.3f}  {verdict}"
                print(row, flush=True)


if __name__ == "__main__":
    main()
