"""What stands under the dry run: the recorder against counts by hand, what it replaces in torch and here, and linear extension."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_megascale.verification.dryrun import fakes, recorder
from lightning_megascale.verification.dryrun.extend import added, line, round_of, traced_microbatches
from lightning_megascale.verification.dryrun.processes import in_processes
from lightning_megascale.verification.dryrun.subject import counts_of, owned, resized, shrunk
from tests.verification.dryruns import changed, subject_of


def recorded(function):
    """The recorder of a function that ran on fake tensors, in this process, where nothing of torch is replaced."""
    with FakeTensorMode(), recorder.Recorder({}) as found:
        function()
    return found


def test_memory_of_tensors_that_come_and_go():
    def work():
        a = torch.empty(1000, dtype=torch.float32)
        b = a + 1  # 8,000 bytes live
        del a
        c = b.view(10, 100)[:5]  # no storage of its own
        d = torch.empty(250, dtype=torch.float64)  # 6,000
        del b, c
        return d

    found = recorded(work)
    assert found.peak == 8000 and found.live == 0


def test_flops_of_attention_and_of_products_in_place():
    def work():
        q = torch.empty(2, 3, 8, 4, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        torch.empty(5, 7).addmm_(torch.empty(5, 6), torch.empty(6, 7))

    found = recorded(work)
    pairs = 2 * 3 * (8 * 9 // 2)
    assert found.flops["forward"] == 2 * (2 * pairs * 4) + 2 * 5 * 6 * 7
    assert found.flops["backward"] == 5 * (2 * pairs * 4)


def test_an_unknown_collective_is_an_error():
    with pytest.raises(NotImplementedError, match="does not know the collective c10d::gather_"):
        recorder.Recorder({})._note("c10d::gather_", (), None)


def _global_shapes(_):
    """A first product of DTensors: torch runs it at its global shape to learn the result's."""
    fakes.become_rank(0, 4)
    recorder.install()
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    with FakeTensorMode(allow_non_fake_inputs=True), recorder.Recorder({}) as found:
        a = DTensor.from_local(torch.empty(8, 16), mesh, [Replicate()], run_check=False)
        b = DTensor.from_local(torch.empty(16, 5), mesh, [Shard(1)], run_check=False)
        product = a @ b
    return found.flops["forward"], tuple(product.shape)


def test_propagation_of_shapes_is_no_work():
    assert in_processes(_global_shapes, [None], 1) == [(2 * 8 * 16 * 5, (8, 20))]


def test_what_is_replaced_is_there():
    """Names that are private to torch or to a module of ours: when one goes, the dry run has to follow."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils import checkpoint

    from lightning_megascale.models import moe
    from lightning_megascale.ops import dispatch
    from lightning_megascale.parallel import expert, parallelize, tensor_proof

    assert callable(getattr(ShardingPropagator, recorder.PROPAGATION)) and FakeStore
    hook = getattr(checkpoint, recorder.RECOMPUTATION)
    assert callable(hook.__enter__) and callable(hook.__exit__)
    assert all(callable(getattr(PipelineStage, name)) for name in fakes.VOTES)
    assert hasattr(torch.distributed.distributed_c10d._world, "pg_map") and torch._C._current_graph_task_id() == -1
    assert tensor_proof._enabled is True
    assert moe.check_choice is expert.check_choice and callable(expert.host_name) and callable(expert._nodes)
    assert callable(parallelize.expert_views)
    assert all(callable(getattr(dispatch, name)) for name in ("_by_expert", "_share_counts", "_expert_ids", "bytes_across"))


def _failing(job):
    if job == "user":
        raise ValueError("said to the user")
    if job == "gone":
        import os

        os._exit(9)
    raise KeyError("inside")


@pytest.mark.parametrize(
    ("job", "kind", "message"),
    [("user", ValueError, "^said to the user$"), ("gone", RuntimeError, "exit code 9"), ("bug", RuntimeError, "KeyError: 'inside'")],
)
def test_processes_that_fail(job, kind, message):
    with pytest.raises(kind, match=message):
        in_processes(_failing, [job, job], 1)


def test_extension():
    assert line({"a": 10, "c": 2}, {"a": 16, "b": 4}, 2, 5) == {"a": 25, "b": 10, "c": -3}
    assert added({"a": 10}, ({"a": 13}, 1, 4), ({"a": 14, "b": 2}, 2, 6)) == {"a": 10 + 4 * 3 + 3 * 4, "b": 6}


@pytest.mark.parametrize(
    ("given", "few"),
    [
        ((64, 8, None), (9, 10)),
        ((10, 8, None), (10,)),
        ((8, 1, None), (2, 3)),
        ((64, 8, 2), (16, 24)),
        ((24, 8, 2), (24,)),
        ((36, 8, 2), (18, 27)),  # four rounds of nine
        ((44, 8, 2), (44,)),  # four rounds of eleven; three of them would be four of eight
        ((64, 8, 3), (24, 32)),
    ],
)
def test_microbatches_that_are_traced(given, few):
    assert traced_microbatches(*given) == few


def test_rounds():
    assert [round_of(count, 8) for count in (8, 9, 16, 36, 44, 64)] == [8, 9, 8, 9, 8, 8]


def test_small_models_have_the_same_stages():
    subject = subject_of(changed("tiny_moe", num_layers=12, num_dense_layers=5), pipeline_parallel_size=4, global_batch_size=16)
    counts = counts_of(subject.config, subject.plan)
    assert sum(dense for dense, _ in counts) == 5 and sum(moe for _, moe in counts) == 7 and len(counts) == 4
    small = resized(subject, shrunk(counts, 2, 1))
    assert counts_of(small.config, small.plan) == tuple((min(dense, 2), min(moe, 1)) for dense, moe in counts)
    assert owned(counts, (0, 3)) == {"dense": counts[0][0] + counts[3][0], "moe": counts[0][1] + counts[3][1]}
