"""verify on models of a user's own: right ones are equal, and of wrong ones the first module that differs is named."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lightning_megascale import MegascaleModule
from lightning_megascale.parallel import tensor_proof
from lightning_megascale.strategies import precision, steps
from lightning_megascale.verification import Report, verify
from tests.verification import models
from tests.verification.models import LAYOUT


def only(reports: list[Report]) -> Report:
    (report,) = reports
    return report


def words(kind: type, *args: Any) -> Any:
    return lambda: (kind(*args), models.batches())


# ---- equal ---------------------------------------------------------------------------------------------------------------------------


def test_a_right_layout_is_equal() -> None:
    axes = ["tp2", "fsdp2", "pp2", "fsdp2xtp2"]
    reports = verify(models.build, axes, layout=LAYOUT)
    assert [report.axes for report in reports] == axes
    for report in reports:
        assert report.ok and report.verdict == "equal", report
        assert report.refused is report.error is report.first_divergence is report.hint is None
        assert report.loss is not None and report.norm is not None and report.gradient is not None and report.parameters is not None
        assert max(report.loss, report.norm, report.gradient[0], report.parameters[0]) < 1e-13
        assert report.gradient[1].startswith("model.") and report.parameters[1].startswith("model.")
        assert max(report.gradient[0], report.parameters[0]) > 0, "sums in another order are never all the same: nothing was compared"


@pytest.mark.slow
def test_accumulation_interleaved_stages_and_float32() -> None:
    build = lambda: (models.Words(4), models.batches(8))  # noqa: E731
    axes = ["fsdp2", "pp2:interleaved1f1b"]
    for report in verify(build, axes, layout=LAYOUT, accumulate=2, microbatch_size=2, dtype=torch.float32):
        assert report.ok, report
        assert report.gradient[0] > 1e-12, "float64's accuracy: dtype was ignored"  # type: ignore[index]


@pytest.mark.slow
def test_tied_parameters_and_models_of_the_package() -> None:
    sizes = dict(vocab_size=32, hidden_size=16, num_layers=2, num_heads=4, intermediate_size=24, max_position_embeddings=16, dropout=0.1)
    ids = {"input_ids": models.batches()[0]["ids"], "labels": models.batches()[1]["ids"]}
    own = lambda: (MegascaleModule(model=sizes, optimizer={"lr": 1e-2}, schedule={"kind": "constant"}), ids)  # noqa: E731
    reports = [*verify(words(models.Tied), ["fsdp2", "pp2"], layout=LAYOUT), *verify(own, ["tp2"])]
    assert all(report.ok for report in reports), reports


@pytest.mark.slow
def test_a_model_with_a_loss_of_its_own() -> None:
    """Hugging Face's Llama: norms and loss in float32 inside, dropout in its config, masked labels."""
    for report in verify(models.build_llama, ["tp2", "fsdp2", "pp2"], layout=models.decoder_layout(), label_alignment="huggingface"):
        assert report.ok, report
        assert max(report.loss or 0, report.gradient[0], report.parameters[0]) < 1e-13  # type: ignore[index]


@pytest.mark.slow
def test_recomputed_activations_are_float64_too() -> None:
    for mode in ("full", "selective"):
        report = only(verify(models.build, ["fsdp2"], activation_checkpointing=mode, dtype=torch.float64))
        assert report.ok and report.gradient[0] < 1e-13, report  # type: ignore[index]


def test_manual_optimization_with_two_optimizers() -> None:
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    report = only(verify(lambda: (models.TwoOptimizers(), [rows, -rows]), "fsdp2"))
    assert report.ok and report.norm is None, report


def test_own_loader_late_model_sums_and_dropout() -> None:
    report = only(verify(models.Sums, ["dp2"]))
    assert report.ok, report


@pytest.mark.slow
def test_steps_of_gradients_that_are_zero_but_for_rounding_are_no_difference() -> None:
    report = only(verify(words(models.KeyBias), ["tp2"], layout=LAYOUT))
    assert report.ok, report
    assert report.parameters[0] > 1e-8 and report.parameters[1].endswith("k_proj.bias"), "this model proves nothing"  # type: ignore[index]


# ---- different -----------------------------------------------------------------------------------------------------------------------


def test_a_mean_over_rows_inside_the_model_is_found() -> None:
    for report in verify(models.build_centered, ["fsdp2", "pp2"], layout=LAYOUT):
        assert report.verdict == "DIFFERENT"
        assert report.first_divergence is not None and report.first_divergence.startswith("model.h.1.between: its output"), report
        assert report.hint is not None and "rows together" in report.hint
        assert report.loss is not None and report.loss > 1e-4


def test_a_gradient_that_is_not_summed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = steps.remaining
    monkeypatch.setattr(steps, "remaining", lambda parameters, partial, views: complete(parameters, set(), views))
    report = only(verify(models.build, ["tp2"], layout=LAYOUT))
    assert report.verdict == "DIFFERENT"
    assert report.first_divergence is not None and report.first_divergence.startswith("model.h.1.attn.q_norm: the gradient of"), report
    assert "wrong: model.h.*.attn.q_norm.weight; the other" in report.first_divergence
    assert report.hint is not None and "layout.replicated" in report.hint


def test_a_layout_without_the_norms_of_queries_and_keys_is_refused() -> None:
    right = models.decoder_layout(replicated=["model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm"])
    assert only(verify(models.build_qwen3, "tp2", layout=right, label_alignment="huggingface")).ok
    report = only(verify(models.build_qwen3, ["tp2"], layout=replace(right, replicated=()), label_alignment="huggingface"))
    assert not report.ok and report.verdict == "refused" and report.loss is None
    assert report.refused is not None and "q_norm" in report.refused


class WholeMean(models.Forward):
    """Takes the mean over all features, of which a rank has a part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.up(x))
        return self.down(x - x.mean(-1, keepdim=True))


def build_whole_mean() -> Any:
    module, batches = models.build()
    module.model.h[1].mlp = WholeMean()
    return module, batches


@pytest.mark.slow
@pytest.mark.parametrize("is_proven", [True, False])
def test_an_operation_over_split_features_is_a_failure_with_and_without_the_strategys_own_proof(
    is_proven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_proof, "_enabled", is_proven)
    report = only(verify(build_whole_mean, ["tp2"], layout=LAYOUT))
    assert not report.ok
    if is_proven:
        assert report.refused is not None and "h.1 (Block)" in report.refused and "does not compute" in report.refused
    else:
        assert report.first_divergence is not None and report.first_divergence.startswith("model.h.1.mlp.down: its output"), report
        assert report.hint is not None and "part of the heads or features" in report.hint


@pytest.mark.slow
def test_a_sum_in_place_of_a_mean_is_found() -> None:
    report = only(verify(words(models.SumLoss), ["fsdp2"], layout=LAYOUT))
    assert report.first_divergence is not None and report.first_divergence.startswith("training_step: the first loss"), report
    assert report.hint is not None and "loss_sum" in report.hint


@pytest.mark.slow
def test_another_step_of_the_optimizer_is_found() -> None:
    report = only(verify(words(models.ScaledOnRanks), ["dp2"], layout=LAYOUT))
    assert report.first_divergence is not None and report.first_divergence.startswith(
        "the optimizer, or what the module does from step 2 on"
    ), report
    assert report.gradient[0] > 1e-6  # type: ignore[index]


@pytest.mark.slow
def test_another_norm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = precision.clip_grad_norm_
    monkeypatch.setattr(precision, "clip_grad_norm_", lambda *args, **kwargs: clip(*args, **kwargs) * 1.001)
    report = only(verify(models.build, ["fsdp2"], layout=LAYOUT))
    assert report.norm is not None and report.norm > 1e-4 and report.parameters[0] < 1e-12  # type: ignore[index]
    assert report.first_divergence is not None and report.first_divergence.startswith("clipping: the norm of step 1 is off"), report


# ---- ranks that fail -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_place() -> None:
    report = only(verify(words(models.Hanging), ["fsdp2"], timeout=15))
    assert report.verdict == "FAILED" and report.error is not None
    assert "did not finish in 15 s" in report.error and "models.py" in report.error and "wait_for_ever" in report.error


def test_a_rank_that_fails_is_shown() -> None:
    report = only(verify(words(models.Failing), ["fsdp2"]))
    assert report.verdict == "FAILED" and report.error is not None
    assert "rank 1" in report.error and "KeyError: 'no such word'" in report.error


def test_a_plan_that_is_refused_says_why() -> None:
    refused = verify(models.build, ["tp2", "pp2:zbvzerobubble"], activation_checkpointing="full", compile=False)
    assert [report.verdict for report in refused] == ["refused", "refused"]
    assert "needs to know the roles" in (refused[0].refused or "") or "layout" in (refused[0].refused or "")
    assert "zero-bubble" in (refused[1].refused or "")
    statistics = only(verify(models.BatchNorm, "fsdp2")).refused
    assert statistics is not None and "'model.1' is a BatchNorm1d: it takes its statistics from this rank's rows only" in statistics


# ---- what cannot be proven -----------------------------------------------------------------------------------------------------------


def none() -> None:
    return None


def takes_arguments(size: int) -> Any:
    return models.build()


def stops() -> Any:
    raise RuntimeError("no file")


def of(kind: type, *given: Any) -> Any:
    return lambda: (kind(), *given) if given else kind()


class WithBadLoader(models.Words):
    def train_dataloader(self) -> Any:
        return self.trainer.datamodule.rows  # type: ignore[union-attr]


class RaisesInStep(models.Words):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.nothing


class Infinite(models.Words):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * float("inf")


class Unseeded(models.Words):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.init.normal_(self.model.wte.weight, generator=torch.Generator().manual_seed(torch.seed()))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (none, r"build\(\) returned nothing. build\(\) must return a LightningModule, or"),
        (lambda: 3, r"build\(\) returned int"),
        (takes_arguments, r"build\(\) failed: TypeError: .*missing 1 required positional argument: 'size'"),
        (stops, r"build\(\) failed: RuntimeError: no file \(.*test_verify.py, line \d+\)"),
        (of(models.Words), "Words has no train_dataloader and build"),
        (of(models.Words, []), "no batch at all"),
        (of(models.Words, "text"), "returned str as batches"),
        (of(models.Words, [torch.tensor(1.0)]), "no tensor with rows"),
        (of(models.Words, [{"ids": torch.zeros(4, 3)}, {"ids": torch.zeros(3, 3)}]), r"different numbers of rows \(4, 3, 4\)"),
        (of(models.Words, models.batches(3)), "a batch of 3 rows cannot be divided into 2 data-parallel shares: give it 2 or 4 rows"),
        (of(models.Net), "returned a Net without batches"),
        (of(WithBadLoader), r"train_dataloader\(\) outside of a Trainer failed: .*return \(module, batches\) from build"),
        (of(RaisesInStep, models.batches()), "(?s)does not train on one device.*has no attribute 'nothing'"),
        (of(Infinite, models.batches()), "first step's loss is inf"),
        (of(Unseeded, models.batches()), r"build\(\) does not repeat itself: model.wte.weight"),
        (of(models.Noisy, models.batches()), r"(?s)differs from itself on one device.*draws random numbers \(torch\)"),
        (of(models.Counting, models.batches()), "(?s)differs from itself on one device.*besides weights and batch"),
    ],
)
def test_a_build_that_allows_no_proof_is_told_so(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(build, ["dp2"], layout=LAYOUT)


def test_a_model_that_is_too_large_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_megascale.verification.subject.LARGEST", 1000)
    with pytest.raises(ValueError, match=r"Net|Words.*has .* parameters.*a small one of the same structure"):
        verify(models.build, ["dp2"])


@pytest.mark.parametrize(
    ("axes", "arguments", "message"),
    [
        ([], {}, "name at least one combination"),
        (["tpp2"], {}, "'tpp2' is no axis; did you mean 'tp2'"),
        (["tp2"], {"tensor_parallel_size": 4}, "tensor_parallel_size=4: sizes come from axes"),
        (["tp2"], {"activation_checkpoint": "full"}, "no field 'activation_checkpoint'; did you mean 'activation_checkpointing'"),
        (["tp2"], {"steps": 0}, "steps=0: must be a whole number of at least 1"),
        (["tp2"], {"timeout": 0}, "timeout=0"),
        (["tp2"], {"dtype": torch.bfloat16}, "must be float64 or float32"),
    ],
)
def test_arguments_that_are_wrong_are_told_so(axes: list[str], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(partial(pytest.fail, "build must not be called"), axes, **arguments)
