"""What context parallelism would get wrong is refused, before a parameter changes, in the same words on every rank, and never hangs."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megascale import MegascaleStrategy, RingContextSharding
from tests import huggingface
from tests.harness import run_ranks
from tests.huggingface import VOCABULARY as WORDS
from tests.strategies.context_runs import HEADS, WIDTH, Attention, Case, Module, Pool, Published, Toy, family, rows
from tests.strategies.test_context_models import QUIET, aligned

# ---- steps ---------------------------------------------------------------------------------------------------------------------------


class OwnPositions(Module):
    """Counts the tokens that it got: no shape shows it."""

    def logits(self, batch: Any) -> Tensor:
        ids = batch["input_ids"]
        return self.model(ids, position_ids=torch.arange(ids.shape[1]).expand_as(ids))


class LatePositions(OwnPositions):
    """In longer rows than those of a trial; on the first rank of contiguous parts they are even right."""

    def logits(self, batch: Any) -> Tensor:
        return super().logits(batch) if batch["input_ids"].shape[1] > 9 else Module.logits(self, batch)


class ByRow(Module):
    """A mean of the means of rows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.logits(batch)[:, :-1], batch["labels"][:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


class Chunked(Module):
    """A loss by hand that shifts, which no watch over cross-entropy sees."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.logits(batch)[:, :-1], batch["labels"][:, 1:]
        counts = labels != -100
        picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return {"loss_sum": -(picked * counts).sum(), "num_tokens": counts.sum()}


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx))


class Unlabelled(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids = batch["input_ids"]
        return F.cross_entropy(self.logits(batch)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class LateShift(Module):
    """Scores what stands at each token in trials of 8 tokens and shifts longer rows: only the watch over the first step sees it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.logits(batch), batch["labels"]
        if logits.shape[1] > 9:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class WithTypes(Published):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch, token_type_ids=torch.zeros_like(batch["input_ids"])).loss


class OneShared(Module):
    """The layers are attributes of the LightningModule."""

    def __init__(self) -> None:
        super().__init__(Toy)
        toy, self.model = self.model, None
        self.embed, self.layers, self.head = toy.embed, toy.layers, toy.head

    def logits(self, batch: Any) -> Tensor:
        x = self.embed(batch["input_ids"])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---- models --------------------------------------------------------------------------------------------------------------------------


def changed(attention: type[Attention]) -> Any:
    """A toy whose last block attends in another way."""

    def make() -> nn.Module:
        model = Toy()
        model.layers[-1].attention = attention()
        return model

    return make


class RotaryAttention(Attention):
    """Turns by the place in the input (Su et al. 2021, "RoFormer", section 3.4.2)."""

    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x_BLD).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        half = q.shape[-1] // 2
        angles = torch.arange(q.shape[2])[:, None] * 100.0 ** (-torch.arange(half) / half)
        q, k = (torch.cat([x[..., :half] * angles.cos() - x[..., half:] * angles.sin(),
                           x[..., half:] * angles.cos() + x[..., :half] * angles.sin()], -1) for x in (q, k))  # fmt: skip
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MultiheadAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x_BLD.shape[1], dtype=x_BLD.dtype)
        return self.inner(x_BLD, x_BLD, x_BLD, attn_mask=mask, need_weights=False)[0]


class FunctionalAttention(MultiheadAttention):
    """The same function without the module that is named after it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3 * WIDTH, WIDTH)), nn.Parameter(torch.zeros(3 * WIDTH))
        del self.inner

    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        x, o = x_BLD.transpose(0, 1), self.o
        mask = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)
        bias = torch.zeros(WIDTH)
        out, _ = F.multi_head_attention_forward(
            x, x, x, WIDTH, HEADS, self.weight, self.bias, None, None, False, 0.0, o.weight, bias, attn_mask=mask, need_weights=False
        )
        return out.transpose(0, 1)


class MaskedAttention(Attention):
    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        length = x_BLD.shape[1]
        return super().forward(x_BLD, torch.ones(length, length, dtype=torch.bool).tril())


class DroppingAttention(Attention):
    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        self.options = {"is_causal": True, "dropout_p": 0.1 if self.training else 0.0}
        return super().forward(x_BLD)


class CrossAttention(Attention):
    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k = (layer(y)[:, None] for layer, y in ((self.q, x_BLD), (self.k, x_BLD[:, ::2])))
        return self.o(F.scaled_dot_product_attention(q, k, k)[:, 0])


class RegisterAttention(Attention):
    """A token of its own in front."""

    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        x_BLD = torch.cat([x_BLD.new_zeros(len(x_BLD), 1, WIDTH), x_BLD], 1)
        return super().forward(x_BLD)[:, 1:]


class HandAttention(Attention):
    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.q(x_BLD) @ self.k(x_BLD).transpose(-1, -2)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return self.o(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ self.v(x_BLD))


def three_heads() -> nn.Module:
    return huggingface._text("Llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=36)


def double_heads() -> nn.Module:
    config = huggingface.FAMILIES["GPT2"]().config
    config.summary_first_dropout = 0.0
    return transformers.GPT2DoubleHeadsModel(config)


def words() -> list[dict[str, Tensor]]:
    return rows(vocabulary=WORDS)


def by_rank() -> list[dict[str, Tensor]]:
    """A loader that divides its data by RANK."""
    return rows(seed=int(os.environ["RANK"]))


def case(module: Any, batches: Any = rows, alignment: str | None = "shift", **plan: Any) -> Case:
    return Case(module, batches, alignment, plan)


REFUSED: dict[str, tuple[Case, str]] = {
    "a self-shifting step declared aligned": (
        case(lambda: Module(Toy), rows, "aligned"),
        "label_alignment='aligned' says that the step scores the logits at i against labels[:, i]",
    ),
    "a self-shifting loss by hand declared aligned": (case(lambda: Chunked(Toy), rows, "aligned"), "label_alignment='aligned' says"),
    "a self-shifting model declared aligned": (case(lambda: Published(family("Llama")), words, "aligned"), "or 'huggingface' for a"),
    "a self-shifting step declared huggingface": (case(lambda: Module(Toy), rows, "huggingface"), "label_alignment='huggingface' says"),
    "an aligned step declared shift": (
        case(lambda: Module(Toy, "aligned"), lambda: aligned(rows())),
        "label_alignment='shift' says that the step scores the logits at i against labels[:, i + 1]",
    ),
    "a step that shifts long rows only": (case(lambda: LateShift(Toy), lambda: rows(24), "aligned"), "label_alignment='aligned' says"),
    "a class that ignores shift_labels": (
        case(lambda: Published(double_heads), words, "huggingface"),
        "For a class that ignores it, and shifts labels itself, say 'shift'",
    ),
    "no label_alignment": (case(lambda: Module(Toy), rows, None), "context_parallel_size=2 needs label_alignment"),
    "a mean of rows' means": (case(lambda: ByRow(Toy)), "was not the mean of their single losses"),
    "rotary positions by arange": (
        case(lambda: Module(changed(RotaryAttention))),
        "layers.1.attention: what attends depends on where a token stands in a rank's part of the row",
    ),
    "positions that the step counts": (
        case(lambda: OwnPositions(Toy)),
        "training_step's loss of a short batch changed when its tokens were laid in another order, with their positions",
    ),
    "positions that are right on the first rank": (
        case(lambda: LatePositions(Toy), lambda: rows(24), context_parallel_layout="contiguous"),
        "training_step gives the model position_ids that are not those of this rank's tokens",
    ),
    "nn.MultiheadAttention": (
        case(lambda: Module(changed(MultiheadAttention))),
        "layers.1.attention.inner: nn.MultiheadAttention attends inside of torch",
    ),
    "its function": (
        case(lambda: Module(changed(FunctionalAttention))),
        "layers.1.attention: nn.MultiheadAttention attends inside of torch",
    ),
    "a mask": (
        case(lambda: Module(changed(MaskedAttention))),
        "layers.1.attention: attn_mask of shape (12, 12) cannot be honoured under context parallelism",
    ),
    "dropout in attention": (
        case(lambda: Module(lambda: Toy(dropout_p=0.2))),
        "layers.0.attention: dropout_p=0.2 in attention has no counterpart under context parallelism: set it to 0",
    ),
    "dropout in attention while training": (case(lambda: Module(changed(DroppingAttention))), "layers.1.attention: dropout_p=0.1"),
    "cross-attention": (
        case(lambda: Module(changed(CrossAttention))),
        "layers.1.attention: attention over 12 queries and 6 keys, for a row of 12 tokens: cross-attention, a cache",
    ),
    "a token that the model makes": (
        case(lambda: Module(changed(RegisterAttention))),
        "layers.1.attention: attention over 13 queries and 13 keys, for a row of 12 tokens",
    ),
    "a softmax by hand": (case(lambda: Module(changed(HandAttention))), "attention that is not reached (a softmax by hand)"),
    "layers of the LightningModule": (case(OneShared), "the layers of OneShared are its own attributes"),
    "Gemma2's cap": (
        case(lambda: Published(lambda: huggingface._text("Gemma2", head_dim=8)), words, "huggingface"),
        "attn_logit_softcapping=50.0: a cap on attention scores is not computed under context parallelism",
    ),
    "chunked layers": (
        case(lambda: Published(family("Llama", layer_types=["chunked_attention"] * 2)), words, "huggingface"),
        "layers of kind chunked_attention mix tokens otherwise",
    ),
    "chunked attention": (
        case(lambda: Published(family("Llama", attention_chunk_size=4)), words, "huggingface"),
        "attention_chunk_size=4: chunked attention is not computed under context parallelism",
    ),
    "transformers' dropout in attention": (
        case(lambda: Published(family("Llama", attention_dropout=0.1)), words, "huggingface"),
        "attention_dropout=0.1: dropout in attention has no counterpart; set config.attention_dropout = 0",
    ),
    "token types": (case(lambda: WithTypes(family("Llama")), words, "huggingface"), "token_type_ids: masks that a model makes"),
    "an encoder": (case(lambda: Published(family("Whisper")), lambda: huggingface.batches("Whisper"), "aligned"), "two sequences"),
    "heads that do not divide": (
        case(lambda: Published(three_heads), words, "huggingface", context_parallel_method="ulysses"),
        "num_heads=3 is not divisible by the 2 context-parallel ranks that exchange heads for tokens (Ulysses)",
    ),
    "different batches": (case(lambda: Module(Toy), by_rank), "peers got different batches"),
    "manual optimization": (Case(lambda: Manual(Toy), rows, clip=None), "context_parallel_size=2 and manual optimization"),
    "no labels": (
        case(lambda: Unlabelled(Toy), lambda: [{"input_ids": b["input_ids"]} for b in rows()]),
        "the batch has no 'labels' (B, L), so what the step scores at the borders of this rank's tokens is unknown",
    ),
    "rows as weights": (case(lambda: Module(Toy), loss_weight="samples"), "loss_weight='samples' and context_parallel_size=2"),
    "two rings of two ranks": (case(lambda: Module(Toy), context_parallel_method="ring+ulysses"), "into two factors, and it has none"),
    "an unknown layout": (case(lambda: Module(Toy), context_parallel_layout="striped"), "context_parallel_layout='striped'"),
    "packed positions without documents": (
        case(lambda: Module(Toy), lambda: [{**b, "position_ids": torch.arange(12) % 6 + torch.zeros_like(b["labels"])} for b in rows()]),
        "position_ids start again inside a row, as packed documents do, and the batch has no document_ids",
    ),
}
POOL = Pool({name: case for name, (case, _) in REFUSED.items()}, timeout=120)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_not_trained(name: str) -> None:
    told = POOL.told(name)
    assert all(REFUSED[name][1] in message for message in told), told
    assert all(message.startswith("ValueError") and message.endswith("(after 0 steps)") for message in told), told
    assert told[0] == told[1]


def test_the_pool_trains_what_is_right() -> None:
    """The refusals are not those of a pool in which everything fails."""
    pool = Pool({"right": case(lambda: Module(Toy)), "blind": case(lambda: Module(zeros))})
    for name in pool.cases:
        pool.assert_equal(name)


def zeros() -> nn.Module:
    """A head that starts at zero: the loss tells nothing about targets, and is not refused for that."""
    model = Toy()
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


# ---- without context parallelism -----------------------------------------------------------------------------------------------------


def fit_with(strategy: Any) -> None:
    trainer = L.Trainer(devices=1, strategy=strategy, callbacks=[RingContextSharding()], max_steps=1, **QUIET)
    trainer.fit(Module(Toy), DataLoader(rows(), batch_size=None))


def test_the_callback_without_our_strategy() -> None:
    with pytest.raises(ValueError, match="RingContextSharding cuts batches for context-parallel ranks, and SingleDeviceStrategy has none"):
        fit_with("auto")


def fit_with_one_rank() -> str:
    try:
        fit_with(MegascaleStrategy(data_parallel_shard_size=1))
    except ValueError as error:
        return str(error)
    return "no error"


def test_the_callback_without_ranks_of_a_row() -> None:
    (told,) = run_ranks(fit_with_one_rank, 1)
    assert "RingContextSharding cuts batches for context-parallel ranks, and MegascaleStrategy has none" in told
    assert "MegascaleStrategy(context_parallel_size=2, label_alignment=...)" in told


@pytest.mark.parametrize(
    ("name", "value"), [("context_parallel_method", "ring"), ("context_parallel_layout", "packed"), ("attention_backend", "math")]
)
def test_options_without_context_parallelism(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{value}' needs context_parallel_size above 1: rows lie whole on a rank otherwise"):
        MegascaleStrategy(**{name: value})
