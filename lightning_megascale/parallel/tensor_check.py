"""Rules of tensor and sequence parallelism, checked on the model before anything is split: no process group, meta modules too."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

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
    norms: tuple[str, ...]
    replicated: tuple[str, ...]
    embedding: tuple[str, ...]
    head: tuple[str, ...]
    experts: tuple[str, ...]
    router: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module, layout: ModelLayout) -> Roles:
        """The roles of ``model``; patterns that match nothing give nothing."""
        names = [name for name, _ in model.named_modules() if name]
        found = {key: tuple(n for n in names if matches_any(n, getattr(layout, key))) for key in cls.__dataclass_fields__ if key != "model"}
        return cls(model, **found)

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
        return {name: role for role in ("colwise", "rowwise", "embedding", "head") for name in getattr(self, role)}


def check_tensor_parallel(model: nn.Module, layout: ModelLayout, tp: int, sequence_parallel: bool) -> list[str]:
    """Every violated rule as one line: name, value, rule, remedy. Empty when the model can be split.

    Args:
        model: the model, on any device, meta included.
        layout: which module plays which role.
        tp: tensor_parallel_size, at least 2.
        sequence_parallel: whether the residual stream is split over the sequence.
    """
    roles = Roles.of(model, layout)
    wrong = _Messages()
    wrong.lines.extend(layout.unmatched(name for name, _ in model.named_modules()))
    for role in _missing(roles, sequence_parallel):
        wrong.lines.append(role)
    for rule in (_types, _sizes, _heads, _partners, _dropouts, _places, _sharing):
        for name, text in rule(roles, tp):
            wrong.add(name, text)
    for name, text in _roleless(roles, sequence_parallel):
        wrong.add(name, text)
    return wrong.all()


Found = Iterator[tuple[str, str]]


class _Messages:
    """Messages in order; the same one about every layer is said once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.alike: dict[tuple[str, str], list[str]] = {}

    def add(self, name: str, text: str) -> None:
        self.alike.setdefault((re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), text), []).append(name)

    def all(self) -> list[str]:
        lines = list(self.lines)
        for (_, text), names in self.alike.items():
            others = f" (and {len(names) - 1} more like it)" if len(names) > 1 else ""
            lines.append(f"{names[0]}{others}: {text}")
        return lines


def _missing(roles: Roles, sequence_parallel: bool) -> list[str]:
    needed = ["colwise", "rowwise"] + (["attention", "mlp", "norms", "embedding"] if sequence_parallel else [])
    why = {
        "colwise": "the linears split by output features",
        "rowwise": "the linears split by input features",
        "attention": "the modules whose input sequence is gathered",
        "mlp": "the modules whose input sequence is gathered",
        "norms": "the modules that run on the sequence shard",
        "embedding": "the embeddings whose output is scattered over the sequence",
    }
    feature = {True: "sequence_parallel", False: "tensor parallelism"}
    return [
        f"layout.{role} names no module, {feature[role not in ('colwise', 'rowwise')]} needs it: {why[role]}"
        for role in needed
        if not getattr(roles, role)
    ]


def _types(roles: Roles, tp: int) -> Found:
    for name, role in roles.split().items():
        module = roles.model.get_submodule(name)
        kind = type(module).__name__
        if role == "embedding":
            if type(module) is not nn.Embedding:
                yield name, f"is {kind}, an embedding must be a plain nn.Embedding; take it out of layout.embedding"
            elif module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                yield name, "max_norm, scale_grad_by_freq and sparse cannot be split by rows; switch them off"
        elif role == "head":
            takes_labels = isinstance(module, nn.Linear) and "labels" in inspect.signature(module.forward).parameters
            if type(module) is not nn.Linear and not takes_labels:
                yield name, f"is {kind}, a head must be a plain nn.Linear, or a subclass whose forward takes labels"
        elif type(module) is not nn.Linear:
            yield name, f"is {kind}, a {role} layer must be a plain nn.Linear; take it out of layout.{role}"


def _sizes(roles: Roles, tp: int) -> Found:
    what = {"colwise": "out_features", "rowwise": "in_features", "embedding": "num_embeddings", "head": "out_features"}
    for name, role in roles.split().items():
        size = getattr(roles.model.get_submodule(name), what[role], tp)
        if size % tp:
            yield name, f"{what[role]}={size} is not divisible by tensor_parallel_size={tp}; {_legal(size, tp)}"


def _legal(size: int, tp: int) -> str:
    below, above = size - size % tp, size - size % tp + tp
    sizes = f"{below} or {above}" if below else f"{above}"
    divisors = [n for n in range(2, 2 * tp) if size % n == 0]
    nearest = min(divisors, key=lambda n: (abs(n - tp), n)) if divisors else 1
    return f"the nearest legal size is {sizes}, the nearest legal tensor_parallel_size {nearest}"


_HEADS = ("num_heads", "num_attention_heads", "n_heads", "num_kv_heads", "num_key_value_heads", "n_kv_heads")


def _heads(roles: Roles, tp: int) -> Found:
    """Whole heads on every rank; a number of features may divide where the heads do not."""
    columns = roles.columns_by_owner()
    for owner in roles.attention:
        module = roles.model.get_submodule(owner)
        for source in (module, getattr(module, "config", None)):
            for attribute in _HEADS:
                heads = getattr(source, attribute, None)
                if isinstance(heads, int) and heads % tp:
                    yield owner, f"{attribute}={heads} is not divisible by tensor_parallel_size={tp}; {_legal(heads, tp)}"
        head_dim = getattr(module, "head_dim", None)
        if not isinstance(head_dim, int) or head_dim < 1:
            continue
        for name in columns.get(owner, []):
            features = getattr(roles.model.get_submodule(name), "out_features", 0)
            heads, rest = divmod(features, head_dim)
            if heads and not rest and heads % tp and not features % tp:
                yield name, f"{heads} heads of head_dim={head_dim} are not divisible by tensor_parallel_size={tp}; {_legal(heads, tp)}"


def _partners(roles: Roles, tp: int) -> Found:
    """A row-parallel linear gets its part of the features from column-parallel ones of the same module."""
    columns = roles.columns_by_owner()
    for name in roles.rowwise:
        owner = roles.owner(name)
        if owner is not None:
            partners = columns.get(owner, [])
        else:
            scope = next((block for block in roles.blocks if _within(name, block)), name.rpartition(".")[0])
            partners = [column for column in roles.colwise if _within(column, scope)]
        if not partners:
            where = "attention or mlp module" if owner else "block"
            yield name, f"is row-parallel, but no column-parallel linear is in the same {where}; its input would not be split"
    rows: dict[str | None, list[str]] = {owner: [] for owner in columns}
    for name in roles.rowwise:
        rows.setdefault(roles.owner(name), []).append(name)
    for owner, names in columns.items():
        if len(names) != 1 or not rows[owner]:
            continue
        column, row = roles.model.get_submodule(names[0]), roles.model.get_submodule(rows[owner][0])
        if isinstance(column, nn.Linear) and isinstance(row, nn.Linear) and column.out_features > row.in_features:
            text = (
                f"out_features={column.out_features} are more than the in_features={row.in_features} of its row-parallel partner: a fused "
                "projection, whose rows would be dealt out wrongly; split it into one linear per projection"
            )
            yield names[0], text


def _dropouts(roles: Roles, tp: int) -> Found:
    """Inside attention and MLP a rank sees its own heads and features: no generator draws one device's mask there."""
    remedy = "dropout inside attention or mlp is not supported with tensor_parallel_size > 1; set it to 0 or move it behind the module"
    for name, module in roles.model.named_modules():
        if roles.owner(name) is None:
            if isinstance(module, _DropoutNd) and type(module) is not nn.Dropout and module.p > 0:
                yield name, f"is {type(module).__name__} with p={module.p}; only nn.Dropout can be split over the sequence"
            continue
        if isinstance(module, _DropoutNd) and module.p > 0:
            yield name, f"p={module.p}: {remedy}"
        for attribute, value in vars(module).items():
            if "dropout" in attribute and isinstance(value, float) and value > 0:
                yield name, f"{attribute}={value}: {remedy}"


def _places(roles: Roles, tp: int) -> Found:
    """Roles whose gradient rule depends on where the module stands."""
    for name in roles.norms:
        if roles.owner(name) is not None:
            yield name, "is in layout.norms but inside attention or mlp, where its gradient is partial: list it in layout.replicated"
    for name in roles.replicated:
        if roles.owner(name) is None:
            yield name, "is in layout.replicated but outside of attention and mlp, where its gradient is whole: list it in layout.norms"
    for name in roles.parallel_modules:
        if "forward" in vars(roles.model.get_submodule(name)):
            yield name, "its forward was replaced on the instance; tensor parallelism must be applied first"
    listed: dict[str, list[str]] = {}
    for role in ("colwise", "rowwise", "embedding", "head", "norms", "replicated"):
        for name in getattr(roles, role):
            listed.setdefault(name, []).append(f"layout.{role}")
    for name, places in listed.items():
        if len(places) > 1:
            yield name, f"is in {' and '.join(places)}; a module has one of these roles"


def _sharing(roles: Roles, tp: int) -> Found:
    """Parameters shared by several modules must be split in one way everywhere."""
    dims = {"colwise": 0, "embedding": 0, "head": 0, "rowwise": 1}
    split = roles.split()
    users: dict[int, list[tuple[str, object]]] = {}
    for name, module in roles.model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append((name, dims.get(split.get(name, ""))))
    for places in users.values():
        if len({dim for _, dim in places}) > 1:
            first, *others = (name for name, _ in places)
            yield first, f"shares a parameter with {', '.join(others)}, which is not split the same way; list both"


def _roleless(roles: Roles, sequence_parallel: bool) -> Found:
    """Parameters whose gradient would silently be a part of a sum."""
    known = {*roles.split(), *roles.norms, *roles.replicated}
    exempt = (*roles.experts, *roles.router)
    for name, module in roles.model.named_modules():
        if name in known or any(_within(name, other) for other in exempt) or not any(True for _ in module.parameters(recurse=False)):
            continue
        kind = type(module).__name__
        if roles.owner(name) is not None:
            remedy = "list it in layout.colwise, rowwise, or replicated (whole on every rank, its gradients summed)"
            yield name, f"{kind} has parameters inside attention or mlp but no role: {remedy}"
        elif sequence_parallel:
            why = "under sequence_parallel it would see 1/tp of the sequence and its gradients would not be summed"
            yield name or "the model itself", f"{kind} has parameters but no role; {why}: list it in layout.norms, or in the role it has"


def _within(name: str, owner: str) -> bool:
    return name == owner or name.startswith(owner + ".")
