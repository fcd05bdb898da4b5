"""The search against a brute force that knows none of its shortcuts, its rejections, and what it says when nothing can be."""

import dataclasses
from itertools import product

import numpy as np
import pytest

from lightning_megascale.models.config import DecoderConfig
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.planning.candidates import CHECKPOINTING, METHODS, SHARDING, Candidates
from lightning_megascale.planning.estimates import Setting, estimate, floor_seconds
from lightning_megascale.planning.grid import MOST_TOKENS, STAGES_PER_RANK, base_candidates, variants
from lightning_megascale.planning.memory import memory
from lightning_megascale.planning.model_config import from_decoder_config
from lightning_megascale.planning.nearest import explain_nothing
from lightning_megascale.planning.search import search
from lightning_megascale.planning.stacks import stack_for
from lightning_megascale.planning.step_time import step_time
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import SCHEDULES, ZERO_BUBBLE_SCHEDULES
from lightning_megascale.topology.describe import load_cluster

CLUSTER = load_cluster("h100_1024")
SMALL = DecoderConfig(
    vocab_size=1536, hidden_size=384, num_layers=7, num_heads=12, num_kv_heads=6, intermediate_size=1536, max_position_embeddings=2048
)
EXPERTS = dataclasses.replace(
    SMALL, num_layers=5, num_experts=12, num_experts_per_token=2, expert_intermediate_size=768, num_dense_layers=1
)


def setting(config, *, batch=96, length=768, memory_gib=1.0, gpus=64, failures=6.5):
    gpu = dataclasses.replace(CLUSTER.gpu, memory_gib=memory_gib)
    cluster = dataclasses.replace(CLUSTER.cut(gpus=gpus), gpu=gpu, failures_per_1000_node_days=failures)
    stack = dataclasses.replace(stack_for("h100"), reserve_bytes=0.0)
    shape = from_decoder_config(dataclasses.asdict(config), "small")
    return Setting(Workload(shape, length, batch), cluster, stack, memory_margin=0.0)


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


def every_plan(given, world):
    """Rows of all columns, by loops over everything, and the rules in words of one plan."""
    work, experts = given.workload, 12 if any(m.copies > 1 for k in given.workload.model.kinds for m in k.matmuls) else 0
    heads, kv_heads, features, parts = 12, 6, 1536, len(work.model.layers) + 2
    said: dict[tuple, bool] = {}
    for pp, replicate, shard, cp in product(divisors(world), repeat=4):
        if world % (pp * replicate * shard * cp):
            continue
        tp = world // (pp * replicate * shard * cp)
        if heads % tp or kv_heads % tp or features % tp or tp > 8 or (cp > 1 and work.sequence_length % (2 * cp)):
            continue
        for ep, micro, schedule, stages in product(
            divisors(shard * cp * tp) if experts else [1], divisors(work.global_batch_size), SCHEDULES, STAGES_PER_RANK
        ):
            if (experts and experts % ep) or work.global_batch_size % (micro * replicate * shard):
                continue
            if (pp == 1 and (schedule, stages) != ("1F1B", 1)) or pp * stages > parts:
                continue
            if experts and schedule in ZERO_BUBBLE_SCHEDULES:
                continue
            if micro > max(1, MOST_TOKENS * cp // work.sequence_length):
                continue
            count = work.global_batch_size // (micro * replicate * shard)
            for saving, sharding, sequence, method, every in product(
                CHECKPOINTING, SHARDING, (False, True), METHODS if cp > 1 else METHODS[:1], (False, True)
            ):
                if (sharding == "none") != (shard * cp == 1) or sharding == "optimizer" or (every and count == 1):
                    continue
                if experts and ep == 1 and not sequence and experts % tp:
                    continue
                if sequence != (tp > 1 and work.sequence_length // cp % tp == 0):  # a stated bound of the search
                    continue
                if method == "ulysses" and kv_heads % (tp * cp):
                    continue
                row = dict(
                    pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, microbatch_size=micro, stages_per_rank=stages,
                    schedule=SCHEDULES.index(schedule), checkpointing=CHECKPOINTING.index(saving), sharding=SHARDING.index(sharding),
                    sequence_parallel=sequence, method=METHODS.index(method), reduce_every=every,
                )  # fmt: skip
                above = tuple(size > 1 for size in (pp, replicate, shard, cp, tp, ep, count))
                key = (*above, stages, schedule, saving, sharding, sequence, method, every)
                if key not in said:
                    plan = Candidates.of([row]).plan(0, work.global_batch_size)
                    said[key] = not plan.check(world)
                if said[key]:
                    plan_rules = Candidates.of([row]).plan(0, work.global_batch_size) if pp > 1 else None
                    if plan_rules is None or not plan_rules.check_microbatches(count):
                        yield row


def brute_force(given, world, plans):
    """Seconds per useful step of the best of all legal plans that fits; None where none does."""
    fits = memory(given.workload, given.cluster, given.stack, plans).total <= given.memory_bytes
    fitting = plans.take(fits)
    if not len(fitting):
        return None
    seconds = step_time(given.workload, given.cluster, given.stack, fitting).total
    near = np.flatnonzero(seconds <= 1.5 * seconds.min())
    return min(given.goodput(float(seconds[index]), world, int(fitting.dp_replicate[index])).seconds_per_useful_step for index in near)


def agree(config, world, sizes):
    """How often a plan was found; the search and the brute force say the same at every size of memory, in GiB."""
    plans, found = Candidates.of(list(every_plan(setting(config), world))), 0
    for gib in sizes:
        given = setting(config, memory_gib=gib)
        expected, result = brute_force(given, world, plans), search(given, world, top=3)
        if expected is None:
            assert not result.best
            continue
        assert result.best[0].goodput.seconds_per_useful_step == pytest.approx(expected, rel=1e-12)
        assert not result.plan().check(world)
        found += 1
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 16])
def test_no_plan_is_better_than_the_one_found(world):
    assert agree(SMALL, world, (0.02, 0.08, 0.35, 8.0)) >= 2


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8])
def test_nor_with_experts(world):
    assert agree(EXPERTS, world, (0.05, 0.15, 0.5, 2.0, 8.0)) >= 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_on_every_world_up_to_64_gpus(config):
    found = [agree(config, world, (0.05, 0.2, 2.0)) for world in range(1, 65) if world <= 8 or world % 8 == 0]
    assert len(found) == 15 and min(found) >= 1


def test_every_combination_is_accounted_for():
    given = setting(SMALL, memory_gib=0.35)
    found = search(given, 16, top=4)
    assert len(found.best) == 4 and sum(found.rejected.values()) + 4 == found.considered
    useful = [plan.goodput.seconds_per_useful_step for plan in found.best]
    assert useful == sorted(useful) and all(plan.fits and plan.gpus == 16 for plan in found.best)
    assert any("GB of a h100" in reason for reason in found.rejected)


def test_the_bound_is_below_every_step_time_and_saving_memory_only_costs_time():
    given = setting(SMALL, memory_gib=8.0)
    bases, _ = base_candidates(given.workload, 16, most_tensor=8)
    plain = step_time(given.workload, given.cluster, given.stack, bases).total
    assert (floor_seconds(given, bases) <= plain).all()
    saved, owner = variants(bases, given.workload.global_batch_size)
    assert (step_time(given.workload, given.cluster, given.stack, saved).total >= plain[owner] * (1 - 1e-9)).all()


def test_a_fixed_column_is_kept_and_an_unknown_one_refused():
    given = setting(SMALL, memory_gib=8.0)
    found = search(given, 16, top=5, fixed={"tp": 2, "pp": 2, "microbatch_size": 3, "checkpointing": 2})
    assert found.best
    for plan in found.best:
        columns = plan.candidates.columns()
        assert [int(columns[name][0]) for name in ("tp", "pp", "microbatch_size", "checkpointing")] == [2, 2, 3, 2]
    with pytest.raises(ValueError, match="fixed: tensor is no column; there are pp, "):
        search(given, fixed={"tensor": 2})
    with pytest.raises(ValueError, match="gpus=65: cluster 'h100_1024' has 64"):
        search(given, 65)


def test_failures_reverse_the_first_two_plans():
    """Twice the GPUs make a faster step, and where nodes fail every few minutes the smaller plan trains more in a day."""
    from lightning_megascale.planning.goodput import Reliability

    given = setting(SMALL, memory_gib=8.0, gpus=64)
    often = dataclasses.replace(given, reliability=Reliability(failures_per_node_year=40000.0, detection_seconds=100, restart_seconds=400))
    large, small = (search(given, gpus, top=1).best[0] for gpus in (64, 32))
    assert large.step_seconds < small.step_seconds
    assert large.goodput.seconds_per_useful_step < small.goodput.seconds_per_useful_step
    after = [often.goodput(plan.step_seconds, plan.gpus, 1).seconds_per_useful_step for plan in (large, small)]
    assert after[0] > after[1]


def test_replicas_win_where_a_failure_costs_only_one_of_them():
    from lightning_megascale.planning.goodput import Reliability

    often = Reliability(failures_per_node_year=4000.0, replica_recovery=True, restart_seconds=600.0, detection_seconds=1.0)
    given = dataclasses.replace(setting(SMALL, memory_gib=8.0, gpus=64), reliability=often)
    free, single = search(given, 64, top=1).best[0], search(given, 64, top=1, fixed={"dp_replicate": 1}).best[0]
    assert int(free.candidates.dp_replicate[0]) > 1 and free.goodput.share > single.goodput.share


def test_a_request_that_cannot_be_says_which_rule_and_what_is_nearest():
    given = setting(SMALL, memory_gib=0.35)
    fixed = {"tp": 8}
    found = search(given, 16, fixed=fixed)
    assert not found.best
    text = explain_nothing(found, fixed)
    assert "num_heads=12 is not divisible by tensor_parallel_size" in text and "nearest: tp=" in text
    starved = setting(dataclasses.replace(SMALL, num_layers=40, hidden_size=1536), memory_gib=0.5, gpus=64)
    found = search(starved, 8)
    text = explain_nothing(found)
    assert "the one that needs least memory needs at least" in text and "nearest found: gpus=16" in text


def test_a_mixture_names_its_cut():
    given = setting(EXPERTS, memory_gib=8.0)
    found = search(given, 8, top=1, fixed={"pp": 4})
    plan = found.plan()
    assert isinstance(plan.pipeline_split, list) and len(plan.pipeline_split) == 4 * plan.pipeline_stages_per_rank - 1
    assert set(plan.pipeline_split) <= {"last", *(f"layers.{number}" for number in range(5))} and not plan.check(8)


def test_one_plan_is_estimated_as_the_search_does():
    given = setting(SMALL, memory_gib=8.0)
    best = search(given, 16, top=1)
    again = estimate(given.workload, given.cluster, best.plan().resolve(16), stack=given.stack)
    assert again.step_seconds == pytest.approx(best.best[0].step_seconds, rel=1e-12)
    assert again.memory_bytes == pytest.approx(best.best[0].memory_bytes, rel=1e-12)
    assert sum(again.shares.values()) == pytest.approx(1, abs=1e-9)
    with pytest.raises(ValueError, match="it needs 128 GPUs, and cluster 'h100_1024' has 64"):
        estimate(given.workload, given.cluster, Candidates.of([{"dp_replicate": 128}]))


def test_preset_175b_fits_1024_gpus_only_with_a_pipeline_or_tensor_parallelism():
    given = Setting(
        Workload(from_decoder_config(dataclasses.asdict(PRESETS["dense_175b"]), "175b"), 2048, 1024), CLUSTER, stack_for("h100")
    )
    found = search(given, top=3)
    assert found.best and all(int(plan.candidates.pp[0] * plan.candidates.tp[0]) > 1 for plan in found.best)


def test_the_package_gives_the_estimate_by_name():
    from lightning_megascale import planning

    assert planning.estimate is estimate and "estimate" in planning.__all__
    with pytest.raises(AttributeError, match="has no attribute 'guess'"):
        planning.guess  # noqa: B018
