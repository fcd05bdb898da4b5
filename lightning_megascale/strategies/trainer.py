"""MegascaleStrategy: the only place where plan, layout and model meet Lightning. It calls; the axes live in parallel/."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_megascale.data.sharing import Replica
from lightning_megascale.layout import ModelLayout
from lightning_megascale.mesh import build_mesh, compatible_mesh
from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, set_microbatch_weight
from lightning_megascale.parallel.context import Context
from lightning_megascale.parallel.data import postponed_reduction
from lightning_megascale.parallel.init import broadcast_from_first, materialize, on_meta, same_on_all_ranks
from lightning_megascale.parallel.layouts import find_layout, is_published, target_of
from lightning_megascale.parallel.loss_scale import documents_of, real_tokens
from lightning_megascale.parallel.model_check import check_model
from lightning_megascale.parallel.parallelize import Parallelized, is_parallel, parallelize, record_units
from lightning_megascale.parallel.pipeline import standing_in
from lightning_megascale.parallel.rng import seed_microbatch, seed_step
from lightning_megascale.parallel.tied import broadcast_tied, sum_tied_gradients
from lightning_megascale.plan import ParallelPlan, batch_arithmetic
from lightning_megascale.strategies import guards, pipeline_guards
from lightning_megascale.strategies.arguments import plan_from, shows_fields_of_a_plan
from lightning_megascale.strategies.checkpoint.pretrained import InitFrom, Pretrained
from lightning_megascale.strategies.context_steps import ContextSteps, open_context
from lightning_megascale.strategies.habits import give_finder_the_step_loss
from lightning_megascale.strategies.pipeline_steps import PipelineSteps
from lightning_megascale.strategies.precision import for_sharded_model, install_clipping, reduction_dtype
from lightning_megascale.strategies.saving import Saving
from lightning_megascale.strategies.sharded_values import answer_grad_norm, forget_grad_norm, log_whole_values, prepare_tensors
from lightning_megascale.strategies.steps import StepNumbers, drop_parameters
from lightning_megascale.strategies.summary import keep_whole_summary
from lightning_megascale.topology.placement_file import read_placement

log = logging.getLogger(__name__)


class MegascaleStrategy(Saving):
    """Runs an unmodified LightningModule over several ranks, with the numbers of one device.

    Args:
        plan: a ``ParallelPlan``; or give its fields as keyword arguments, not both.
        module: which child of the LightningModule is parallelized; "auto": the one with parameters, else the module itself.
        layout: a ``ModelLayout``, a dict of patterns, or "auto": the model's ``megascale_layout``. FSDP2 alone needs none.
        placement: which global rank stands at each place of the mesh, a permutation of all ranks, or the file of them that
            ``megascale plan ranks=FILE`` wrote; None: rank i at place i.
        init_from: first weights, when no checkpoint is resumed: a Hugging Face folder or hub name, an export, a checkpoint (its weights
            only); or a dict of module name -> one of these. Each rank reads its own part.
        save_distributed_checkpoint, process_group_backend, timeout: as in Lightning's ``ModelParallelStrategy``.
        **sizes: the fields of ``ParallelPlan``, such as ``tensor_parallel_size=8``, which the signature shows one by one.

    Raises:
        ValueError: before anything is started, naming every argument that is wrong with its value, rule and remedy.
    """

    accepts_loss_sum = True
    settles_routers = True

    @shows_fields_of_a_plan
    def __init__(
        self,
        *,
        plan: ParallelPlan | Mapping[str, Any] | None = None,
        module: str = "auto",
        layout: ModelLayout | Mapping[str, Any] | str = "auto",
        placement: Sequence[int] | Tensor | str | os.PathLike[str] | None = None,
        init_from: InitFrom | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **sizes: Any,
    ) -> None:
        if isinstance(layout, Mapping):
            layout = ModelLayout.from_dict(layout)
        elif not isinstance(layout, ModelLayout) and layout != "auto":
            raise ValueError(f"layout={layout!r}: must be a ModelLayout, a dict of patterns, or 'auto'")
        self.plan = plan_from(plan, sizes, MegascaleStrategy)
        guards.check_values(self.plan)
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint, process_group_backend=process_group_backend, timeout=timeout
        )
        self._module_name, self._layout = module, layout
        self._placement = read_placement(placement) if isinstance(placement, (str, os.PathLike)) else placement
        self.init_from = init_from
        self._seed = 0
        self._numbers: StepNumbers | None = None
        self._finishing: Optimizer | None = None
        self._pipeline: PipelineSteps | None = None
        self._sequences: ContextSteps | None = None
        self._scaling: pipeline_guards.GradientScaling | None = None
        self._peers_checked: set[str] = set()
        self.grad_norm: Tensor | None = None
        """Norm of the last step's gradients before clipping (0-dim, equal on all ranks), or None without clipping."""

    # ---- ranks and mesh ------------------------------------------------------------------------------------------------

    @property
    def step_loss(self) -> Tensor | None:
        """Exact mean loss of the last optimizer step over all its tokens, microbatches and ranks (0-dim); None before the first."""
        return None if self._numbers is None else self._numbers.scale.step_loss

    @property
    def num_parameters(self) -> int | None:
        """Parameters of the whole LightningModule, tied ones once; None before setup."""
        return None if self._done is None else self._done.num_parameters

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the trainable parameters of the whole LightningModule, of which a pipeline's rank holds some."""
        return () if self._done is None else self._done.trainable

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the last training batch: the loader's rows / ``microbatch_size``; 1 without a pipeline, 0 before the first."""
        return 1 if self.plan.pipeline_parallel_size == 1 else 0 if self._pipeline is None else self._pipeline.num_microbatches

    @property
    def numbers(self) -> StepNumbers:
        """The bookkeeping of weights and reductions of the running fit."""
        assert self._numbers is not None, "only while fitting"
        return self._numbers

    @property
    def model_replica(self) -> Replica | None:
        """The ranks that work on this rank's rows, and who of them reads with ``share="model"``; None where there is no other.

        Asking for the first time makes a group: to be done on all of these ranks together, once the model is parallelized.
        """
        return self._replica(None if self._done is None else self._done.pipeline)

    def _configure_launcher(self) -> None:
        guards.refuse_notebook(self.cluster_environment)
        super()._configure_launcher()

    def setup_environment(self) -> None:
        self.plan = self.plan.resolve(self.world_size)  # raises on every rank before a process group exists
        assert self.lightning_module is not None
        guards.check_trainer(self.lightning_module, self.plan)
        self._setup_distributed()
        own_mesh = is_overridden("configure_model", self.lightning_module)
        self._views = build_mesh(self.plan, self.root_device.type, self._placement, keep=("tp",) if own_mesh else ())
        self._device_mesh = compatible_mesh(self._views) if own_mesh else self._views.root
        self.lightning_module._device_mesh = self._device_mesh
        self._seed = int(self.broadcast(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed() % 2**63))
        seed_microbatch(self._seed, -1, self.data_parallel_rank)  # tensor-parallel peers draw alike from here on

    # ---- the model -----------------------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.model is not None and self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        prepare_tensors()
        keep_whole_summary(trainer, self.lightning_module, runs_example=self.plan.model_parallel_size == 1)
        self._use_no_grad_for_evaluation(trainer)
        plugin, param_dtype = for_sharded_model(self.precision_plugin)
        self.precision_plugin = plugin
        install_clipping(plugin, self._note_norm, self._spread_of_parameters)
        self._parallelize(param_dtype)
        self._open_pipeline(None if param_dtype is None else torch.float32)
        if self._done is not None and self._done.context is not None:
            _, target = target_of(self.lightning_module, self._module_name)
            self._sequences = open_context(self, trainer, self.lightning_module, target, self._done.context)
        self._set_metric_groups()
        log_whole_values(trainer, self.lightning_module)
        answer_grad_norm(self)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self._numbers = StepNumbers(self.plan, self.mesh_views, self.root_device)
            self._derive_accumulation(trainer)
            self._drop_whole_copies()  # an optimizer made now must hold the shards
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _parallelize(self, param_dtype: torch.dtype | None) -> None:
        """Applies the plan to the LightningModule, once in its life."""
        module = self.lightning_module
        assert module is not None
        known = module.__dict__.get("_megascale")
        if known is not None:
            guards.refuse_other_plan(known.plan, self.plan)
            self._done, self._views = known, known.views
            return
        self.model = self.precision_plugin.convert_module(module)
        pretrained = self.open_pretrained()
        if is_parallel(module):
            self._done = Parallelized(self.plan, self.mesh_views, by_user=True)
            guards.refuse_options_of_parallel_module(self.plan)
            if pretrained is not None:
                pretrained.reserve(module, self.root_device)
            materialize(module, self.root_device, self._seed)
            record_units(module, self._done)
        else:
            self._parallelize_from_layout(param_dtype, pretrained)
        self.model_to_device()
        if pretrained is not None:
            self.fill_from(pretrained)
        module.__dict__["_megascale"] = self._done  # not an attribute of nn.Module: it must not reach the state dict

    def _parallelize_from_layout(self, param_dtype: torch.dtype | None, pretrained: Pretrained | None) -> None:
        module = self.lightning_module
        assert module is not None
        name, target = target_of(module, self._module_name)
        sizes = self.plan.tensor_parallel_size, self.plan.expert_parallel_size
        layout = find_layout(target, self._layout, tensor_parallel=sizes[0] > 1, expert_parallel=sizes[1] > 1)
        piped = pipeline_guards.check_module(module, target) if self.plan.pipeline_parallel_size > 1 else []
        wrong = piped or check_model(module, target, self.plan, layout)
        if layout is not None and self._layout == "auto" and is_published(target) and any("layout" in message for message in wrong):
            wrong.append(f"the layout that was read, to be corrected and given as MegascaleStrategy(layout=...):\n{layout.paste()}")
        guards.raise_all(wrong, type(module).__name__)
        filled = {id(tensor) for tensor in pretrained.filled(module)} if pretrained is not None else set()
        if not on_meta(module) and not same_on_all_ranks(module, self.root_device, filled):
            rank_zero_info("ranks built different first values (no seed_everything?): all take those of rank 0")
            broadcast_from_first(module, self.root_device, filled)
        reduce_dtype = reduction_dtype(module, param_dtype, self.plan.reduce_dtype)
        plan, views = self.plan, self.mesh_views
        method, backend = plan.context_parallel_method, plan.attention_backend
        context = Context(views, method, backend, self.root_device, told=rank_zero_info) if views.context is not None else None
        dtypes = {"param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
        self._done = parallelize(module, target, plan, views, layout, context=context, **dtypes)
        if pretrained is not None:
            pretrained.reserve(module, self.root_device)
        if on_meta(module):
            materialize(target, self.root_device, self._seed)
            materialize(module, self.root_device, self._seed)
        if self._done.pipeline is not None and self.mesh_views.pipeline is not None:
            broadcast_tied(target.to(self.root_device), self._done.pipeline, self.mesh_views.pipeline.get_group())
        units = f"{len(self._done.blocks)} blocks ({self._done.blocks[0]} ...)" if self._done.blocks else "no repeated blocks found"
        log.info("plan: %s; %s is sharded as %s and its rest", self.plan.summary(), name or type(module).__name__, units)

    def _open_pipeline(self, output_dtype: torch.dtype | None) -> None:
        """Makes the module's steps run through its stages; the zeroing of gradients moves before the forward, which runs the backward."""
        module = self.lightning_module
        assert module is not None and self._done is not None
        if self._done.pipeline is None:
            return
        _, target = target_of(module, self._module_name)
        views, device = self.mesh_views, self.root_device
        dtype, agree = output_dtype, self._largest_over_ranks
        self._pipeline = PipelineSteps(
            module, target, self._done.pipeline, self.plan, views, device, self._seed, dtype, agree, self._done.context
        )
        module.trainer.fit_loop.epoch_loop.automatic_optimization.__dict__["_make_zero_grad_fn"] = _zeroed_already
        hooks = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
        owners = (module, *module.trainer.callbacks)  # type: ignore[attr-defined]
        if any(_is_overridden(owner, hook) for owner in owners for hook in hooks) and views.pipeline is not None:
            self._scaling = pipeline_guards.GradientScaling(views.pipeline)
            self.precision_plugin._after_closure = self._checked_after_closure  # type: ignore[method-assign]

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._sequences is None:
            return batch
        assert self.lightning_module is not None
        state = self.lightning_module.trainer.state.stage
        return self._sequences.shard(batch, "train" if state is None else str(state.value))

    @property
    def batch_shape(self) -> tuple[int, int] | None:
        """(tokens, tokens of a row) of the last whole batch under context parallelism, padding left out; None without it."""
        return None if self._sequences is None else (self._sequences.batch_tokens, self._sequences.batch_length)

    def _checked_after_closure(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's hooks and clipping between a backward and the optimizer's step; then what they did to the gradients."""
        type(self.precision_plugin)._after_closure(self.precision_plugin, *args, **kwargs)
        assert self._scaling is not None
        self._scaling.check()

    def teardown(self) -> None:
        if self.lightning_module is not None:
            self.lightning_module.trainer.fit_loop.epoch_loop.automatic_optimization.__dict__.pop("_make_zero_grad_fn", None)
            self.lightning_module.__dict__.pop("log", None)
        forget_grad_norm()
        super().teardown()

    def _spread_of_parameters(self) -> tuple[Any, Any]:
        """What a norm over all parameters has to know: who holds other ones, and which are counted elsewhere."""
        assert self._done is not None
        pipeline = self.mesh_views.pipeline
        return None if pipeline is None else pipeline.get_group(), self._done.copies

    def _use_no_grad_for_evaluation(self, trainer: pl.Trainer) -> None:
        """FSDP2's and DTensor's views cannot be made under inference_mode; no_grad gives the same numbers."""
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False

    def _derive_accumulation(self, trainer: pl.Trainer) -> None:
        """Accumulation follows from the global batch."""
        if self.plan.global_batch_size is None or self.plan.pipeline_parallel_size > 1:
            return  # under a pipeline the loader's batch says how many microbatches make a step
        _, accumulation, line = batch_arithmetic(self.plan)
        if trainer.accumulate_grad_batches not in (1, accumulation):
            raise ValueError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} contradicts global_batch_size: {line}; "
                "leave accumulate_grad_batches at 1, it is derived"
            )
        trainer.accumulate_grad_batches = accumulation
        rank_zero_info(f"batch: {line}")

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        with standing_in(self.lightning_module) as absent:
            super().setup_optimizers(trainer)
        drop_parameters(self.optimizers, absent)
        guards.check_optimizers(self.lightning_module, self.optimizers)
        if self.plan.pipeline_parallel_size > 1:
            pipeline_guards.check_optimizers(self.optimizers)
            pipeline_guards.check_tied_options(self.lightning_module, self.optimizers, self._tied_names(), self.mesh_views.pipeline)

    def on_any_stage(self, mine: bool) -> bool:
        """What may differ between pipeline stages, which hold other parameters; without a pipeline this rank's answer."""
        return mine if self._pipeline is None else bool(self._largest_over_ranks([float(mine)])[0])

    # ---- a step --------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        batch = args[0] if args else next(iter(kwargs.values()))
        guards.check_rows(batch, self.plan)
        self._check_peers("train", batch)
        number = module.trainer.fit_loop.epoch_loop.total_batch_idx
        if self._sequences is None:
            return self._numbered_step(number, batch, args, kwargs)
        self._sequences.proof.prove(module.training_step, args[1:], self._pipeline)
        with self._sequences.shared_logs(batch), self._sequences.proof.watched(batch):
            output = self._numbered_step(number, batch, args, kwargs)
        seed_step(self._seed, "after", number, self.data_parallel_rank)  # what a loader draws next is drawn alike by all parts of its rows
        return output

    def _numbered_step(self, number: int, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.lightning_module
        assert module is not None
        if self._pipeline is not None:
            return self._pipelined_step(self._pipeline, number, batch, args[1:])
        seed_microbatch(self._seed, number, self.mesh_views.token_rank)
        self.numbers.before_forward(batch, self._real_tokens(batch), self._documents(batch))
        with guards.explained(guards.IN_STEP):
            output = super().training_step(*args, **kwargs)
        return self.numbers.after_forward(module, output)

    def _real_tokens(self, batch: Any) -> Tensor | None:
        """Which of this rank's tokens are no padding."""
        return real_tokens(batch) if self._sequences is None else self._sequences.real_tokens

    def _documents(self, batch: Any) -> Tensor | None:
        """Which document each token is of; context parallelism's own attention knows."""
        return documents_of(batch) if self._sequences is None else None

    def _pipelined_step(self, pipeline: PipelineSteps, number: int, batch: Any, rest: tuple[Any, ...]) -> Any:
        """Forward and backward of all microbatches at once: Lightning's order, zeroing between the two, would wipe the gradients."""
        module = self.lightning_module
        assert module is not None
        if module.trainer.fit_loop.epoch_loop.batch_idx == 0 and self._done is not None:
            guards.refuse_unfreezing(module, self._done.trainable, self._done.copies, self.on_any_stage)
        self._zero_early(module)
        with self.precision_plugin.train_step_context(), guards.explained(guards.IN_STEP):
            loss, sums = pipeline.train(module.training_step, batch, rest, number)
        self.numbers.scale.add_row(sums)
        return {"loss": loss}

    def _zero_early(self, module: pl.LightningModule) -> None:
        """What Lightning does between a step's forward and its backward, hooks included."""
        loop = module.trainer.fit_loop.epoch_loop
        zero_grad = type(loop.automatic_optimization)._make_zero_grad_fn(loop.automatic_optimization, loop.batch_idx, self.optimizers[0])
        if zero_grad is not None:
            zero_grad()
            self.numbers.begin_window(module)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        result = self._evaluate("predict_step", super().predict_step, *args, **kwargs)
        return result if self._sequences is None else self._sequences.restore(result)

    def _evaluate(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = args[0] if args else next(iter(kwargs.values()))
        self._check_peers(name, batch)
        if self._sequences is None:
            return self._evaluated(name, step, batch, args, kwargs)
        self._sequences.proof.prove(None, (), self._pipeline)
        with self._sequences.shared_logs(batch):
            result = self._evaluated(name, step, batch, args, kwargs)
        self._sequences.context.end()
        return result

    def _evaluated(self, name: str, step: Callable[..., Any], batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._pipeline is None:
            set_microbatch_weight(MicrobatchWeight(1.0, tokens=self._real_tokens(batch), documents=self._documents(batch)))
            try:
                return step(*args, **kwargs)
            finally:
                set_microbatch_weight(MicrobatchWeight(1.0))
        contexts = {"validation_step": "val_step_context", "test_step": "test_step_context", "predict_step": "predict_step_context"}
        with getattr(self.precision_plugin, contexts[name])():
            return self._pipeline.evaluate(name, getattr(self.lightning_module, name), batch, args[1:])

    def _check_peers(self, loop: str, batch: Any) -> None:
        """On a loop's first batch: tensor- and pipeline-parallel peers must work on the same rows."""
        if loop not in self._peers_checked:
            self._peers_checked.add(loop)
            views = self.mesh_views
            for group in (views.tensor_group, None if views.pipeline is None else views.pipeline.get_group()):
                guards.check_same_batch(batch, group, self.root_device)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        module = self.lightning_module
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        partial = set() if self._done is None else self._done.partial
        kept = [] if module.automatic_optimization else self.numbers.set_aside(module, partial)
        if self._pipeline is None:
            self.precision_plugin.backward(self.numbers.before_backward(module, closure_loss), module, optimizer, *args, **kwargs)
        if module.automatic_optimization:
            self._finish()  # here already, so that on_after_backward sees the gradients that one device would have
        else:
            self.numbers.complete(module, partial, kept)
        if self._sequences is not None:
            self._sequences.context.end()
        set_microbatch_weight(MicrobatchWeight(1.0))
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None

        def closure_and_reductions() -> Any:
            self._finishing = optimizer
            result = closure()
            if not module.automatic_optimization:
                self._finish()
            return result

        with guards.explained(guards.IN_HOOK):
            result = super().optimizer_step(optimizer, closure_and_reductions, model, **kwargs)
        if self._done is not None and self._done.routers is not None:
            self._done.routers.settle()
        self._drop_whole_copies()
        return result

    def _finish(self) -> None:
        """Finishes the gradients of the optimizer that is about to step, once."""
        assert self.lightning_module is not None and self._done is not None
        optimizer, self._finishing = self._finishing, None
        if optimizer is not None and self._done.pipeline is not None and self.mesh_views.pipeline is not None:
            _, target = target_of(self.lightning_module, self._module_name)
            sum_tied_gradients(target, self._done.pipeline, self.mesh_views.pipeline.get_group())
        if optimizer is not None:
            self.numbers.finish(self.lightning_module, optimizer, self._done.partial)
            if self._scaling is not None:
                self._scaling.note(parameter for group in optimizer.param_groups for parameter in group["params"])

    def on_train_start(self) -> None:
        self._set_metric_groups()
        assert self.lightning_module is not None
        give_finder_the_step_loss(self.lightning_module.trainer, self)

    on_validation_start = on_test_start = on_train_start

    def on_train_end(self) -> None:
        self.numbers.settle()

    def _note_norm(self, norm: Tensor) -> None:
        self.grad_norm = norm

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self._done is not None
        with postponed_reduction(self._done.units, last_only=self.plan.reduce_gradients == "last"):
            yield


def _is_overridden(owner: Any, hook: str) -> bool:
    """Whether a module or callback has a hook of its own."""
    base = pl.LightningModule if isinstance(owner, pl.LightningModule) else pl.Callback
    return getattr(type(owner), hook, None) is not getattr(base, hook, None)


def _zeroed_already(batch_idx: int, optimizer: Optimizer) -> None:
    """Lightning zeroes after the forward; under a pipeline the backward is done by then, and the strategy has zeroed before it."""
