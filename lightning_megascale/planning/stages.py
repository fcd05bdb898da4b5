"""Which blocks stand on which pipeline stage, and which rank owns it: the cut that makes the dearest stage as cheap as it can be."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from lightning_megascale.planning.shape import LayerKind, ModelShape, Stream
from lightning_megascale.support import V_SCHEDULES

MOST_BLOCKS = 1024  # a cut tries all pairs of places


def split_model(model: ModelShape, stages: int, sequence_length: int | None = None) -> np.ndarray:
    """Blocks of each kind on each stage; the embedding stands on the first, what follows the last block on the last.

    The cost of a part is what a token's forward multiplies in it: of routed experts those it goes through, which the strategy's own
    "auto" cannot know and counts whole. So a plan for a mixture of experts names its cut.

    Args:
        model: its shape.
        stages: of the whole pipeline; more than blocks and two leave nothing for some and are refused.
        sequence_length: tokens of a row, by which the attention core is weighed; None: it is left out.

    Returns:
        int64 (S, K), K kinds in the order of ``model.kinds``. The first and the last stage may hold no block.

    Raises:
        ValueError: more stages than parts.
    """
    return _counts(model, stages, cut_points(model, stages, sequence_length))


def cut_points(model: ModelShape, stages: int, sequence_length: int | None = None) -> tuple[int, ...]:
    """The part with which each stage but the first begins: part 0 is the embedding, part 1 + i block i, the last one the head.

    Raises:
        ValueError: more stages than parts.
    """
    if len(model.layers) > MOST_BLOCKS:
        raise ValueError(f"{model.name} has {len(model.layers):,} blocks; the planner cuts models of up to {MOST_BLOCKS:,}")
    costs = _part_costs(model, sequence_length)
    if not 1 <= stages <= len(costs):
        raise ValueError(
            f"stages={stages}: {model.name} has {len(costs)} parts (embedding, {len(costs) - 2} blocks, head); use at most as many stages"
        )
    return cut(costs, stages)


def split_names(model: ModelShape, stages: int, block: str) -> list[str]:
    """The cut as ``pipeline_split`` takes it: the block with which each stage but the first begins, or "last".

    Args:
        block: how a block is called, with {} for its number, such as "layers.{}".
    """
    names = ["", *(block.format(number) for number in range(len(model.layers))), "last"]
    return [names[start] for start in cut_points(model, stages)]


def stage_owners(stages: int, ranks: int, schedule: str) -> np.ndarray:
    """The pipeline rank of each stage, int64 (S,): round robin, or down and up again for V-shaped schedules.

    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", section 2.2 (round
        robin); Qi et al. 2023, "Zero bubble pipeline parallelism", section 6 (V).
    """
    stage = np.arange(stages)
    return np.minimum(stage, 2 * ranks - 1 - stage) if schedule in V_SCHEDULES else stage % ranks


@lru_cache(maxsize=4096)
def cut(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Where each stage but the first begins, so that the dearest stage is as cheap as it can be; among those cuts the most even one.

    Args:
        costs: of the U parts, in order.
        stages: contiguous, non-empty; from 1 to U.

    Returns:
        ``stages - 1`` ascending indices into ``costs``.
    """
    before = np.concatenate(([0.0], np.cumsum(costs)))
    segment = before[None, :] - before[:, None]  # (start, end)
    segment[np.tril_indices(len(before))] = np.inf  # no part is empty
    dearest = segment[0]
    for _ in range(stages - 1):
        dearest = np.maximum(dearest[:, None], segment).min(0)
    squares = np.where(segment <= dearest[-1] * (1 + 1e-12), segment, np.inf) ** 2
    evenest, starts = squares[0], []
    for _ in range(stages - 1):
        total = evenest[:, None] + squares
        starts.append(total.argmin(0))
        evenest = total.min(0)
    end, places = len(costs), []
    for start in reversed(starts):
        end = int(start[end])
        places.append(end)
    return tuple(reversed(places))


def _part_costs(model: ModelShape, sequence_length: int | None) -> tuple[float, ...]:
    of_kind = [_block_cost(kind, sequence_length) for kind in model.kinds]
    head = sum(matmul.inputs * matmul.outputs * matmul.per_token for matmul in model.head)
    return (float(model.hidden_size), *(of_kind[number] for number in model.kind_numbers), float(head))


def _block_cost(kind: LayerKind, sequence_length: int | None) -> float:
    """Multiplications of one token's forward."""
    cost = 0.0 + sum(matmul.inputs * matmul.outputs * matmul.per_token for matmul in kind.matmuls)
    if sequence_length is not None:
        row: dict[Stream, tuple[int, ...]] = {"tokens": (sequence_length,), "source": (sequence_length,)}
        cost += sum(core.flops(row).forward for core in kind.cores) / 2 / sequence_length
    return cost


def _counts(model: ModelShape, stages: int, starts: tuple[int, ...]) -> np.ndarray:
    counts = np.zeros((stages, len(model.kinds)), dtype=np.int64)
    stage_of = np.searchsorted(np.array(starts), np.arange(1, len(model.layers) + 1), side="right")
    np.add.at(counts, (stage_of, np.array(model.kind_numbers)), 1)
    return counts
