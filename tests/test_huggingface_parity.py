"""transformers classes under every plan they are offered for, against one device: the table that README prints, and that it can fail."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from lightning_megascale import support
from lightning_megascale.parallel import tensor, tensor_proof
from lightning_megascale.verification import Report, verify
from tests import huggingface

FIRST = ("tp2", "pp2:interleaved1f1b")  # in the default tier; "cp2" of two classes too
CASES = [(family, axes) for family, proven in support.TRANSFORMERS.items() for axes in proven]
DEFAULT = [(family, axes) for family, axes in CASES if family in ("Llama", "Mixtral") and axes in FIRST]
DEFAULT += [("Qwen3", "tp2"), ("GPT2", "pp2:interleaved1f1b"), ("Llava", "tp2")]
DEFAULT += [("Llama", "cp2"), ("Qwen3", "cp2"), ("Mixtral", "fsdp2xep2"), ("Mixtral", "tp2xep2")]


def prove(family: str, axes: str, **options: Any) -> Report:
    alignment = "aligned" if family == "Whisper" else "huggingface"
    options = {"microbatch_size": 1 if "pp2xfsdp2" in axes else 2, **options}
    (report,) = verify(partial(huggingface.build, family), axes=[axes], label_alignment=alignment, timeout=200, **options)
    return report


@pytest.mark.parametrize(
    ("family", "axes"), [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow, id=" ".join(case)) for case in CASES]
)
def test_equal_to_one_device(family: str, axes: str) -> None:
    report = prove(family, axes)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "axes"), [("Llama", "fsdp2xtp2"), ("GPT2", "pp2"), ("Llava", "fsdp2")])
def test_accumulated_microbatches(family: str, axes: str) -> None:
    """Their labels are masked in unequal numbers, so a mean of their losses would be wrong."""
    report = prove(family, axes, accumulate=2, **({"microbatch_size": 1} if axes == "pp2" else {}))
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["tp2", "pp2xtp2", "fsdp2xep2", "tp2xep2"])
def test_grouped_products_of_experts(axes: str) -> None:
    """The kernel that trains in float32 and bfloat16 takes no float64."""
    report = prove("Mixtral, grouped", axes, dtype=torch.float32)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("axes", ["tp2", "tp2xep2"])
def test_a_balance_loss_trains_the_router_once(axes: str) -> None:
    """Each rank has the whole balance loss and a part of the experts' say about the router."""
    report = prove("Mixtral, balanced", axes)
    assert report.ok, str(report)


@pytest.mark.parametrize("axes", ["fsdp2", "fsdp2xep2", "cp2", "pp2"])
def test_a_balance_loss_over_rows_and_layers_is_refused_where_nobody_sees_them_all(axes: str) -> None:
    assert "output_router_logits=True adds a balance loss" in str(prove("Mixtral, balanced", axes).refused)


# ---- that it can fail --------------------------------------------------------------------------------------------------------------


def test_without_the_style_of_query_and_key_norms_the_numbers_are_found_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss alone would not tell: it is off by little, and the ranks drift apart."""
    whole = tensor._partial_names
    monkeypatch.setattr(tensor, "_partial_names", lambda *args: [n for n in whole(*args) if "q_norm" not in n and "k_norm" not in n])
    refused = prove("Qwen3", "tp2")
    assert not refused.ok and "_norm.weight" in str(refused.refused)  # by the strategy's own proof of a block
    monkeypatch.setattr(tensor_proof, "_enabled", False)
    report = prove("Qwen3", "tp2")
    assert not report.ok and report.refused is None
    assert report.loss is not None and report.loss < 1e-2
    assert report.gradient is not None and report.gradient[1].endswith(("q_norm.weight", "k_norm.weight"))
    assert report.first_divergence is not None and "_norm" in report.first_divergence


def test_a_plan_without_that_style_is_refused_by_name() -> None:
    class Forgetful(huggingface.HuggingFaceModule):
        def __init__(self) -> None:
            super().__init__("Qwen3")
            plan = {key: style for key, style in self.model.tp_plan.items() if "q_norm" not in key}
            type(self.model).tp_plan = property(lambda model: plan)  # type: ignore[assignment]

    kind = type(huggingface.FAMILIES["Qwen3"]())
    kept = kind.__dict__.get("tp_plan")
    try:
        (report,) = verify(lambda: (Forgetful(), huggingface.batches("Qwen3")), axes=["tp2"], label_alignment="shift")
    finally:
        if kept is None:
            del kind.tp_plan  # type: ignore[attr-defined]
        else:
            kind.tp_plan = kept  # type: ignore[attr-defined]
    assert not report.ok
    assert "model.layers.0.self_attn.q_norm (and 3 more like it)" in str(report.refused)
    assert "no role" in str(report.refused)
