"""What is known of the software and the machines behind published measurements: stacks and fabrics, by the beginning of a row's id."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from lightning_megascale.planning.stack import Precision, Stack
from lightning_megascale.topology.cluster import Cluster
from lightning_megascale.topology.describe import cluster_from

# A parameter of Megatron: 2 bytes, an fp32 gradient, an fp32 copy and two fp32 moments: 18 bytes, as Korthikanti et al. 2022, figure 1,
# draws them (45.56 GiB for an eighth of 22B). Before accumulation in fp32 existed (2021), gradients had 2 bytes.
MEGATRON_FP16 = Precision("16-true", "float16", 2, 2, 4, 12, 2, 4, 4)
MEGATRON_2021 = Precision("16-true", "float16", 2, 2, 2, 12, 2, 2, 2)
MEGATRON_BF16 = Precision("bf16-true", "bfloat16", 2, 2, 4, 12, 2, 4, 4)
_FSDP = Precision("bf16-mixed", "bfloat16", 2, 4, 4, 8, 2, 4, 4)


@dataclass(frozen=True)
class Fabric:
    """A node's NICs and how many nodes hang on the same leaves.

    Args:
        nics: of a node; rail-optimised, so each on a leaf of its own.
        nic_gb_per_s: line rate of one, 1e9 bytes per second, one direction.
        leaf_nodes: below one leaf.
        domain_nodes: nodes of an NVLink domain.
    """

    nics: int
    nic_gb_per_s: float
    leaf_nodes: int = 32
    domain_nodes: int = 1


# Source: data sheets of the DGX of each kind (H100 and B200: eight ConnectX-7; B300 and GB300: ConnectX-8 of 800 Gb/s; GB200: four
# ConnectX-7 a tray), reference architectures of the SuperPODs (20 nodes a leaf with A100, 32 after).
_FABRICS: Mapping[str, Fabric] = {
    "a100": Fabric(8, 25, 20),
    "a100_40gb": Fabric(8, 25, 20),
    "h100": Fabric(8, 50),
    "h100_96gb": Fabric(8, 50),
    "h800": Fabric(8, 50),
    "h200": Fabric(8, 50),
    "b200": Fabric(8, 50),
    "b300": Fabric(8, 100),
    "gb200": Fabric(4, 50, 18, 18),
    "gb300": Fabric(4, 100, 18, 18),
}


@dataclass(frozen=True)
class Software:
    """A stack's facts and what its users did where a row does not say.

    Args:
        stack: facts; constants are the assumed ones.
        gpu: where the row names none.
        fabric: by GPU where another than the usual one.
        pads_vocabulary: to a multiple of 128 x tp, as Megatron does (arguments.py: make_vocab_size_divisible_by=128).
        bias: of GPT-like models.
        method: of context parallelism.
        reduce_every: gradients are reduced after each microbatch.
        local_batch: ``micro_batch`` is the batch of a data-parallel rank; under a pipeline it is cut into as many microbatches as stages.
        keeps_gathered: fully sharded parameters stay gathered under a pipeline.
    """

    stack: Stack
    gpu: str = "h100"
    fabric: Mapping[str, Fabric] = dataclasses.field(default_factory=dict)
    pads_vocabulary: bool = False
    bias: bool = True
    method: str = "ring"
    reduce_every: bool = False
    local_batch: bool = False
    keeps_gathered: bool = False


# Activation and bias of a gated feed-forward are one kernel that keeps its input (core/fusions/fused_bias_swiglu.py). The loss holds
# logits in 2 bytes and in 4, which become the softmax, and the gradient in 2 (core/tensor_parallel/cross_entropy.py). A weight's gradient
# is added to the buffer of all by the product itself (gradient_accumulation_fusion).
_MEGATRON: Mapping[str, Any] = {
    "selective": "core", "even_split": True,
    "copies_weights": False, "zeroes_late": False, "receive_all": False, "weight_gradient_bytes": 0,
    "gated_kept": 3, "expert_kept": 3, "router_float32": False,
    "loss_chunk": None, "logit_bytes": 8, "split_logit_bytes": 8,
}  # fmt: skip


def _megatron(name: str, precision: Precision, **facts: Any) -> Stack:
    return Stack(name, precision, **{**_MEGATRON, **facts})


_OWN = Software(Stack("megascale", _FSDP), keeps_gathered=True)
# Cases called "cef": cross-entropy in one kernel, logits and their gradient in 2 bytes. A weight's gradient in 4: fitted on its rows.
_SIMUMAX = {"logit_bytes": 4, "split_logit_bytes": 4, "weight_gradient_bytes": 4, "reserve_bytes": 0.0}
_SELENE = {"a100": Fabric(8, 25, 20)}  # Narayanan et al. 2021, section 5: eight 200 Gb/s HDR InfiniBand a DGX A100
_OLD = {"flash": False, "dropout": True, "overlap_data": False, "overlap_pipeline": False}  # all-reduce after the backward, sends in line

# Beginning of a row's id -> software. Source of each: the row's own source, and where noted, the repository of the software.
_SOFTWARE: tuple[tuple[str, Software], ...] = (
    # Narayanan et al. 2021 (SC'21), sections 4 and 5.
    ("megatron_sc21", Software(_megatron("megatron-2021", MEGATRON_2021, regather=False, **_OLD), "a100", _SELENE, True)),
    # Korthikanti et al. 2022, section 6: regathers under sequence parallelism (section 4.2.2), selective recompute of the core.
    ("korthikanti", Software(_megatron("megatron-2022", MEGATRON_FP16, **_OLD), "a100", _SELENE, True)),
    # Bang et al. 2024 (vTrain), section IV: A100, four 200 Gb/s HDR a node; Megatron-DeepSpeed with plain data parallelism.
    (
        "vtrain",
        Software(_megatron("megatron-deepspeed", MEGATRON_2021, regather=False, **_OLD), "a100", {"a100": Fabric(4, 25, 20)}, True),
    ),
    # BigScience's chronicles: Jean Zay, four 100 Gb/s Omni-Path links a node of eight; fp32 gradients, ZeRO-1.
    (
        "bloom",
        Software(_megatron("megatron-deepspeed", MEGATRON_BF16, regather=False, **_OLD), "a100", {"a100": Fabric(4, 12.5, 20)}, True),
    ),
    # Composer: FSDP1, whose gradients are reduced after every microbatch (trainer.py makes no no_sync for it); 1.6 and 3.2 Tb/s a node.
    ("mosaic", Software(Stack("foundry", _FSDP, regather=False, zeroes_late=False), bias=False, reduce_every=True)),
    # torchtitan: FSDP2, DTensor tensor parallelism (keeps what it gathers), every second product kept by selective checkpointing. The loss
    # holds logits in 2 bytes, their copy in 4, log-probabilities in 4 and the gradient in 4; of a split vocabulary 19 bytes, fitted on
    # torchtitan:11 and 12. Reserve (it reports what the allocator reserves): fitted on torchtitan:4, 8, 9 and 31.
    (
        "torchtitan",
        Software(
            Stack(
                "torchtitan",
                _FSDP,
                regather=False,
                selective="half",
                zeroes_late=False,
                loss_chunk=None,
                logit_bytes=14,
                split_logit_bytes=19,
                reserve_bytes=6.7e9,
                even_split=True,
            ),
            "h100_96gb",
            method="allgather",
            local_batch=True,
            keeps_gathered=True,
        ),
    ),
    (
        "nemo_automodel",
        Software(Stack("automodel", _FSDP, regather=False), method="allgather", keeps_gathered=True),
    ),
    ("nemo_megatron_bridge", Software(_megatron("megatron-bridge", MEGATRON_BF16), pads_vocabulary=True)),
    ("megatron_moe_modelzoo", Software(_megatron("megatron-bridge", MEGATRON_BF16), pads_vocabulary=True)),
    ("simumax", Software(_megatron("megatron-simumax", MEGATRON_BF16, **_SIMUMAX), "b200", method="ulysses")),
    ("megascale_a100", Software(_megatron("megatron-2022", MEGATRON_BF16), "a100", _SELENE, True)),
    ("megatron_h100", Software(_megatron("megatron-bridge", MEGATRON_BF16), pads_vocabulary=True)),
    ("llama3_405b", Software(Stack("llama3", _FSDP, zeroes_late=False), keeps_gathered=True)),
)


def software_of(row_id: str) -> Software:
    """By the beginning of the row's id; otherwise this package's own."""
    return next((software for start, software in _SOFTWARE if row_id.startswith(start)), _OWN)


def cluster_for(gpu: str, gpus: int, gpus_per_node: int, software: Software) -> Cluster:
    """``gpus`` GPUs in nodes of ``gpus_per_node``, rail-optimised below leaves and one spine without oversubscription.

    Args:
        gpu: name of a sheet.
        gpus: part of one node, or whole nodes.
        gpus_per_node: GPUs of a node.
        software: whose fabric is taken, else the usual one of the GPU.

    Raises:
        ValueError: ``gpus`` is above one node and no multiple of it.
    """
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ValueError(f"gpus={gpus}: must be a multiple of gpus_per_node={gpus_per_node}; correct one of them")
    fabric = software.fabric.get(gpu) or _FABRICS.get(gpu) or Fabric(8, 50)
    return _cluster(gpu, gpus, gpus_per_node, fabric)


@lru_cache(maxsize=256)
def _cluster(gpu: str, gpus: int, per_node: int, fabric: Fabric) -> Cluster:
    nodes = -(-gpus // per_node)
    leaf = fabric.leaf_nodes
    whole = cluster_from(
        {
            "name": f"{gpus} {gpu}",
            "gpu": gpu,
            "nodes": nodes,
            "node": {"gpus": per_node, "nics": fabric.nics, "nic_gb_per_s": fabric.nic_gb_per_s, "rails": fabric.nics},
            "nvlink": {"nodes": fabric.domain_nodes, "latency_us": 3.4},  # latencies as in conf/cluster/h100_1024.yaml
            "levels": [
                {"name": "leaf", "nodes": leaf, "latency_us": 9.6},
                {"name": "spine", "nodes": -(-nodes // leaf) * leaf, "latency_us": 9.9},
            ],
            "storage": {"read_gb_per_s": 160, "write_gb_per_s": 80, "node_gb_per_s": 50},  # assumed; no row depends on it
            "failures_per_1000_node_days": 6.5,
        }
    )
    return whole.cut(gpus=gpus)
