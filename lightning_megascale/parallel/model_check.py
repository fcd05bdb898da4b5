"""Whether a model can run under a plan: every violated rule as a message, the same on all ranks, without communication."""

from __future__ import annotations

import inspect

from torch import nn

from lightning_megascale.layout import ModelLayout, guess_layout
from lightning_megascale.parallel.context_seams import check_context
from lightning_megascale.parallel.data import shared_between
from lightning_megascale.parallel.expert import check_experts, regroups_ranks
from lightning_megascale.parallel.layouts import block_names, describe, is_published, roots_of, stage_count, stages_of, unit_names
from lightning_megascale.parallel.pipeline import unowned_parameters
from lightning_megascale.parallel.pipeline_split import check_places, check_split
from lightning_megascale.parallel.published_calls import check_call
from lightning_megascale.plan import ParallelPlan
from lightning_megascale.support import REFUSED, ZERO_BUBBLE_SCHEDULES, schedule_name

_HUGGING_FACE_SEQUENCES = (
    "sequence_parallel=True with a layout read from a transformers model: its forward makes positions and masks from the length of the "
    "hidden state, which would be a part of the sequence. Use sequence_parallel=False, or give a layout with norms and pass position_ids"
)


def check_model(module: nn.Module, model: nn.Module, plan: ParallelPlan, layout: ModelLayout | None) -> list[str]:
    """A message for every rule that a model violates under this plan. Same on all ranks, no communication.

    Args:
        module: the LightningModule.
        model: its part that the layout's names refer to.
        plan, layout: what is to be done.
    """
    if plan.tensor_parallel_size > 1 and (layout is None or (is_published(model) and not (layout.colwise or layout.rowwise))):
        guess = guess_layout(describe(model)).paste()
        message = (
            f"tensor_parallel_size={plan.tensor_parallel_size} needs to know the roles of the modules of {type(model).__name__}, which "
            "has no megascale_layout and publishes no tp_plan. A guess from its names and shapes, to be read, corrected and given as "
            f"MegascaleStrategy(layout=...):\n{guess}"
        )
        return [message]
    wrong = []
    if layout is not None and (plan.tensor_parallel_size > 1 or layout.blocks):
        wrong += layout.unmatched([name for name, _ in model.named_modules()]) if plan.tensor_parallel_size == 1 else []
    if plan.tensor_parallel_size > 1:
        from lightning_megascale.parallel.tensor import check_tensor_parallel

        assert layout is not None
        if plan.sequence_parallel and is_published(model) and not layout.norms:
            return [_HUGGING_FACE_SEQUENCES]
        deals = not regroups_ranks(plan, layout)
        wrong += check_tensor_parallel(model, layout, plan.tensor_parallel_size, plan.sequence_parallel, deals_experts=deals)
    if plan.expert_parallel_size > 1 or (layout is not None and layout.experts):
        wrong += [message for message in check_experts(model, layout, plan) if message not in wrong]
    if (plan.activation_checkpointing or plan.compile) and not wrong and not block_names(model, layout):
        option = "activation_checkpointing" if plan.activation_checkpointing else "compile"
        wrong.append(
            f"{option}={getattr(plan, option)!r} works on repeated blocks, and {type(model).__name__} has none that can be found: "
            "name them with layout=ModelLayout(blocks='...')"
        )
    wrong += _rank_dependent_modules(module) if int(plan.data_parallel_size) > 1 or plan.pipeline_parallel_size > 1 else []
    wrong += check_context(model, layout, plan) if plan.context_parallel_size > 1 else []
    wrong += _hooked_parameters(module)
    wrong += _units(model, layout)
    wrong += _published(model, plan) if is_published(model) else []
    wrong += _chunked(model, plan, layout)
    wrong += _experts(plan, layout)
    if plan.pipeline_parallel_size > 1 and not wrong:
        wrong = _check_pipeline(model, plan, layout)
    if not wrong and plan.pipeline_parallel_size == 1:
        wrong = _shared_modules(model, layout, plan)
    return wrong or _shared_between_units(module, model, layout)


def _units(model: nn.Module, layout: ModelLayout | None) -> list[str]:
    """A message for every unit of FSDP2 that cannot be one."""
    if layout is None or layout.unmatched([name for name, _ in model.named_modules()]):
        return []
    names = unit_names(model, layout)
    lists = [name for name in names if isinstance(model.get_submodule(name), (nn.ModuleList, nn.ModuleDict))]
    nested = [(name, other) for name in names for other in names if name.startswith(other + ".")]
    wrong = [f"{name} is a list of layers, and layout.blocks and units name the layers: write {name + '.*'!r}" for name in lists]
    return wrong + [
        f"{name} is a unit inside {other}, which is one too: leave one of them out of layout.blocks and units" for name, other in nested[:1]
    ]


def _chunked(model: nn.Module, plan: ParallelPlan, layout: ModelLayout | None) -> list[str]:
    """A message for every choice under which feed-forwards that run in chunks (``mlp_chunk_tokens``) would not do what they are for."""
    sizes = {name: size for name, module in model.named_modules() if (size := getattr(module, "mlp_chunk_tokens", None)) is not None}
    if not sizes:
        return []
    first, size = next(iter(sizes.items()))
    chunked, wrong = f"{first} has mlp_chunk_tokens={size}", []
    if plan.activation_checkpointing == "selective":
        wrong.append(
            f"{chunked} and activation_checkpointing='selective', which would keep the matmuls of every chunk and run them again all the "
            "same: use activation_checkpointing='full' or None, or mlp_chunk_tokens=None"
        )
    schedule = schedule_name(plan.pipeline_schedule)
    if plan.pipeline_parallel_size > 1 and schedule in ZERO_BUBBLE_SCHEDULES:
        wrong.append(
            f"{chunked} and pipeline_schedule={schedule!r}, whose backward of weights would run every chunk's forward again for each of "
            "them: use 'Interleaved1F1B', or mlp_chunk_tokens=None"
        )
    names = [name for name, _ in model.named_modules()]
    readable = layout is None or not layout.unmatched(names)
    units = [unit for unit in (unit_names(model, layout) if readable else ()) if any(f"{unit}.".startswith(f"{name}.") for name in sizes)]
    if units:
        wrong.append(
            f"{chunked}, and {units[0]} is a unit of its own, whose parameters would be gathered for every chunk, on ranks with rows of "
            "other lengths another number of times: name the block that holds it in layout.blocks or units"
        )
    return wrong


def _experts(plan: ParallelPlan, layout: ModelLayout | None) -> list[str]:
    """A message where a schedule would split the backward of experts."""
    schedule = schedule_name(plan.pipeline_schedule)
    if layout is None or not layout.experts or plan.pipeline_parallel_size == 1 or schedule not in ZERO_BUBBLE_SCHEDULES:
        return []
    return [f"pipeline_schedule={schedule!r} and experts ({layout.experts[0]}): {REFUSED[frozenset((schedule, 'moe-like'))]}"]


def _published(model: nn.Module, plan: ParallelPlan) -> list[str]:
    """A message for every setting of a transformers model that contradicts the plan."""
    wrong = []
    try:
        check_call(model, plan, {})
    except ValueError as error:
        wrong.append(str(error))
    name, encodes = type(model).__name__, bool(getattr(model.config, "is_encoder_decoder", False))
    if plan.label_alignment == "huggingface" and (encodes or name.endswith(("ForMaskedLM", "ForTokenClassification"))):
        wrong.append(
            f"label_alignment='huggingface': the loss of {name} does not shift labels, each stands at its own position: say 'aligned'"
        )
    return wrong


def _check_pipeline(model: nn.Module, plan: ParallelPlan, layout: ModelLayout | None) -> list[str]:
    """A message for every rule of pipeline stages that a model violates."""
    if layout is None or not (layout.blocks and layout.first and layout.last):
        missing = [role for role in ("blocks", "first", "last") if layout is None or not getattr(layout, role)]
        if layout is not None and is_published(model) and len(layout.blocks) > 1:
            lists = " and ".join(layout.blocks)
            message = (
                f"pipeline_parallel_size={plan.pipeline_parallel_size}: {type(model).__name__} has several lists of layers, {lists} (an "
                "encoder and a decoder, two towers), and only one hidden state crosses a pipeline boundary: use pipeline_parallel_size=1"
            )
            return [message]
        message = (
            f"pipeline_parallel_size={plan.pipeline_parallel_size} needs a layout that names the model's {', '.join(missing)}: the "
            "repeated layers, the modules called before and those called after them. A guess for "
            f"{type(model).__name__}, to be read, corrected and given as MegascaleStrategy(layout=...):\n"
            f"{guess_layout(describe(model)).paste()}"
        )
        return [message]
    wrong = layout.unmatched([name for name, _ in model.named_modules()])
    takes = inspect.signature(model.forward).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        unknown = [name for name in layout.first_inputs if name not in takes]
        wrong += [
            f"layout.first_inputs: {name!r} is no argument of {type(model).__name__}, which takes {', '.join(takes)}" for name in unknown
        ]
    if not wrong:
        roles = layout.resolve([name for name, _ in model.named_modules()])
        wrong = check_places([*roles["first"], *roles["blocks"], *roles["last"]])
    wrong = wrong or check_split(plan.pipeline_split, block_names(model, layout), stage_count(plan))
    if wrong:
        return wrong
    try:
        stages = stages_of(model, plan, layout)
    except ValueError as error:
        return [str(error)]
    return unowned_parameters(model, stages)


def _rank_dependent_modules(module: nn.Module) -> list[str]:
    """A message for every module whose result depends on which rows a rank holds, or whose state ranks would not share."""
    wrong = []
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._NormBase) and child.training and (child.track_running_stats or _is_batch_norm(child)):
            wrong.append(
                f"module {name!r} is a {type(child).__name__}: it takes its statistics from this rank's rows only (in a pipeline from one "
                "microbatch), so the numbers would depend on the number of ranks. Use group, layer or RMS norm, or freeze it "
                "(requires_grad_(False) and eval())"
            )
        if isinstance(child, nn.Embedding) and (child.max_norm is not None or child.scale_grad_by_freq):
            option = "max_norm" if child.max_norm is not None else "scale_grad_by_freq"
            wrong.append(f"module {name!r} is an Embedding with {option}, which looks at this rank's rows only: leave it out")
    return wrong


def _is_batch_norm(child: nn.Module) -> bool:
    return isinstance(child, nn.modules.batchnorm._BatchNorm)


def _hooked_parameters(module: nn.Module) -> list[str]:
    """A message for every parameter whose hooks sharding would drop."""
    hooked = [name for name, p in module.named_parameters() if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]
    if not hooked:
        return []
    message = (
        f"{', '.join(hooked)}: a hook on a parameter never runs once the parameter is sharded; change gradients in "
        "on_before_optimizer_step, where they are final"
    )
    return [message]


def _shared_modules(model: nn.Module, layout: ModelLayout | None, plan: ParallelPlan) -> list[str]:
    """A message for every module with parameters that stands in two FSDP2 units; experts that regroup the ranks are units of their own."""
    own = (
        layout.resolve([name for name, _ in model.named_modules()])["experts"]
        if layout is not None and regroups_ranks(plan, layout)
        else ()
    )
    apart = {id(model.get_submodule(name)) for name in own}
    units = {name: list(model.get_submodule(name).named_modules()) for name in unit_names(model, layout)}
    names = shared_between({name: [(key, child) for key, child in found if id(child) not in apart] for name, found in units.items()})
    return [
        f"{' and '.join(both)} are one module in blocks that are sharded apart, each of which would hold its parameters: make it a child "
        "of the LightningModule outside the repeated blocks, or give each block its own"
        for both in names[:4]
    ]


def _shared_between_units(module: nn.Module, model: nn.Module, layout: ModelLayout | None) -> list[str]:
    """A message for every parameter that two FSDP2 units would hold: each would shard a copy, untied without an error.

    Outside of the blocks a pipeline may separate them: it gives each stage a copy and adds their gradients up.
    """
    blocks = [model.get_submodule(name) for name in unit_names(model, layout)]
    inside = {id(child): number for number, block in enumerate(blocks) for child in block.modules()}
    for number, root in enumerate(roots_of(module, model)):
        for child in root.modules():
            inside.setdefault(id(child), -1 - number)
    holders: dict[int, list[tuple[int | None, str]]] = {}
    for name, child in module.named_modules():
        for key, parameter in child.named_parameters(recurse=False):
            holders.setdefault(id(parameter), []).append((inside.get(id(child)), f"{name}.{key}".lstrip(".")))
    return [
        f"{' and '.join(name for _, name in held)} are one parameter in units that are sharded apart, which would untie them: "
        "put the modules "
        "that share it into one child of the LightningModule, outside the repeated blocks"
        for held in holders.values()
        if len({unit for unit, _ in held}) > 1
    ]
