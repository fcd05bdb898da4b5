"""The dry run against what arithmetic, real ranks, the planner and a full trace say."""

import dataclasses

import pytest
import torch

from lightning_megascale.planning.model_config import from_decoder_config
from lightning_megascale.planning.workload import Workload
from lightning_megascale.verification.dryrun import compare
from lightning_megascale.verification.dryrun.result import Difference
from tests.verification.dryruns import changed, dry_run, figures, subject_of

DENSE = subject_of(pipeline_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True)


@pytest.fixture(scope="module")
def dense():
    """pp2 x fsdp2 x tp2, two layers, eight microbatches of one row."""
    return dry_run(DENSE)


def test_bytes_are_those_of_the_shards(dense):
    """Matrices are split by tp and by fsdp, norms by fsdp alone; gradients are float32 as parameters are, AdamW keeps two moments."""
    config = DENSE.config
    hidden, width, vocabulary, tp, fsdp = config.hidden_size, config.intermediate_size, config.vocab_size, 2, 2
    layer = 4 * hidden * hidden + 3 * hidden * width
    assert config.num_kv_heads * config.head_dim == hidden
    whole = [(layer + vocabulary * hidden, 2 * hidden, 11), (layer + vocabulary * hidden, 3 * hidden, 11)]
    for trace, (matrices, vectors, _) in zip(dense.stages, whole):
        held = 4 * (matrices // tp + vectors) // fsdp
        assert trace.parameters == matrices + vectors
        assert trace.parameters_bytes == trace.gradient_bytes == held
        tensors = 7 + 1 + vectors // hidden
        assert trace.optimizer_bytes == 2 * held + 4 * tensors  # and a step number for each tensor
    assert dense.parameters == from_decoder_config(dataclasses.asdict(config)).parameters
    assert dense.world_size == 8 and [trace.rank for trace in dense.stages] == [0, 4]
    assert [trace.groups for trace in dense.stages] == [4, 4]  # pp, dp_shard, tp and the default one


def test_flops_are_the_planners_to_the_last_one(dense):
    shape = from_decoder_config(dataclasses.asdict(DENSE.config))
    workload = Workload(shape, DENSE.sequence_length, 16)
    layer, head = workload.layer_flops(shape.layers[0], flash=True).total, workload.head_flops().total
    assert [trace.flops for trace in dense.stages] == [8 * layer // 2, 8 * (layer + head) // 2]
    assert all(trace.recomputed_flops == 0 for trace in dense.stages)
    exact = [entry for entry in dense.differences if entry.name in ("parameters", "FLOP per step", "parameters, bytes")]
    assert len(exact) == 6 and all(entry.relative == 0 for entry in exact)
    assert max(entry.relative for entry in compare.judged(dense.differences)) < 0.001  # numbers of steps in the optimizer


def test_messages_by_hand(dense):
    """A layer under sequence parallelism: attention and MLP each gather their input, gather it again in the backward, and gather the
    gradient of their output; they scatter their output, and the gradient of their input. The embedding scatters once and gathers once."""
    rows, length, hidden = 8, DENSE.sequence_length, DENSE.config.hidden_size
    whole = 2 * rows * length * hidden  # bytes of a step's activations in bfloat16
    first, last = ({(row.axis, row.operation, row.dtype): (row.calls, row.bytes_) for row in trace.traffic} for trace in dense.stages)
    assert first["tp", "all_gather", "bfloat16"] == (rows * 7, 7 * whole)
    assert first["tp", "reduce_scatter", "bfloat16"] == (rows * 5, 5 * whole)
    assert first["pp", "send", "bfloat16"] == first["pp", "recv", "bfloat16"] == last["pp", "send", "bfloat16"] == (rows, whole // 2)
    sharded = first["dp_shard", "all_gather", "bfloat16"]
    assert sharded == (2, dense.stages[0].parameters_bytes)  # a block and the rest, once: 2 of 4 bytes, and from 2 ranks
    assert first["dp_shard", "reduce_scatter", "float32"] == (2, 2 * sharded[1])
    assert dense.stages[0].comm_bytes["pp"] < whole // 2 + 100  # what is received is its sender's


def test_schedule_and_microbatches_in_flight(dense):
    first, last = dense.stages
    assert first.in_flight == 2 and last.in_flight == 1
    few = 4  # microbatches that were traced
    assert first.schedule[:5] == ("F0.0", "F0.1", "B0.0", "F0.2", "B0.1") and len(first.schedule) == 2 * few
    assert last.schedule == tuple(f"{what}1.{number}" for number in range(few) for what in "FB")


def test_extension_is_the_full_trace_dense():
    """Seven layers in two stages and six microbatches, extended and whole."""
    subject = subject_of(changed("tiny", num_layers=7), pipeline_parallel_size=2, activation_checkpointing="full", global_batch_size=12)
    assert figures(dry_run(subject)) == figures(dry_run(subject, full=True))


def test_recomputed_products_are_counted_apart():
    """Full recomputation runs each block's forward again, but for the last product, of whose result nothing is kept."""
    subject = subject_of(changed("tiny", num_layers=1), activation_checkpointing="full", global_batch_size=4)
    (trace,) = dry_run(subject).stages
    shape = from_decoder_config(dataclasses.asdict(subject.config))
    layer = Workload(shape, subject.sequence_length, 4).layer_flops(shape.layers[0], flash=True)
    last = next(matmul for matmul in shape.layers[0].matmuls if matmul.name == "mlp.down_proj").flops(subject.sequence_length)
    assert trace.recomputed_flops == 2 * (layer.forward - last.forward)


def test_ranks_that_exist_hold_the_same():
    """Parameters, gradients and the optimizer's state of a real step on four gloo ranks (pp2 x fsdp2)."""
    from tests.harness import run_ranks

    subject = subject_of(pipeline_parallel_size=2, precision="32-true", global_batch_size=4)
    held, groups = run_ranks(_really_held, 4, subject), run_ranks(_groups_of_mesh, 4, subject)
    for trace in dry_run(subject).stages:
        assert held[trace.rank] == (trace.parameters_bytes, trace.gradient_bytes, trace.optimizer_bytes)
        assert groups[trace.rank] == trace.groups


def _groups_of_mesh(subject):
    from lightning_megascale.mesh import build_mesh
    from lightning_megascale.verification.dryrun.fakes import number_of_groups

    build_mesh(subject.plan, "cpu")
    return number_of_groups()


def _really_held(subject):
    import lightning.pytorch as pl

    from lightning_megascale import MegascaleStrategy
    from lightning_megascale.module import MegascaleModule
    from lightning_megascale.verification.dryrun.measure import storage_bytes
    from lightning_megascale.verification.dryrun.rank import local

    held = []

    class Look(pl.Callback):
        def on_before_zero_grad(self, trainer, module, optimizer):
            parameters = [p for p in module.parameters() if p.grad is not None]
            state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
            if state:
                kinds = (parameters, [p.grad for p in parameters], state)
                held.append(tuple(storage_bytes([local(t) for t in tensors]) for tensors in kinds))

    rows = subject.rows * subject.microbatches
    batch = {"input_ids": torch.zeros(rows, 64, dtype=torch.int64), "labels": torch.zeros(rows, 64, dtype=torch.int64)}
    trainer = pl.Trainer(
        strategy=MegascaleStrategy(plan=subject.plan), accelerator="cpu", devices=4, max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[Look()],
    )  # fmt: skip
    trainer.fit(MegascaleModule(model=dataclasses.asdict(subject.config)), torch.utils.data.DataLoader([batch] * 2, batch_size=None))
    return held[-1]


def test_experts_are_balanced_and_extended():
    """Dense and expert layers in one stage, experts over two ranks: FLOPs are the planner's but for the row that stands for no expert."""
    config = changed("tiny_moe", num_layers=7, num_dense_layers=3)
    subject = subject_of(config, length=128, expert_parallel_size=2, pipeline_parallel_size=2, global_batch_size=12)
    run = dry_run(subject)
    assert run.parameters == from_decoder_config(dataclasses.asdict(config)).parameters
    assert 0 < max(entry.relative for entry in run.differences if entry.name == "FLOP per step") < 0.01
    compare.check(run.differences)
    exchanged = {(row.operation, row.dtype): row for row in run.stages[1].traffic if row.axis == "ep"}["all_to_all", "bfloat16"]
    tokens = 6 * subject.sequence_length * config.num_experts_per_token * config.hidden_size * 2
    layers = run.stages[1].layers["moe"]
    assert exchanged.bytes_ == 4 * layers * tokens  # there and back, forward and backward
    assert figures(run) == figures(dry_run(subject, full=True))


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_context_parallelism(method):
    """A rank's tokens, and one spare place where the label of the next rank's first token stands."""
    subject = subject_of(length=512, context_parallel_size=2, label_alignment="shift", context_parallel_method=method, global_batch_size=4)
    (trace,) = dry_run(subject).stages
    config, tokens, rows = subject.config, 512 // 2 + 1, 2
    traffic = {(row.operation, row.dtype): row.bytes_ for row in trace.traffic if row.axis == "cp"}
    heads = 2 * rows * tokens * config.hidden_size * config.num_layers  # bytes of q, k, v or the output in bfloat16
    if method == "ulysses":
        assert traffic == {("all_to_all", "bfloat16"): 8 * heads}
    else:  # keys and values once forward and once backward; their gradients, in float32, one hop
        assert traffic["send", "bfloat16"] == 4 * heads and traffic["send", "float32"] == 4 * heads
    assert trace.parameters_bytes * 4 == 4 * trace.parameters  # fsdp over dp_shard x cp


def test_a_planner_that_is_far_off_is_an_error():
    near, far = Difference(0, "FLOP per step", 100.0, 104.0), Difference(3, "FLOP per step", 100.0, 106.0)
    compare.check([near])
    with pytest.raises(compare.PlannerDisagrees, match=r"stage 3: FLOP per step is 100 in the dry run and 106 in the planner, 6.0% off"):
        compare.check([near, far])


def test_a_wrong_planner_is_found(dense):
    """A layer less in the planner's model."""
    wrong = dataclasses.replace(DENSE, config=dataclasses.replace(DENSE.config, intermediate_size=96))
    differences = compare.compare(wrong, dense.stages, {0: (True, False), 1: (False, True)})
    assert {"parameters", "FLOP per step"} < {entry.name for entry in differences if entry.relative > compare.TOLERANCE}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": True}, "plan.compile: a compiler decides"),
        ({"tensor_parallel_size": 8, "sequence_parallel": True}, "4 heads of head_dim=16 are not divisible by tensor_parallel_size=8"),
    ],
)
def test_what_cannot_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dry_run(subject_of(**changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline_schedule": "GPipe"},
        {"pipeline_schedule": "Interleaved1F1B", "pipeline_stages_per_rank": 2},
        {"pipeline_schedule": "InterleavedZeroBubble", "pipeline_stages_per_rank": 2},
        {"pipeline_schedule": "ZBVZeroBubble", "pipeline_stages_per_rank": 2},
        {"reduce_gradients": "every"},
        {"reshard_after_forward": True},
        {"data_parallel_replicate_size": 2},
        {"pipeline_parallel_size": 1},
        {"pipeline_parallel_size": 4},
        {"tensor_parallel_size": 2, "sequence_parallel": True, "activation_checkpointing": "selective"},
    ],
    ids=str,
)
def test_extension_is_the_full_trace(changes):
    """Every figure of ten layers and 32 microbatches; the peak, which may lie at another moment of a longer step, to half a percent."""
    subject = subject_of(changed("tiny", num_layers=10), **{"pipeline_parallel_size": 2, "global_batch_size": 64, **changes})
    extended, full = figures(dry_run(subject)), figures(dry_run(subject, full=True))
    peaks = [[stage.pop("peak_bytes") for stage in stages] for stages in (extended, full)]
    assert extended == full
    assert peaks[0] == pytest.approx(peaks[1], rel=0.005)
