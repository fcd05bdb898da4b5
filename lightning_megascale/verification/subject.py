"""The model under proof: a user's ``build()`` made into a module and whole batches that can be built again, alike, in every process."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sized
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_megascale.parallel.loss_scale import rows_of
from lightning_megascale.parallel.microbatches import split_rows
from lightning_megascale.parallel.rng import kept_generators, seed_step
from lightning_megascale.verification.report import CannotVerify

LARGEST = 200_000_000  # parameters: several processes hold all of them, their gradients and the optimizer's state
_CONFIGS = ("config", "cfg", "hparams", "_hparams", "args")
RETURNS = "build() must return a LightningModule, or (LightningModule, batches); batches: a list of batches or a DataLoader"


@dataclass
class Subject:
    """What is trained on one device and on ranks.

    Args:
        build: the user's function, without arguments.
        dtype: of parameters and floating batches.
        seed: of first values.
        steps: optimizer steps.
        batches: a whole batch for each step.
        rows: of a batch.
        parameters: elements in the model.
        kind: class name of the model.
        notes: what was changed for the proof, a line each.
    """

    build: Callable[[], Any]
    dtype: torch.dtype
    seed: int
    steps: int
    batches: list[Any] = field(default_factory=list)
    rows: int = 0
    parameters: int = 0
    kind: str = ""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, build: Callable[[], Any], dtype: torch.dtype, seed: int, steps: int) -> Subject:
        """Builds once, to look at it, and takes the batches.

        Raises:
            CannotVerify: for something that cannot be trained here.
        """
        subject = cls(build, dtype, seed, steps)
        with kept_generators(torch.device("cpu")):
            seed_step(seed)
            module, batches = _read(called(build))
            seed_step(seed)
            subject._look_at(module)
            subject._take(module, batches)
        return subject

    def _look_at(self, module: pl.LightningModule) -> None:
        inner = module.model if isinstance(module, WithLoss) else module
        self.kind = type(inner).__name__
        self.parameters = sum(parameter.numel() for parameter in module.parameters())
        if self.parameters > LARGEST:
            raise CannotVerify(
                f"{self.kind} has {self.parameters:,} parameters, and verify trains it several times over in processes of this machine: "
                f"let build() return a small one of the same structure (fewer layers, narrower; at most {LARGEST:,})"
            )
        if any(True for _ in dropouts(module)):
            self.notes.append("dropout is set to 0 on both sides: no two plans draw the same masks as one device")
        if isinstance(module, WithLoss):
            self.notes.append("a plain model: the step is model(**batch).loss, the optimizer AdamW(lr=1e-3, eps=1e-6)")

    def _take(self, module: pl.LightningModule, given: Any) -> None:
        """``steps`` whole batches; fewer are used again and again."""
        if given is None:
            given = _own_loader(module)
        if isinstance(given, (Tensor, Mapping)):
            given = [given]
        if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            raise CannotVerify(f"build() returned {type(given).__name__} as batches. {RETURNS}")
        found = [self._converted(batch) for batch in islice(given, self.steps)]
        if not found:
            raise CannotVerify(f"build() returned no batch at all. {RETURNS}")
        count = len(given) if isinstance(given, Sized) else len(found)
        if count > self.steps and isinstance(given, (list, tuple)):
            self.notes.append(f"the first {self.steps} of {count} batches are used; steps={count} uses all")
        elif len(found) < self.steps:
            self.notes.append(f"{len(found)} batch{'es are' if len(found) > 1 else ' is'} used again and again in {self.steps} steps")
        self.batches = list(islice(cycle(found), self.steps))
        rows = [rows_of(batch) for batch in self.batches]
        if None in rows or 0 in rows:
            raise CannotVerify("a batch holds no tensor with rows (dim 0), so it cannot be divided over ranks")
        if len(set(rows)) > 1:
            raise CannotVerify(f"batches have different numbers of rows ({', '.join(map(str, rows))}): give each the same")
        self.rows = int(rows[0] or 0)

    def _converted(self, batch: Any) -> Any:
        return apply_to_collection(batch, Tensor, lambda t: t.detach().cpu().to(self.dtype if t.is_floating_point() else t.dtype))

    def shares(self, count: int, index: int, parts: int) -> list[Any]:
        """The batches of one data-parallel rank: its rows of each whole batch, in ``parts`` microbatches to accumulate.

        Args:
            count, index: number of shares, and which.
            parts: microbatches of an optimizer step.
        """
        found = []
        for batch in self.batches:
            mine = batch if count == 1 else split_rows(batch, self.rows, count)[index]
            found += [mine] if parts == 1 else split_rows(mine, self.rows // count, parts)
        return found

    def check_division(self, name: str, shares: int, parts: int) -> None:
        """Raises CannotVerify when the rows of a batch cannot be divided."""
        if self.rows % (shares * parts):
            size = shares * parts
            what = f"{shares} data-parallel shares" + (f" x accumulate={parts}" if parts > 1 else "")
            near = f"{self.rows // size * size or size} or {(self.rows // size + 1) * size}"
            raise CannotVerify(f"axes={name}: a batch of {self.rows} rows cannot be divided into {what}: give it {near} rows")
        try:
            self.shares(shares, 0, parts)
        except ValueError as error:
            raise CannotVerify(f"axes={name}: {error}") from error

    def make(self) -> pl.LightningModule:
        """A new module with the same first values in every process; without dropout. For a process of its own."""
        os.environ["PL_GLOBAL_SEED"] = str(self.seed)
        seed_step(self.seed)
        module, _ = _read(self.build())
        module.configure_callbacks = list  # type: ignore[method-assign]  # they look at validation, loggers and checkpoints
        self._finish(module)
        if is_overridden("configure_model", module):
            configure = module.configure_model

            def configure_model() -> None:
                seed_step(self.seed)
                configure()
                self._finish(module)

            module.configure_model = configure_model  # type: ignore[method-assign]
        return module

    def _finish(self, module: pl.LightningModule) -> None:
        module.to(self.dtype)
        for owner, key in dropouts(module):
            if isinstance(owner, MutableMapping):
                owner[key] = 0.0
            else:
                object.__setattr__(owner, key, 0.0)  # a frozen dataclass too


class WithLoss(pl.LightningModule):
    """A plain model whose output has a ``loss``, such as those of Hugging Face, with a step and an optimizer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3, eps=1e-6)


def _read(result: Any) -> tuple[pl.LightningModule, Any]:
    """(module, batches or None) from what ``build()`` returned."""
    module, batches = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(module, pl.LightningModule):
        return module, batches
    if isinstance(module, nn.Module) and hasattr(module, "training_step"):
        raise CannotVerify(f"build() returned a {type(module).__name__} of pytorch_lightning: import lightning.pytorch in its place")
    if isinstance(module, nn.Module):
        if batches is None:
            raise CannotVerify(f"build() returned a {type(module).__name__} without batches: return (model, batches), each batch a dict")
        return WithLoss(module), batches
    what = "nothing" if result is None else f"{type(module).__name__}"
    raise CannotVerify(f"build() returned {what}. {RETURNS}")


def _own_loader(module: pl.LightningModule) -> Any:
    if not is_overridden("train_dataloader", module):
        raise CannotVerify(f"{type(module).__name__} has no train_dataloader and build() returned no batches. {RETURNS}")

    def load() -> Any:
        module.prepare_data()
        module.setup("fit")
        return module.train_dataloader()

    return called(load, "train_dataloader() outside of a Trainer", "return (module, batches) from build() in its place")


def called(function: Callable[[], Any], what: str = "build()", remedy: str = "") -> Any:
    """The result of a user's function.

    Raises:
        CannotVerify: with its error and the place of it, in place of its traceback.
    """
    try:
        return function()
    except CannotVerify:
        raise
    except Exception as error:
        raise CannotVerify(f"{what} failed: {described(error)}" + (f"; {remedy}" if remedy else "")) from error


def described(error: BaseException) -> str:
    """An error in one line, with the last place outside of installed packages."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not re.search(r"/(site-packages|lightning_megascale)/", frame.filename)]
    place = f" ({os.path.relpath(own[-1].filename)}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


def dropouts(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """(owner, attribute or key) of every dropout probability above 0: of modules, and of the configs that they read in their forwards."""
    seen: set[int] = set()
    for child in module.modules():
        named_so = isinstance(child, nn.modules.dropout._DropoutNd) or re.search("drop|stochasticdepth", type(child).__name__, re.I)
        if named_so and _is_probability(vars(child).get("p")):
            yield child, "p"
        yield from _named(child, vars(child))
        for name in _CONFIGS:
            yield from _in_config(vars(child).get(name), seen)


def _in_config(config: Any, seen: set[int]) -> Iterator[tuple[Any, str]]:
    if config is None or id(config) in seen or isinstance(config, (nn.Module, Tensor, type)):
        return
    seen.add(id(config))
    values = config if isinstance(config, Mapping) else getattr(config, "__dict__", None)
    if values is None:
        return
    yield from _named(config, values)
    for key, value in list(values.items()):
        if isinstance(key, str) and (key.endswith(_CONFIGS)):
            yield from _in_config(value, seen)


def _named(owner: Any, values: Mapping[Any, Any]) -> Iterator[tuple[Any, str]]:
    for key, value in list(values.items()):
        if isinstance(key, str) and "drop" in key.lower() and _is_probability(value):
            yield owner, key


def _is_probability(value: Any) -> bool:
    return isinstance(value, float) and 0 < value <= 1
