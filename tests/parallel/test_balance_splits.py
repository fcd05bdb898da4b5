"""Balance losses are the same for every split of a global batch: by rows, along the sequence, in microbatches and over stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import parity

SPLITS = {
    "rows, ep2": dict(axes="fsdp2", family="ep2"),
    "microbatches, ep2": dict(axes="fsdp2", family="ep2", accumulation="accumulate 2, reduce last", checkpointing="full"),
    "sequence shards": dict(axes="tp+sp", family="moe-like"),
    "sequence shards, ep2": dict(axes="tp+sp", family="ep2", checkpointing="full"),
    "parts of rows": dict(axes="cp2", family="ep2"),
    "stages": dict(axes="pp2", family="moe-like", schedule="1F1B", checkpointing="full"),
}


def cases(scopes: tuple[str, ...], here: set[tuple[str, str]], without: str = "") -> list[Any]:
    """(scope, split) of all of them; what is not ``here`` is left to the slow tier."""
    pairs = [(scope, split) for scope in scopes for split in SPLITS if split != without]
    return [pytest.param(*pair, marks=[] if pair in here else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(
    ("scope", "split"),
    cases(
        ("sequence", "microbatch"),
        {("sequence", "sequence shards, ep2"), ("sequence", "parts of rows"), ("sequence", "stages"), ("microbatch", "parts of rows")},
    ),
)
def test_by_rows_and_microbatches(scope: str, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fractions of each row, or of each rank's microbatch, are those of all its tokens, wherever they lie."""
    monkeypatch.setitem(parity.MIXTURE, "balance_scope", scope)
    parity.check(parity.default_case(**SPLITS[split]))


@pytest.mark.parametrize(
    ("scope", "split"),
    cases(
        ("global", "sequence"),
        {("global", "microbatches, ep2"), ("global", "stages"), ("sequence", "sequence shards, ep2")},
        "parts of rows",
    ),
)  # there a mask keeps documents apart
def test_padding_does_not_count(split: str, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unlike lengths, most of one of them padding; labels are masked in other places too."""
    plain = parity.batches

    def padded(case: parity.Case) -> list[dict[str, torch.Tensor]]:
        found = plain(case)
        for batch in found:
            mask = torch.ones_like(batch["input_ids"])
            mask[0, 4:], mask[-1, 10:] = 0, 0
            batch["attention_mask"], batch["labels"] = mask, batch["labels"].masked_fill(mask == 0, -100)
        return found

    monkeypatch.setattr(parity, "batches", padded)
    monkeypatch.setitem(parity.MIXTURE, "balance_scope", scope)
    parity.check(parity.default_case(**SPLITS[split], labels="90% of one rank masked"))
