"""Positions in packed rows, and attention that keeps their documents apart without context parallelism."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_megascale import MegascaleModule
from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.models.layers import ScaledDotProductAttention
from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, current_documents, set_microbatch_weight, weighed_as
from lightning_megascale.ops.documents import positions_in
from lightning_megascale.parallel.published_calls import guard_calls
from lightning_megascale.plan import ParallelPlan

SHAPE: dict[str, Any] = dict(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=24, max_position_embeddings=16
)
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 7 + [1] * 3 + [-1] * 2])


def test_positions_begin_anew_in_each_run() -> None:
    expected = [[*range(5), *range(4), *range(3)], [*range(7), *range(3), *range(2)]]
    assert positions_in(DOCUMENTS).tolist() == expected
    assert positions_in(torch.tensor([[3, 3, 0, 3, 3]])).tolist() == [[0, 1, 0, 0, 1]]


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_a_packed_row_gives_what_its_documents_give(positions: str) -> None:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**SHAPE, positions=positions)).double()  # type: ignore[arg-type]
    ids, labels = torch.randint(32, (2, 12)), torch.randint(32, (2, 12)).masked_fill(DOCUMENTS < 0, -100)
    with weighed_as(MicrobatchWeight(1.0, documents=DOCUMENTS)):
        loss, count = model(ids, position_ids=positions_in(DOCUMENTS), labels=labels)
    packed = torch.autograd.grad(loss, list(model.parameters()))
    alone, counted = torch.zeros((), dtype=torch.float64), 0
    for row in range(2):
        for document in range(3):
            here = DOCUMENTS[row] == document
            if here.any():
                part = model(ids[row, here][None], labels=labels[row, here][None])
                alone, counted = alone + part[0], counted + int(part[1])
    assert counted == int(count) and abs(float(loss - alone)) < 1e-10
    for mine, theirs in zip(packed, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


def test_ids_of_another_shape_are_refused() -> None:
    q = torch.randn(2, 4, 6, 8)
    with weighed_as(MicrobatchWeight(1.0, documents=DOCUMENTS)), pytest.raises(ValueError, match=r"2 rows of 6 tokens.*\(2, 12\)"):
        ScaledDotProductAttention()(q, q, q)


def test_packed_rows_under_lightnings_own_strategy() -> None:
    """Packed and whole batches in turn: none is attended to by the ids of the one before."""
    torch.manual_seed(0)
    ids = torch.randint(32, (2, 12))
    labels = ids.clone()
    labels[positions_in(DOCUMENTS) == 0] = -100
    labels[DOCUMENTS < 0] = -100
    packed, whole = {"input_ids": ids, "labels": labels, "document_ids": DOCUMENTS}, {"input_ids": ids, "labels": ids}
    module = MegascaleModule(dict(SHAPE), optimizer={"lr": 0.0})
    losses: list[float] = []

    class Keep(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            losses.append(float(outputs["loss"]))

    options = dict(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = L.Trainer(max_steps=3, enable_model_summary=False, callbacks=[Keep()], **options)  # type: ignore[arg-type]
    batches: Any = [packed, whole, packed]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    set_microbatch_weight(MicrobatchWeight(1.0))
    assert losses[0] == losses[2] != losses[1] and current_documents() is None
    model: Any = module.model
    total, count = 0.0, 0
    for row in range(2):
        for document in range(3):
            here = DOCUMENTS[row] == document
            if here.any():
                part = model(ids[row, here][None], labels=torch.cat([ids[row, here][1:], torch.tensor([-100])])[None])
                total, count = total + float(part[0]), count + int(part[1])
    assert losses[0] == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize("guarded", [False, True])
def test_packed_rows_of_a_transformers_model(guarded: bool) -> None:
    """Told by positions alone; with its default cache it attends across documents, which the strategy's guard prevents."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(config).double()
    if guarded:
        guard_calls(model, ParallelPlan().resolve(1))
    ids = torch.randint(32, (1, 9))
    documents = torch.tensor([[0] * 5 + [1] * 4])
    together = model(input_ids=ids, position_ids=positions_in(documents)).logits
    alone = torch.cat([model(input_ids=ids[:, :5]).logits, model(input_ids=ids[:, 5:]).logits], 1)
    off = float((together - alone).abs().max())
    assert off < 1e-10 if guarded else off > 1e-4
