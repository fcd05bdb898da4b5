"""The part of ``megascale plan`` that places the best plan: which host gets which ranks, and which rank stands where in the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_megascale.cli.errors import UserError
from lightning_megascale.planning.estimates import Estimate
from lightning_megascale.planning.legal import expert_counts
from lightning_megascale.planning.traffic import plan_traffic
from lightning_megascale.topology.cluster import Cluster
from lightning_megascale.topology.placement import AXES, Placement, evaluate, place
from lightning_megascale.topology.placement_file import write_placement


def place_best(best: Estimate, whole: Cluster, own: Mapping[str, str]) -> Placement:
    """Places a plan, prints how good it is, and writes the files that were asked for.

    Args:
        best: the plan.
        whole: the cluster, of which more nodes than the plan needs may be chosen from.
        own: with "hosts" and "ranks", paths.

    Raises:
        UserError: the cluster has no network, or the plan leaves a node half filled.
    """
    columns = {name: int(column[0]) for name, column in best.candidates.columns().items()}
    sizes = {axis: columns[axis] for axis in AXES}
    traffic = plan_traffic(best.setting.workload, best.setting.stack, best.candidates)
    ep = columns["ep"] if expert_counts(best.setting.workload.model) else None
    try:
        found = place(whole, sizes, traffic, ep=ep)
        plain = evaluate(whole, sizes, traffic, ep=ep)
    except ValueError as error:
        raise UserError(f"placement: {error}") from error
    order = " > ".join(axis for axis in found.axis_order if sizes[axis] > 1) or "one rank"
    print(f"placement: {order}; the slowest link is busy {found.seconds:.3g} s a step, {plain.seconds:.3g} s in the order of the nodes")
    print(f"           {found.quality}")
    print("           step times above are those of ranks in the cluster's own order")
    _write(found, own)
    if "hosts" in own and "ranks" not in own and found.axis_order != AXES:
        print("the order of the axes is half of the placement: ranks=FILE writes it for the strategy")
    return found


def _write(found: Placement, own: Mapping[str, str]) -> None:
    if "hosts" in own:
        Path(own["hosts"]).write_text(found.slurm_hostfile(), encoding="utf-8")
        print(f"wrote {own['hosts']}: SLURM_HOSTFILE={own['hosts']} srun --distribution=arbitrary; torchrun: --node-rank in its order")
    if "ranks" in own:
        write_placement(
            found.strategy_placement, own["ranks"], ("the rank at each place of the mesh (pp, dp_replicate, dp_shard, cp, tp)",)
        )
        print(f"wrote {own['ranks']}: MegascaleStrategy(placement={own['ranks']!r})")
