"""The plan and the stack of a measured run, from the cells of its row; what the row leaves open is taken by stated rules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from lightning_megascale.planning.candidates import CHECKPOINTING, METHODS, SHARDING
from lightning_megascale.planning.known_models import Architecture
from lightning_megascale.planning.measured_software import MEGATRON_2021, MEGATRON_BF16, Software
from lightning_megascale.planning.row_cells import Cells, Unpredictable
from lightning_megascale.planning.stack import Precision, Stack
from lightning_megascale.support import SCHEDULES


def row_plan(
    cells: Cells, software: Software, sizes: Mapping[str, int], architecture: Architecture, gpus: int, notes: str
) -> dict[str, Any]:
    """The columns of the candidate."""
    tp, pp, cp, dp = (sizes[name] for name in ("tp", "pp", "cp", "dp"))
    micro, stages = _microbatch(cells, software, pp, architecture, dp)
    sharding, shard = _sharding(cells, software, pp, cp, dp)
    ep = cells.whole("ep") or cells.default("ep", _expert_parallel(architecture.experts, dp * cp * tp))
    if ep > 1 and sharding == "none":  # plain replicas, but experts need ranks to be dealt to
        shard = next((size for size in range(1, dp + 1) if not dp % size and not (size * cp * tp) % ep), dp)
    if (shard * cp * tp) % ep or architecture.experts % ep:
        raise Unpredictable(f"ep={ep} divides dp_shard x cp x tp = {shard * cp * tp} or experts={architecture.experts} not")
    sequence = cells.flag("sequence_parallel")
    if sequence is None:
        sequence = bool(cells.default("sequence_parallel", int(tp > 1)))
    schedule = "Interleaved1F1B" if stages > 1 else "GPipe" if "gpipe" in notes else "1F1B"
    return {
        "pp": pp, "dp_replicate": dp // shard, "dp_shard": shard, "cp": cp, "tp": tp, "ep": ep,
        "microbatch_size": micro, "stages_per_rank": stages, "schedule": SCHEDULES.index(schedule),
        "checkpointing": CHECKPOINTING.index(_recompute(cells)), "sharding": SHARDING.index(sharding),
        "sequence_parallel": sequence and tp > 1, "method": METHODS.index(software.method if cp > 1 else "ring"),
        "reduce_every": software.reduce_every and sharding in ("gradients", "parameters"),
    }  # fmt: skip


# Microbatch and stages of a rank of SC'21's table 1, by blocks; they are in no column.
# Source: NVIDIA/Megatron-LM examples/sc21/run_table_1.sh (the 39B has no virtual stages there).
_SC21 = {24: (16, 1), 30: (16, 1), 36: (16, 1), 40: (8, 1), 48: (4, 1), 60: (2, 3), 80: (2, 2), 96: (1, 2), 105: (1, 3), 128: (1, 1)}


def _microbatch(cells: Cells, software: Software, pp: int, architecture: Architecture, dp: int) -> tuple[int, int]:
    """(rows of a microbatch, stages of a rank)."""
    micro, stages = cells.whole("micro_batch"), cells.whole("vpp")
    table = _SC21.get(architecture.layers) if software.stack.name == "megatron-2021" else None
    if table is not None and (micro is None or stages is None):
        cells.assumed.append(f"micro_batch, vpp: {table}, of Megatron-LM's examples/sc21/run_table_1.sh")
        micro, stages = micro or table[0], stages or table[1]
    if micro is not None and software.local_batch and pp > 1 and not micro % pp:
        cells.assumed.append(f"micro_batch={micro // pp}: a local batch of {micro} cut into as many microbatches as stages")
        micro //= pp
    return micro or cells.default("micro_batch", 1), (stages or (cells.default("vpp", 1) if pp > 1 else 1)) if pp > 1 else 1


def _expert_parallel(experts: int, ranks: int) -> int:
    """Where no ep is given: the most of one node's GPUs that fit."""
    return next(size for size in (8, 4, 2, 1) if not experts % size and not ranks % size) if experts else 1


def _sharding(cells: Cells, software: Software, pp: int, cp: int, dp: int) -> tuple[str, int]:
    """(what is shared out, dp_shard)."""
    zero, group = (cells.text("zero") or "").lower(), cells.whole("fsdp_group", least=0) or 0
    kinds = {"0": "none", "1": "optimizer", "2": "gradients", "3": "parameters", "fsdp": "parameters", "fsdp1": "parameters",
             "fsdp2": "parameters", "hsdp": "parameters"}  # fmt: skip
    if re.fullmatch(r"\d+\.0*", zero):  # a table with empty cells is often saved with 3.0 for 3
        zero = zero.partition(".")[0]
    if not zero:
        zero = cells.default("zero", "1" if software.stack.name.startswith("megatron") else "3")
    if zero not in kinds:
        raise cells.wrong("zero", zero, f"one of {', '.join(kinds)}")
    kind = kinds[zero]
    if kind == "none":
        return kind, 1
    if kind == "parameters" and pp > 1 and software.keeps_gathered:
        cells.assumed.append("parameters stay gathered until the pipeline's end")
        kind = "gradients"
    if not group or group >= dp:  # a group may be counted with the ranks of context parallelism or without
        return kind, dp
    return kind, group if not dp % group else dp


def _recompute(cells: Cells) -> str | None:
    word = (cells.text("recompute") or "").lower().strip("? ")
    if word in ("full", "selective"):
        return word
    if word in ("none", "0", "false", "no"):
        return None
    if not word:
        cells.default("recompute", "none")
        return None
    cells.assumed.append(f"recompute={word}: taken as selective")
    return "selective"


def row_stack(cells: Cells, software: Software, notes: str) -> Stack:
    """The software's stack with the row's precision and what its notes say."""
    stack = software.stack
    facts: dict[str, Any] = {"precision": _precision(cells, stack.precision, notes)}
    if "asynctp" in notes:
        facts["overlap_tensor"] = True
    if "eager" in notes.split():
        facts["fused"] = False
    if stack.name == "torchtitan" and "2025" in (cells.text("source") or ""):  # the loss is compiled: 2 bytes a logit, and its gradient
        facts |= {"logit_bytes": 4, "split_logit_bytes": 4}
    if "flash" in (cells.text("attention") or ""):
        facts["flash"] = True
    return dataclasses.replace(stack, **facts)


def _precision(cells: Cells, usual: Precision, notes: str) -> Precision:
    word = (cells.text("precision") or cells.default("precision", "bf16")).lower()
    if "fp4" in word or "fp8" in word:
        gathered = 1 if usual.shard_bytes == 4 and "rowwise" not in word and "amp" not in word else usual.gather_bytes
        kind = "float4" if "fp4" in word else "float8"
        moved = 12 if "rowwise" in word else usual.cast_bytes  # scales by row and by column, not fused: chosen on torchtitan:30
        return dataclasses.replace(usual, name=word, matmul_dtype=kind, gather_bytes=gathered, cast_bytes=moved)
    if "16" in word:
        kind = "float16" if "fp16" in word and "bf16" not in word else "bfloat16"
        if kind == "float16" and usual is MEGATRON_BF16:  # gradients add up in float32 for bfloat16 only (Megatron-LM arguments.py)
            usual = MEGATRON_2021
        reduced = 2 if "mp mode pure" in notes else usual.reduce_bytes
        return dataclasses.replace(usual, name=word, matmul_dtype=kind, reduce_bytes=reduced)
    if "32" in word:
        kind = "tf32" if "tf32" in word else "float32"
        return Precision(word, kind, compute_bytes=4, gather_bytes=4)
    raise Unpredictable(f"precision={word!r} is not known; there are bf16, fp16, fp8, fp4, fp32 and tf32")
