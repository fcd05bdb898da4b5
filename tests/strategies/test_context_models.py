"""Models under context parallelism are those of one device: losses, gradients, parameters, metrics, predictions, checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megascale import MegascaleModule, MegascaleStrategy, RingContextSharding, ThroughputMonitor
from lightning_megascale.ops.sequence_layout import positions_of
from tests.harness import full, run_alone, run_ranks, worst
from tests.huggingface import VOCABULARY as WORDS
from tests.strategies.context_runs import CP2, HEADS, VOCABULARY, WIDTH, Case, Module, Pool, Published, Toy, family, rows, texts

QUIET: dict[str, Any] = dict(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)


# ---- training ------------------------------------------------------------------------------------------------------------------------


def packed(length: int = 16, vocabulary: int = VOCABULARY) -> list[dict[str, Tensor]]:
    """Documents of unlike lengths, the first target of each left out, padding in the last row."""
    documents = torch.tensor([[0] * 5 + [1] * 8 + [2] * 3, [0] * 16, [0] + [1] * 9 + [2] * 6, [3] * 7 + [4] * 4 + [-1] * 5])
    found = rows(length, seed=5, vocabulary=vocabulary)
    for batch in found:
        batch["document_ids"] = documents
        batch["position_ids"] = torch.stack([torch.from_numpy(positions_of(row.numpy())) for row in documents])
        batch["labels"] = batch["input_ids"].masked_fill((batch["position_ids"] == 0) | (documents < 0), -100)
        batch["labels"][1, 3:9] = -100
    return found


def with_mask(batch: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    """One device is told of documents by a mask between all tokens; padding sees itself."""
    documents = batch["document_ids"]
    length = documents.shape[1]
    mask = (documents[:, None, :, None] == documents[:, None, None]) & torch.ones(length, length, dtype=torch.bool).tril()
    return {**batch, key: mask}


def aligned(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{**batch, "labels": F.pad(batch["labels"][:, 1:], (0, 1), value=-100)} for batch in batches]


def padded(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The labels of padding count, if only the mask is not laid over them rightly."""
    found = []
    for batch in batches:
        mask = torch.ones_like(batch["input_ids"])
        mask[1, -2:], mask[2, -5:] = 0, 0
        found.append({**batch, "attention_mask": mask})
    return found


class PerToken(Module):
    """Notes the loss of each token: (step, row, document, position) -> loss."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[tuple[tuple[int, ...], float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels, ids = self.logits(batch), batch["labels"], batch["input_ids"]
        documents = batch.get("document_ids", torch.zeros_like(ids))
        positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
        logits, labels, documents, positions = logits[:, :-1], labels[:, 1:], documents[:, :-1], positions[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        for row, place in (labels != -100).nonzero().tolist():
            key = (batch_idx, row, int(documents[row, place]), int(positions[row, place]))
            self.seen.append((key, losses[row, place].item()))
        return losses.sum() / (labels != -100).sum()


class Weighted(Module):
    """A prompt that is masked by weights beside the labels, shifted with them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels, weights = self.logits(batch)[:, :-1], batch["labels"][:, 1:], batch["loss_weights"][:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels) * weights
        return {"loss_sum": losses.sum(), "num_tokens": (weights * (labels != -100)).sum()}


def weighted(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    weights = torch.tensor([0.0] * 5 + [0.5, 2.0, 1.0] * 3)[:12].double()
    return [{**batch, "loss_weights": weights.expand(len(batch["labels"]), -1)} for batch in batches]


class CutOff(Module):
    """The model never gets the last token."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["input_ids"][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class Counting(Module):
    """Logs in the ways that people do."""

    def __init__(self) -> None:
        super().__init__(Toy)
        self.tokens, self.rows = torchmetrics.SumMetric().set_dtype(torch.float64), torchmetrics.SumMetric()
        self.mean = torchmetrics.MeanMetric().set_dtype(torch.float64)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=VOCABULARY, ignore_index=-100, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.logits(batch)[:, :-1], batch["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        count = int((labels != -100).sum())
        self.tokens.update(count)
        self.mean.update(loss.detach(), count)
        self.accuracy.update(logits.argmax(-1).flatten(), labels.flatten())
        self.log("plain", loss)  # neither sync_dist nor batch_size
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=count)
        self.log("count", float(count), on_step=True, on_epoch=False, sync_dist=True, reduce_fx="sum")
        self.log("tokens", self.tokens, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss


class Ticking(ThroughputMonitor):
    """A clock that every look moves by a second."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(window=1, flops_per_token=None, peak_flops=None, clock=self.tick)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    @property
    def found(self) -> dict[str, float]:
        return self.latest


def megascale(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return MegascaleModule(model() if callable(model) else model, optimizer=dict(lr=1e-2, eps=1e-6), **options)


OURS = dict(
    vocab_size=VOCABULARY, hidden_size=WIDTH, num_layers=2, num_heads=HEADS, intermediate_size=32, max_position_embeddings=32, qk_norm=True
)


CASES = {
    "Llama, its loss": Case(lambda: Published(family("Llama")), texts, "huggingface"),
    "Llama, own loss": Case(lambda: Module(family("Llama")), lambda: rows(vocabulary=WORDS), plan=dict(context_parallel_method="ring")),
    "Llama, packed": Case(
        lambda: Published(family("Llama")), lambda: packed(vocabulary=WORDS), "huggingface", alone=lambda b: with_mask(b, "attention_mask")
    ),
    "Qwen3, its loss": Case(
        lambda: Published(family("Qwen3")),
        texts,
        "huggingface",
        plan=dict(context_parallel_method="ulysses", activation_checkpointing="full"),
    ),
    "Qwen3, own loss": Case(lambda: Module(family("Qwen3")), lambda: rows(13, vocabulary=WORDS)),
    "Mistral, a window shorter than the row": Case(
        lambda: Published(family("Mistral")), lambda: rows(vocabulary=WORDS), "huggingface", plan=dict(context_parallel_method="ring")
    ),
    "Gemma3, sliding and full": Case(
        lambda: Published(family("Gemma3")), texts, "huggingface", plan=dict(context_parallel_method="allgather")
    ),
    "Mixtral": Case(lambda: Published(family("Mixtral")), texts, "huggingface"),
    "Qwen3Moe": Case(lambda: Published(family("Qwen3Moe")), lambda: rows(14, vocabulary=WORDS), "huggingface"),
    "GPT2, learned positions": Case(lambda: Published(family("GPT2")), texts, "huggingface"),
    "toy": Case(lambda: Module(Toy), rows, plan=dict(context_parallel_method="ring", context_parallel_layout="contiguous")),
    "toy, aligned": Case(lambda: Module(Toy, "aligned"), lambda: aligned(rows()), "aligned"),
    "toy, tokens that are their labels": Case(lambda: Module(Toy), lambda: [{**b, "labels": b["input_ids"]} for b in rows(11)]),
    "toy, packed": Case(lambda: PerToken(Toy), packed, plan=dict(context_parallel_method="ulysses"), alone=lambda b: with_mask(b, "mask")),
    "toy, each token": Case(lambda: PerToken(Toy), rows, plan=dict(context_parallel_layout="headtail")),
    "toy, weights beside the labels": Case(lambda: Weighted(Toy), lambda: weighted(rows())),
    "toy, without the last token": Case(lambda: CutOff(Toy), rows),
    "toy, counted": Case(Counting, lambda: rows(12), callbacks=lambda: [Ticking()]),
    "toy in MegascaleModule": Case(lambda: megascale(Toy), lambda: rows(11)),
    "toy in MegascaleModule, aligned": Case(lambda: megascale(Toy, label_shift=False), lambda: aligned(rows()), "aligned"),
    "ours in MegascaleModule, padded": Case(lambda: megascale(OURS), lambda: padded(rows())),
}
LATER = ("Qwen3, own loss", "Gemma3, sliding and full", "Mixtral", "Qwen3Moe", "GPT2, learned positions", "toy in MegascaleModule, aligned")
DEFAULT = Pool({name: case for name, case in CASES.items() if name not in LATER})
SLOW = Pool({name: CASES[name] for name in LATER})


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LATER else ()) for name in CASES])
def test_equal_to_one_device(name: str) -> None:
    (SLOW if name in LATER else DEFAULT).assert_equal(name)


FOUR = {
    f"{name}, {method}": Case(
        case.module, case.batches, case.alignment, dict(context_parallel_size=4, context_parallel_method=method), case.alone
    )
    for name, case in CASES.items()
    for method in ("ring", "allgather", "ring+ulysses")
    if name.startswith(("Llama, packed", "Mistral", "toy, packed", "Gemma3"))
}
FOUR["Qwen3, its loss, cp2 x fsdp2"] = Case(lambda: Published(family("Qwen3")), texts, "huggingface", dict(data_parallel_shard_size=2))
FOUR["Llama, own loss, cp2 x tp2"] = Case(
    lambda: Module(family("Llama")), lambda: rows(vocabulary=WORDS), plan=dict(tensor_parallel_size=2)
)
WIDE = Pool(FOUR, ranks=4, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_equal_to_one_device_on_four_ranks(name: str) -> None:
    WIDE.assert_equal(name)


@pytest.mark.parametrize("name", ["toy, each token", "toy, packed"])
def test_the_loss_of_each_token(name: str) -> None:
    """Those at the borders of the ranks' parts too: nothing is scored twice, left out, or against another target."""
    results, alone = DEFAULT.of(name)
    seen = [item for result in results for item in result["seen"]]
    assert len(seen) == len(dict(seen)) == len(alone["seen"]), "tokens are scored twice, or not at all"
    mine, reference = dict(seen), dict(alone["seen"])
    assert mine.keys() == reference.keys()
    if name == "toy, each token":  # chunks of 3 tokens: the targets of 2, 5 and 8 stand on another rank or in another chunk
        assert {(0, 2, 0, border) for border in (2, 5, 8)} <= mine.keys()
    for key, loss in reference.items():
        assert mine[key] == pytest.approx(loss, abs=1e-10), key
    assert all(len(result["seen"]) > 0 for result in results)


def test_metrics_are_not_multiplied_by_the_ranks_of_a_row() -> None:
    results, alone = DEFAULT.of("toy, counted")
    assert alone["metrics"]["tokens"] == sum(int((b["labels"][:, 1:] != -100).sum()) for b in rows(12))
    for result in results:
        for name, value in alone["metrics"].items():
            if name != "perf/tokens_per_second":
                assert result["metrics"][name] == pytest.approx(value, abs=1e-10), name
    per_second = alone["found"][0]["perf/tokens_per_second"]
    assert per_second == 4 * 12 / alone["found"][0]["perf/step_seconds"]
    for result in results:
        assert result["found"][0]["perf/tokens_per_second"] == per_second


# ---- validation, test, prediction ----------------------------------------------------------------------------------------------------


class Evaluated(Module):
    def evaluate(self, name: str, batch: Any) -> Tensor:
        logits, labels = self.logits(batch)[:, :-1], batch["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.log(name, loss, sync_dist=True, batch_size=int((labels != -100).sum()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.evaluate("val_loss", batch)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        return self.evaluate("test_loss", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.logits(batch)
        return {"logits": logits, "ids": batch["input_ids"], "rows": len(logits), "size": torch.tensor(float(len(logits)))}


def strategy_of(ranks: int, **options: Any) -> Any:
    return MegascaleStrategy(**{**CP2, "label_alignment": "shift", **options}) if ranks else "auto"


def evaluate_all(ranks: int) -> dict[str, Any]:
    """Lengths that divide and that do not, with and without labels, in one prediction: as people mix them."""
    found: dict[str, Any] = {}
    batches = [batch for length in (12, 7, 9) for batch in rows(length, count=1)]
    unlabelled = [{"input_ids": batch["input_ids"]} for batch in batches]
    documents = [{"input_ids": batch["input_ids"], "document_ids": batch["document_ids"]} for batch in packed()[:1]]
    if not ranks:
        documents = [with_mask(batch, "mask") for batch in packed()[:1]]
    module = Evaluated(Toy).double()
    trainer = L.Trainer(devices=ranks or 1, strategy=strategy_of(ranks), **QUIET)
    for name, data in (("plain", unlabelled), ("labelled", batches), ("documents", documents)):
        found[name] = trainer.predict(module, DataLoader(data, batch_size=None))
    trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)
    found["val"] = float(trainer.callback_metrics["val_loss"])
    trainer.test(module, DataLoader(batches, batch_size=None), verbose=False)
    found["test"] = float(trainer.callback_metrics["test_loss"])
    found["callbacks"] = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return found


def test_evaluation_and_predictions() -> None:
    """Predictions are whole and in the order of the rows on every rank, whatever the length."""
    alone, results = run_alone(evaluate_all, 0), run_ranks(evaluate_all, 2, 2)
    for result in results:
        for kind in ("plain", "labelled", "documents"):
            assert len(result[kind]) == len(alone[kind])
            for mine, reference in zip(result[kind], alone[kind]):
                assert torch.equal(mine["ids"], reference["ids"]) and mine["rows"] == 4 and float(mine["size"]) == 4
                real = packed()[0]["document_ids"] >= 0 if kind == "documents" else torch.ones_like(mine["ids"], dtype=torch.bool)
                assert mine["logits"].shape == reference["logits"].shape
                assert torch.allclose(mine["logits"][real], reference["logits"][real], atol=1e-10, rtol=0), kind
        for key in ("val", "test"):
            assert result[key] == pytest.approx(alone[key], abs=1e-10)
        assert result["callbacks"].count("RingContextSharding") == 1
        assert all(prediction["logits"].shape[1] == length for prediction, length in zip(result["plain"], (12, 7, 9)))


class Unlabelled(Module):
    """Its validation, which runs before training, has no labels."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert "labels" not in batch
        self.logits(batch)


def fit_after_validation(ranks: int) -> dict[str, Tensor]:
    module = Unlabelled(Toy).double()
    loaders = [DataLoader(batches, batch_size=None) for batches in (rows(), [{"input_ids": rows()[0]["input_ids"]}])]
    options = dict(max_steps=2, use_distributed_sampler=False)  # Lightning's would shuffle
    L.Trainer(devices=ranks or 1, strategy=strategy_of(ranks), **options, **QUIET).fit(module, *loaders)
    return {name: full(parameter) for name, parameter in module.named_parameters()}


def test_the_loss_is_tried_on_a_batch_of_training() -> None:
    """The sanity check's batch comes first, and has nothing that a loss could be tried on."""
    alone = run_alone(fit_after_validation, 0)
    for result in run_ranks(fit_after_validation, 2, 2):
        off, where = worst(alone, result)
        assert off < 1e-10, where


class Rewritten(RingContextSharding):
    """A callback of one's own is used in the place of ours."""

    def shard(self, batch: Any, cut: Any) -> Any:
        return super().shard({**batch, "extra": batch["input_ids"] * 2}, cut)


def own_callback() -> list[Any]:
    class Checks(Evaluated):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            assert torch.equal(batch["extra"], batch["input_ids"] * 2)
            return batch["extra"]

    trainer = L.Trainer(devices=2, strategy=strategy_of(2), callbacks=[Rewritten()], **QUIET)
    result = trainer.predict(Checks(Toy).double(), DataLoader(rows(7, count=1), batch_size=None))
    return [result[0], [type(callback).__name__ for callback in trainer.callbacks]]  # type: ignore[index, attr-defined]


def test_a_subclass_of_the_callback() -> None:
    for tensor, names in run_ranks(own_callback, 2):
        assert torch.equal(tensor, rows(7, count=1)[0]["input_ids"] * 2)
        assert "Rewritten" in names and "RingContextSharding" not in names


def choosing() -> str:
    """A prediction of some tokens only: each rank has another number of them."""

    class Chooses(Evaluated):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch["input_ids"][batch["position_ids"] > 1]

    try:
        trainer = L.Trainer(devices=2, strategy=strategy_of(2), **QUIET)
        trainer.predict(Chooses(Toy).double(), DataLoader(rows(12, count=1), batch_size=None))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_prediction_of_some_tokens_is_refused_alike() -> None:
    first, second = run_ranks(choosing, 2)
    assert first == second and "predict_step returned tensors of shapes [(16,)] on a rank and [(24,)] on another" in first


# ---- callbacks and checkpoints -------------------------------------------------------------------------------------------------------


def stop_early(ranks: int) -> dict[str, Any]:
    """A learning rate that is too large: the validation's loss rises soon."""

    class Wild(Evaluated):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.7)

    stopping = EarlyStopping("val_loss", patience=2, min_delta=0.0)
    module = Wild(Toy).double()
    trainer = L.Trainer(
        devices=ranks or 1,
        strategy=strategy_of(ranks),
        max_epochs=30,
        callbacks=[stopping],
        use_distributed_sampler=False,
        **QUIET,
    )
    trainer.fit(module, DataLoader(rows(9), batch_size=None), DataLoader(rows(7, seed=8), batch_size=None))
    return {"epoch": stopping.stopped_epoch, "best": float(stopping.best_score), "step": trainer.global_step}


def test_early_stopping_on_the_loss_of_whole_rows() -> None:
    alone, results = run_alone(stop_early, 0), run_ranks(stop_early, 2, 2)
    assert 0 < alone["epoch"] < 29, "it never stopped, so this proves nothing"
    for result in results:
        assert (result["epoch"], result["step"]) == (alone["epoch"], alone["step"])
        assert result["best"] == pytest.approx(alone["best"], abs=1e-9)


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, dict(data_parallel_shard_size=1)),
    "cp2": (2, CP2),
    "dp2": (2, dict(data_parallel_replicate_size=2)),
    "tp2": (2, dict(tensor_parallel_size=2)),
}


def resumable(name: str, epochs: int, folder: str | None, ckpt_path: str | None) -> dict[str, Any]:
    """Trains to the end of ``epochs`` of three steps; a checkpoint after each into ``folder``. The learning rate follows the steps."""
    os.environ["PL_GLOBAL_SEED"] = "7"
    losses: list[float] = []

    class Scheduled(MegascaleModule):
        def train_dataloader(self) -> Any:
            size, rank = self.trainer.strategy.data_parallel_size, self.trainer.strategy.data_parallel_rank
            return DataLoader([{k: v.chunk(size)[rank] for k, v in batch.items()} for batch in rows(10, seed=4)], batch_size=None)

        def on_train_batch_end(self, *_: Any) -> None:
            losses.append(float(self.trainer.strategy.step_loss))

    ranks, plan = PLANS[name]
    module = Scheduled(OURS, dict(lr=1e-2, eps=1e-6), dict(kind="cosine", warmup_steps=2, total_steps=8))
    saving = [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)] if folder else []
    options = {**QUIET, "enable_checkpointing": bool(saving)}
    trainer = L.Trainer(
        devices=ranks,
        strategy=MegascaleStrategy(**plan, label_alignment="shift"),
        max_epochs=epochs,
        plugins=[DoublePrecision()],
        callbacks=saving,
        use_distributed_sampler=False,
        gradient_clip_val=0.1,
        **options,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    return {"losses": losses, "lr": trainer.optimizers[0].param_groups[0]["lr"], "step": trainer.global_step}


SAVED: dict[str, Path] = {}


def saved_under(name: str, factory: pytest.TempPathFactory) -> str:
    """Once for each plan."""
    if name not in SAVED:
        SAVED[name] = factory.mktemp("saved")
        run_ranks(resumable, PLANS[name][0], name, 1, str(SAVED[name]), None)
    return str(SAVED[name] / "epoch=0.ckpt")


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Any]:
    return run_ranks(resumable, 1, "one device", 2, None, None)[0]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("cp2", "one device"),
        ("tp2", "cp2"),
        *(pytest.param("cp2", name, marks=pytest.mark.slow) for name in ("dp2", "tp2", "cp2")),
        *(pytest.param(name, "cp2", marks=pytest.mark.slow) for name in ("one device", "dp2")),
    ],
)
def test_saved_under_one_plan_and_resumed_under_another(
    source: str, target: str, uninterrupted: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The next losses are those of a run that was never interrupted."""
    path = saved_under(source, tmp_path_factory)
    for result in run_ranks(resumable, PLANS[target][0], target, 2, None, path):
        assert result["losses"] == pytest.approx(uninterrupted["losses"][3:], abs=1e-10)
        assert result["step"] == uninterrupted["step"] == 6 and result["lr"] == pytest.approx(uninterrupted["lr"], abs=1e-15)


def seeds_and_lengths(ranks: int) -> list[float]:
    """Rows of other lengths in every step: layouts are made anew."""
    os.environ["PL_GLOBAL_SEED"] = "3"
    module = Module(Toy).double()
    losses: list[float] = []

    class Note(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
            losses.append(float(trainer.strategy.step_loss if ranks else outputs["loss"]))  # type: ignore[attr-defined]

    data = [batch for length in (12, 5, 16, 7, 2) for batch in rows(max(length, 6), count=1, seed=length)]
    options = dict(devices=ranks or 1, strategy=strategy_of(ranks), max_epochs=2, use_distributed_sampler=False)
    L.Trainer(**options, callbacks=[Note()], **QUIET).fit(module, DataLoader(data, batch_size=None))
    return losses


def test_rows_of_other_lengths_in_every_step() -> None:
    alone = run_alone(seeds_and_lengths, 0)
    assert len(alone) == 10
    for losses in run_ranks(seeds_and_lengths, 2, 2):
        assert losses == pytest.approx(alone, abs=1e-10)
