"""Mistakes that hide from a look at a few tokens of a fresh model in evaluation, each refused; and steps that only look like mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.huggingface import VOCABULARY as WORDS
from tests.strategies.context_runs import HEADS, VOCABULARY, WIDTH, Attention, Case, Module, Pool, Published, Toy, rows
from tests.strategies.test_context_refusals import case, changed

# ---- models --------------------------------------------------------------------------------------------------------------------------


class LengthAttention(Attention):
    """Scores scaled by the log of the length of the input."""

    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        self.options = {"is_causal": True, "scale": float(torch.tensor(float(x_BLD.shape[1])).log()) / 3}
        return super().forward(x_BLD)


class LateMix(Toy):
    """Mixes tokens in rows of 12 and more only."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        logits = super().forward(input_ids, position_ids)
        return logits - logits.mean(1, keepdim=True) if input_ids.shape[1] >= 12 else logits


class TrainingMix(Toy):
    """Mixes tokens in training only."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        logits = super().forward(input_ids, position_ids)
        return logits - logits.mean(1, keepdim=True) if self.training else logits


class OwnPlaces(Toy):
    """Counts positions itself, into a table that starts at zero and shows nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.places.weight)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


class GatedAttention(Attention):
    """A shift of tokens behind a gate that starts at zero (as in ReZero, RWKV)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x_BLD + self.gate * F.pad(x_BLD, (0, 0, 1, -1)))


class PlacesFromTwo(Toy):
    """Left alone it counts from 2, as RoBERTa does."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids) + 2
        return super().forward(input_ids, position_ids)


class Needy(Toy):
    """A second argument that has to be given."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, position_ids)


def modern_bert() -> nn.Module:
    config = transformers.ModernBertConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        global_attn_every_n_layers=2,
        local_attention=6,
        pad_token_id=0,
        attention_dropout=0.0,
    )
    return transformers.ModernBertForMaskedLM(config)


# ---- steps ---------------------------------------------------------------------------------------------------------------------------


class Teacher(Module):
    """Learns from another model, whose attention sees a rank's part of the row only."""

    def __init__(self) -> None:
        super().__init__(Toy)
        self.teacher = Toy().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.logits(batch)[:, :-1], batch["labels"][:, 1:]
        targets = self.teacher(batch["input_ids"])[:, :-1].softmax(-1)
        counted = labels != -100
        losses = -(targets * logits.log_softmax(-1)).sum(-1) + F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses * counted).sum() / counted.sum()


class ByPlace(Module):
    """Weights by the place in the row."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.logits(batch)[:, :-1], batch["labels"][:, 1:]
        weights = torch.linspace(1, 2, labels.shape[1])
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return {"loss_sum": (losses * weights).sum(), "num_tokens": (labels != -100).sum()}


class Penalized(Module):
    """A penalty over all tokens, with and without a target."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + 0.1 * self.logits(batch).square().mean()


class ByClass(Module):
    """Weights by class, below 1 too: two sums over tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.logits(batch)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        weights = torch.linspace(0.01, 0.2, VOCABULARY, dtype=logits.dtype)
        loss_sum = F.cross_entropy(logits, labels, weight=weights, reduction="sum")
        return {"loss_sum": loss_sum, "num_tokens": weights[labels.clamp(min=0)][labels != -100].sum()}


class Cut(Module):
    """``x, y = ids[:, :-1], labels[:, 1:]``, as in many tutorials."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["input_ids"][:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class Given(Module):
    """The mask goes to the model."""

    def logits(self, batch: Any) -> Tensor:
        return self.model(batch["input_ids"], batch["attention_mask"])


class Logged(Module):
    """Logs its mean with the number of rows, as Lightning does by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, batch_size=len(batch["input_ids"]), on_step=False, on_epoch=True)
        return loss


# ---- batches -------------------------------------------------------------------------------------------------------------------------


def left_padded() -> list[dict[str, Tensor]]:
    found = rows()
    for batch in found:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, :3] = 0
    return found


def right_padded() -> list[dict[str, Tensor]]:
    return [{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in rows()]


def with_features() -> list[dict[str, Tensor]]:
    """As many features of each row as it has tokens."""
    return [{**batch, "condition": torch.randn(batch["labels"].shape)} for batch in rows()]


def short_by_one() -> list[dict[str, Tensor]]:
    return [{**batch, "token_scores": torch.randn(4, 11)} for batch in rows()]


REFUSED: dict[str, tuple[Case, str]] = {
    "scores by the length": (case(lambda: Module(changed(LengthAttention))), "other numbers when the row is longer"),
    "mixes long rows": (case(lambda: Module(LateMix)), "tokens of one document change the model's output for another"),
    "mixes in training": (case(lambda: Module(TrainingMix)), "tokens of one document change the model's output for another"),
    "own positions from a table of zeros": (case(lambda: Module(OwnPlaces)), "depends on where a token stands"),
    "a shift behind a gate of zeros": (case(lambda: Module(changed(GatedAttention))), "layers.1.attention: what attends depends on where"),
    "positions that begin at 2": (case(lambda: Module(PlacesFromTwo)), "counts from elsewhere than 0"),
    "a window on both sides": (
        case(lambda: Published(modern_bert), lambda: rows(vocabulary=WORDS), "aligned"),
        "a window of 4 tokens on both sides is not computed under context parallelism",
    ),
    "a teacher": (Case(Teacher, rows, "shift", dict(module="model")), "another model whose attention is not reached (a teacher)"),
    "weights by place": (case(lambda: ByPlace(Toy)), "something in the step depends on where a token stands"),
    "a penalty over all tokens": (case(lambda: Penalized(Toy)), "other tokens must not count (a penalty over all of them)"),
    "left padding that the model never hears of": (
        case(lambda: Cut(Toy), left_padded),
        "leaves out tokens at the start of rows, and the step does not give it to the model",
    ),
    "features that look like tokens": (case(lambda: Module(Toy), with_features), "or that many features of each row"),
    "one entry less than tokens": (case(lambda: Module(Toy), short_by_one), "has one entry less than the row has tokens (12)"),
}
EQUAL: dict[str, Case] = {
    "weights by class": case(lambda: ByClass(Toy)),
    "the last token cut off": case(lambda: Cut(Toy), lambda: rows(13)),
    "a mask that has to be given": case(lambda: Given(Needy), right_padded),
    "logged by rows": case(lambda: Logged(Toy)),
}
POOL = Pool({**{name: case for name, (case, _) in REFUSED.items()}, **EQUAL}, timeout=150)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_not_trained(name: str) -> None:
    told = POOL.told(name)
    assert all(REFUSED[name][1] in message and message.endswith("(after 0 steps)") for message in told), told
    assert told[0] == told[1]


@pytest.mark.parametrize("name", EQUAL)
def test_equal_to_one_device(name: str) -> None:
    POOL.assert_equal(name)


def test_a_mean_logged_with_rows_is_that_of_one_device() -> None:
    found, reference = POOL.of("logged by rows")
    for result in found:
        assert abs(result["metrics"]["loss"] - reference["metrics"]["loss"]) < 1e-6  # Lightning keeps float32
