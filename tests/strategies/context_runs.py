"""Small models under context parallelism and on one device: losses, gradients and parameters of both, many cases in one start of ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn

from lightning_megascale import MegascaleStrategy
from lightning_megascale.parallel.rng import seed_step
from lightning_megascale.strategies import context_proof
from lightning_megascale.verification.one_device import OneDevice
from lightning_megascale.verification.training import Batches, Recorder, Setting, fit
from tests import huggingface
from tests.harness import RankFailure, full, run_alone, run_ranks, worst

STEPS, VOCABULARY, WIDTH, HEADS = 3, 24, 16, 2
CP2: dict[str, Any] = dict(context_parallel_size=2)
DTYPE = torch.float64


# ---- a model of one's own ----------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Projections around ``F.scaled_dot_product_attention``, as people write it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.options = {"is_causal": True, **options}

    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x_BLD).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if mask is not None:  # a reference with documents
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(**options)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x_BLD: Tensor, mask: Tensor | None = None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.norm(x_BLD), mask)
        return x_BLD + self.mlp(x_BLD)


class Toy(nn.Module):
    """Learned positions, given by ``position_ids``; two blocks; documents by a mask on one device only."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Block(**options) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x_BLD = self.embed(input_ids) + self.places(position_ids)
        for layer in self.layers:
            x_BLD = layer(x_BLD, mask)
        return self.head(x_BLD)


def rows(length: int = 12, seed: int = 1, count: int = STEPS, number: int = 4, vocabulary: int = VOCABULARY) -> list[dict[str, Tensor]]:
    """Batches with labels masked in unequal numbers, also where ranks' parts of rows meet."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(1, vocabulary, (number, length), generator=generator)
        labels = ids.clone()
        labels[0, : length // 2 + 1], labels[1, 2], labels[-1, -3:] = -100, -100, -100
        found.append({"input_ids": ids, "labels": labels})
    return found


class Module(L.LightningModule):
    """Own cross-entropy. ``align``: "shift": the step shifts, "aligned": the labels are shifted by the loader already."""

    def __init__(self, model: Callable[[], nn.Module], align: str = "shift") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.align = model(), align

    def logits(self, batch: Any) -> Tensor:
        given = {key: batch[key] for key in ("position_ids", "mask", "attention_mask") if key in batch}
        given = {key: value for key, value in given.items() if value is not None}
        output = self.model(batch["input_ids"], **given)
        return output if isinstance(output, Tensor) else output.logits

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, labels = self.logits(batch), batch["labels"]
        if self.align == "shift":
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)


class Published(Module):
    """The model's own loss, unmodified."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss


# ---- cases -------------------------------------------------------------------------------------------------------------------------------


def same(batch: Any) -> Any:
    return batch


@dataclass(frozen=True, eq=False)
class Case:
    """One comparison.

    Args:
        module: makes the LightningModule; the same values in every process.
        batches: whole ones, a step each.
        alignment: ``label_alignment``.
        plan: further arguments of the strategy.
        alone: a batch as one device takes it.
        callbacks: of both Trainers; what they have under ``found`` is compared by the test.
        clip: norm of gradients.
    """

    module: Callable[[], L.LightningModule]
    batches: Callable[[], list[Any]]
    alignment: str | None = "shift"
    plan: Mapping[str, Any] = field(default_factory=dict)
    alone: Callable[[Any], Any] = same
    callbacks: Callable[[], list[L.Callback]] = list
    clip: float | None = 0.05


def train(case: Case, ranks: int) -> dict[str, Any]:
    """Trains on these ranks, or on one device (0); whole gradients of every step."""
    gradients: list[dict[str, Tensor]] = []

    def note(step: int, name: str, gradient: Tensor) -> None:
        if len(gradients) == step:
            gradients.append({})
        gradients[step][name] = gradient.clone()

    os.environ["PL_GLOBAL_SEED"] = "7"
    seed_step(7)
    Counted.steps = 0
    module, recorder, callbacks = case.module().to(DTYPE), Recorder(note), [Counted(), *case.callbacks()]
    strategy: Any = OneDevice(7)
    plugins = [LightningEnvironment()]
    if ranks:
        strategy = MegascaleStrategy(**{**CP2, **case.plan, "label_alignment": case.alignment})
        plugins = []
    share = (lambda s: (s.data_parallel_size, s.data_parallel_rank)) if ranks else (lambda s: (1, 0))

    def mine(strategy: Any) -> list[Any]:
        size, rank = share(strategy)
        found = case.batches() if ranks else [case.alone(batch) for batch in case.batches()]
        return found if size == 1 else [{key: value.chunk(size)[rank] for key, value in batch.items()} for batch in found]

    setting = Setting(STEPS, case.clip, wide=True)
    arguments = dict(devices=ranks or 1, strategy=strategy, plugins=plugins, callbacks=[recorder, *callbacks])
    fit(module, Batches(mine), DTYPE, setting, **arguments)
    trainer = module.trainer
    return {
        "losses": recorder.losses,
        "norms": recorder.norms,
        "gradients": gradients,
        "state": {name: full(parameter) for name, parameter in module.named_parameters()},
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "found": [callback.found for callback in callbacks if hasattr(callback, "found")],
        "seen": getattr(module, "seen", None),
    }


Cases = Mapping[str, Case]


def train_all(cases: Cases, ranks: int) -> dict[str, Any]:
    """One after the other; an error is a case's result."""
    found: dict[str, Any] = {}
    context_proof._enabled = True  # whatever ran in the parent before
    for name, case in cases.items():
        print("case", name, flush=True)  # a hang shows the log's last lines
        try:
            found[name] = train(case, ranks)
        except Exception as error:  # noqa: BLE001 - it is the case's result, and the next ones share the ranks
            found[name] = f"{type(error).__name__}: {error}"
            found[name] += f" (after {Counted.steps} steps)"
    return found


class Counted(L.Callback):
    """How many times the last fit changed parameters."""

    steps = 0

    def on_train_start(self, *_: Any) -> None:
        Counted.steps = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        Counted.steps += 1


class Pool:
    """Cases that share a start of ranks and one of one device.

    Args:
        cases: by name.
        ranks: of each.
        timeout: seconds for all of them together.
    """

    def __init__(self, cases: Cases, ranks: int = 2, timeout: float = 150) -> None:
        self.cases, self._ranks, self._timeout = cases, ranks, timeout

    @functools.cached_property
    def results(self) -> list[dict[str, Any]]:
        """Of each rank; where they hang, the failure is every case's result: they are not started again."""
        try:
            return run_ranks(train_all, self._ranks, self.cases, self._ranks, timeout=self._timeout)
        except RankFailure as failure:
            return [dict.fromkeys(self.cases, str(failure))] * self._ranks

    @functools.cached_property
    def alone(self) -> dict[str, Any]:
        return run_alone(train_all, self.cases, 0, timeout=self._timeout)

    def of(self, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """(each rank's, one device's); an error they had fails the test."""
        found, reference = [result[name] for result in self.results], self.alone[name]
        for result in (*found, reference):
            assert not isinstance(result, str), f"{name}: {result}"
        return found, reference

    def told(self, name: str) -> list[str]:
        """What each rank was told."""
        return [result[name] if isinstance(result[name], str) else "no error" for result in self.results]

    def assert_equal(self, name: str, tolerance: float = 1e-10) -> None:
        """Losses, norms, every gradient of every step, and parameters after the last are those of one device."""
        found, reference = self.of(name)
        assert len(reference["losses"]) == len(reference["gradients"]) == STEPS
        for rank, result in enumerate(found):
            for key in ("losses", "norms"):
                off = max(abs(a - b) for a, b in zip(result[key], reference[key], strict=True))
                assert off < tolerance, f"{name}, rank {rank}: {key} {result[key]}, one device has {reference[key]}"
            for step, (mine, theirs) in enumerate(zip(result["gradients"], reference["gradients"], strict=True)):
                off, where = worst(theirs, mine)
                assert off < tolerance, f"{name}, rank {rank}, step {step}: gradient of {where} is off by {off:.2e}"
            off, where = worst(reference["state"], result["state"])
            assert off < tolerance, f"{name}, rank {rank}: after {STEPS} steps {where} is off by {off:.2e}"


TEXT: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": dict(head_dim=8),
    "Mistral": dict(sliding_window=6),
    "Gemma3": dict(head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "Qwen3Moe": dict(head_dim=8, num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2),
}


def family(name: str, **options: Any) -> Callable[[], nn.Module]:
    """A small random transformers model of two layers, with attributes of its config changed after it was made."""

    def make() -> nn.Module:
        known = TEXT.get(name)
        model = huggingface.FAMILIES[name]() if known is None else huggingface._text(name, num_hidden_layers=2, **known)
        for key, value in options.items():
            setattr(model.config, key, value)
        return model

    return make


def texts(name: str = "Llama") -> list[dict[str, Tensor]]:
    return huggingface.batches(name)
