"""Cuts into pipeline stages: optimal by brute force, who owns which stage, splits by hand, and what is said of wrong ones."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megascale.layout import ModuleInfo
from lightning_megascale.parallel.pipeline_split import Stages, check_split, cut_by_cost, cut_stages, module_cost, owners_of

WIDTH, BLOCKS = 8, ("layers.0", "layers.1", "layers.2", "layers.3")


def infos(vocabulary: int = 16, depth: int = 4) -> list[ModuleInfo]:
    """Embedding, blocks of one matrix and one norm vector, norm, head."""
    square = (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
    blocks = [
        info
        for n in range(depth)
        for info in (
            ModuleInfo(f"layers.{n}", "Block"),
            ModuleInfo(f"layers.{n}.linear", "Linear", square),
            ModuleInfo(f"layers.{n}.norm", "RMSNorm", (("weight", (WIDTH,)),)),
        )
    ]
    table = (("weight", (vocabulary, WIDTH)),)
    return [
        ModuleInfo("", "Net"),
        ModuleInfo("embed", "Embedding", table),
        ModuleInfo("layers", "ModuleList"),
        *blocks,
        ModuleInfo("norm", "RMSNorm", (("weight", (WIDTH,)),)),
        ModuleInfo("head", "Linear", table),
    ]


def cut(vocabulary: int = 16, ranks: int = 2, **options: Any) -> Stages:
    options = {**dict(stages_per_rank=1, schedule="1F1B"), **options}
    return cut_stages(["embed"], BLOCKS, ["norm", "head"], infos(vocabulary), ranks=ranks, **options)


# ---- the cut ---------------------------------------------------------------------------------------------------------------


def sums(costs: list[float], starts: tuple[int, ...]) -> list[float]:
    return [sum(costs[a:b]) for a, b in pairwise((0, *starts, len(costs)))]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9), st.data())
def test_the_cut_is_the_best_of_all(costs: list[float], data: Any) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    starts = cut_by_cost(costs, stages)
    assert len(starts) == stages - 1 and all(a < b for a, b in pairwise((0, *starts, len(costs)))), starts

    def rating(cuts: tuple[int, ...]) -> tuple[float, float]:
        """The dearest stage, then how uneven all are."""
        return max(sums(costs, cuts)), sum(cost**2 for cost in sums(costs, cuts))

    assert rating(starts) == min(rating(cuts) for cuts in combinations(range(1, len(costs)), stages - 1))


def test_among_equally_good_cuts_the_rest_is_spread() -> None:
    assert cut_by_cost([9.0, 1.0, 1.0, 1.0, 1.0], 3) == (1, 3)
    assert cut_by_cost([4.0, 5.0, 9.0, 1.0, 10.0, 10.0], 5) == (1, 2, 4, 5), "4 | 5 | 9 1 | 10 | 10"


def test_layers_need_not_divide() -> None:
    assert [len(part) for part in _parts([1.0] * 7, 3)] in ([2, 2, 3], [2, 3, 2], [3, 2, 2])


def _parts(costs: list[float], stages: int) -> list[list[float]]:
    return [costs[a:b] for a, b in pairwise((0, *cut_by_cost(costs, stages), len(costs)))]


def test_fewer_units_than_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="2 units cannot make 3 pipeline stages"):
        cut_by_cost([1.0, 1.0], 3)


def test_many_layers_and_stages_are_cut_in_no_time() -> None:
    starts = cut_by_cost([1.0] * 200, 32)
    assert len(starts) == 31 and max(sums([1.0] * 200, starts)) == 7


# ---- costs -----------------------------------------------------------------------------------------------------------------


def test_a_modules_cost_is_its_matrix_work() -> None:
    modules = infos(vocabulary=1000)
    assert module_cost("layers.0", modules) == WIDTH * WIDTH + WIDTH + WIDTH
    assert module_cost("head", modules) == 1000 * WIDTH and module_cost("norm", modules) == WIDTH
    assert module_cost("embed", modules) == WIDTH, "a lookup reads one row"
    assert module_cost("layers", modules) == 4 * module_cost("layers.3", modules)
    assert module_cost("layers.1", [*modules, ModuleInfo("layers.10", "Linear", (("weight", (9, 9)),))]) == module_cost("layers.1", modules)


def test_a_heavy_head_gets_a_stage_of_its_own() -> None:
    stages = cut(vocabulary=1000)
    assert stages.units == (("embed", *BLOCKS), ("norm", "head"))
    head = 1000 * WIDTH + WIDTH
    blocks = 4 * (WIDTH * WIDTH + 2 * WIDTH) + WIDTH
    assert stages.costs == pytest.approx((blocks / (blocks + head), head / (blocks + head)))


def test_a_light_head_shares_its_stage() -> None:
    assert cut(vocabulary=1).units == (("embed", "layers.0", "layers.1"), ("layers.2", "layers.3", "norm", "head"))


def test_with_many_stages_embedding_and_head_stand_alone() -> None:
    assert cut(ranks=6).units == (("embed",), *((block,) for block in BLOCKS), ("norm", "head"))


def test_names_are_found_by_whole_parts() -> None:
    stages = Stages((("embed", "layers.1"), ("layers.10", "norm")), (0, 1))
    assert stages.stage_of("layers.1") == stages.stage_of("layers.1.linear.weight") == 0
    assert stages.stage_of("layers.10.linear.weight") == 1 and stages.stage_of("layers.2") is None and stages.stage_of("normal") is None
    assert stages.order == ("embed", "layers.1", "layers.10", "norm") and len(stages) == 2


# ---- owners ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "ranks", "schedule", "owners"),
    [
        (4, 4, "1F1B", (0, 1, 2, 3)),
        (4, 2, "Interleaved1F1B", (0, 1, 0, 1)),
        (9, 3, "InterleavedZeroBubble", (0, 1, 2) * 3),
        (4, 2, "ZBVZeroBubble", (0, 1, 1, 0)),
        (8, 4, "ZBVZeroBubble", (0, 1, 2, 3, 3, 2, 1, 0)),
    ],
)
def test_owners(stages: int, ranks: int, schedule: str, owners: tuple[int, ...]) -> None:
    assert owners_of(stages, ranks, schedule) == owners


def test_a_v_gives_the_first_rank_both_ends() -> None:
    stages = cut(ranks=2, stages_per_rank=2, schedule="ZBVZeroBubble")
    assert stages.of_rank(0) == (0, 3) and stages.of_rank(1) == (1, 2)
    assert stages.units[0][0] == "embed" and stages.units[3][-1] == "head"


def test_a_loop_goes_round() -> None:
    stages = cut(ranks=2, stages_per_rank=3, schedule="Interleaved1F1B")
    assert stages.of_rank(0) == (0, 2, 4) and stages.of_rank(1) == (1, 3, 5)


# ---- by hand ---------------------------------------------------------------------------------------------------------------


def test_a_split_by_hand_is_taken_as_it_is() -> None:
    assert cut(vocabulary=1000, split=["layers.1"]).units == (("embed", "layers.0"), (*BLOCKS[1:], "norm", "head"))
    assert cut(ranks=3, split=["layers.0", "last"]).units == (("embed",), BLOCKS, ("norm", "head"))
    assert sum(cut(split=["layers.1"]).costs) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("split", "stages", "said"),
    [
        (["layers.1"], 3, ["pipeline_split=['layers.1']: 1 names make 2 pipeline stages", "= 3 are needed: give 2"]),
        (["layers.1", "layers.2"], 2, ["2 names make 3 pipeline stages", "give 1, the block with which each stage but the first begins"]),
        (["layer.1"], 2, ["pipeline_split: 'layer.1' is no block; blocks are layers.0 ... layers.3, then 'last'"]),
        (["head", "norm"], 3, ["'head', 'norm' is no block"]),
        (["layers.2", "layers.1"], 3, ["must stand in the order of the model, each once"]),
        (["layers.2", "layers.2"], 3, ["['layers.2', 'layers.2']", "each once"]),
        (["last", "layers.2"], 3, ["must stand in the order of the model"]),
        (["layers.9"], 3, ["1 names make 2", "'layers.9' is no block"]),
    ],
)
def test_a_wrong_split_is_explained(split: list[str], stages: int, said: list[str]) -> None:
    text = "\n".join(check_split(split, BLOCKS, stages))
    for part in said:
        assert part in text, text


def test_a_right_split_passes() -> None:
    assert check_split("auto", BLOCKS, 9) == []
    assert check_split(["layers.3", "last"], BLOCKS, 3) == [] == check_split(("layers.0",), BLOCKS, 2)


def test_too_many_stages_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError) as caught:
        cut(ranks=4, stages_per_rank=2, schedule="Interleaved1F1B")
    text = str(caught.value)
    assert text.startswith("pipeline_parallel_size=4 x pipeline_stages_per_rank=2 = 8 pipeline stages, and the model has 6 parts")
    assert "(embedding, 4 blocks, head): use fewer stages or a deeper model" in text
