"""The rules that make the numbers right, each broken once: parity must notice. A rule whose loss goes unnoticed is not proven."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megascale.parallel import loss_scale, rng
from lightning_megascale.strategies import steps
from lightning_megascale.strategies import trainer as strategy_module
from lightning_megascale.strategies.trainer import MegascaleStrategy
from tests import parity
from tests.harness import RankFailure
from tests.strategies.test_data import check_peers_and_union

Broken = (AssertionError, RankFailure)


def must_fail(**choices: str) -> None:
    with pytest.raises(Broken):
        parity.check(parity.default_case(**choices))


def test_without_the_scale_by_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale, "scale_gradients", lambda gradients, scale: None)
    must_fail(axes="fsdp2", accumulation="accumulate 2, reduce last")


def test_without_the_share_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "weighted", lambda loss, weight: loss)
    must_fail(axes="fsdp2")


def test_with_the_share_of_the_rows_in_place_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "weighted", lambda loss, weight: loss / 2)
    must_fail(axes="fsdp2", labels="90% of one rank masked")


def test_with_a_mean_of_means_in_place_of_the_token_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows_only(batch: Any, *_: Any) -> loss_scale.Weights:
        return loss_scale.Weights(torch.tensor(float(len(batch["input_ids"])), dtype=torch.float64))

    monkeypatch.setattr(steps, "weigh", rows_only)
    must_fail(axes="fsdp2", labels="90% of one rank masked")


def test_with_torchs_mean_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_megascale.parallel import parallelize

    monkeypatch.setattr(parallelize, "sum_gradients", lambda units: None)
    must_fail(axes="fsdp2")


def test_without_the_sum_of_the_q_and_k_norms_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = steps.remaining
    monkeypatch.setattr(steps, "remaining", lambda parameters, partial, views: complete(parameters, set(), views))
    must_fail(axes="tp")


def test_with_zero_grad_after_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = MegascaleStrategy.backward

    def backward(self: MegascaleStrategy, loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = complete(self, loss, optimizer, *args, **kwargs)
        self.lightning_module.zero_grad(set_to_none=False)
        return result

    monkeypatch.setattr(MegascaleStrategy, "backward", backward)
    must_fail(axes="fsdp2")


def test_with_a_sampler_that_follows_the_global_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    by_rank = property(lambda self: {"num_replicas": self.world_size, "rank": self.global_rank})
    monkeypatch.setattr(MegascaleStrategy, "distributed_sampler_kwargs", by_rank)
    with pytest.raises(Broken):
        check_peers_and_union()


def test_with_dropout_seeded_by_the_global_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rank(seed: int, batch: int, data_parallel_rank: int) -> None:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else data_parallel_rank
        torch.manual_seed(rng.derive_seed(seed, "microbatch", batch, rank))

    monkeypatch.setattr(strategy_module, "seed_microbatch", by_rank)
    must_fail(axes="tp+sp", dropout="dropout")


def test_without_lightnings_division_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_scale.LossScale, "add", lambda self, loss, weights: None)
    must_fail(axes="dp", accumulation="accumulate 2, reduce last")


def test_the_unbroken_rules_pass() -> None:
    parity.check(parity.default_case(axes="fsdp2", labels="90% of one rank masked", accumulation="accumulate 2, reduce last"))
