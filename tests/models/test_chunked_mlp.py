"""The feed-forward in chunks: the numbers of the plain one, on one device and on ranks, and one chunk's activations at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_megascale import MegascaleStrategy, ParallelPlan
from lightning_megascale.layout import ModelLayout
from lightning_megascale.models.decoder import Decoder, DecoderConfig
from lightning_megascale.models.layers import Attention, FeedForward
from lightning_megascale.parallel.model_check import check_model
from lightning_megascale.parallel.recompute import apply_recompute
from tests import parity
from tests.benchmarks.long_context import mlp_formula, mlp_peak
from tests.harness import full, run_ranks
from tests.parallel.tensor_runs import GELU, SWIGLU, batch, build, case
from tests.parallel.test_recompute import Calls, step

FULL_OFFLOADED = {"checkpointing": "full", "offload": "block inputs offloaded"}


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("shape", [SWIGLU, GELU], ids=["swiglu", "gelu"])
def test_loss_and_gradients_are_those_of_the_plain_one(shape: dict[str, Any], chunk: int) -> None:
    """64 tokens: chunks of one, with a short last one, that divide, one chunk, and fewer tokens than a chunk. With dropout around."""
    wanted = step(build(case({**shape, "dropout": 0.3})))[0]
    for mode in (None, "full", {FeedForward}, {Attention}):
        model = build(case({**shape, "dropout": 0.3, "mlp_chunk_tokens": chunk}))
        apply_recompute(list(model.layers), mode)
        numbers = step(model)[0]
        assert numbers.keys() == wanted.keys()
        for name, value in wanted.items():
            assert (numbers[name] - value).abs().max() < 1e-12, (mode, name)


def test_each_chunk_runs_again_in_the_backward_and_none_without_gradients() -> None:
    """Two layers of 3 matmuls in ceil(64 / 7) = 10 chunks. Nothing that the last matmul of a chunk makes is kept, so it is not repeated."""
    plain, model = build(case(SWIGLU)), build(case({**SWIGLU, "mlp_chunk_tokens": 7}))
    more = step(model)[1].matmuls() - step(plain)[1].matmuls()
    assert more == 2 * (10 - 1) * 3 * 2 + 2 * 10 * 2  # two gradients of each matmul, for every chunk, and two matmuls again
    ids = batch(0)[0]
    with torch.no_grad(), Calls() as calls:
        out = model(ids)
    assert calls.matmuls() == 2 * (4 + 10 * 3) + 1 and (out - plain(ids)).abs().max() < 1e-12


@pytest.mark.parametrize("layers", [1, 3])
def test_one_chunk_is_alive_at_a_time(layers: int) -> None:
    tokens, width, inner = 512, 8, 64
    for chunk in (None, 128, 32):
        peak, formula = mlp_peak(tokens, width, inner, chunk, layers), mlp_formula(tokens, width, inner, chunk, layers)
        assert 0.9 * formula < peak < 1.1 * formula, (chunk, peak, formula)


# ---- on ranks ------------------------------------------------------------------------------------------------------------------------


def chunked(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Makes the decoders of parity cases run in chunks; ranks are forked, so they see it."""
    plain = parity.config_of
    monkeypatch.setattr(parity, "config_of", lambda case: replace(plain(case), mlp_chunk_tokens=chunk))


@pytest.mark.parametrize(
    "choices",
    [
        {"axes": "fsdp2"},
        {"axes": "fsdp2", "precision": "bf16-mixed", **FULL_OFFLOADED},
        {"axes": "tp+sp"},
        {"axes": "tp", "checkpointing": "full", "family": "gpt-like", "init": "meta", "dropout": "dropout"},
        {"axes": "tp+sp", "accumulation": "accumulate 2, reduce last", "dropout": "dropout", **FULL_OFFLOADED},
        {"axes": "pp2", "schedule": "1F1B", **FULL_OFFLOADED},
        {"axes": "cp2", **FULL_OFFLOADED},
        pytest.param({"axes": "fsdp2", "compile": "compiled"}, marks=pytest.mark.slow),
        pytest.param({"axes": "tp+sp", "compile": "compiled", "checkpointing": "full"}, marks=pytest.mark.slow),
        pytest.param({"axes": "pp2 x tp+sp", "schedule": "Interleaved1F1B", **FULL_OFFLOADED}, marks=pytest.mark.slow),
    ],
    ids=lambda choices: " ".join(choices.values()),
)
def test_parity_with_one_device(choices: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    chunked(monkeypatch, 5)
    parity.check(parity.default_case(**choices))


def _chunks_of_ranks(case: parity.Case) -> list[int]:
    """Tokens of each chunk that this rank has run, in order."""
    seen: list[int] = []
    run = FeedForward._run_chunk

    def counted(self: FeedForward, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[0])
        return run(self, hidden)

    FeedForward._run_chunk = counted  # type: ignore[method-assign]
    parity.train_parallel(case, {})
    return seen


@pytest.mark.parametrize("axes, tokens", [("tp+sp", 32), ("cp2", 32), ("fsdp2", 32), ("tp", 64)])
def test_all_ranks_run_as_many_chunks(axes: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tokens a step: a rank's share of the sequence or of the rows, or all of them. Each chunk of two layers runs twice a step."""
    chunked(monkeypatch, 5)
    first, second = run_ranks(_chunks_of_ranks, 2, parity.default_case(axes=axes))
    assert first == second and max(first) == 5
    runs = 2 * 2 * parity.STEPS
    if axes == "fsdp2":
        assert len(first) == runs * (tokens // 5 + 1) and first.count(tokens % 5) == runs
    else:  # the first call of a model is also tried out, on copies and on few tokens
        assert len(first) >= runs * (tokens // 5 + 1) and first.count(tokens % 5) >= runs


class OtherLengths(parity.ParityModule):
    """Rank 1 has half as many tokens in a row."""

    def train_dataloader(self) -> DataLoader:
        rank = self.trainer.strategy.data_parallel_rank
        found = parity.Rows(self.case, rank, 2).rows
        return DataLoader([{key: value[: 16 // (1 + rank)] for key, value in row.items()} for row in found], batch_size=2)  # type: ignore[arg-type]


def _other_lengths(case: parity.Case) -> dict[str, torch.Tensor]:
    module = OtherLengths(case)
    quiet: dict[str, Any] = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    strategy = MegascaleStrategy(**parity.plan_of(case))
    L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=1, use_distributed_sampler=False, **quiet).fit(module)
    return {name: full(value) for name, value in module.seen[0].items()}


def test_data_parallel_ranks_may_run_other_numbers_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's parameters are gathered once, not once a chunk, so ranks with rows of other lengths do not wait for each other."""
    chunked(monkeypatch, 5)
    one = parity.default_case(axes="fsdp2", loss="loss_sum and num_tokens")
    gradients = run_ranks(_other_lengths, 2, one)[0]
    torch.manual_seed(parity.SEED)
    model, first = Decoder(parity.config_of(one)).double(), parity.batches(one)[0]
    total = tokens = 0
    for rows, length in ((slice(0, 2), 16), (slice(2, 4), 8)):
        loss, count = model(first["input_ids"][rows, :length], labels=first["labels"][rows, :length])
        total, tokens = total + loss, tokens + count
    (total / tokens).backward()
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).abs().max() < 1e-12, name


# ---- refusals ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "all"])
def test_a_wrong_size_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=f"mlp_chunk_tokens={value!r}: must be an integer of at least 1"):
        DecoderConfig(32, 16, 1, 2, 24, 16, mlp_chunk_tokens=value)


@pytest.mark.parametrize(
    "plan, layout, ranks, said",
    [
        (
            dict(activation_checkpointing="selective"),
            {},
            1,
            ["layers.0.mlp has mlp_chunk_tokens=5", "activation_checkpointing='selective'", "use activation_checkpointing='full'"],
        ),
        (
            dict(pipeline_parallel_size=2, pipeline_schedule="ZBVZeroBubble", pipeline_stages_per_rank=2, microbatch_size=1),
            {},
            2,
            ["mlp_chunk_tokens=5", "pipeline_schedule='ZBVZeroBubble'", "'Interleaved1F1B'"],
        ),
        (
            dict(),
            dict(blocks=["layers.*.attention", "layers.*.mlp"]),
            2,
            ["mlp_chunk_tokens=5", "layers.0.mlp is a unit of its own", "layout.blocks"],
        ),
        (dict(), dict(blocks=["layers.*.mlp.up_proj"]), 2, ["layers.0.mlp.up_proj is a unit of its own"]),
    ],
    ids=["selective", "zero bubble", "a unit", "a part is a unit"],
)
def test_what_defeats_chunks_is_refused(plan: dict[str, Any], layout: dict[str, Any], ranks: int, said: list[str]) -> None:
    for chunk in (5, None):
        model = build(case({**SWIGLU, "num_layers": 4, "mlp_chunk_tokens": chunk}))
        wrong = check_model(model, model, ParallelPlan(**plan).resolve(ranks), ModelLayout(**layout) if layout else model.megascale_layout)
        assert bool(wrong) == (chunk == 5), wrong
        for part in said if wrong else ():
            assert part in wrong[0]
