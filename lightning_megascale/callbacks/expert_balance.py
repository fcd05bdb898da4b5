"""ExpertBalanceMonitor: how evenly routers deal tokens to experts, layer by layer: numbers, pictures, warnings. It only reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_megascale.callbacks.expert_heatmap import draw_loads, publish
from lightning_megascale.callbacks.expert_routers import RoutedLayer, RouterWatch, labels_of
from lightning_megascale.callbacks.expert_rules import BalanceRules
from lightning_megascale.ops.balance import metrics
from lightning_megascale.parallel.loss_scale import real_tokens
from lightning_megascale.plan import ParallelPlan


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


# name -> (of one layer, from ops.balance.metrics; over layers)
_FIGURES: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "max_violation": ("max_violation", max),
    "min_violation": ("min_violation", max),
    "dead_experts": ("dead_experts", sum),
    "load_cv": ("cv", _mean),
    "load_entropy": ("load_entropy", _mean),
    "balance": ("balance_loss", _mean),
    "z": ("z", _mean),
    "dropped": ("dropped_fraction", _mean),
    "router_entropy": ("router_entropy", _mean),
    "ep_max_over_mean": ("ep_max_over_mean", _mean),
}


_NOTHING = (
    "ExpertBalanceMonitor counted no token in {steps} steps: counted are forwards in training mode and with gradients. A checkpoint with "
    "use_reentrant=True runs its first forward without: use activation_checkpointing of MegascaleStrategy, or use_reentrant=False"
)


class ExpertBalanceMonitor(Callback):
    """Logs, once per ``every_n_steps`` optimizer steps, what routers did in these steps, over all ranks and microbatches.

    Each figure is one of a layer; ``moe/...`` sums it up over layers, ``moe/layer_{i}/...`` (i: number of the block) has it for a layer:

    * ``max_violation``: load of the busiest expert over the mean, minus 1 (arXiv 2408.15664, equation 4); over layers the largest.
      ``min_violation``: 1 minus that of the idlest; the largest.
    * ``dead_experts``: experts without any token; the sum. ``load_cv``: standard deviation of the load over its mean; the mean.
      ``load_entropy``: entropy of the load over ln E (1.0 is even); the mean.
    * ``balance``: E * sum_i f_i P_i, 1.0 for an even router and E for a collapsed one, made in each layer and only then averaged: pooled
      first, layers that collapsed on experts of their own would look even. ``z``: mean of logsumexp^2. ``router_entropy``: of a token's
      probabilities, in nats. ``dropped``: part of all assignments that capacity dropped. All means.
    * ``ep_max_over_mean``, with ``expert_parallel_size`` above 1: load of the busiest rank of experts over the mean: so much longer than
      needed a layer's experts take, since all ranks wait for the slowest; the mean.

    Loads are before capacity drops. Counted are the forwards that train: no validation, no second run of a checkpoint, no padding (as
    ``attention_mask`` or ``document_ids`` tell it; with a strategy that is not MegascaleStrategy the package's own routers do not know it).
    Ranks that hold the same tokens count once. One sum over all ranks per interval, for all layers; a step costs nothing of its own with
    our routers, and one count per call with those of transformers.

    A heat map (layers x experts) goes to W&B and TensorBoard loggers, else to ``moe_load_step{n}.png`` in the log's folder. Warnings name
    layer, experts and a remedy, once when a state has lasted; again when it has passed and come back. Windows and what has lasted travel in
    checkpoints.

    Args:
        every_n_steps: optimizer steps of an interval.
        heatmap_every_n_steps: optimizer steps of a picture, a multiple of ``every_n_steps``; None: no pictures.
        per_layer: the figures that are logged for each layer.
        dead_for: intervals after which an expert without tokens is named; None: never. Intervals with fewer than 10 tokens an expert say
            nothing about that.
        violation_above: a layer whose ``max_violation`` is above it is named; None: never.
        violation_for: after how many intervals.
        routers: further classes by name: {"MyRouter": "softmax"} or "sigmoid", what they make of logits. They return (logits (T, E),
            weights (T, K), indices (T, K)) and have ``num_experts`` and ``top_k``.

    Attributes:
        latest: values of the last interval, all that were logged.
        layers: name of a router's module -> all of its figures in the last interval, and ``load``, a list: its share of each expert over
            the even one.

    Raises:
        ValueError: for wrong arguments, and in ``on_fit_start`` for a model without routers.
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        heatmap_every_n_steps: int | None = 1000,
        per_layer: Sequence[str] = ("max_violation", "dead_experts", "balance"),
        dead_for: int | None = 3,
        violation_above: float | None = 2.0,
        violation_for: int = 3,
        routers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("every_n_steps", every_n_steps), ("violation_for", violation_for), ("dead_for", dead_for)):
            if not _is_count(value) and not (name == "dead_for" and value is None):
                raise ValueError(f"{name}={value!r}: a whole number, at least 1{', or None for no warning' if name == 'dead_for' else ''}")
        if heatmap_every_n_steps is not None and (not _is_count(heatmap_every_n_steps) or heatmap_every_n_steps % every_n_steps):
            raise ValueError(
                f"heatmap_every_n_steps={heatmap_every_n_steps!r}: a multiple of every_n_steps={every_n_steps} (a picture is made of whole "
                f"intervals), say {20 * every_n_steps}, or None for no pictures"
            )
        if violation_above is not None and (isinstance(violation_above, (bool, str)) or not 0 < violation_above < math.inf):
            raise ValueError(f"violation_above={violation_above!r}: a positive number (0 is an even load), or None for no warning")
        if not isinstance(per_layer, (list, tuple, set, frozenset)) or not set(per_layer) <= set(_FIGURES):
            raise ValueError(f"per_layer={per_layer!r}: a list of figures of a layer, out of {', '.join(_FIGURES)}; [] for none")
        if routers is not None and not isinstance(routers, Mapping):
            raise ValueError(f"routers={routers!r}: a mapping of class names to 'softmax' or 'sigmoid', what each makes of its logits")
        for name, scores in dict(routers or {}).items():
            if scores not in ("softmax", "sigmoid"):
                raise ValueError(f"routers={{{name!r}: {scores!r}}}: class names with 'softmax' or 'sigmoid', what it makes of its logits")
        self.every_n_steps, self.heatmap_every_n_steps = every_n_steps, heatmap_every_n_steps
        self.per_layer, self.routers = tuple(per_layer), dict(routers or {})
        self.latest: dict[str, float] = {}
        self.layers: dict[str, dict[str, Any]] = {}
        self._rules = BalanceRules(dead_for, violation_above, violation_for, every_n_steps)
        self._watch: RouterWatch | None = None
        self._seen: Tensor | None = None  # this rank's counts when the interval began
        self._window: Tensor | None = None  # of all ranks: what a run before this one counted of the interval
        self._picture: Tensor | None = None  # of all ranks: what was counted since the last picture, whole intervals
        self._loaded: dict[str, Any] = {}
        self._has_told = False

    @property
    def state_key(self) -> str:
        """Two monitors with other intervals or figures keep their states apart."""
        return self._generate_state_key(every_n_steps=self.every_n_steps, per_layer=list(self.per_layer), routers=self.routers)

    # ---- a fit ---------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()
        views, plan = _parallel(trainer)
        tensor = None if views is None else views.tensor
        self._owners = 1 if plan is None else plan.expert_parallel_size
        self._tells_padding = plan is not None
        self._watch = RouterWatch(
            pl_module,
            self.routers,
            trainer.strategy.root_device,
            tensor=(0, 1) if tensor is None else (tensor.get_local_rank(), tensor.size()),
            sequence_parallel=plan is not None and plan.sequence_parallel,
            is_distributed=trainer.world_size > 1,
        )
        if not self._watch.layers:
            raise ValueError(
                f"ExpertBalanceMonitor found no router in {type(pl_module).__name__}. It looks for lightning_megascale.models.moe.Router "
                "and for transformers' routers by class (MixtralTopKRouter, Qwen3MoeTopKRouter, DeepseekV3TopkRouter, ...: "
                "lightning_megascale.callbacks.expert_routers.SCORES). Name a class of yours as ExpertBalanceMonitor(routers={'MyRouter': "
                "'softmax'}), or leave the callback out where no layer has experts"
            )
        self._labels = labels_of([layer.name for layer in self._watch.layers])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._watch is not None
        self._seen = self._watch.snapshot()
        self._step, self._interval = trainer.global_step, trainer.global_step // self.every_n_steps
        log_dir = None if self.heatmap_every_n_steps is None else trainer.log_dir  # asked by all ranks together
        self._folder = Path(log_dir or trainer.default_root_dir)
        self._resume()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._watch is not None and not self._tells_padding:
            self._watch.batch_mask = real_tokens(batch)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._step = trainer.global_step
        interval = self._step // self.every_n_steps
        if interval != self._interval:
            self._interval = interval
            self._finish(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loaded = self.state_dict()  # for a checkpoint that is made after the fit, and for a fit that goes on

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = self._seen = None

    # ---- an interval ---------------------------------------------------------------------------------------------------

    def _finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Closes an interval, on all ranks."""
        assert self._watch is not None
        counted = self._counted()
        self._window = None
        step, layers = self._step, self._watch.layers
        found = [figures(part, layer, self._owners) for layer, part in zip(layers, self._watch.split(counted))]
        self.layers = {layer.name: values for layer, values in zip(layers, found)}
        self._log(trainer, pl_module, found)
        if not self.latest and not self._has_told:
            self._has_told = True
            rank_zero_warn(_NOTHING.format(steps=self.every_n_steps))
        lines = self._rules.update(step, layers, self._labels, found)
        if lines:
            rank_zero_warn("\n".join(lines))
        if self.heatmap_every_n_steps is not None:
            self._picture = counted if self._picture is None else self._picture + counted
            if step // self.heatmap_every_n_steps != (step - self.every_n_steps) // self.heatmap_every_n_steps:
                picture, self._picture = self._picture, None
                if trainer.is_global_zero:
                    self._draw(trainer, picture, step)

    def _counted(self) -> Tensor:
        """What all ranks counted since the interval began, on the host; also before this run was resumed."""
        assert self._watch is not None and self._seen is not None
        counted, self._seen = self._watch.since(self._seen)
        return counted if self._window is None else counted + self._window

    def _log(self, trainer: Trainer, pl_module: LightningModule, found: list[dict[str, Any]]) -> None:
        over_layers: dict[str, float] = {}
        for name, (_, over) in _FIGURES.items():
            values = [layer[name] for layer in found if not math.isnan(layer.get(name, math.nan))]
            if values:
                over_layers[f"moe/{name}"] = float(over(values))
        of_layers = {
            f"moe/{label}/{name}": float(layer[name])
            for label, layer in zip(self._labels, found)
            for name in self.per_layer
            if not math.isnan(layer.get(name, math.nan))
        }
        self.latest = {**over_layers, **of_layers}
        if not over_layers:
            return
        for logger in trainer.loggers:  # at once: self.log would wait for a multiple of log_every_n_steps, which may never fall here
            logger.log_metrics(self.latest, step=trainer.global_step - 1)  # Lightning numbers the first step 0
        for name, value in over_layers.items():
            pl_module.log(name, value, logger=False, on_step=True, on_epoch=False)

    def _draw(self, trainer: Trainer, picture: Tensor, step: int) -> None:
        assert self._watch is not None
        parts = zip(self._watch.layers, self._watch.split(picture))
        loads = [metrics(part, layer.num_experts, layer.top_k)["load"] for layer, part in parts]
        figure = draw_loads(loads, self._labels, f"Load of experts up to step {step}")
        publish(figure, trainer.loggers, step, self._folder)

    # ---- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Sums over all ranks, so that any plan continues them; while fitting, all ranks must ask together, as they do for a checkpoint."""
        if self._watch is None or self._seen is None:
            return self._loaded
        self._window = self._counted()
        windows = {"window": self._window, "picture": self._picture}
        split = {key: None if flat is None else [part.tolist() for part in self._watch.split(flat)] for key, flat in windows.items()}
        names = [layer.name for layer in self._watch.layers]
        return {"step": self._step, "layers": names, **split, "rules": self._rules.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def _resume(self) -> None:
        """Takes up what was loaded, where it is of this step and of the same layers."""
        assert self._watch is not None
        state, self._loaded = self._loaded, {}
        self._window = self._picture = None
        is_same = state.get("step") == self._step and state["layers"] == [layer.name for layer in self._watch.layers]
        self._rules.load_state_dict(state["rules"] if is_same else {})
        if is_same:
            for key in ("window", "picture"):
                parts = state[key]
                if parts is not None and [len(part) for part in parts] == [layer.size for layer in self._watch.layers]:
                    setattr(self, f"_{key}", torch.tensor([x for part in parts for x in part], dtype=torch.float64))


def figures(vector: Tensor, layer: RoutedLayer, owners: int) -> dict[str, Any]:
    """What counts of a layer say, by the names of ``moe/...``, and ``load``.

    Args:
        vector: (2 * E + 5,), laid out as ``RoutingCounts.vector``.
        layer: whose.
        owners: ranks of the expert-parallel axis; each holds E / owners experts that follow one another.
    """
    found = metrics(vector, layer.num_experts, layer.top_k)
    if owners > 1 and layer.num_experts % owners == 0:
        of_owner = vector[: layer.num_experts].view(owners, -1).sum(1)
        found["ep_max_over_mean"] = (of_owner.max() / of_owner.mean()).item()
    named = {name: found[key] for name, (key, _) in _FIGURES.items() if key in found}
    return {**named, "load": found["load"], "tokens": vector[2 * layer.num_experts].item()}


def _parallel(trainer: Trainer) -> tuple[Any, ParallelPlan | None]:
    """Mesh views and plan of our strategy; None of another."""
    plan = getattr(trainer.strategy, "plan", None)
    return (trainer.strategy.mesh_views, plan) if isinstance(plan, ParallelPlan) else (None, None)  # type: ignore[attr-defined]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
