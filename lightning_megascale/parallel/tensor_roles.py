"""The modules of a model by the role they play under tensor parallelism, and what a linear looks like in either layout of its weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from lightning_megascale.layout import ModelLayout, matches_any


@dataclass(frozen=True)
class Roles:
    """The modules of a model by role, each in module order, and what follows from their places."""

    model: nn.Module
    blocks: tuple[str, ...]
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    colwise: tuple[str, ...]
    rowwise: tuple[str, ...]
    gathered: tuple[str, ...]
    norms: tuple[str, ...]
    replicated: tuple[str, ...]
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    experts: tuple[str, ...]
    router: tuple[str, ...]
    packed: tuple[tuple[str, int | tuple[int, ...]], ...] = ()
    divided: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, model: nn.Module, layout: ModelLayout) -> Roles:
        """The roles of ``model``; patterns that match nothing give nothing."""
        names = [name for name, _ in model.named_modules() if name]
        plain = [key for key in cls.__dataclass_fields__ if key not in ("model", "packed", "divided")]
        found = {key: tuple(n for n in names if matches_any(n, getattr(layout, key))) for key in plain}
        packed = tuple((name, parts) for name in names if (parts := layout.parts_of(name)) is not None)
        divided = tuple((name, attribute) for name in names for attribute in layout.divided_of(name))
        return cls(model, **found, packed=packed, divided=divided)

    @property
    def parallel_modules(self) -> tuple[str, ...]:
        return (*self.attention, *self.mlp)

    def owner(self, name: str) -> str | None:
        """The innermost attention or MLP module that holds ``name``, or is it."""
        while name and name not in self._parallel_names:
            name = name.rpartition(".")[0]
        return name or None

    @cached_property
    def _parallel_names(self) -> frozenset[str]:
        return frozenset(self.parallel_modules)

    def columns_by_owner(self) -> dict[str, list[str]]:
        """Column-parallel linears by the module that gathers for them; a linear in no attention or MLP module gathers for itself."""
        owned: dict[str, list[str]] = {owner: [] for owner in self.parallel_modules}
        for name in self.colwise:
            owned.setdefault(self.owner(name) or name, []).append(name)
        return {owner: names for owner, names in owned.items() if names}

    def sharded_dropouts(self) -> list[str]:
        """Dropout modules that see a sequence shard under sequence parallelism."""
        return [name for name, m in self.model.named_modules() if type(m) is nn.Dropout and m.p > 0 and self.owner(name) is None]

    def split(self) -> dict[str, str]:
        """Name -> role of the modules whose parameters are split."""
        return {name: role for role in ("colwise", "rowwise", "gathered", "embedding", "head") for name in getattr(self, role)}

    def parts(self, name: str) -> list[int] | None:
        """Output features of each projection of a packed linear; None for one that is not packed."""
        parts = dict(self.packed).get(name)
        if isinstance(parts, int):
            size, rest = divmod(features(self.model.get_submodule(name))[1], parts)
            return [size] * parts if not rest else [size] * parts + [rest]
        return None if parts is None else list(parts)


def is_transposed(module: nn.Module) -> bool:
    """A linear whose weight is (in_features, out_features): the ``Conv1D`` of transformers."""
    weight = getattr(module, "weight", None)
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int) and getattr(weight, "ndim", 0) == 2


def features(module: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a linear in either layout of its weight."""
    if is_transposed(module):
        return int(module.nx), int(module.nf)  # type: ignore[arg-type]
    return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or is_transposed(module)


def split_dim(module: nn.Module, role: str) -> int:
    """The dim of the weight that a role splits."""
    return int((role == "rowwise") != is_transposed(module))
