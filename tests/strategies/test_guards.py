"""Refusals: what is said, that every rank says it, and that nothing hangs (run_ranks fails a rank that does not end)."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_megascale import MegascaleStrategy, ParallelPlan
from lightning_megascale.strategies import guards
from tests.harness import run_ranks
from tests.strategies.test_existing_code import CLASSES, CallsModel, Net, StockStyle, Tokens

QUIET: dict[str, Any] = dict(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)


# ---- before anything is started --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(tensor_paralel_size=2), ["no argument 'tensor_paralel_size'", "did you mean 'tensor_parallel_size'"]),
        (dict(layot={}), ["did you mean 'layout'"]),
        (dict(sequence_parallel=True), ["sequence_parallel=True needs tensor_parallel_size above 1", "context_parallel_size"]),
        (dict(tensor_parallel_size=0), ["tensor_parallel_size=0: must be a whole number of at least 1"]),
        (dict(tensor_parallel_size=True), ["tensor_parallel_size=True: must be a whole number"]),
        (dict(data_parallel_shard_size="all"), ["data_parallel_shard_size='all': must be 'auto' or a whole number"]),
        (dict(activation_checkpointing="ful"), ["did you mean 'full'"]),
        (dict(activation_checkpointing={"Block"}), ["a set must hold module classes"]),
        (dict(compile="yes"), ["compile='yes': must be False, True or a dict"]),
        (dict(reduce_dtype="float16"), ["reduce_dtype='float16': must be one of"]),
        (dict(expert_dispatcher="two_hop"), ["expert_dispatcher='two_hop' needs expert_parallel_size above 1"]),
        (dict(expert_dispatcher="two_hops", expert_parallel_size=2), ["must be one of 'auto', 'alltoall'", "did you mean 'two_hop'?"]),
        (dict(context_parallel_size=2), ["context_parallel_size=2 needs label_alignment"]),
        (dict(expert_parallel_size=0), ["expert_parallel_size=0: must be a whole number of at least 1"]),
        (dict(activation_offload=True), ["none x block inputs offloaded", "use activation_checkpointing='full'"]),
        (dict(pipeline_schedule="2F2B"), ["pipeline_schedule='2F2B': must be one of GPipe, 1F1B"]),
        (dict(activation_checkpointing="selective", compile=True), ["selective x compiled", "activation_checkpointing='full'"]),
        (dict(global_batch_size=8), ["give both"]),
        (dict(microbatch_size=8), ["give both"]),
        (dict(loss_parallel=True), ["loss_parallel=True needs tensor_parallel_size above 1"]),
        (dict(loss_parallel=True, tensor_parallel_size=2), ["logits that stay sharded over the vocabulary is not proven"]),
        (dict(cpu_offload=True), ["parameters and optimizer state in host memory is not proven"]),
        (dict(reshard_after_forward=4), ["resharding to smaller groups is not proven"]),
        (dict(reduce_dtype=None), ["a gradient sum in the parameters' dtype is not proven"]),
        (dict(layout=3), ["layout=3: must be a ModelLayout"]),
        (dict(layout=dict(rowise=["a"])), ["no role 'rowise'", "did you mean 'rowwise'"]),
        (dict(plan=ParallelPlan(), tensor_parallel_size=2), ["give the plan or its fields, not both"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_named_at_construction(arguments: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        MegascaleStrategy(**arguments)
    for part in said:
        assert part in str(caught.value)


def test_several_violated_rules_come_in_one_error() -> None:
    with pytest.raises(ValueError) as caught:
        MegascaleStrategy(sequence_parallel=True, context_parallel_size=2)
    assert "sequence_parallel=True needs" in str(caught.value) and "context_parallel_size=2" in str(caught.value)


@pytest.mark.parametrize(
    "plan, world, said",
    [
        (dict(tensor_parallel_size=3), 8, ["does not divide the 8 ranks", "nearest tensor_parallel_size: 2 or 4"]),
        (dict(data_parallel_replicate_size=3), 8, ["leave 8 ranks for data parallelism", "nearest data_parallel_replicate_size: 2 or 4"]),
        (dict(data_parallel_size=4, tensor_parallel_size=4), 8, ["leave 2 ranks"]),
        (dict(data_parallel_size=8, data_parallel_shard_size=4), 8, ["data_parallel_shard_size=4"]),
        (dict(reshard_after_forward=3), 8, ["must divide dp_shard x cp = 8"]),
        (
            dict(global_batch_size=12, microbatch_size=2),
            4,
            ["no multiple of microbatch_size 2 x data-parallel size 4 = 8", "nearest 8 or 16"],
        ),
    ],
)
def test_a_plan_that_does_not_fit_the_ranks_names_the_nearest(plan: dict[str, Any], world: int, said: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        ParallelPlan(**plan).resolve(world)
    for part in said:
        assert part in str(caught.value)


def test_sizes_resolve() -> None:
    plan = ParallelPlan(tensor_parallel_size=2, data_parallel_replicate_size=2).resolve(16)
    assert (plan.data_parallel_size, plan.data_parallel_shard_size) == (8, 4)


def test_notebooks_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_IS_INTERACTIVE", True)
    with pytest.raises(ValueError, match="notebook"):
        L.Trainer(**QUIET, devices=2, strategy=MegascaleStrategy())


# ---- on the ranks ----------------------------------------------------------------------------------------------------------


class Unused(CallsModel):
    def build(self) -> None:
        super().build()
        self.model.spare = nn.Linear(4, 4)


class SumWithoutCount(CallsModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss_sum": super().training_step(batch, batch_idx)}


class VectorLoss(CallsModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")}


class Opaque(CallsModel):
    """A batch that tells neither labels nor rows."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return Hidden(batch)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch.inside, batch_idx)


class Hidden:
    def __init__(self, inside: Any) -> None:
        self.inside = inside


class ManualMode(CallsModel):
    def build(self) -> None:
        super().build()
        self.automatic_optimization = False


class WithLBFGS(CallsModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


class OnMetaWithoutInit(CallsModel):
    def build(self) -> None:
        with torch.device("meta"):
            self.model = Net()
            self.model.scale = nn.Parameter(torch.ones(3))


class NoBlocks(CallsModel):
    def build(self) -> None:
        self.model = nn.Linear(4, 4)


class Heads(nn.Module):
    """Attention whose 3 heads cannot be split in two."""

    head_dim, num_heads = 4, 3

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(12, 12), nn.Linear(12, 12)


class OddHeads(CallsModel):
    def build(self) -> None:
        self.model = nn.ModuleDict({"attn": Heads()})


CASES: dict[str, tuple[type[L.LightningModule], dict[str, Any], dict[str, Any], list[str]]] = {
    "label alignment undeclared": (CallsModel, {}, {}, ["label_alignment=None", "'aligned'", "'shift'"]),
    "no layout": (
        CallsModel,
        dict(tensor_parallel_size=2),
        {},
        ["no megascale_layout", "ModelLayout(", "colwise=['layers.*.up']", "head=['head']"],
    ),
    "pattern without match": (
        CallsModel,
        dict(tensor_parallel_size=2, layout=dict(colwise=["layers.*.upp"], rowwise=["layers.*.down"])),
        {},
        ["layout.colwise: pattern 'layers.*.upp' matches no module", "'layers.*.up'"],
    ),
    "features do not divide": (
        CallsModel,
        dict(tensor_parallel_size=2, layout=dict(colwise=["layers.*.up"], rowwise=["layers.*.down"], head="head")),
        {},
        ["head", str(CLASSES), "2"],
    ),
    "unused parameter": (
        Unused,
        dict(label_alignment="aligned"),
        {},
        ["no gradient: model.spare.weight, model.spare.bias", "requires_grad_(False)"],
    ),
    "loss_sum alone": (SumWithoutCount, {}, {}, ["one of 'loss_sum' and 'num_tokens'"]),
    "vector loss": (VectorLoss, {}, {}, ["must be a single number"]),
    "unweighable batch": (Opaque, {}, {}, ["neither labels nor rows"]),
    "labels wanted, none there": (
        Opaque,
        dict(loss_weight="labels"),
        {},
        ["loss_weight='labels' needs a batch that is a dict with an integer tensor 'labels'"],
    ),
    "optimizer of whole tensors": (WithLBFGS, dict(label_alignment="aligned"), {}, ["optimizer LBFGS", "AdamW"]),
    "global batch in manual optimization": (ManualMode, dict(global_batch_size=8, microbatch_size=4), {}, ["manual optimization"]),
    "accumulation contradicts": (
        CallsModel,
        dict(global_batch_size=16, microbatch_size=4),
        dict(accumulate_grad_batches=4),
        ["accumulate_grad_batches=4 contradicts global_batch_size: 16 = micro 4 x accumulation 2 x dp 2"],
    ),
    "loader's rows are not the microbatch": (
        CallsModel,
        dict(global_batch_size=12, microbatch_size=6),
        {},
        ["the loader gave 4 rows and microbatch_size=6"],
    ),
    "options of a module that shards itself": (StockStyle, dict(compile=True), {}, ["compile", "configure_model"]),
    "meta without initialization": (OnMetaWithoutInit, {}, {}, ["meta device", "reset_parameters"]),
    "wrong child": (CallsModel, dict(module="modle"), {}, ["module='modle'", "model"]),
    "checkpointing without blocks": (NoBlocks, dict(activation_checkpointing="full"), {}, ["none that can be found"]),
    "heads do not divide": (
        OddHeads,
        dict(tensor_parallel_size=2, layout=dict(attention="model.attn", colwise=["model.attn.q_proj"], rowwise=["model.attn.o_proj"])),
        {},
        ["attn", "3"],
    ),
    "ranks do not divide": (CallsModel, dict(tensor_parallel_size=3), {}, ["does not divide the 2 ranks"]),
}


def refused(name: str) -> str:
    """The error's text on this rank."""
    kind, arguments, options, _ = CASES[name]
    try:
        trainer = L.Trainer(**{**QUIET, **options}, devices=2, max_epochs=1, strategy=MegascaleStrategy(**arguments))
        trainer.fit(kind(), DataLoader(Tokens(), batch_size=4))
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", CASES)
def test_every_rank_refuses_with_the_same_words(name: str) -> None:
    messages = run_ranks(refused, 2, name, timeout=30)
    assert len(set(messages)) == 1, f"ranks differ: {messages}"
    for part in CASES[name][3]:
        assert part in messages[0], messages[0]


def test_float16_autocast_is_refused() -> None:
    from lightning.pytorch.plugins.precision import MixedPrecision

    from lightning_megascale.strategies.precision import for_sharded_model

    with pytest.raises(ValueError, match="loss scaler does not work on sharded gradients"):
        for_sharded_model(MixedPrecision("16-mixed", "cuda"))


def test_a_parallel_run_needs_no_layout_for_fsdp2_alone() -> None:
    assert run_ranks(trains_without_layout, 2) == ["fine", "fine"]


def trains_without_layout() -> str:
    trainer = L.Trainer(**QUIET, devices=2, max_epochs=1, strategy=MegascaleStrategy(label_alignment="aligned"))
    trainer.fit(CallsModel(), DataLoader(Tokens(), batch_size=4))
    return "fine"
