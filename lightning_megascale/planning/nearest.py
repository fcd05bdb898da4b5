"""The nearest request that can be met, where a search found no plan: fewer or more GPUs, another global batch, or other fixed sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lightning_megascale.planning.estimates import Setting
from lightning_megascale.planning.search import SearchResult, search
from lightning_megascale.topology.cluster import Cluster


def explain_nothing(result: SearchResult, fixed: Mapping[str, int] | None = None, whole: Cluster | None = None) -> str:
    """Why no plan fits, and the nearest request that has one.

    Args:
        result: of a search that found none.
        fixed: what it had to hold to.
        whole: the cluster that the search's own was cut from; None: it was not cut.
    """
    setting, gpus = result.setting, result.gpus
    lines = [f"no plan of {gpus} GPUs can train {setting.workload.model.name} on {setting.cluster.name}:"]
    lines += [f"  {count:>9,} combinations: {reason}" for reason, count in list(result.rejected.items())[:6]]
    if result.smallest_bytes < float("inf"):
        usable = f"{setting.usable_bytes / 1e9:.1f} that are planned with"
        lines.append(f"the one that needs least memory needs {result.smallest_bytes / 1e9:.1f} GB of the {usable}")
    lines.append(_nearest(setting, gpus, dict(fixed or {}), whole or setting.cluster))
    return "\n".join(lines)


def _nearest(setting: Setting, gpus: int, fixed: dict[str, int], whole: Cluster) -> str:
    for name in fixed:
        others = {key: value for key, value in fixed.items() if key != name}
        found = search(setting, gpus, top=1, fixed=others)
        if found.best:
            value = int(found.best[0].candidates.columns()[name][0])
            return f"nearest: {name}={value} instead of {fixed[name]}"
    node = setting.cluster.gpus_per_node
    for count in _counts(gpus, node, whole.num_gpus):
        if search(dataclasses.replace(setting, cluster=whole.cut(gpus=count)), top=1, fixed=fixed).best:
            return f"nearest: gpus={count}"
    batch = setting.workload.global_batch_size
    for data in sorted({2**power for power in range(20)}, key=lambda size: abs(size - batch)):
        other = dataclasses.replace(setting, workload=dataclasses.replace(setting.workload, global_batch_size=data))
        if abs(data - batch) <= 4 * batch and search(other, gpus, top=1, fixed=fixed).best:
            return f"nearest: batch.global_size={data} instead of {batch}"
    if gpus == whole.num_gpus:
        return f"the cluster {whole.name!r} is too small: take a larger one, GPUs with more memory (gpu=NAME) or shorter rows"
    return "no nearby number of GPUs has one either: take GPUs with more memory (gpu=NAME) or shorter rows"


def _counts(gpus: int, node: int, most: int) -> list[int]:
    """Numbers of GPUs to try, the nearest first: parts of a node, whole nodes nearby, and powers of two of nodes."""
    near = {count * node for count in range(max(1, gpus // node - 8), gpus // node + 9)}
    powers = {node << power for power in range(20)} | {1 << power for power in range(20) if 1 << power < node}
    return sorted((count for count in near | powers if 1 <= count <= most and count != gpus), key=lambda count: (abs(count - gpus), count))
