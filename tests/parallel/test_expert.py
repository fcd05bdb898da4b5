"""Expert parallelism where routing or sizes are at their limits: the numbers of one device, or a refusal that says what to do."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.models.moe import Router
from lightning_megascale.parallel import expert
from lightning_megascale.parallel.model_check import check_model
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.verification import verify
from tests import huggingface, parity

EXPERTS = 4
NOBODY, EVERYBODY = -10.0, 10.0  # added to scores between 0 and 1


def plain_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what routers add to a loss and learn from a step."""
    for name in ("balance_loss", "router_z_loss", "balance_bias_rate"):
        monkeypatch.setitem(parity.MIXTURE, name, 0.0)


# ---- routing -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bias", "top_k"),
    [
        pytest.param((0.0, 0.0, 0.0, NOBODY), 2, id="an expert without tokens"),
        pytest.param((0.0, 0.0, NOBODY, NOBODY), 2, id="a rank without tokens"),
        pytest.param((0.0, EVERYBODY, 0.0, 0.0), 1, id="all tokens to one expert"),
    ],
)
@pytest.mark.parametrize("axes", ["fsdp2", "tp"])
def test_uneven_routing(bias: tuple[float, ...], top_k: int, axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def biased(config: DecoderConfig) -> Decoder:
        model = Decoder(config)
        for router in (module for module in model.modules() if isinstance(module, Router)):
            assert router.expert_bias is not None
            router.expert_bias.copy_(torch.tensor(bias))
        return model

    monkeypatch.setattr(parity, "Decoder", biased)
    monkeypatch.setitem(parity.MIXTURE, "num_experts_per_token", top_k)
    parity.check(parity.default_case(axes=axes, family="ep2"))


@pytest.mark.parametrize("axes", ["fsdp2", "tp"])
def test_tokens_over_capacity_are_dropped_as_on_one_device(axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_losses(monkeypatch)
    case = parity.default_case(axes=axes, family="ep2")
    every = parity.train_single(case, steps=1)["losses"][0]
    monkeypatch.setitem(parity.MIXTURE, "capacity_factor", 0.5)
    assert abs(parity.train_single(case, steps=1)["losses"][0] - every) > 1e-3, "nothing was dropped, so this case proves nothing"
    parity.check(case)


# ---- sizes ---------------------------------------------------------------------------------------------------------------------------


def test_tokens_that_ranks_with_equal_ones_cannot_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 rows of 15 tokens, of which two tensor-parallel ranks route a part each."""
    monkeypatch.setattr(parity, "ROWS", 3)
    monkeypatch.setattr(parity, "LENGTH", 15)
    parity.check(parity.default_case(axes="tp", family="ep2"))


def test_more_ranks_than_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts over four ranks: each is sharded over two of them, within."""
    monkeypatch.setitem(parity.MIXTURE, "num_experts", 2)
    monkeypatch.setitem(parity.AXES, "fsdp4", (4, 4, dict(data_parallel_shard_size=4)))
    parity.check(parity.default_case(axes="fsdp4", family="ep2"))


def test_experts_that_ranks_cannot_share_evenly_are_shared_by_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three experts on a rank and two ranks that share them: each has half of every expert, not two and one."""
    monkeypatch.setitem(parity.MIXTURE, "num_experts", 6)
    monkeypatch.setitem(parity.AXES, "fsdp4", (4, 4, dict(data_parallel_shard_size=4)))
    parity.check(parity.default_case(axes="fsdp4", family="ep2"))


# ---- frozen experts ------------------------------------------------------------------------------------------------------------------


class Own(L.LightningModule):
    """Our decoder as a user would train it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder(parity.config_of(parity.default_case(axes="fsdp2", family="ep2")))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-6)


def frozen(family: str) -> tuple[L.LightningModule, list[dict[str, Tensor]]]:
    if family == "own":
        module, batches = Own(), parity.batches(parity.default_case(axes="fsdp2", family="ep2"))
    else:
        module, batches = huggingface.build(family)
    experts = [child for name, child in module.named_modules() if name.endswith("mlp.experts")]
    assert experts
    for child in experts:
        child.requires_grad_(False)
    return module, batches


@pytest.mark.parametrize("family", ["own", "Mixtral"])
@pytest.mark.parametrize("axes", ["fsdp2xep2", "tp2xep2"])
def test_frozen_experts(family: str, axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_losses(monkeypatch)
    alignment = "aligned" if family == "own" else "huggingface"
    (report,) = verify(lambda: frozen(family), axes=[axes], label_alignment=alignment, timeout=100)
    assert report.ok, str(report)


# ---- refusals ------------------------------------------------------------------------------------------------------------------------


def refused(plan: dict[str, Any], ranks: int, **options: Any) -> str:
    with torch.device("meta"):
        module = L.LightningModule()
        shape = dict(vocab_size=32, hidden_size=16, num_layers=2, num_heads=4, intermediate_size=24, max_position_embeddings=16)
        module.model = Decoder(DecoderConfig(**{**shape, **dict(num_experts=EXPERTS), **options}))  # type: ignore[arg-type]
    wrong = check_model(module, module.model, ParallelPlan(**plan).resolve(ranks), module.model.megascale_layout)
    return "\n".join(wrong)


@pytest.mark.parametrize(
    ("plan", "ranks", "options", "parts"),
    [
        (
            dict(expert_parallel_size=2),
            2,
            dict(num_experts=3),
            ["layers.0.mlp.experts: num_experts=3 is not divisible by expert_parallel_size=2", "nearest 1 or 3"],
        ),
        (
            dict(expert_parallel_size=2),
            2,
            dict(num_experts=0),
            ["expert_parallel_size=2: no experts are known in Decoder", "layout.experts", "or use expert_parallel_size=1"],
        ),
        (
            dict(expert_parallel_size=2, context_parallel_size=2, label_alignment="aligned"),
            2,
            dict(capacity_factor=1.0),
            ["layers.0.mlp.router has capacity_factor=1.0", "context_parallel_size=2", "capacity_factor=None"],
        ),
        (
            dict(expert_parallel_size=2, tensor_parallel_size=2, sequence_parallel=True),
            2,
            dict(capacity_factor=1.0),
            ["layers.0.mlp.router has capacity_factor=1.0", "sequence_parallel=True", "capacity_factor=None"],
        ),
    ],
    ids=["not divisible", "no experts", "capacity and cp", "capacity and sequence shards"],
)
def test_refused_with_a_remedy(plan: dict[str, Any], ranks: int, options: dict[str, Any], parts: list[str]) -> None:
    message = refused(plan, ranks, **options)
    for part in parts:
        assert part in message, message


def test_what_is_fine_is_not_refused() -> None:
    assert refused(dict(expert_parallel_size=2), 2) == ""
    assert refused(dict(expert_parallel_size=2, tensor_parallel_size=2), 2, capacity_factor=1.0) == ""


def test_ranks_that_do_not_make_the_axis() -> None:
    with pytest.raises(ValueError, match=r"expert_parallel_size=3 must divide dp_shard x cp x tp = 4: nearest 2 or 4"):
        ParallelPlan(expert_parallel_size=3).resolve(4)


def test_a_transformers_model_without_experts_is_refused_by_name() -> None:
    (report,) = verify(lambda: huggingface.build("Llama"), axes=["fsdp2xep2"], label_alignment="huggingface", timeout=60)
    assert "expert_parallel_size=2: no experts are known in LlamaForCausalLM" in str(report.refused)


@pytest.mark.parametrize("made", [3, (torch.zeros(2, 2), None), (None, None)], ids=["a number", "another shape", "nothing"])
def test_a_dispatcher_of_ones_own_must_return_results(made: Any) -> None:
    with pytest.raises(ValueError, match=r"expert_dispatcher='kernel' returned .*: it must return a pair of the results, \(4, 2\)"):
        expert._checked("kernel", made, torch.zeros(4, 2))


@pytest.mark.parametrize("axes", ["tp", "tp+sp"])
@pytest.mark.parametrize("family", [pytest.param("moe-like", marks=pytest.mark.slow), "ep2"])
def test_blocks_with_nothing_but_experts(family: str, axes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No dense layer and no shared expert: no feed-forward is left that tensor parallelism would cut."""
    monkeypatch.setitem(parity.MIXTURE, "num_shared_experts", 0)
    parity.check(parity.default_case(axes=axes, family=family))
