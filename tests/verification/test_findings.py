"""What a proof says of modules and runs that are odd: the right verdict, and the right culprit."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_megascale.verification import RankFailure, run_ranks, verify
from lightning_megascale.verification.proof import Proof


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    return [{"x": torch.randn(4, 6), "y": torch.randn(4, 2)} for _ in range(count)]


class Base(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return (self.net(batch["x"]) - batch["y"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.inner(x))


class Hidden(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = Hiding()  # type: ignore[assignment]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return (self.net(batch["x"]).logits - batch["y"]).square().mean()


class Aside(Base):
    """A parameter that learns nothing, for no optimizer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(6, 2)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.aside(batch["x"]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


class Skips(Base):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class MixesLater(Base):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        x = batch["x"] - batch["x"].mean(0) if batch_idx == 2 else batch["x"]
        return (self.net(x) - batch["y"]).square().mean()


class MixesBefore(Base):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return (self.net(batch["x"] - batch["x"].mean(0)) - batch["y"]).square().mean()


def test_tensors_in_an_object_that_sharding_does_not_see_are_refused() -> None:
    (report,) = verify(lambda: (Hidden(), batches()), axes=["fsdp2"])
    assert not report.ok and "Hiding returns its tensors in a SimpleNamespace" in str(report.refused)


def test_a_parameter_that_no_optimizer_has_may_get_gradients() -> None:
    (report,) = verify(lambda: (Aside(), batches()), axes=["fsdp2"])
    assert report.ok, str(report)


def test_what_differs_from_a_later_step_on_is_not_blamed_on_the_optimizer_alone() -> None:
    (report,) = verify(lambda: (MixesLater(), batches()), axes=["dp2"])
    assert not report.ok and "the optimizer, or what the module does from step 3 on" in str(report.first_divergence)


def test_the_first_module_called_is_not_blamed_for_its_input() -> None:
    (report,) = verify(lambda: (MixesBefore(), batches()), axes=["dp2"])
    assert not report.ok and "what it is given may be off already" in str(report.first_divergence)


def test_a_step_that_gives_no_loss_ends_in_a_sentence() -> None:
    (report,) = verify(lambda: (Skips(), batches()), axes=["dp2"])
    assert report.ok or report.refused or report.error  # no traceback of the proof itself


@pytest.mark.parametrize(("count", "part"), [(5, "the first 3 of 5 batches are used; steps=5"), (2, "2 batches are used again and again")])
def test_batches_that_do_not_fit_the_steps_are_told(count: int, part: str) -> None:
    assert any(part in note for note in Proof(lambda: (Base(), batches(count)), ["dp2"]).notes)


def test_a_tolerance_that_proves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 1e-2: more proves nothing"):
        verify(lambda: (Base(), batches()), axes=["dp2"], tolerance=1e3)


def _dies() -> None:
    if os.environ["RANK"] == "1":
        print("last words", flush=True)
        os._exit(0)
    torch.distributed.barrier()


def test_the_rank_that_died_is_named_and_not_the_one_that_noticed() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[1\] died: exit codes \[0\]\nlast words"):
        run_ranks(_dies, 2, timeout=20)
