"""Public reports of what context parallelism got wrong elsewhere, each replayed here. The docstrings name them."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megascale import MegascaleStrategy
from lightning_megascale.ops.sequence_layout import assign, imbalance, positions_of, runs_of
from lightning_megascale.parallel.context_batch import SequenceCut
from tests.harness import run_alone, run_ranks
from tests.huggingface import VOCABULARY as WORDS
from tests.strategies.context_runs import CP2, Case, Module, Pool, Published, Toy, family, rows
from tests.strategies.test_context_models import QUIET, Counting, PerToken, packed, with_mask

# ---- training, equal to one device ---------------------------------------------------------------------------------------------------


def seven() -> list[dict[str, Tensor]]:
    """Documents of 4 and 3 tokens in rows of 7."""
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]])
    return [{**batch, "document_ids": documents, "labels": batch["input_ids"]} for batch in rows(7, number=2)]


def positioned(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    for batch in batches:
        batch["position_ids"] = torch.stack([torch.from_numpy(positions_of(row.numpy())) for row in batch["document_ids"]])
    return batches


def unlike() -> list[dict[str, Tensor]]:
    """All targets of a row in its second half: ranks count unlike numbers."""
    found = rows(16, number=2)
    for batch in found:
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][:, :11] = -100
    return found


class LookingAhead(Module):
    def __init__(self) -> None:
        super().__init__(lambda: Toy(is_causal=False))


CASES = {
    "odd documents": Case(lambda: PerToken(Toy), lambda: positioned(seven()), alone=lambda b: with_mask(b, "mask")),
    "a window": Case(lambda: Published(family("Mistral")), lambda: rows(20, vocabulary=WORDS), "huggingface"),
    "borders": Case(lambda: PerToken(Toy), lambda: rows(16), plan=dict(context_parallel_layout="contiguous")),
    "unlike counts": Case(Counting, unlike),
    "not causal": Case(LookingAhead, rows, plan=dict(context_parallel_layout="headtail", context_parallel_method="ring")),
    "packed transformers": Case(
        lambda: Module(family("Qwen3")), lambda: packed(vocabulary=WORDS), alone=lambda b: with_mask(b, "attention_mask")
    ),
    "plain kernel": Case(lambda: Module(Toy), rows, plan=dict(attention_backend="math")),
}
POOL = Pool(CASES)


def test_the_last_token_of_an_odd_document() -> None:
    """TransformerEngine #1929, #1930, Megatron-LM #1669: of a packed document of 7 tokens on 2 ranks the last was dropped."""
    POOL.assert_equal("odd documents")
    results, alone = POOL.of("odd documents")
    mine = dict(item for result in results for item in result["seen"])
    assert mine.keys() == dict(alone["seen"]).keys() and len(mine) == 3 * 2 * 6  # three steps, two rows, all tokens but the last
    assert (0, 0, 1, 1) in mine and (0, 1, 1, 2) in mine  # what the last tokens are the targets of


def fitted(numbers: tuple[int, int], length: int) -> float:
    """On 2 x 2 ranks, whose first batches have these numbers of rows by data-parallel rank; the loss of the last step."""

    class Uneven(Module):
        def train_dataloader(self) -> Any:
            rank = self.trainer.strategy.data_parallel_rank  # type: ignore[union-attr]
            batches: Any = [{key: value[: numbers[rank]] for key, value in batch.items()} for batch in rows(length, number=2, seed=rank)]
            return DataLoader(batches, batch_size=None)

    strategy = MegascaleStrategy(**CP2, label_alignment="shift")
    trainer = L.Trainer(devices=4, strategy=strategy, use_distributed_sampler=False, max_steps=2, **QUIET)
    trainer.fit(Uneven(Toy).double())
    return float(strategy.step_loss)


def test_ranks_with_unlike_numbers_of_rows_in_the_first_batch() -> None:
    """Ranks meet in every step of a trial, so they must all make equally many; one of them has a single row."""
    losses = run_ranks(fitted, 4, (1, 2), 12, timeout=60)
    assert len(set(losses)) == 1 and losses[0] > 0


def predicted(batches: list[dict[str, Tensor]]) -> list[Tensor]:
    class Predicts(Module):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.logits(batch)

    strategy = MegascaleStrategy(**CP2, label_alignment="shift")
    trainer = L.Trainer(devices=2, strategy=strategy, **QUIET)
    return trainer.predict(Predicts(Toy).double(), DataLoader(batches, batch_size=None))  # type: ignore[return-value]


def test_documents_do_not_see_each_other() -> None:
    """trl #6843: with packing and context parallelism every document saw those before it."""
    documents = torch.tensor([[0] * 5 + [1] * 6 + [2] * 5] * 2)
    ids = rows(16, number=2)[0]["input_ids"]
    other = ids.clone()
    other[:, 5:11] = (ids[:, 5:11] + 1) % 24  # all tokens of the second document
    first, second = run_ranks(predicted, 2, [{"input_ids": x, "document_ids": documents} for x in (ids, other)])[0]
    changed = (first != second).any(-1)
    assert changed[:, 5:11].all() and not changed[:, :5].any() and not changed[:, 11:].any()


def test_a_sliding_window_is_not_made_full_attention() -> None:
    """accelerate #4177: a mask was replaced by is_causal, so that windows and chunks became full attention. A window is honoured (20 tokens
    under one of 6), a chunk refused."""
    POOL.assert_equal("a window")
    wide = Case(lambda: Published(family("Mistral", sliding_window=None)), lambda: rows(20, vocabulary=WORDS), "huggingface")
    off = POOL.alone["a window"]["losses"][0] - Pool({"full": wide}).alone["full"]["losses"][0]
    assert abs(off) > 1e-4, "the window changes nothing here"


def test_the_label_at_each_border() -> None:
    """verl #4250, and the documentation of DeepSpeed's ALST: labels rolled after the cut gave a wrong target at each border."""
    POOL.assert_equal("borders")
    results, alone = POOL.of("borders")
    mine, reference = dict(item for result in results for item in result["seen"]), dict(alone["seen"])
    border = [key for key in reference if key[3] == 7]  # the last token of the first rank: its target lies on the second
    assert len(border) >= 9
    for key in border:
        assert mine[key] == pytest.approx(reference[key], abs=1e-10)


def test_a_metric_is_not_summed_over_the_ranks_of_a_row() -> None:
    """SkyRL #1420: metrics were summed over context-parallel ranks, and the factor of the gradient left them out."""
    POOL.assert_equal("unlike counts")
    results, alone = POOL.of("unlike counts")
    assert alone["metrics"]["tokens"] == 3 * 2 * 5
    for result in results:
        assert result["metrics"] == pytest.approx(alone["metrics"], abs=1e-10)


LENGTH = 2999


def long_row(ranks: int) -> list[float]:
    losses: list[float] = []

    class Note(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
            losses.append(float(trainer.strategy.step_loss if ranks else outputs["loss"]))  # type: ignore[attr-defined]

    strategy: Any = MegascaleStrategy(context_parallel_size=ranks, label_alignment="shift") if ranks else "auto"
    trainer = L.Trainer(devices=ranks or 1, strategy=strategy, callbacks=[Note()], use_distributed_sampler=False, **QUIET, max_epochs=1)
    trainer.fit(Module(Long).double(), DataLoader(rows(LENGTH, number=2, count=2), batch_size=None))
    return losses


class Long(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.places = torch.nn.Embedding(LENGTH, self.places.embedding_dim)


def test_a_length_that_does_not_divide() -> None:
    """EasyContext #47, ring-flash-attention #39: 2999 tokens over 4 ranks as 750, 750, 750, 749 broke the backward, or hung. They are
    padded where labels say what counts, and refused in the same words on all ranks, before anything is sent, where nothing does."""
    batch = {"input_ids": torch.arange(LENGTH)[None]}
    for rank in range(4):
        cut, shard = SequenceCut(4, rank, label_alignment="shift")({**batch, "labels": batch["input_ids"]})
        assert cut["input_ids"].shape == (1, 751) and shard.local_length == 751  # 3000 places, and a spare one on each rank
        words = "rows of 2999 tokens over context_parallel_size=4 need 1 places that hold no token, and the batch has no 'labels'"
        with pytest.raises(ValueError, match=re.escape(words)):
            SequenceCut(4, rank)(batch)


@pytest.mark.slow
def test_a_length_that_does_not_divide_trains() -> None:
    """The same reports, trained."""
    alone = run_alone(long_row, 0, timeout=120)
    for losses in run_ranks(long_row, 4, 4, timeout=200):
        assert losses == pytest.approx(alone, abs=1e-10)


def test_attention_that_is_not_causal_with_a_balanced_layout() -> None:
    """pytorch #141429: is_causal=False with load balance crashed."""
    POOL.assert_equal("not causal")
    reference = Pool({"causal": Case(lambda: Module(Toy), rows)})
    assert abs(reference.alone["causal"]["losses"][0] - POOL.alone["not causal"]["losses"][0]) > 1e-4, "it looks ahead at nothing here"


def test_plain_mathematics_on_cpus() -> None:
    """pytorch #147793: context_parallel failed with the MATH backend, and on CPUs."""
    POOL.assert_equal("plain kernel")


def test_a_balancer_that_balances() -> None:
    """pytorch #189902: the per-document balancer left one rank 1.3 to 1.4 times the mean of the work."""
    for lengths, ranks in (((4, 12), 2), ((1024, 7168), 4), ((8192,), 4), ((4, 4, 8), 2)):
        documents = np.repeat(np.arange(len(lengths)), lengths)
        positions = positions_of(documents)
        tables = [runs_of(documents[own], positions[own]) for own in assign(documents, ranks, "packed")]
        assert imbalance(tables) <= 1.02, lengths
        assert {sum(run.length for run in table) for table in tables} == {sum(lengths) // ranks}


def test_a_packed_transformers_model() -> None:
    """ring-flash-attention #67, #78: through its adapter of transformers, packed rows gave other outputs."""
    POOL.assert_equal("packed transformers")
    unpacked = Pool({"whole": Case(lambda: Module(family("Qwen3")), lambda: packed(vocabulary=WORDS), alone=_without_documents)})
    off = abs(unpacked.alone["whole"]["losses"][0] - POOL.alone["packed transformers"]["losses"][0])
    assert off > 1e-4, "documents change nothing here"


def _without_documents(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Positions and tokens as they are, and attention over the whole row."""
    length = batch["input_ids"].shape[1]
    return {**batch, "attention_mask": torch.ones(length, length, dtype=torch.bool).tril().expand(len(batch["input_ids"]), 1, -1, -1)}


def test_the_gradient_of_every_parameter_of_attention() -> None:
    """Megatron-LM #1464: gradients of attention's parameters were wrong under context parallelism, with a relative error of about 1."""
    for name in ("odd documents", "a window", "not causal", "packed transformers"):
        results, alone = POOL.of(name)
        attention = [key for key in alone["gradients"][0] if re.search(r"attention|self_attn", key)]
        assert len(attention) >= 8
        for result in results:
            for key in attention:
                mine, reference = result["gradients"][0][key], alone["gradients"][0][key]
                assert float((mine - reference).norm() / reference.norm()) < 1e-10, (name, key)
