"""The probe of a model's layout, without ranks: what takes positions as they are given passes, anything else is found by its numbers."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lightning_megascale.layout import ModelLayout
from lightning_megascale.parallel.context import Context
from lightning_megascale.parallel.context_call import prepare_call
from lightning_megascale.parallel.context_huggingface import check_published
from lightning_megascale.parallel.context_probe import LARGEST, Probe, probe_layout
from lightning_megascale.parallel.context_seams import apply_context, attention_names
from tests import huggingface

VOCABULARY, WIDTH, HEADS = 16, 16, 2


class Attention(nn.Module):
    """Attention as people write it; ``rotary`` turns queries and keys by position."""

    def __init__(self, rotary: bool = False, is_causal: bool = True, by_hand: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.rotary, self.is_causal, self.by_hand = rotary, is_causal, by_hand

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if self.rotary:
            q, k = turned(q, positions), turned(k, positions)
        if self.by_hand:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.o(out.transpose(1, 2).flatten(2))


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, "RoFormer", section 3.4.2), halves paired."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] * 100.0 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).to(x.dtype)


class Toy(nn.Module):
    """Two blocks of attention.

    Args:
        positions: "learned", "rotary" or "none".
        counts: positions are counted from the length of the input, whatever is given.
        mixes: what else looks at other tokens: "convolution", "mean", "place" (a factor by the place in the input), "length" (by the
            length of the input), "later" (positions of its own count from 2), or "".
        zero: the last projection starts at 0.
        **attention: of ``Attention``.
    """

    def __init__(self, positions: str = "learned", counts: bool = False, mixes: str = "", zero: bool = False, **attention: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.places = nn.Embedding(32, WIDTH) if positions == "learned" else None
        self.blocks = nn.ModuleList(Attention(rotary=positions == "rotary", **attention) for _ in range(2))
        self.counts, self.mixes = counts, mixes
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3) if mixes == "convolution" else None
        if zero:
            for block in self.blocks:
                nn.init.zeros_(block.o.weight)
            nn.init.zeros_(self.head.weight)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if position_ids is None or self.counts:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids) + (2 if self.mixes == "later" else 0)
        x = self.embed(input_ids) + (0 if self.places is None else self.places(position_ids))
        if self.convolution is not None:
            x = x + self.convolution(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        for block in self.blocks:
            x = x + block(x, position_ids)
        if self.mixes == "mean":
            x = x + x.mean(1, keepdim=True)
        if self.mixes == "length":
            x = x * math.log(x.shape[1])
        if self.mixes == "place":
            x = x * torch.linspace(0.5, 1.5, x.shape[1], dtype=x.dtype)[:, None]
        return self.head(x)


def found(model: nn.Module, layout: ModelLayout | None = None, largest: int = VOCABULARY - 1) -> tuple[list[str], Context, Probe]:
    """(what is wrong, context, last probe), as ranks find it on their first batch."""
    context = Context(None, "auto", "auto", torch.device("cpu"))  # type: ignore[arg-type]
    apply_context(model, layout, context)
    model.register_forward_pre_hook(lambda m, args, kwargs: prepare_call(m, context, args, kwargs), with_kwargs=True, prepend=True)
    model.eval()
    probes: list[Probe] = []

    def call(ids: Tensor, probe: Probe) -> Tensor:
        context.probe = probe
        probes.append(probe)
        output = model(ids)
        return output if isinstance(output, Tensor) else output.logits

    with torch.no_grad():
        return probe_layout(call, largest, 8, torch.device("cpu")), context, probes[-1]


def make(**options: Any) -> Toy:
    torch.manual_seed(0)
    return Toy(**options)


# ---- passed ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"positions": "rotary"}, {"positions": "none"}, {"is_causal": False}, {"zero": True}], ids=str)
def test_what_follows_its_positions_passes(options: dict[str, Any], dtype: torch.dtype) -> None:
    wrong, context, _ = found(make(**options).to(dtype))
    assert wrong == [] and context.missing == []
    assert context.reached == {"blocks.0", "blocks.1"}


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2", "Mistral", "Gemma3", "Mixtral", "Phi3"])
def test_transformers_classes_pass(family: str) -> None:
    torch.manual_seed(0)
    wrong, context, _ = found(huggingface.FAMILIES[family](), largest=huggingface.VOCABULARY - 1)
    assert wrong == [] and context.missing == []


def test_a_probe_says_whether_attention_looks_ahead() -> None:
    assert found(make())[2].bidirectional is False
    assert found(make(is_causal=False))[2].bidirectional is True


def test_few_tokens_are_enough() -> None:
    """A vocabulary smaller than the row of the probe."""
    model = make()
    model.embed = nn.Embedding(3, WIDTH)
    assert found(model, largest=2)[0] == []


# ---- found ----------------------------------------------------------------------------------------------------------------------------

BY_PLACE = "blocks.0: what attends depends on where a token stands in a rank's part of the row, and not on the position_ids"
OUTPUT_BY_PLACE = "the model's output depends on where a token stands in a rank's part of the row"
BY_LENGTH = "the model gives its first tokens other numbers when the row is longer, or when it is left to count position_ids itself"
OTHER_DOCUMENT = "tokens of one document change the model's output for another"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "learned positions by arange": ({"counts": True}, BY_PLACE),
    "rotary positions by arange": ({"counts": True, "positions": "rotary"}, BY_PLACE),
    "a convolution over the sequence": ({"mixes": "convolution"}, BY_PLACE),
    "a factor by place behind attention": ({"mixes": "place"}, OUTPUT_BY_PLACE),
    "a mean over the row": ({"mixes": "mean"}, OTHER_DOCUMENT),
    "a factor by the length of the input": ({"mixes": "length"}, BY_LENGTH),
    "positions of its own that count from 2": ({"mixes": "later"}, BY_LENGTH),
    "a causal softmax by hand": ({"by_hand": True}, OUTPUT_BY_PLACE),
    "positions by arange behind projections that start at zero": ({"counts": True, "zero": True}, BY_PLACE),
    "rotary by arange behind projections that start at zero": ({"counts": True, "positions": "rotary", "zero": True}, BY_PLACE),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_is_named(name: str, dtype: torch.dtype) -> None:
    options, words = WRONG[name]
    wrong, _, _ = found(make(**options).to(dtype))
    assert len(wrong) == 1 and wrong[0].startswith(words)
    assert "position_ids" in wrong[0] or "layout.attention" in wrong[0], "no remedy"


class Everything(nn.Module):
    """A softmax by hand over the whole input: no mask, no positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1) @ x


def test_attention_without_order_that_ignores_documents() -> None:
    """It passes any shuffle of tokens: only a change of another document shows it."""
    model = make(positions="none", is_causal=False)
    model.blocks[1] = Everything()
    wrong, _, _ = found(model, ModelLayout(blocks="blocks.*", attention="blocks.*"))
    assert len(wrong) == 1 and wrong[0].startswith(OTHER_DOCUMENT)


def test_attention_by_hand_behind_a_head_of_zeros() -> None:
    """The output shows nothing; what did not come through does."""
    model = make(zero=True, by_hand=True)
    wrong, context, _ = found(model)
    assert wrong == [] and context.missing == ["blocks.0", "blocks.1"]


def test_one_layer_of_many_by_hand_is_named() -> None:
    model = make()
    model.blocks[1].by_hand = True
    assert found(model)[1].missing == ["blocks.1"]


def test_attention_called_outside_of_a_named_module() -> None:
    """Grouped heads by hand in the model's own forward: the layout names what projects, not what attends."""

    class Outside(Toy):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            x = self.embed(input_ids)[:, None]
            return self.head(F.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0])

    torch.manual_seed(0)
    wrong, _, _ = found(Outside())
    assert len(wrong) == 1 and wrong[0].startswith(OUTPUT_BY_PLACE)


def test_cross_attention_is_named() -> None:
    class CrossAttention(Attention):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            q, k = (layer(y)[:, None] for layer, y in ((self.q, x), (self.k, x[:, :3])))
            return self.o(F.scaled_dot_product_attention(q, k, k)[:, 0])

    model = make()
    model.blocks[1] = CrossAttention()
    with pytest.raises(ValueError, match=re.escape("blocks.1: attention over 8 queries and 3 keys, for a row of 8 tokens")):
        found(model)


def test_an_output_without_a_row_for_each_token() -> None:
    class Pooled(Toy):
        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            return super().forward(input_ids, position_ids)[:, -1]

    torch.manual_seed(0)
    (wrong,), _, _ = found(Pooled())
    assert wrong.startswith("the model's output has shape (1, 16) for 8 tokens")


def test_positions_of_a_transformers_model_that_are_forgotten() -> None:
    """A wrapper that does not hand position_ids on: the model counts by itself."""
    torch.manual_seed(0)
    inner = huggingface.FAMILIES["Llama"]()
    kept = inner.model.forward
    inner.model.forward = lambda *args, **kwargs: kept(*args, **{**kwargs, "position_ids": None})  # type: ignore[method-assign]
    (wrong,), _, _ = found(inner, largest=huggingface.VOCABULARY - 1)
    assert "what attends depends on where a token stands in a rank's part of the row" in wrong


@pytest.mark.parametrize("kind", ["Bloom", "Mamba"])
def test_transformers_classes_whose_attention_is_not_reached(kind: str) -> None:
    """Attention biased by index, and a recurrence: refused by what they publish, and found by the probe without that."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2)
    options = {"n_head": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0} if kind == "Bloom" else {"state_size": 4}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes, **options))
    assert any("its attention does not come through transformers' attention registry" in message for message in check_published(model))
    if kind == "Bloom":
        with pytest.raises(ValueError, match="BloomForCausalLM keeps its attention 'eager'"):
            found(model)
    else:
        wrong, context, _ = found(model)
        assert wrong and wrong[0].startswith(OUTPUT_BY_PLACE) and context.missing == ["backbone.layers.0", "backbone.layers.1"]


# ---- that the threshold lies between ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_right_and_wrong_are_far_from_the_threshold(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times stricter or looser changes no verdict but bfloat16's rounding."""
    for factor in (0.1, 10.0):
        monkeypatch.setattr("lightning_megascale.parallel.context_probe.LARGEST", LARGEST * factor)
        assert found(make().to(dtype))[0] == []
        assert found(make(counts=True).to(dtype))[0] != []


def test_modules_that_attend() -> None:
    assert attention_names(make(), None) == ("blocks.0", "blocks.1")
    assert attention_names(make(), ModelLayout(blocks="blocks.*", attention="blocks.1")) == ("blocks.1",)
