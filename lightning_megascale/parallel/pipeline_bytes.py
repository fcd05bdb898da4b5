"""Bytes that a pipeline stage's parameters, gradients, optimizer state and receive buffers need at their peak under FSDP2: pure arithmetic.

What torch does, and what therefore stands below (p, r, o: bytes of a number in forward and backward, in the reduction, in the optimizer):

- ``PipelineStage`` turns resharding after backward off until the schedule's last backward, so from a backward on all of the stage's
  parameters lie there whole (p each). With ``reshard_after_forward=True`` a stage (``CallStage``) frees a block after its forward and
  after its backward: whole are the root, the block at work, the one gathered ahead, and the output of that gather.
- ``reduce_gradients="last"``: gradients stay whole in the reduction's dtype (r each) until the schedule has ended. Where r is wider than p,
  a unit's gradients of one microbatch are first made in p, and are added when that unit's backward is over; the root unit's is over last,
  and the head's gradients, which come first, wait for it.
- The reduction then goes unit by unit, root first: its parameters are freed, its gradients copied into the reduce-scatter's input (r each),
  freed, and the shard of the sum kept. One input at a time. The last gradient of a unit is freed late, only when the sum is there: in the
  root unit that is the embedding's or the head's, nearly all of it.
- ``reduce_gradients="every"``: gradients are reduced when a unit's backward is over, so whole ones exist for one unit only (p each), beside
  the input of its reduce-scatter (r each), or of the unit before, or input and output; sharded ones for all.
- Every microbatch has its own receive buffers, for the hidden state and for its gradient, which are kept from step to step.

Not counted: activations, and what one operator's backward makes before it is added to the gradient (one parameter, p each).

Source: derived from torch 2.13, ``torch/distributed/pipelining/stage.py`` (``backward_maybe_with_nosync``, ``perform_reduce_grad``) and
``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`` (``post_backward``), ``_fsdp_collectives.py`` (``foreach_reduce``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageBytes:
    """Bytes on one rank at the peak within a schedule call, by what they are for.

    Args:
        shards: this rank's shard of the parameters.
        optimizer: the optimizer's state.
        receive: buffers of all microbatches.
        gathered: whole parameters.
        gradients: gradients that are kept, whole or sharded.
        working: gradients of the unit at work, and inputs and outputs of its collectives.
    """

    shards: int
    optimizer: int
    receive: int
    gathered: int
    gradients: int
    working: int

    @property
    def total(self) -> int:
        return self.shards + self.optimizer + self.receive + self.gathered + self.gradients + self.working


def stage_bytes(
    root: int,
    blocks: Sequence[int],
    *,
    is_last: bool,
    shard_size: int,
    microbatches: int,
    received: int = 0,
    sent: int = 0,
    parameter: int = 4,
    compute: int = 4,
    reduce: int = 4,
    states: int = 2,
    reduce_gradients: str = "last",
    reshard_after_forward: bool = False,
    accumulated: bool = False,
) -> StageBytes:
    """The peak of a rank with one pipeline stage, at the schedules "GPipe" and "1F1B" and two microbatches or more.

    Args:
        root: parameters of the stage outside its blocks: embedding, or norm and head.
        blocks: parameters of each block, in order; this rank's tensor-parallel part of them.
        is_last: the root's parameters come after the blocks.
        shard_size: ranks over which FSDP2 shards.
        microbatches: of one schedule call.
        received, sent: bytes of the hidden state of one microbatch that crosses the stage's two boundaries; 0 at the ends.
        parameter, compute, reduce: bytes of a number: parameters and optimizer state; forward and backward; sum of gradients over ranks.
        states: numbers that the optimizer keeps for each parameter.
        reduce_gradients: "last" or "every".
        reshard_after_forward: True frees parameters after their forward and backward.
        accumulated: earlier schedule calls of the same optimizer step have left sharded gradients.

    Raises:
        ValueError: for other values of ``reduce_gradients``.
    """
    if reduce_gradients not in ("last", "every"):
        raise ValueError(f"reduce_gradients={reduce_gradients!r}: must be 'last' or 'every'")
    units = [root, *blocks]
    whole = sum(units)
    shard = -(-whole // shard_size)
    fixed = dict(
        shards=shard * parameter,
        optimizer=shard * parameter * states,
        receive=microbatches * (received + sent),
    )
    sharded = shard * parameter
    waiting = root * compute if is_last else 0  # the head's gradients, while the blocks' are made
    largest = max(blocks, default=0)
    output = reduce / shard_size  # of a reduce-scatter
    ahead = min(2, len(blocks)) * largest * compute  # the block gathered ahead, and the output of its gather
    if reshard_after_forward:
        gathered = (root + largest) * compute
    else:
        gathered, ahead = whole * compute, 0
    if reduce_gradients == "every" and reshard_after_forward:
        working = root * (compute + reduce) + ahead if is_last else largest * (compute + reduce) + ahead // max(1, min(2, len(blocks)))
        return StageBytes(**fixed, gathered=gathered, gradients=sharded, working=working)
    if reduce_gradients == "every":
        block = waiting + largest * max(compute + reduce, int(reduce + output))
        working = max(block, int(root * (compute + reduce + output)), root * compute + largest * reduce)
        return StageBytes(**fixed, gathered=whole * compute, gradients=sharded, working=working)
    kept = sharded if accumulated else 0
    working = ahead
    if reduce > compute and reshard_after_forward:
        working += waiting
    elif reduce > compute:
        working = waiting + largest * compute if is_last else max(root, largest) * compute
    candidates = [StageBytes(**fixed, gathered=gathered, gradients=whole * reduce + kept, working=working)]
    for place, unit in enumerate(units):
        done, left = sum(units[:place]), sum(units[place + 1 :])
        gradients = (unit + left) * reduce + (kept or done * parameter // shard_size)
        working = int(unit * (reduce if place else reduce + output))
        still = 0 if reshard_after_forward else left * compute
        candidates.append(StageBytes(**fixed, gathered=still, gradients=gradients, working=working))
    return max(candidates, key=lambda candidate: candidate.total)
