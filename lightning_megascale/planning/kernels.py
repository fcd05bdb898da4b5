"""Seconds of kernels on one GPU: matrix products by tiles and waves, attention cores, and kernels that only move memory.

Arguments may be numbers or arrays that broadcast; one call serves many plans. "Rows" are tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_megascale.planning.stack import Stack
from lightning_megascale.topology.gpus import Gpu

Number = np.ndarray | float | int

# Tiles of the output that a multiprocessor works on, and the share of the best rate that each size reaches: a smaller tile reads more
# for each operation. Sizes: NVIDIA, "Matrix multiplication background user's guide", section 3.1, which names these as the efficient
# ones. Shares: assumed, after the order that its figure 3 shows (256 x 128 fastest, 64 x 64 slowest).
TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.95),
    (64, 256, 0.85),
    (256, 64, 0.85),
    (128, 64, 0.75),
    (64, 128, 0.75),
    (64, 64, 0.6),
)
# Of the bandwidth of memory that products reach where it is their limit. Assumed: what copies of large tensors reach.
PRODUCT_MEMORY = 0.9
# Times that batched products take when a head's features are no multiple of 8 numbers, 16 bytes. NVIDIA's guide, section 2.2, has such
# products slower without a figure; this one after BigScience's 3D sweep (tr11-176B-ml/chronicles-prequel.md: 128 heads of 108 features
# instead of 64 of 216 take a 182B model from 152 to 106 TFLOPs).
MISALIGNED = 8.0
# A flash kernel reaches its rate on rows much longer than this, and half of it at this length. Read off figures 4 to 6 of Dao 2023,
# "FlashAttention-2" (causal forward, A100, head 128: 1k tokens 0.67 of 16k's rate, 2k 0.8, 4k 0.9).
HALF_LENGTH = 512
# Dao 2023, figure 6: the backward of flash attention runs at 0.8 to 0.9 of the rate of its forward.
FLASH_BACKWARD_RATE = 0.85


@dataclass(frozen=True)
class Rates:
    """What one GPU does in a second with a software stack.

    Args:
        matmul: operations of large products in the stack's dtype, at its best.
        plain: the same in bfloat16 or wider, for products that never run in a smaller dtype: routers and logits.
        attention: operations of attention's products.
        memory: bytes of memory, of kernels between products.
        product_memory: the same of products, whose reads are large and regular.
        multiprocessors: of the GPU.
        element_bytes: of an operand of ``matmul``.
        plain_bytes: of an activation, and of an operand of what runs at ``plain``.
    """

    matmul: float
    plain: float
    attention: float
    memory: float
    product_memory: float
    multiprocessors: int
    element_bytes: float
    plain_bytes: float = 2

    @classmethod
    def of(cls, gpu: Gpu, stack: Stack) -> Rates:
        """Peaks of the data sheet times the stack's efficiencies."""
        dtype = stack.precision.matmul_dtype
        small = dtype in ("float8", "float4", "int8")
        plain = gpu.peak_flops_per_s("bfloat16" if small else dtype)
        peak = gpu.peak_flops_per_s(dtype if dtype in gpu.peak_tflops or not small else "bfloat16")
        return cls(
            matmul=peak * stack.matmul_efficiency * (stack.small_dtype_efficiency if small else 1.0),
            plain=plain * stack.matmul_efficiency,
            attention=plain * stack.attention_efficiency,
            memory=gpu.memory_tb_per_s * 1e12 * stack.memory_efficiency,
            product_memory=gpu.memory_tb_per_s * 1e12 * PRODUCT_MEMORY,
            multiprocessors=gpu.multiprocessors,
            element_bytes={"float8": 1, "int8": 1, "float4": 0.5}.get(dtype, stack.precision.compute_bytes),
            plain_bytes=stack.precision.compute_bytes,
        )


def matmul_seconds(
    rates: Rates, rows: Number, inner: Number, columns: Number, *, out_bytes: Number, groups: Number = 1, plain: bool = False
) -> np.ndarray:
    """Of products (rows, inner) x (inner, columns), ``groups`` of them in one kernel.

    Tiles are dealt to the multiprocessors in waves, a wave takes as long when it is not full, and the best size of tile is taken. A tile is
    stored after its last product, by its multiprocessor's share of memory's bandwidth. Or memory is the limit of the whole.

    Args:
        rates: of the GPU.
        rows, inner, columns: of one product.
        out_bytes: moved for each element of the result; twice the element where it is added to what lies there.
        groups: products of one kernel (experts).
        plain: in the type of activations, however small that of other products.

    Source: NVIDIA, "Matrix multiplication background user's guide", sections 3 and 4 (tile and wave quantization); Williams et al. 2009,
        "Roofline", equation 1.
    """
    rows, inner, columns, groups = (np.asarray(value, dtype=np.float64) for value in (rows, inner, columns, groups))
    rate = rates.plain if plain else rates.matmul
    tall, wide, share = (side.reshape(-1, *[1] * np.broadcast(rows, inner, columns, groups).ndim) for side in np.array(TILES).T)
    waves = np.ceil(groups * np.ceil(rows / tall) * np.ceil(columns / wide) / rates.multiprocessors)
    each = 2.0 * inner / rate / share + np.asarray(out_bytes) / rates.product_memory  # of an element of the result, on all multiprocessors
    best = (waves * tall * wide * each).min(0) * rates.multiprocessors
    element = rates.plain_bytes if plain else rates.element_bytes
    moved = groups * ((rows + columns) * inner * element + rows * columns * out_bytes)
    return np.maximum(best, moved / rates.product_memory)


def flash_seconds(rates: Rates, flops: Number, length: Number, *, backward: bool = False) -> np.ndarray:
    """Of attention kernels that keep their scores on the chip.

    Args:
        rates: of the GPU.
        flops: of the visible pairs; for a backward of all five products.
        length: mean tokens of a document.
        backward: slower than a forward.
    """
    rate = rates.attention * (FLASH_BACKWARD_RATE if backward else 1.0)
    return np.asarray(flops) / rate * (1 + HALF_LENGTH / np.asarray(length))


def scores_seconds(
    rates: Rates, pairs: Number, batch: Number, length: Number, query_dim: int, value_dim: int
) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of attention that writes its scores: two batched products over all pairs, and a softmax between them.

    Args:
        rates: of the GPU.
        pairs: of a query and a key, over all heads and rows.
        batch: heads times rows.
        length: tokens of a row.
        query_dim, value_dim: features of a head.

    Bytes for each pair, of 2-byte numbers: the forward writes scores (2), softmax reads and writes (4), dropout reads, writes and keeps a
    mask (5), the product reads (2); the first and the last are in the products. Backward: dropout reads two and writes one (5), softmax
    reads two and writes one (6). Source: Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models", section
    4.1, for what is kept; kernels as Megatron-LM's fused softmax runs them.
    """
    square, pairs = np.asarray(length), np.asarray(pairs)
    element = rates.plain_bytes
    slow = MISALIGNED if query_dim * element % 16 or value_dim * element % 16 else 1.0
    one = slow * matmul_seconds(rates, square, query_dim, square, out_bytes=element, groups=batch, plain=True)
    two = slow * matmul_seconds(rates, square, square, value_dim, out_bytes=element, groups=batch, plain=True)
    return one + two + pairs * (4 * element + 1) / rates.memory, 2 * (one + two) + pairs * (5 * element + 1) / rates.memory


def traffic_seconds(rates: Rates, bytes_: Number) -> np.ndarray:
    """Of kernels that only read and write so many bytes."""
    return np.asarray(bytes_, dtype=np.float64) / rates.memory
