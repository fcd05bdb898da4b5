"""A ModelLayout from what a transformers model publishes as data: tp_plan, pp_plan and _no_split_modules. No torch, no transformers.

Styles are read by name and given our own meaning; a style or a key that is not understood is an error, never left out: a plan that is
obeyed in part trains with wrong numbers and no message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_megascale.layout import ROLES, ModelLayout, ModuleInfo, matches, starred_name

# transformers' style of a module -> our role. Styles of expert parameters follow from "moe_tp_experts" of the module that owns them.
STYLES = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "gathered",
    "rowwise_split_input": "rowwise",
    "embedding_rowwise": "embedding",
    "replicated_with_grad_allreduce": "replicated",
    "mla_kv_a_proj": "replicated",
    "moe_tp_experts": "experts",
}
_EXPERT_STYLES = ("packed_colwise", "colwise", "rowwise", "packed_rowwise")

_ENCODER = dict(
    attention=["self_attn"],
    mlp=["mlp"],
    colwise=["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"],
    rowwise=["self_attn.out_proj", "mlp.fc2"],
)
_SPEECH = dict(
    attention=["self_attn"],
    colwise=["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"],
    rowwise=["self_attn.out_proj", "fc2"],
    divided=["self_attn.num_heads"],
)
# Blocks of classes that publish no tp_plan: roles relative to the block.
BLOCKS: dict[str, dict[str, Any]] = {
    "GPT2Block": dict(
        attention=["attn"],
        mlp=["mlp"],
        colwise=["attn.c_attn", "mlp.c_fc"],
        rowwise=["attn.c_proj", "mlp.c_proj"],
        packed={"attn.c_attn": 3},
        divided=["attn.split_size"],
    ),
    "CLIPEncoderLayer": _ENCODER,
    "SiglipEncoderLayer": _ENCODER,
    "WhisperEncoderLayer": _SPEECH,
    "WhisperDecoderLayer": dict(
        attention=[*_SPEECH["attention"], "encoder_attn"],
        colwise=[*_SPEECH["colwise"], "encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj"],
        rowwise=[*_SPEECH["rowwise"], "encoder_attn.out_proj"],
        divided=[*_SPEECH["divided"], "encoder_attn.num_heads"],
    ),
}
# Attention of classes whose tp_plan leaves it out: multi-head latent attention, whose latents are whole on every rank.
_LATENT = dict(
    colwise=["q_proj", "q_b_proj", "kv_b_proj"],
    rowwise=["o_proj"],
    replicated=["q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"],
)
ATTENTIONS: dict[str, dict[str, list[str]]] = {"DeepseekV3Attention": _LATENT, "DeepseekV2Attention": _LATENT}

# What an encoder before the language model reads: only the first pipeline stage has one. (Grids of images make positions too, so all stages
# get them.)
ENCODER_INPUTS = ("pixel_values", "pixel_values_videos", "input_features")


@dataclass(frozen=True)
class Published:
    """What a transformers model publishes.

    Args:
        modules: all of the model, in module order.
        tp_plan: name pattern of a module or expert parameter -> style.
        pp_plan: module name -> (inputs, outputs), which names the embedding, the list of blocks, and what comes after.
        no_split: class names of the blocks.
        inputs: names of the arguments of the model's forward.
        shared: pairs of names of modules that share a parameter.
    """

    modules: Sequence[ModuleInfo]
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    pp_plan: Mapping[str, Any] = field(default_factory=dict)
    no_split: Iterable[str] = ()
    inputs: Sequence[str] = ()
    shared: Sequence[tuple[str, str]] = ()


def layout_of(published: Published, *, tensor_parallel: bool, expert_parallel: bool = False) -> ModelLayout:
    """The layout of a transformers model.

    Args:
        published: the model as data.
        tensor_parallel: read the roles of tensor parallelism too; without it ``tp_plan`` is not looked at.
        expert_parallel: read which modules are experts, also without tensor parallelism.

    Raises:
        ValueError: naming every style that is not understood and every key that matches nothing.
    """
    roles: dict[str, Any] = {role: [] for role in (*ROLES, "divided")} | {"packed": {}}
    lists = _block_lists(published)
    main = _main_list(published, lists)
    for parent, names in lists.items():
        roles["blocks" if main in (None, parent) else "units"] += [f"{parent}.*"] if names else []
    if main is not None:
        roles["first"], roles["last"] = _around(published, main)
        roles["first_inputs"] = [name for name in ENCODER_INPUTS if name in published.inputs and len(lists) > 1]
    if tensor_parallel:
        if published.tp_plan:
            _read_plan(published, roles)
        else:
            _read_blocks(published, lists, roles)
        _read_attentions(published, roles)
        _regions(published, roles)
        _whole_embeddings(published, roles)
    elif expert_parallel:
        roles["experts"] = _experts(published)
    return ModelLayout(**roles)


def _block_lists(published: Published) -> dict[str, list[str]]:
    """List of layers -> its members, for the lists whose members are of a class in ``no_split``."""
    kinds, numbered = set(published.no_split), re.compile(r"^(.+)\.\d+$")
    found: dict[str, list[str]] = {}
    for module in published.modules:
        match = numbered.match(module.name)
        if match and module.kind in kinds:
            found.setdefault(match[1], []).append(module.name)
    return found


def _main_list(published: Published, lists: Mapping[str, list[str]]) -> str | None:
    """The list of layers that a pipeline cuts: the one of ``pp_plan``, else the only one."""
    planned = [name for name in published.pp_plan if name in lists]
    if len(planned) == 1:
        return planned[0]
    return next(iter(lists)) if len(lists) == 1 else None


def _around(published: Published, main: str) -> tuple[list[str], list[str]]:
    """Modules that stand before the list of layers and after it, the largest ones that do not hold it; those without parameters only
    where they change what passes (dropout)."""
    first: list[str] = []
    last: list[str] = []
    seen = False
    by_parent: dict[str, list[ModuleInfo]] = {}
    for module in published.modules:
        if module.name:
            by_parent.setdefault(module.name.rpartition(".")[0], []).append(module)

    def walk(parent: str) -> None:
        nonlocal seen
        for child in by_parent.get(parent, []):
            if child.name == main:
                seen = True
            elif main.startswith(child.name + "."):
                walk(child.name)
            elif "Dropout" in child.kind or any(m.shapes for m in published.modules if _within(m.name, child.name)):
                (last if seen else first).append(child.name)

    walk("")
    # two habits of registering modules out of the order of their calls; the first forward proves the order
    early = [name for name in last if "emb" in name.rpartition(".")[2] and name.rpartition(".")[0] == main.rpartition(".")[0]]
    late = [name for name in first if name.rpartition(".")[2].startswith("final")]
    return [name for name in (*first, *early) if name not in late], [*late, *(name for name in last if name not in early)]


def _within(name: str, owner: str) -> bool:
    return name == owner or name.startswith(owner + ".")


def _read_plan(published: Published, roles: dict[str, Any]) -> None:
    names = [module.name for module in published.modules if module.name]
    owned = {f"{module.name}.{key}": module for module in published.modules for key, _ in module.shapes}
    matched = {key: [n for n in (*names, *owned) if matches(n, key)] for key in published.tp_plan}
    experts = [key for key, style in published.tp_plan.items() if STYLES.get(style) == "experts"]
    wrong = []
    for key, style in published.tp_plan.items():
        if not matched[key]:
            parent = key.rpartition(".")[0]
            if not any(found and other.rpartition(".")[0].startswith(parent) for other, found in matched.items() if other != key):
                wrong.append(f"tp_plan[{key!r}]={style!r} matches no module and no parameter of this model")
        elif matched[key][0] in owned and matched[key][0] not in names:
            if key.rpartition(".")[0] not in experts or style not in _EXPERT_STYLES:
                wrong.append(f"tp_plan[{key!r}]={style!r}: a split of a single parameter is understood for experts only")
        elif style not in STYLES:
            wrong.append(f"tp_plan[{key!r}]={style!r}: the style is not known; known are {', '.join(STYLES)}")
        else:
            roles[STYLES[style]].append(key)
    if wrong:
        raise ValueError(
            "the tensor-parallel plan that this model publishes is not understood, and part of a plan gives wrong numbers: give "
            "layout=ModelLayout(...) or use tensor_parallel_size=1\n" + "\n".join(f"  - {message}" for message in wrong)
        )


def _experts(published: Published) -> list[str]:
    """The keys of ``tp_plan`` that name modules of experts."""
    names = [module.name for module in published.modules if module.name]
    keys = [key for key, style in published.tp_plan.items() if STYLES.get(style) == "experts"]
    return [key for key in keys if any(matches(name, key) for name in names)]


def _read_blocks(published: Published, lists: Mapping[str, list[str]], roles: dict[str, Any]) -> None:
    """Blocks of classes without a plan; the embedding that a head outside of the blocks shares is split with it."""
    kinds = {module.name: module.kind for module in published.modules}
    for parent, members in lists.items():
        known = BLOCKS.get(kinds[members[0]])
        if known is None:
            continue
        for role, value in known.items():
            if role == "packed":
                roles["packed"].update({f"{parent}.*.{name}": parts for name, parts in value.items()})
            else:
                roles[role] += [f"{parent}.*.{name}" for name in value]
    if roles["colwise"]:
        for one, other in published.shared:
            pair = sorted((one, other), key=lambda name: kinds.get(name) != "Embedding")
            if [kinds.get(name) for name in pair] == ["Embedding", "Linear"]:
                roles["embedding"].append(pair[0])
                roles["head"].append(pair[1])


def _read_attentions(published: Published, roles: dict[str, Any]) -> None:
    for module in published.modules:
        known = ATTENTIONS.get(module.kind)
        inside = {m.name for m in published.modules if m.name.startswith(module.name + ".")}
        if known is None or any(matches(name, key) for role in ("colwise", "rowwise") for key in roles[role] for name in inside):
            continue
        for role, names in known.items():
            roles[role] += [
                pattern
                for name in names
                if f"{module.name}.{name}" in inside and (pattern := starred_name(f"{module.name}.{name}")) not in roles[role]
            ]


def _regions(published: Published, roles: dict[str, Any]) -> None:
    """Attention and MLP modules: those that hold a column- and a row-parallel linear side by side. And the head among the gathered."""
    lists = _block_lists(published)
    blocks = {name for members in lists.values() for name in members}
    named = {
        role: [m.name for m in published.modules if any(matches(m.name, key) for key in roles[role])] for role in ("colwise", "rowwise")
    }
    known = [m.name for m in published.modules if any(matches(m.name, key) for role in ("attention", "mlp") for key in roles[role])]
    for row in named["rowwise"]:
        parent = row.rpartition(".")[0]
        if parent in blocks or parent in known or not any(name.rpartition(".")[0] == parent for name in named["colwise"]):
            continue
        role, pattern = "attention" if "att" in parent.rpartition(".")[2].lower() else "mlp", starred_name(parent)
        if pattern not in roles[role]:
            roles[role].append(pattern)
    # one pattern may match modules that are no regions (an MLP in one layer, experts in another): then plain names
    regions = {row.rpartition(".")[0] for row in named["rowwise"]} | set(known)
    for role in ("attention", "mlp"):
        exact: list[str] = []
        for pattern in roles[role]:
            found = [m.name for m in published.modules if matches(m.name, pattern)]
            exact += [pattern] if all(name in regions for name in found) else [name for name in found if name in regions]
        roles[role] = exact
    outside = [key for key in roles["gathered"] if "*" not in key]
    roles["head"] += [key for key in outside if any(m.name == key and m.kind == "Linear" for m in published.modules)]
    roles["gathered"] = [key for key in roles["gathered"] if key not in roles["head"]]


def _whole_embeddings(published: Published, roles: dict[str, Any]) -> None:
    """An embedding of a class of its own does more than look rows up: it stays whole, and so does a head that shares its rows."""
    kinds = {module.name: module.kind for module in published.modules}
    special = {name for name, kind in kinds.items() if kind != "Embedding" and any(matches(name, key) for key in roles["embedding"])}
    special |= {name for pair in published.shared for name in pair if special & set(pair)}
    for role in ("embedding", "head"):
        roles[role] = [key for key in roles[role] if not any(matches(name, key) for name in special)]
