"""What a plan sends, against counts by hand."""

import pytest

from lightning_megascale.planning.candidates import CHECKPOINTING, METHODS, SHARDING, Candidates
from lightning_megascale.planning.model_config import from_decoder_config
from lightning_megascale.planning.stacks import stack_for
from lightning_megascale.planning.traffic import plan_traffic
from lightning_megascale.planning.workload import Workload
from lightning_megascale.support import SCHEDULES

CONFIG = dict(vocab_size=1024, hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=2, intermediate_size=512, head_dim=32,
              max_position_embeddings=512,
              norm="rms", positions="rope", mlp="swiglu", qk_norm=False, bias=False, tie_embeddings=False, num_dense_layers=0,
              num_experts=0, num_experts_per_token=2, expert_intermediate_size=None, num_shared_experts=0)  # fmt: skip


def sent(batch=16, **plan):
    values = {key: plan.pop(key) for key in list(plan) if key in CONFIG}
    work = Workload(from_decoder_config(CONFIG | values), 512, batch)
    found = plan_traffic(work, stack_for("h100"), Candidates.of([plan]))
    return {(traffic.groups, traffic.kind): traffic.bytes_ for traffic in found}, work.model


def test_tensor_parallelism_gathers_and_scatters_twice_in_each_pass():
    found, _ = sent(tp=2, sequence_parallel=True, microbatch_size=4)
    whole = 4 * 512 * 256 * 2  # bytes of the hidden state of a microbatch in bfloat16
    assert found == {("tp", "ring"): 4 * 4 * 10 * whole / 2}  # microbatches x blocks x (8 passes, 2 gathers again) x half
    again, _ = sent(tp=2, sequence_parallel=True, microbatch_size=4, checkpointing=CHECKPOINTING.index("full"))
    assert again["tp", "ring"] == found["tp", "ring"] * 14 / 10


def test_sharded_parameters_are_gathered_for_each_microbatch_or_once():
    keep, model = sent(dp_shard=4, microbatch_size=2, sharding=SHARDING.index("gradients"))
    free, _ = sent(dp_shard=4, microbatch_size=2, sharding=SHARDING.index("parameters"))
    assert keep == {("fsdp", "ring"): model.parameters * 0.75 * (2 + 4)}
    assert free == {("fsdp", "ring"): model.parameters * 0.75 * (2 * 2 * 2 + 4)}
    hybrid, _ = sent(dp_shard=2, dp_replicate=4, microbatch_size=2, sharding=SHARDING.index("gradients"))
    assert hybrid["dp_replicate", "ring"] == pytest.approx(2 * 0.75 * 4 * model.parameters / 2)


def test_a_ring_passes_keys_and_values_on_and_ulysses_exchanges_heads():
    ring, _ = sent(cp=4, sharding=SHARDING.index("gradients"))
    tokens = 512 / 4
    assert ring["cp", "ring"] == 4 * 16 * 3 * (2 + 2) * tokens * 2 * 64 * 2  # blocks, microbatches, hops, (k, v; again; float32 gradients)
    ulysses, _ = sent(cp=2, method=METHODS.index("ulysses"), sharding=SHARDING.index("gradients"))
    assert ulysses["cp", "alltoall"] == 4 * 16 * 0.5 * 2 * 256 * 2 * (64 + 8 * 32) * 2


def test_experts_and_stages():
    found, model = sent(
        dp_shard=4, ep=4, num_experts=8, expert_intermediate_size=128, microbatch_size=4, sharding=SHARDING.index("gradients")
    )
    assert found["ep", "alltoall"] == 4 * 4 * 512 * (4 * 2) * 256 * 2 * 0.75  # four exchanges, tokens, blocks x top-2, bytes, 3 of 4 ranks
    assert ("expert_shard", "ring") not in found  # each expert on one rank only
    piped, _ = sent(pp=2, microbatch_size=2)
    assert piped == {("pp", "chain"): 8 * 2 * 512 * 256 * 2}
    looped, _ = sent(pp=2, microbatch_size=2, stages_per_rank=2, schedule=2)
    assert looped["pp", "ring"] == 4 * piped["pp", "chain"]


def test_a_v_holds_both_ends_on_its_first_rank_and_never_wraps():
    sent_by, model = sent(pp=2, dp_shard=2, microbatch_size=2, stages_per_rank=2, schedule=SCHEDULES.index("ZBVZeroBubble"),
                          sharding=SHARDING.index("gradients"), num_layers=6, vocab_size=32768)  # fmt: skip
    row = 2 * 512 * 256 * 2
    assert sent_by["pp", "chain"] == 4 * 2 * row and ("pp", "ring") not in sent_by
    block = next(iter(model.kinds)).parameters
    ends = model.embedding_parameters + model.head_parameters + model.vectors
    held = [count * block + ends for count in range(1, 6)]
    assert any(sent_by["fsdp", "ring"] == pytest.approx(total * 0.5 * 6) for total in held)


def test_only_parts_that_are_split_send_over_tensor_parallel_ranks():
    plain, _ = sent(tp=2, dp_shard=2, microbatch_size=4, sharding=2)
    mixed, _ = sent(tp=2, dp_shard=2, microbatch_size=4, ep=4, num_experts=8, expert_intermediate_size=128, sharding=2)
    assert mixed["tp", "ring"] == plain["tp", "ring"] * 6 / 8  # attention, and results of experts gathered both ways
    dealt, _ = sent(tp=2, dp_shard=2, microbatch_size=4, num_experts=8, expert_intermediate_size=128, sharding=2)
    assert dealt["tp", "ring"] == plain["tp", "ring"]  # experts are dealt over the same ranks, which add their results up


def test_replicas_add_up_once_however_often_shards_are_reduced():
    last, _ = sent(dp_shard=2, dp_replicate=2, microbatch_size=2, sharding=2)
    every, _ = sent(dp_shard=2, dp_replicate=2, microbatch_size=2, sharding=2, reduce_every=True)
    assert every["dp_replicate", "ring"] == last["dp_replicate", "ring"] and every["fsdp", "ring"] > last["fsdp", "ring"]
