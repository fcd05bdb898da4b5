"""ModelLayout: which module plays which role, as data. Names relative to the parallelized module, ``*`` for one name part.

No torch: a model is described to this file as ``ModuleInfo`` rows (``parallel.parallelize.describe`` makes them), so the
planner and the tests read layouts without importing it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

ROLES = (
    "blocks",
    "units",
    "first",
    "last",
    "attention",
    "mlp",
    "colwise",
    "rowwise",
    "gathered",
    "norms",
    "replicated",
    "embedding",
    "head",
    "experts",
    "router",
)


@dataclass(frozen=True)
class ModuleInfo:
    """One module as data: its name ("" for the root), class name, and the shapes of the parameters it owns itself."""

    name: str
    kind: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class ModelLayout:
    """Which module plays which role. Every role takes a name, a pattern or a list of them; what a plan does not need stays out.

    Args:
        blocks: the repeated layers: units of FSDP2, recompute, compile and pipeline stages.
        units: further repeated layers that are units of FSDP2, such as those of a vision tower before the blocks.
        first, last: modules of the first and of the last pipeline stage.
        attention, mlp: modules at whose input a sequence is gathered under ``sequence_parallel``, once.
        colwise: linears split by output features (Megatron-LM, Shoeybi et al. 2019, section 3).
        rowwise: linears split by input features; their output is summed over the tensor-parallel axis.
        gathered: linears outside of attention and mlp that are split by output features and hand out all of them.
        norms: modules that run on the sequence shard under ``sequence_parallel``; their gradients are then summed over tp.
        replicated: whole on every tensor-parallel rank, fed with a part of the heads or features: gradients summed over tp
            (q/k norms).
        embedding: embeddings split by rows (vocabulary).
        head: the output projection, split by vocabulary.
        experts: modules called as (hidden (T, D), indices (T, K), weights (T, K)) whose parameters have the experts as dim 0 and which
            count them in ``num_experts``, an index of that number meaning no expert; dealt out whole over the tensor-parallel ranks.
        router: the module that chooses experts.
        packed: colwise linears that hold several projections side by side: pattern -> their number (equal ones) or their output features.
            Each projection is split by itself. The parameter stays whole on every tensor-parallel rank (FSDP2 still shards it).
        divided: ``module.attribute`` patterns: numbers that count heads or features, which a rank has 1/tp of.
        first_inputs: names of arguments that only the first pipeline stage is given (the others get None): an encoder's inputs.
    """

    blocks: str | Sequence[str] = ()
    units: str | Sequence[str] = ()
    first: str | Sequence[str] = ()
    last: str | Sequence[str] = ()
    attention: str | Sequence[str] = ()
    mlp: str | Sequence[str] = ()
    colwise: str | Sequence[str] = ()
    rowwise: str | Sequence[str] = ()
    gathered: str | Sequence[str] = ()
    norms: str | Sequence[str] = ()
    replicated: str | Sequence[str] = ()
    embedding: str | Sequence[str] = ()
    head: str | Sequence[str] = ()
    experts: str | Sequence[str] = ()
    router: str | Sequence[str] = ()
    packed: Mapping[str, int | Sequence[int]] | Sequence[tuple[str, int | tuple[int, ...]]] = ()
    divided: str | Sequence[str] = ()
    first_inputs: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        for role in (*ROLES, "divided", "first_inputs"):
            value = getattr(self, role)
            patterns = (value,) if isinstance(value, str) else tuple(value)
            if not all(isinstance(pattern, str) and pattern for pattern in patterns):
                raise ValueError(f"layout.{role}={value!r}: each entry must be a module name or a pattern such as 'layers.*.attn'")
            object.__setattr__(self, role, patterns)
        if wrong := [pattern for pattern in self.divided if "." not in pattern]:
            raise ValueError(f"layout.divided={wrong[0]!r}: each entry must be module.attribute, such as 'layers.*.attn.num_heads'")
        object.__setattr__(self, "packed", _packed(self.packed))

    @classmethod
    def from_dict(cls, patterns: Mapping[str, Any]) -> ModelLayout:
        """A layout from a dict of patterns.

        Raises:
            ValueError: for a role that does not exist, naming the nearest.
        """
        known = [field.name for field in fields(cls)]
        for role in patterns:
            if role not in known:
                near = difflib.get_close_matches(role, known, 1)
                raise ValueError(
                    f"layout has no role {role!r}" + (f"; did you mean {near[0]!r}?" if near else "") + f" Roles: {', '.join(known)}"
                )
        return cls(**patterns)

    def resolve(self, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The module names of each role, in module order.

        Args:
            names: all module names below the parallelized module, in module order.

        Raises:
            ValueError: listing every pattern that matches nothing, with the nearest name.
        """
        names = [name for name in names if name]
        wrong = self.unmatched(names)
        if wrong:
            raise ValueError("\n".join(wrong))
        return {role: tuple(name for name in names if matches_any(name, getattr(self, role))) for role in ROLES}

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """A message for every pattern that matches no module."""
        names = [name for name in names if name]
        starred = sorted({starred_name(name) for name in names})
        wrong = []
        for role, pattern in self._patterns():
            if not any(matches(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, starred + names, 1, cutoff=0.5)
                wrong.append(
                    f"layout.{role}: pattern {pattern!r} matches no module" + (f"; the nearest name is {near[0]!r}" if near else "")
                )
        return wrong

    def _patterns(self) -> Iterator[tuple[str, str]]:
        """(field, module pattern) of everything that names a module."""
        yield from ((role, pattern) for role in ROLES for pattern in getattr(self, role))
        yield from (("packed", pattern) for pattern, _ in self._packed_pairs)
        yield from (("divided", pattern.rpartition(".")[0]) for pattern in self.divided)

    def only(self, names: Iterable[str]) -> ModelLayout:
        """The layout of a part of the model: the modules in ``names``, by their plain names."""
        names = list(names)
        roles = {role: tuple(name for name in names if matches_any(name, getattr(self, role))) for role in ROLES}
        packed = {name: parts for name in names if (parts := self.parts_of(name)) is not None}
        divided = [f"{name}.{attribute}" for name in names for attribute in self.divided_of(name)]
        return ModelLayout(**roles, packed=packed, divided=divided, first_inputs=self.first_inputs)

    def parts_of(self, name: str) -> int | tuple[int, ...] | None:
        """How many projections, or of which sizes, the packed linear ``name`` holds; None for one that is not packed."""
        return next((parts for pattern, parts in self._packed_pairs if matches(name, pattern)), None)

    @property
    def _packed_pairs(self) -> tuple[tuple[str, int | tuple[int, ...]], ...]:
        return cast("tuple[tuple[str, int | tuple[int, ...]], ...]", self.packed)

    def divided_of(self, name: str) -> tuple[str, ...]:
        """Attributes of the module ``name`` that are divided over the tensor-parallel ranks."""
        split = [pattern.rpartition(".") for pattern in self.divided]
        return tuple(attribute for pattern, _, attribute in split if matches(name, pattern))

    def paste(self) -> str:
        """The layout as Python source, ready to paste."""
        rows = []
        for role in (*ROLES, "divided", "first_inputs"):
            patterns = getattr(self, role)
            if patterns:
                rows.append(
                    f"    {role}={patterns[0]!r}," if role == "blocks" and len(patterns) == 1 else f"    {role}={list(patterns)!r},"
                )
        if self.packed:
            rows.append(f"    packed={dict(self._packed_pairs)!r},")
        return "ModelLayout(\n" + "\n".join(rows) + "\n)"


def _packed(value: Any) -> tuple[tuple[str, int | tuple[int, ...]], ...]:
    pairs = list(value.items()) if isinstance(value, Mapping) else [tuple(pair) for pair in value]
    made = []
    for pattern, parts in pairs:
        sizes = (parts,) if isinstance(parts, int) else tuple(parts)
        least = 2 if isinstance(parts, int) else 1
        if not (isinstance(pattern, str) and pattern and sizes and all(isinstance(size, int) and size >= least for size in sizes)):
            raise ValueError(
                f"layout.packed={pattern!r}: {parts!r}: must be a pattern and the number of equal projections (2 or more), or the list of "
                "their output features"
            )
        made.append((pattern, parts if isinstance(parts, int) else sizes))
    return tuple(made)


def starred_name(name: str) -> str:
    """A module's name with ``*`` for its numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def matches(name: str, pattern: str) -> bool:
    """True when every part of ``name`` equals the pattern's part, ``*`` standing for exactly one part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted))


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def repeated_blocks(modules: Sequence[ModuleInfo]) -> tuple[str, ...]:
    """The outermost modules that repeat under one parent with equal class and equal parameters: layers, found without a layout.

    A parent's numbered or named children count as repeated when at least two of them have the same class and the same
    parameter shapes, and each has parameters. The outermost repetition wins, so a list of experts inside a block is not taken.
    """
    by_name = {module.name: module for module in modules}
    children: dict[str, list[str]] = {}
    for module in modules:
        if module.name:
            children.setdefault(module.name.rpartition(".")[0], []).append(module.name)

    def signature(name: str) -> tuple:
        inside = [m for m in modules if m.name == name or m.name.startswith(name + ".")]
        return tuple((m.name[len(name) :], m.kind, m.shapes) for m in inside)

    found: list[str] = []
    for parent in by_name:
        if parent and any(parent == block or parent.startswith(block + ".") for block in found):
            continue
        if by_name[parent].kind not in ("ModuleList", "ModuleDict", "Sequential"):
            continue
        groups: dict[tuple[str, tuple], list[str]] = {}
        for child in children.get(parent, []):
            inner = signature(child)
            callable_ = by_name[child].kind not in ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
            if callable_ and len(inner) > 1 and any(row[2] for row in inner):  # a bare layer is no block
                groups.setdefault((by_name[child].kind, inner), []).append(child)
        repeated = [child for group in groups.values() if len(group) > 1 for child in group]
        kinds = {by_name[child].kind for child in repeated}
        found += [c for c in children.get(parent, []) if by_name[c].kind in kinds and (c in repeated or len(groups) < len(kinds) + 2)]
    return tuple(name for name in by_name if name in found)


_COLUMN = re.compile(r"(^|\.)(q|k|v|qkv|query|key|value|wq|wk|wv|w1|w3|up|gate|fc1|c_fc|lin1|linear1|dense_h_to_4h|in)(_?proj|_?linear)?$")
_ROW = re.compile(r"(^|\.)(o|out|wo|w2|down|fc2|lin2|linear2|c_proj|proj|output|dense_4h_to_h)(_?proj|_?linear)?$")
_ATTENTION = re.compile(r"attn|attention", re.I)
_MLP = re.compile(r"mlp|feed_?forward|ffn|\bff\b", re.I)
_NORM = re.compile(r"norm|^ln", re.I)


def guess_layout(modules: Sequence[ModuleInfo]) -> ModelLayout:
    """A layout guessed from names and shapes, to be read and corrected by the user: never used without being pasted."""
    blocks = repeated_blocks(modules)
    roles: dict[str, list[str]] = {role: [] for role in ROLES}

    def add(role: str, name: str) -> None:
        for block in blocks:
            if name == block or name.startswith(block + "."):
                name = block.rpartition(".")[0] + ".*" + name[len(block) :]
                break
        name = name.lstrip(".")
        if name not in roles[role]:
            roles[role].append(name)

    inside = lambda name: any(name.startswith(block + ".") for block in blocks)  # noqa: E731
    last_linear = None
    for module in modules:
        name, leaf, weight = module.name, module.name.rpartition(".")[2], dict(module.shapes).get("weight", ())
        if name in blocks:
            add("blocks", name)
        elif module.kind == "Embedding":
            add("embedding", name)
            add("first", name)
        elif inside(name):
            if len(weight) == 2 and _ROW.search(name):
                add("rowwise", name)
            elif len(weight) == 2 and _COLUMN.search(name):
                add("colwise", name)
            elif len(weight) == 1 and _NORM.search(leaf + module.kind):
                parent = name.rpartition(".")[0]
                add("replicated" if parent not in blocks else "norms", name)
            elif _ATTENTION.search(leaf) and not weight and any(m.name.startswith(name + ".") for m in modules):
                add("attention", name)
            elif _MLP.search(leaf) and not weight and any(m.name.startswith(name + ".") for m in modules):
                add("mlp", name)
        elif len(weight) == 1 and _NORM.search(leaf + module.kind):
            add("norms", name)
            add("last", name)
        elif len(weight) == 2:
            last_linear = name
    if last_linear:
        add("head", last_linear)
        add("last", last_linear)
    found: dict[str, Any] = {role: tuple(patterns) for role, patterns in roles.items()}
    return ModelLayout(**found)
