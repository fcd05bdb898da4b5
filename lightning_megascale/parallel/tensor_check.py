"""Rules of tensor and sequence parallelism, checked on the model before anything is split: no process group, meta modules too."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_megascale.layout import ModelLayout
from lightning_megascale.parallel.tensor_roles import Roles, features, is_linear, split_dim


def check_tensor_parallel(
    model: nn.Module, layout: ModelLayout, tp: int, sequence_parallel: bool, *, deals_experts: bool = True
) -> list[str]:
    """Every violated rule as one line: name, value, rule, remedy. Empty when the model can be split.

    Args:
        model: the model, on any device, meta included.
        layout: which module plays which role.
        tp: tensor_parallel_size, at least 2.
        sequence_parallel: whether the residual stream is split over the sequence.
        deals_experts: experts are dealt out over these ranks; False where expert parallelism does it.
    """
    roles = Roles.of(model, layout)
    wrong = _Messages()
    wrong.lines.extend(layout.unmatched(name for name, _ in model.named_modules()))
    for role in _missing(roles, sequence_parallel):
        wrong.lines.append(role)
    for rule in (_types, _sizes, _packed, _divided, _heads, _partners, _experts, _dropouts, _places, _sharing):
        if rule is _experts and not deals_experts:
            continue
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
    regions = ["attention", *([] if roles.experts else ["mlp"])]  # experts take each rank's own tokens, nothing is gathered for them
    needed = ["colwise", "rowwise"] + ([*regions, "norms", "embedding"] if sequence_parallel else [])
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
        if not getattr(roles, role) and not (role == "colwise" and roles.gathered)
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
        elif not is_linear(module):
            yield name, f"is {kind}, a {role} layer must be a plain nn.Linear; take it out of layout.{role}"


def _sizes(roles: Roles, tp: int) -> Found:
    what = {"rowwise": "in_features", "embedding": "num_embeddings"}
    for name, role in roles.split().items():
        module, label = roles.model.get_submodule(name), what.get(role, "out_features")
        if role == "embedding":
            size = getattr(module, label, tp)
        elif is_linear(module):
            size = features(module)[role != "rowwise"]
        else:
            size = getattr(module, label, tp)
        if size % tp and roles.parts(name) is None:
            yield name, f"{label}={size} is not divisible by tensor_parallel_size={tp}; {_legal(size, tp)}"


def _packed(roles: Roles, tp: int) -> Found:
    for name, _ in roles.packed:
        module, parts = roles.model.get_submodule(name), roles.parts(name) if is_linear(roles.model.get_submodule(name)) else None
        if parts is None or name not in roles.colwise:
            yield name, "is in layout.packed, which holds linears of layout.colwise; list it there too, or take it out"
        elif sum(parts) != features(module)[1] or len(set(parts)) > 1 and isinstance(dict(roles.packed)[name], int):
            yield name, f"layout.packed says {dict(roles.packed)[name]}, which does not add up to out_features={features(module)[1]}"
        else:
            for size in dict.fromkeys(parts):
                if size % tp:
                    yield name, f"a projection of {size} features is not divisible by tensor_parallel_size={tp}; {_legal(size, tp)}"


def _divided(roles: Roles, tp: int) -> Found:
    for name, attribute in roles.divided:
        value = getattr(roles.model.get_submodule(name), attribute, None)
        if not isinstance(value, int) or isinstance(value, bool):
            yield name, f"layout.divided names its attribute {attribute!r}, which is {value!r} and no whole number; take it out"
        elif value % tp:
            yield name, f"{attribute}={value} is not divisible by tensor_parallel_size={tp}; {_legal(value, tp)}"


def _experts(roles: Roles, tp: int) -> Found:
    for name in roles.experts:
        module = roles.model.get_submodule(name)
        count = getattr(module, "num_experts", None)
        parameters = dict(module.named_parameters())
        if not isinstance(count, int) or not parameters or any("." in key or p.shape[:1] != (count,) for key, p in parameters.items()):
            yield name, f"is {type(module).__name__}: layout.experts are modules with num_experts whose own parameters have it as dim 0"
        elif count % tp:
            yield name, f"num_experts={count} is not divisible by tensor_parallel_size={tp}; {_legal(count, tp)}"
        elif len(inspect.signature(module.forward).parameters) < 3:
            yield name, "layout.experts are called as (hidden (T, D), indices (T, K), weights (T, K))"
        if roles.owner(name) is not None:
            yield name, f"lies in {roles.owner(name)}, which layout.attention or mlp names; experts complete their own sums: leave it out"


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
            linear = roles.model.get_submodule(name)
            size = features(linear)[1] if is_linear(linear) and roles.parts(name) is None else 0
            heads, rest = divmod(size, head_dim)
            if heads and not rest and heads % tp and not size % tp:
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
            partners = [column for column in (*roles.colwise, *roles.gathered) if not scope or _within(column, scope)]
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
        if roles.parts(names[0]) is None and is_linear(column) and is_linear(row) and features(column)[1] > features(row)[0]:
            text = (
                f"out_features={features(column)[1]} are more than the in_features={features(row)[0]} of its row-parallel partner: a fused "
                "projection, whose rows would be dealt out wrongly; name it in layout.packed, or split it into one linear per projection"
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
    for name in roles.gathered:
        if roles.owner(name) is not None:
            yield name, "is in layout.gathered but inside attention or mlp, where gradients are partial: list it in layout.colwise"
    for name in roles.parallel_modules:
        if "forward" in vars(roles.model.get_submodule(name)):
            yield name, "its forward was replaced on the instance; tensor parallelism must be applied first"
    listed: dict[str, list[str]] = {}
    for role in ("colwise", "rowwise", "gathered", "embedding", "head", "norms", "replicated"):
        for name in getattr(roles, role):
            listed.setdefault(name, []).append(f"layout.{role}")
    for name, places in listed.items():
        if len(places) > 1:
            yield name, f"is in {' and '.join(places)}; a module has one of these roles"


def _sharing(roles: Roles, tp: int) -> Found:
    """Parameters shared by several modules must be split in one way everywhere."""
    split = roles.split()
    users: dict[int, list[tuple[str, object]]] = {}
    for name, module in roles.model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), []).append((name, split_dim(module, split[name]) if name in split else None))
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
