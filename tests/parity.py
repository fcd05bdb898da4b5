"""The parity machine: one combination of features, trained by the strategy on gloo ranks and by a plain torch loop on one device.

A case is a dict {dimension: choice} of ``support.dimensions()``. Both sides see the same global batches, so losses, every
gradient, the norm before clipping and the parameters after three optimizer steps must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.ops.sequence_layout import assign, positions_of
from lightning_megascale.parallel import expert
from lightning_megascale.parallel.init import materialize
from lightning_megascale.parallel.rng import seed_microbatch, seed_stage
from lightning_megascale.strategies import context_proof
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests.harness import full, run_ranks
from tests.routing import OneDeviceRouting

SEED, STEPS, ROWS, LENGTH, CLIP = 7, 3, 4, 16, 0.05
Case = dict[str, str]

# plan sizes of each choice of axes: (ranks, data-parallel size, plan arguments)
AXES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dp": (2, 2, dict(data_parallel_replicate_size=2)),
    "fsdp2": (2, 2, dict(data_parallel_shard_size=2)),
    "hsdp": (4, 4, dict(data_parallel_replicate_size=2, data_parallel_shard_size=2)),
    "tp": (2, 1, dict(tensor_parallel_size=2)),
    "tp+sp": (2, 1, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "fsdp2 x tp": (4, 2, dict(tensor_parallel_size=2)),
    "fsdp2 x tp+sp": (4, 2, dict(tensor_parallel_size=2, sequence_parallel=True)),
    "pp2": (2, 1, dict(pipeline_parallel_size=2)),
    "pp4": (4, 1, dict(pipeline_parallel_size=4)),
    "pp2 x dp": (4, 2, dict(pipeline_parallel_size=2, data_parallel_replicate_size=2, data_parallel_shard_size=1)),
    "pp2 x fsdp2": (4, 2, dict(pipeline_parallel_size=2)),
    "pp2 x tp": (4, 1, dict(pipeline_parallel_size=2, tensor_parallel_size=2)),
    "pp2 x tp+sp": (4, 1, dict(pipeline_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True)),
    "pp2 x hsdp": (8, 4, dict(pipeline_parallel_size=2, data_parallel_replicate_size=2)),
    "dp x tp": (4, 2, dict(tensor_parallel_size=2, data_parallel_replicate_size=2)),
    "dp x tp+sp": (4, 2, dict(tensor_parallel_size=2, data_parallel_replicate_size=2, sequence_parallel=True)),
    "pp2 x dp x tp": (8, 2, dict(pipeline_parallel_size=2, tensor_parallel_size=2, data_parallel_replicate_size=2)),
    "pp2 x dp x tp+sp": (
        8,
        2,
        dict(pipeline_parallel_size=2, tensor_parallel_size=2, data_parallel_replicate_size=2, sequence_parallel=True),
    ),
    "pp2 x hsdp x tp": (16, 4, dict(pipeline_parallel_size=2, tensor_parallel_size=2, data_parallel_replicate_size=2)),
    "pp2 x hsdp x tp+sp": (
        16,
        4,
        dict(pipeline_parallel_size=2, tensor_parallel_size=2, data_parallel_replicate_size=2, sequence_parallel=True),
    ),
    "pp2 x fsdp2 x tp": (8, 2, dict(pipeline_parallel_size=2, tensor_parallel_size=2)),
    "pp2 x fsdp2 x tp+sp": (8, 2, dict(pipeline_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True)),
    "cp2": (2, 1, dict(context_parallel_size=2)),
    "cp4": (4, 1, dict(context_parallel_size=4)),
    "cp2 x dp": (4, 2, dict(context_parallel_size=2, data_parallel_replicate_size=2)),
    "cp2 x fsdp2": (4, 2, dict(context_parallel_size=2)),
    "cp2 x hsdp": (8, 4, dict(context_parallel_size=2, data_parallel_replicate_size=2)),
    "cp2 x tp": (4, 1, dict(context_parallel_size=2, tensor_parallel_size=2)),
    "cp2 x tp+sp": (4, 1, dict(context_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True)),
    "cp2 x fsdp2 x tp": (8, 2, dict(context_parallel_size=2, tensor_parallel_size=2)),
    "cp2 x fsdp2 x tp+sp": (8, 2, dict(context_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True)),
    "pp2 x cp2": (4, 1, dict(pipeline_parallel_size=2, context_parallel_size=2)),
    "pp2 x cp2 x fsdp2": (8, 2, dict(pipeline_parallel_size=2, context_parallel_size=2)),
    "pp2 x cp2 x tp+sp": (8, 1, dict(pipeline_parallel_size=2, context_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True)),
    "pp2 x cp2 x fsdp2 x tp+sp": (
        16,
        2,
        dict(pipeline_parallel_size=2, context_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True),
    ),
    "hsdp x tp": (8, 4, dict(tensor_parallel_size=2, data_parallel_replicate_size=2)),
    "hsdp x tp+sp": (8, 4, dict(tensor_parallel_size=2, data_parallel_replicate_size=2, sequence_parallel=True)),
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.float32}
HALF = ("bf16-mixed", "bf16-true")


MIXTURE: dict[str, Any] = dict(
    num_experts=4,
    num_experts_per_token=2,
    expert_intermediate_size=8,
    num_shared_experts=1,
    router_scores="sigmoid",
    balance_loss=0.05,
    router_z_loss=0.01,
    balance_bias_rate=0.01,
)


def pipeline_ranks(case: Case) -> int:
    return AXES[case["axes"]][2].get("pipeline_parallel_size", 1)


def context_ranks(case: Case) -> int:
    return AXES[case["axes"]][2].get("context_parallel_size", 1)


def expert_ranks(case: Case) -> int:
    return int(case["family"][2:]) if case["family"].startswith("ep") else 1


def dispatcher_of(case: Case) -> str:
    """Another one from case to case; all of them are proven on their own in tests/ops/test_dispatch.py."""
    return ("alltoall", "two_hop", "two_hop_dedup")[sum(map(len, case.values())) % 3]


def stages_per_rank(case: Case) -> int:
    return 1 if case["schedule"] in ("no pipeline", "GPipe", "1F1B") else 2


def microbatches_of(case: Case) -> int:
    """Microbatches of one batch of one data-parallel rank: of one row each under a pipeline."""
    return rows_of(case) // AXES[case["axes"]][1] if pipeline_ranks(case) > 1 else 1


def rows_of(case: Case) -> int:
    """Rows of a global batch: under a pipeline two microbatches for each rank of a round."""
    return ROWS if pipeline_ranks(case) == 1 else max(4, 2 * AXES[case["axes"]][1])


def plan_of(case: Case) -> dict[str, Any]:
    """The strategy's arguments for a case."""
    arguments = dict(AXES[case["axes"]][2])
    arguments["activation_checkpointing"] = {"none": None}.get(case["checkpointing"], case["checkpointing"])
    arguments["activation_offload"] = case["offload"] == "block inputs offloaded"
    arguments["compile"] = {"backend": "aot_eager"} if case["compile"] == "compiled" else False
    arguments["reshard_after_forward"] = {"reshard auto": "auto", "reshard always": True, "reshard never": False}[case["reshard"]]
    arguments["reduce_gradients"] = "every" if case["accumulation"].endswith("every") else "last"
    arguments["reduce_dtype"] = case["reduction"].rpartition(" ")[2]
    arguments["label_alignment"] = "aligned"
    if context_ranks(case) > 1:
        arguments.update(context_parallel_method=case["context method"], context_parallel_layout=case["context layout"])
    if expert_ranks(case) > 1:
        arguments.update(expert_parallel_size=expert_ranks(case), expert_dispatcher=dispatcher_of(case))
    if pipeline_ranks(case) > 1:
        arguments.update(pipeline_schedule=case["schedule"], pipeline_stages_per_rank=stages_per_rank(case), microbatch_size=1)
        if case["split"] == "split by hand":
            arguments["pipeline_split"] = uneven_split(case)
    return arguments


def uneven_split(case: Case) -> list[str]:
    """The blocks with which each stage but the first begins: one block each, and what is left in the middle of the model."""
    stages = pipeline_ranks(case) * stages_per_rank(case)
    names = [f"layers.{number}" for number in range(layers_of(case))]
    return [*names[1 : stages - 1], names[-1]] if stages > 2 else [names[-1]]


def layers_of(case: Case) -> int:
    return 2 if pipeline_ranks(case) == 1 else pipeline_ranks(case) * stages_per_rank(case) + 1


def config_of(case: Case) -> DecoderConfig:
    shape: dict[str, Any] = dict(
        vocab_size=32, hidden_size=16, num_layers=layers_of(case), num_heads=4, intermediate_size=24, max_position_embeddings=LENGTH
    )
    shape["dropout"] = 0.2 if case["dropout"] == "dropout" else 0.0
    if context_ranks(case) > 1:
        shape["num_heads"] = 8  # what tensor and context parallelism divide together
    shape["tie_embeddings"] = case["embeddings"] == "tied head"
    if case["family"] not in ("llama-like", "gpt-like"):
        shape |= dict(MIXTURE, num_dense_layers=int(layers_of(case) > 2))
        if case["precision"] in HALF:
            shape["num_experts_per_token"] = shape["num_experts"]  # two right results may choose otherwise where scores are nearly equal
        return DecoderConfig(**shape, num_kv_heads=shape["num_heads"] // 2, init_std=0.2)
    if case["family"] == "llama-like":
        return DecoderConfig(**shape, num_kv_heads=shape["num_heads"] // 2, qk_norm=True, init_std=0.2, loss_chunk_tokens=7)
    return DecoderConfig(**shape, norm="layer", positions="learned", mlp="gelu", bias=True, init_std=0.2, loss_chunk_tokens=1000)


def accumulation_of(case: Case) -> int:
    return 1 if case["accumulation"] == "accumulate 1" else 2


def batches(case: Case) -> list[dict[str, torch.Tensor]]:
    """The global batches of all microbatches of all steps: ROWS rows each, the last rows' labels mostly masked where asked."""
    generator = torch.Generator().manual_seed(1)
    found, count = [], rows_of(case)
    for _ in range(STEPS * accumulation_of(case)):
        ids = torch.randint(32, (count, LENGTH), generator=generator)
        labels = torch.randint(32, (count, LENGTH), generator=generator)
        labels[0, :3] = -100
        if case["labels"] != "all labels":
            rows = labels[: count // 2]
            rows[torch.rand(rows.shape, generator=generator) < 0.9] = -100
        found.append({"input_ids": ids, "labels": labels})
        if case["documents"] == "packed documents":
            found[-1]["document_ids"] = (torch.rand(ids.shape, generator=generator) < 0.2).cumsum(1)
    return found


class Rows(Dataset):
    """This data-parallel rank's rows of every global batch, one global batch after the other."""

    def __init__(self, case: Case, rank: int, size: int) -> None:
        share = rows_of(case) // size
        self.rows = [
            {key: value[i] for key, value in batch.items()} for batch in batches(case) for i in range(rank * share, (rank + 1) * share)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def positions(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of packed rows that are whole, as a data module gives them; under context parallelism they are filled in."""
    documents = batch.get("document_ids")
    if documents is None or documents.shape != (len(documents), LENGTH):
        return {}
    return {"position_ids": torch.from_numpy(np.stack([positions_of(row.numpy()) for row in documents]))}


def scalar_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"], **positions(batch)).flatten(0, 1)
    return F.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, batch["labels"].flatten())


def make_optimizer(parameters: Any, dtype: torch.dtype) -> torch.optim.Optimizer:
    """AdamW proves float64; in float32 Adam makes a full step of a zero gradient's noise, so SGD with momentum there."""
    if dtype == torch.float64:
        return torch.optim.AdamW(
            parameters, lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1
        )  # 1e-8 makes steps of the noise of a zero gradient
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class ParityModule(L.LightningModule):
    """An ordinary LightningModule around the decoder; it knows of no ranks."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.seen = case, []
        self.dtype_wanted = DTYPES[case["precision"]]
        if case["init"] == "eager":
            torch.manual_seed(SEED)
            self.model = Decoder(config_of(case)).to(self.dtype_wanted)

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with torch.device("meta"):
                self.model = Decoder(config_of(self.case)).to(self.dtype_wanted)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
        if self.case["loss"] == "scalar mean":
            loss = scalar_loss(self.model, batch)
            self.log("loss", loss, sync_dist=True)
            return loss
        loss_sum, num_tokens = self.model(batch["input_ids"], labels=batch["labels"], **positions(batch))
        return {"loss_sum": loss_sum, "num_tokens": num_tokens}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.parameters(), self.dtype_wanted)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append({name: full(parameter.grad) for name, parameter in self.model.named_parameters()})

    def train_dataloader(self) -> DataLoader:
        strategy = self.trainer.strategy
        rows = Rows(self.case, strategy.data_parallel_rank, strategy.data_parallel_size)
        return DataLoader(rows, batch_size=rows_of(self.case) // strategy.data_parallel_size)


class Recorder(L.Callback):
    """Exact loss and gradient norm of every optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.steps = 0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps = trainer.global_step  # above 0 in a resumed run

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.losses.append(float(trainer.strategy.step_loss))
            self.norms.append(float(trainer.strategy.grad_norm))


def train_parallel(case: Case, arguments: dict[str, Any], proofs: bool = True) -> dict[str, Any]:
    """Runs on every rank; without ``proofs`` the first batch's trials under context parallelism are left out, which cost most there."""
    context_proof._enabled = proofs
    expert.host_name = partial(two_nodes, expert_ranks(case))
    torch.manual_seed(SEED)
    module, recorder = ParityModule(case), Recorder()
    strategy = MegascaleStrategy(**{**plan_of(case), **arguments})
    trainer = L.Trainer(
        accelerator="cpu",
        devices=AXES[case["axes"]][0],
        strategy=strategy,
        precision=case["precision"] if case["precision"] in HALF else "32-true",
        max_steps=STEPS,
        gradient_clip_val=CLIP,
        accumulate_grad_batches=accumulation_of(case),
        callbacks=[recorder],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    import os

    os.environ["PL_GLOBAL_SEED"] = str(SEED)
    trainer.fit(module)
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "gradients": module.seen,
        "parameters": {name: full(parameter) for name, parameter in module.model.named_parameters()},
        "compiled": _graphs(),
        "stages": () if strategy._done.pipeline is None else strategy._done.pipeline.stages.units,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def two_nodes(ep: int) -> str:
    """As if the ranks of an expert-parallel group were on two machines, half of them on each."""
    return f"node {torch.distributed.get_rank() % ep // max(ep // 2, 1)}"


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


class StageSeeds:
    """Makes one device draw the random numbers that pipeline stages draw: a stage's first module seeds for the stage."""

    def __init__(self, model: Decoder, stages: tuple[tuple[str, ...], ...], share: int, parts: PartsDropout) -> None:
        self.number, self.share, self.parts = 0, share, parts
        self.handles = [
            model.get_submodule(units[0]).register_forward_pre_hook(lambda *_, stage=stage: self.seed(stage))
            for stage, units in enumerate(stages)
        ]

    def seed(self, stage: int) -> None:
        self.parts.seed(lambda rank: seed_stage(SEED, self.number, self.share * self.parts.ranks + rank, stage))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class PartsDropout:
    """Makes one device draw the dropout that context-parallel ranks draw, each for its tokens.

    Args:
        model: its dropouts are taken over.
        order: (B, W, L / W) the tokens of each rank; of one rank it changes nothing.
    """

    def __init__(self, model: torch.nn.Module, order: torch.Tensor) -> None:
        self.order, self.ranks = order, order.shape[1]
        self.states: list[torch.Tensor] = []
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout) and self.ranks > 1:
                module.forward = partial(self.drop, module)  # type: ignore[method-assign]

    def seed(self, seed: Callable[[int], None]) -> None:
        self.states = []
        for rank in range(self.ranks):
            seed(rank)
            self.states.append(torch.get_rng_state())

    def drop(self, module: torch.nn.Dropout, x: torch.Tensor) -> torch.Tensor:
        parts, rows = [], torch.arange(len(x))[:, None]
        for rank, state in enumerate(self.states):
            torch.set_rng_state(state)
            parts.append(F.dropout(x[rows, self.order[:, rank]], module.p, module.training))
            self.states[rank] = torch.get_rng_state()
        return torch.cat(parts, 1)[rows, self.order.flatten(1).argsort(1)]


class DocumentCore(torch.nn.Module):
    """Attention inside documents, by a mask over the whole row."""

    def __init__(self, documents: torch.Tensor) -> None:
        super().__init__()
        length = documents.shape[1]
        self.mask = (documents[:, None, :, None] == documents[:, None, None]) & torch.ones(length, length, dtype=torch.bool).tril()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = True) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)


def order_of(case: Case, documents: torch.Tensor) -> torch.Tensor:
    """(B, W, L / W) the tokens of each context-parallel rank."""
    ranks = context_ranks(case)
    return torch.from_numpy(
        np.stack([assign(row, ranks, case["context layout"] if ranks > 1 else "contiguous") for row in documents.numpy()])
    )


def train_single(
    case: Case,
    dtype: torch.dtype | None = None,
    half: bool = False,
    steps: int = STEPS,
    stages: tuple[tuple[str, ...], ...] = (),
    rounding: int | None = None,
) -> dict[str, Any]:
    """The reference: a plain loop on one device, no Lightning, no strategy.

    Args:
        case: the combination.
        dtype: of parameters; None: the case's.
        half: forward and backward on a bfloat16 copy, as one device would under mixed precision.
        stages: units of the pipeline's stages, each of which seeds for itself.
        rounding: seed of a change of the first weights by about what rounding does to them; None: as they are.
    """
    wanted = DTYPES[case["precision"]]
    model = _first_model(case, wanted).to(dtype or wanted)
    if rounding is not None:
        generator = torch.Generator().manual_seed(rounding)
        size = torch.finfo(torch.bfloat16).eps / 4 if half else torch.finfo(wanted).eps / 2
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.double() * (1 + size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)))
    optimizer = make_optimizer(model.parameters(), dtype or wanted)
    shares, accumulate, parts = AXES[case["axes"]][1], accumulation_of(case), microbatches_of(case)
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": []}
    data, routing = batches(case), OneDeviceRouting()
    for step in range(steps):
        optimizer.zero_grad()
        working = _copy(case, model, torch.bfloat16) if half else model
        total, tokens = 0.0, 0
        routing.attach(working)
        for index in range(step * accumulate, (step + 1) * accumulate):
            held = data[index].get("attention_mask", torch.ones_like(data[index]["labels"]))
            routing.labels_per_token = int((data[index]["labels"] != -100).sum()) / int(held.sum())
            for share in range(shares):
                for part in range(parts):
                    size = rows_of(case) // shares // parts
                    rows = slice((share * parts + part) * size, (share * parts + part + 1) * size)
                    batch = {key: value[rows] for key, value in data[index].items()}
                    number, routing.mask = index * parts + part, batch.get("attention_mask")
                    logits = forward_like_ranks(case, working, batch, number, share, stages).flatten(0, 1)
                    loss = F.cross_entropy(logits.float() if half else logits, batch["labels"].flatten(), reduction="sum")
                    (loss + routing.losses()).backward()
                    total, tokens = total + loss.item(), tokens + int((batch["labels"] != -100).sum())
        if half:
            for mine, theirs in zip(model.parameters(), working.parameters()):
                mine.grad = theirs.grad.to(mine.dtype)
        for parameter in model.parameters():
            parameter.grad /= tokens
        result["losses"].append(total / tokens)
        result["gradients"].append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        routing.settle(model)
    result["parameters"] = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return result


def forward_like_ranks(
    case: Case, model: Decoder, batch: dict[str, torch.Tensor], number: int, share: int, stages: tuple[tuple[str, ...], ...]
) -> torch.Tensor:
    """Logits of whole rows, with documents kept apart and the random numbers of the ranks that would hold the tokens."""
    ids, documents = batch["input_ids"], batch.get("document_ids")
    parts = PartsDropout(model, order_of(case, torch.zeros_like(ids) if documents is None else documents))
    parts.seed(lambda rank: seed_microbatch(SEED, number, share * parts.ranks + rank))
    seeds = StageSeeds(model, stages, share, parts)
    seeds.number = number
    positions = None
    if documents is not None:
        positions = torch.from_numpy(np.stack([positions_of(row.numpy()) for row in documents]))
        for block in model.layers:
            block.attention.core = DocumentCore(documents)
    logits = model(ids, positions)
    seeds.remove()
    return logits


def _first_model(case: Case, dtype: torch.dtype) -> Decoder:
    if case["init"] == "eager":
        torch.manual_seed(SEED)
        return Decoder(config_of(case)).to(dtype)
    with torch.device("meta"):
        model = Decoder(config_of(case)).to(dtype)
    materialize(model, "cpu", SEED)
    return model


def _copy(case: Case, model: Decoder, dtype: torch.dtype) -> Decoder:
    copy = Decoder(config_of(case)).to(dtype)
    copy.load_state_dict(model.state_dict())
    return copy


def global_norm(gradients: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm())


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    return global_norm({name: a[name].double() - b[name].double() for name in a})


def check(case: Case, timeout: float = 120, proofs: bool = True, **arguments: Any) -> None:
    """Trains both ways and compares to the tolerances of the case's precision.

    Args:
        case: the combination.
        timeout: seconds for all ranks together.
        proofs: see ``train_parallel``.
        **arguments: further arguments of the strategy.

    Raises:
        AssertionError: with the worst figure and the parameter where it is.
    """
    ranks = AXES[case["axes"]][0]
    results = run_ranks(train_parallel, ranks, case, arguments, proofs, timeout=timeout)
    if case["compile"] == "compiled":
        assert results[0]["compiled"] > 0, "nothing was compiled, so this case proves nothing"
    for other in results[1:]:
        assert other["losses"] == results[0]["losses"] and other["norms"] == results[0]["norms"], "ranks disagree on loss or norm"
        assert repr(other["logged"]) == repr(results[0]["logged"]), "ranks disagree on what was logged"  # a mean over nothing is NaN
    compare(case, merged(results))


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The union of what the ranks hold: pipeline stages have different parameters, everybody else equal ones."""
    whole = dict(results[0])
    whole["parameters"] = {name: value for result in results for name, value in result["parameters"].items()}
    whole["gradients"] = [{k: v for result in results for k, v in result["gradients"][step].items()} for step in range(STEPS)]
    return whole


def compare(case: Case, mine: dict[str, Any]) -> None:
    """Tolerances: 1e-10 in float64; 1e-5 in float32, or what one device's number moves by when its first weights are rounded otherwise
    (steps of Adam amplify that in few cases); 1.5 times one device's error in bfloat16, the largest
    of five roundings of its weights where the first does not do."""
    if case["precision"] in HALF:
        _compare_bf16(case, mine)
    else:
        _compare_exact(case, mine)


def _compare_exact(case: Case, mine: dict[str, Any]) -> None:
    reference = train_single(case, stages=mine["stages"])
    for name, value in _tied_copies(case, mine).items():
        reference["parameters"][name] = reference["parameters"][value]
        for gradients in reference["gradients"]:
            gradients[name] = gradients[value]
    tolerance = 1e-10 if case["precision"] == "float64" else 1e-5
    assert len(mine["losses"]) == STEPS
    assert all(norm > CLIP for norm in reference["norms"]), "clipping was not active, so this case proves nothing of it"
    off = _differences(mine, reference, relative=case["precision"] != "float64")
    if case["precision"] == "float32" and any(value >= tolerance for value, _ in off.values()):
        moved = [_differences(train_single(case, stages=mine["stages"], rounding=seed), reference, relative=True) for seed in range(4)]
        allowed = {what: max(tolerance, *(other[what][0] for other in moved)) for what in off}
    else:
        allowed = dict.fromkeys(off, tolerance)
    for what, (value, where) in off.items():
        assert value < allowed[what], f"{what}{where} is off by {value:.2e}, {allowed[what]:.0e} allowed"


def _differences(one: dict[str, Any], reference: dict[str, Any], relative: bool) -> dict[str, tuple[float, str]]:
    """What -> largest difference, and of which parameter: gradients as a share of their global norm (``relative``)."""
    found: dict[str, tuple[float, str]] = {}
    for step, gradients in enumerate(reference["gradients"]):
        scale = global_norm(gradients) if relative else 1.0
        name, value = max(
            ((n, (one["gradients"][step][n] - g).abs().max().item() / scale) for n, g in gradients.items()), key=lambda p: p[1]
        )
        found[f"step {step}: gradient"] = value, f" of {name}"
        for key in ("losses", "norms"):
            expected = reference[key][step]
            found[f"step {step}: {key}"] = abs(one[key][step] - expected) / max(1.0, abs(expected)), ""
    name, value = max(((n, (one["parameters"][n] - v).abs().max().item()) for n, v in reference["parameters"].items()), key=lambda p: p[1])
    found[f"after {STEPS} steps: parameter"] = value, f" {name}"
    return found


def _tied_copies(case: Case, mine: dict[str, Any]) -> dict[str, str]:
    """The second copy of a tied parameter, which only a pipeline has."""
    return {"head.weight": "embed_tokens.weight"} if case["embeddings"] == "tied head" and mine["stages"] else {}


def _compare_bf16(case: Case, mine: dict[str, Any]) -> None:
    """First step, where both start from equal parameters: the error against float64 is at most 1.5 times one device's."""
    exact = train_single(case, torch.float64, steps=1, stages=mine["stages"])
    single = train_single(case, half=True, steps=1, stages=mine["stages"])
    for name in _tied_copies(case, mine):
        del mine["gradients"][0][name]
    error, allowed = distance(mine["gradients"][0], exact["gradients"][0]), distance(single["gradients"][0], exact["gradients"][0])
    if error > 1.5 * allowed:  # where few labels count, one device's own error depends on how its weights happen to be rounded
        others = [train_single(case, half=True, steps=1, stages=mine["stages"], rounding=seed) for seed in range(4)]
        allowed = max(allowed, *(distance(other["gradients"][0], exact["gradients"][0]) for other in others))
    assert error <= 1.5 * allowed, f"gradients: error {error:.2e} against float64, one device in bf16 has {allowed:.2e}"
    off, granted = abs(mine["losses"][0] - exact["losses"][0]), abs(single["losses"][0] - exact["losses"][0])
    # one device's error of one number may be near 0 by luck: a quarter of the gap between bfloat16 numbers of its size is granted
    assert off <= 1.5 * granted + 2**-8, f"loss: error {off:.2e} against float64, one device in bf16 has {granted:.2e}"
    assert error > 1e-4 * global_norm(exact["gradients"][0]), "bfloat16 gave float32's numbers: precision was ignored"


def default_case(**choices: str) -> Case:
    """A case with the first choice of every dimension but those given; float64."""
    from lightning_megascale.support import dimensions

    case = {dimension: names[0] for dimension, names in dimensions().items()}
    if "cp" in choices.get("axes", ""):
        case.update({"context method": "ring", "context layout": "headtail"})
    return {**case, **choices}
