"""MegascaleModule: a ready LightningModule for causal language models. Users may bring their own instead.

Shapes: B batch, L sequence, V vocabulary.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megascale.models.config import DecoderConfig
from lightning_megascale.models.decoder import Decoder
from lightning_megascale.models.generation import generate, logits_of
from lightning_megascale.models.layers import ScaledDotProductAttention
from lightning_megascale.models.presets import PRESETS
from lightning_megascale.ops.auxiliary_loss import MicrobatchWeight, current_documents, set_microbatch_weight
from lightning_megascale.ops.documents import positions_in
from lightning_megascale.optim import build_optimizer, build_scheduler, check_arguments, schedule_function
from lightning_megascale.parallel.expert_balance import Routers
from lightning_megascale.parallel.init import check_materializable, materialize

IGNORED = -100  # label that does not count, as in Hugging Face's batches and torch's cross-entropy
MODEL_INPUTS = ("input_ids", "position_ids", "attention_mask")

ModelSource = str | Mapping[str, Any] | DecoderConfig | nn.Module | Callable[[], nn.Module]


class MegascaleModule(pl.LightningModule):
    """Next-token training of a decoder, or of any model that maps ``input_ids`` to logits.

    Batches are dicts with Hugging Face's keys: ``input_ids`` and ``labels`` (B, L), optionally ``position_ids`` and a right-padded
    ``attention_mask``. It logs ``train/loss`` (mean over all tokens of the optimizer step), ``train/grad_norm`` (before clipping),
    ``train/lr``, ``val/loss`` and ``test/loss``.

    Args:
        model: a preset's name, a ``DecoderConfig`` or its dict (with ``preset`` as a key: that preset with changes), a module, or a
            function that makes one. Presets and configs are built on the meta device and saved with the hyperparameters, so
            ``load_from_checkpoint`` needs nothing else; modules and functions have to be given again.
        optimizer: arguments of ``build_optimizer``; None: ``{"lr": 3e-4}``.
        schedule: ``kind`` and the arguments of ``build_scheduler``; ``total_steps`` (cosine) or ``stable_steps`` (wsd) may be left
            out and follow from the Trainer. None: a constant learning rate.
        label_shift: labels are a copy of ``input_ids`` as Hugging Face's are, and position i learns ``labels[:, i + 1]``. False: they
            are aligned already.

    Raises:
        ValueError: for an unknown preset, key or argument, naming the nearest.
    """

    def __init__(
        self,
        model: ModelSource = "tiny",
        optimizer: Mapping[str, Any] | None = None,
        schedule: Mapping[str, Any] | None = None,
        label_shift: bool = True,
    ) -> None:
        super().__init__()
        optimizer = {"lr": 3e-4} if optimizer is None else dict(optimizer)
        check_arguments(build_optimizer, optimizer, "optimizer", later=["named_parameters", "all_names"])
        if schedule is not None:
            schedule = dict(schedule)
            _check_schedule(schedule)
        source, config = model, _config_of(model)
        model = model if config is None else asdict(config)
        self.save_hyperparameters(ignore=[] if config else ["model"])
        self._config = config
        self._build = source if config is None and not isinstance(source, nn.Module) else None
        self.model: nn.Module | None = source if isinstance(source, nn.Module) else None
        self._optimizer, self._schedule, self._label_shift = optimizer, schedule, label_shift
        self._step_sums: Tensor | None = None
        self._routers: Routers | None = None

    # ---- the model -------------------------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Builds the model once: a config on the meta device, with values at once unless the strategy gives them to its shards."""
        if self.model is not None:
            return
        if self._config is None:
            self.model = self._build_for_strategy()
            return
        device = torch.get_default_device()
        with torch.device("meta"):
            self.model = Decoder(self._config)
        if not self._sums_losses() and device.type != "meta":
            materialize(self.model, device, _seed())

    def _build_for_strategy(self) -> nn.Module:
        """What the function makes, on the meta device where the strategy brings the weights and can draw what they lack."""
        build = cast(Callable[[], nn.Module], self._build)
        if self._trainer is not None and getattr(self._trainer.strategy, "init_from", None) is not None:
            with torch.device("meta"):
                model = build()
            if not check_materializable(model):
                return model
        return build()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own forward."""
        return self._built()(*args, **kwargs)

    def _built(self) -> nn.Module:
        if self.model is None:
            raise RuntimeError("the model is built by configure_model(): call it first when there is no Trainer")
        return self.model

    def _sums_losses(self) -> bool:
        """Whether the strategy takes sums over tokens and divides once per optimizer step over all ranks."""
        return self._trainer is not None and getattr(self._trainer.strategy, "accepts_loss_sum", False)

    # ---- steps -----------------------------------------------------------------------------------------------------------

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Any:
        loss_sum, num_tokens = self.loss(batch)
        if self._sums_losses():
            return {"loss_sum": loss_sum, "num_tokens": num_tokens}
        sums = torch.stack([loss_sum.detach(), num_tokens.to(loss_sum.dtype)])
        self._step_sums = sums if self._step_sums is None else self._step_sums + sums
        return loss_sum / num_tokens.clamp(min=1)

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._log_mean("val/loss", *self.loss(batch))

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._log_mean("test/loss", *self.loss(batch))

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Logits (B, L, V)."""
        return logits_of(self._built()(**self._inputs(batch)))

    def loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy and the number of labels that count, both 0-dim.

        Args:
            batch: ``input_ids`` and ``labels`` (B, L), integer; -100 and padding are not counted.

        Raises:
            ValueError: for a batch without them or with keys that would change what attends to what.
        """
        inputs, labels = self._inputs(batch), self._aligned_labels(batch)
        model = self._built()
        if getattr(model, "sums_loss", False):
            return model(**inputs, labels=labels)
        logits_BLV = logits_of(model(**inputs))
        exact = logits_BLV if logits_BLV.dtype == torch.float64 else logits_BLV.float()
        loss_sum = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)
        return loss_sum, (labels != IGNORED).sum()

    def _aligned_labels(self, batch: Mapping[str, Any]) -> Tensor:
        """(B, L) targets of each position; the last position of a shifted row has none."""
        labels_BL: Tensor = batch["labels"]
        if not self._label_shift:
            return labels_BL
        if batch.get("attention_mask") is not None:
            labels_BL = labels_BL.masked_fill(batch["attention_mask"] == 0, IGNORED)
        return F.pad(labels_BL[:, 1:], (0, 1), value=IGNORED)

    def _inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What the model's forward takes of the batch."""
        model = self._built()
        missing = [key for key in ("input_ids", "labels") if key not in batch]
        if missing and not (missing == ["labels"] and self._trainer is not None and self._trainer.predicting):
            raise ValueError(f"the batch has no {' and no '.join(missing)}, only {', '.join(map(str, batch))}: use Hugging Face's keys")
        cut = self._trainer is not None and getattr(self._trainer.strategy, "batch_shape", None) is not None
        batch = batch if cut else self._apart(model, batch)  # context parallelism keeps documents apart
        given = {key: batch[key] for key in MODEL_INPUTS if batch.get(key) is not None}
        if getattr(model, "sums_loss", False) and "attention_mask" in given:
            mask_BL = given.pop("attention_mask")
            if not cut and not mask_BL[:, 0].all():
                raise ValueError("attention_mask is 0 at the start of a row: pad on the right, where causal attention never looks")
        takes = inspect.signature(model.forward).parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values()):
            return given
        return {key: value for key, value in given.items() if key in takes}

    def _apart(self, model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """A packed batch as the model can keep its documents apart: positions begin in each anew.

        Raises:
            ValueError: for a model whose attention looks at whole rows.
        """
        documents_BL = batch.get("document_ids")
        if documents_BL is None:
            if current_documents() is not None:
                set_microbatch_weight(MicrobatchWeight(1.0))
            return batch
        # a decoder's first pipeline stage may have no attention
        if not (isinstance(model, Decoder) or any(isinstance(module, ScaledDotProductAttention) for module in model.modules())):
            raise ValueError(
                f"the batch has document_ids, and {type(model).__name__} attends to rows as a whole: use rows='padded', or "
                "context_parallel_size above 1, whose attention keeps documents apart"
            )
        if batch.get("position_ids") is None:
            batch = {**batch, "position_ids": positions_in(documents_BL)}
        if current_documents() is not documents_BL:  # MegascaleStrategy says so to layers itself
            set_microbatch_weight(MicrobatchWeight(1.0, tokens=documents_BL >= 0, documents=documents_BL))
        return batch

    # ---- logging ---------------------------------------------------------------------------------------------------------

    def _log_mean(self, name: str, loss_sum: Tensor, num_tokens: Tensor) -> None:
        # A float weight: integer ones are truncated when their mean over ranks is taken.
        weight: Any = float(num_tokens)
        self.log(name, loss_sum / num_tokens.clamp(min=1), batch_size=weight, on_step=False, on_epoch=True, sync_dist=True, prog_bar=True)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips as the Trainer says, then logs what is known of this optimizer step, in time for progress bar and callbacks."""
        strategy = self.trainer.strategy
        norm = None
        if isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
            gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
        if self._sums_losses():
            self._log_step("train/loss", strategy.step_loss, prog_bar=True)  # type: ignore[attr-defined]
            norm = strategy.grad_norm  # type: ignore[attr-defined]
        elif self._step_sums is not None:
            loss_sum, num_tokens = strategy.reduce(self._step_sums, reduce_op="sum")
            self._step_sums = None
            self._log_step("train/loss", loss_sum / num_tokens.clamp(min=1), prog_bar=True)
        self._log_step("train/grad_norm", norm)
        self._log_step("train/lr", torch.tensor(optimizer.param_groups[0]["lr"]))

    def _log_step(self, name: str, value: Tensor | None, prog_bar: bool = False) -> None:
        if value is not None:
            self.log(name, value, on_step=True, on_epoch=False, prog_bar=prog_bar, batch_size=1)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Under Lightning's own strategies too, routers learn from a step what ``MegascaleStrategy`` would tell them."""
        super().optimizer_step(*args, **kwargs)
        if not getattr(self.trainer.strategy, "settles_routers", False):
            if self._routers is None:
                everyone = [dist.group.WORLD] if dist.is_available() and dist.is_initialized() else []
                self._routers = Routers.alone(self, [group for group in everyone if group is not None]) or Routers([])
            self._routers.settle()

    # ---- optimizer -------------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        names = getattr(self._trainer.strategy, "parameter_names", ()) if self._trainer is not None else ()
        optimizer = build_optimizer(self.named_parameters(), all_names=names, **self._optimizer_arguments())
        if self._schedule is None:
            return optimizer
        scheduler = build_scheduler(optimizer, **self._schedule_arguments())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _optimizer_arguments(self) -> dict[str, Any]:
        scaled = self._trainer is not None and self._trainer.precision == "16-mixed"  # its scaler cannot clip for a fused step
        return {"fused": False, **self._optimizer} if scaled else self._optimizer

    def _schedule_arguments(self) -> dict[str, Any]:
        """The schedule with the number of steps that the Trainer will take where it is left open."""
        schedule = {"kind": "cosine", **(self._schedule or {})}
        open_key = {"cosine": "total_steps", "wsd": "stable_steps"}.get(schedule["kind"])
        if open_key is None or open_key in schedule:
            return schedule
        total = self.trainer.estimated_stepping_batches
        if total == float("inf") or total <= 0:
            raise ValueError(f"schedule: {open_key} is left out and the Trainer has no end known in steps; give it, or max_steps")
        spent = schedule.get("warmup_steps", 0) + schedule["decay_steps"] if open_key == "stable_steps" else 0
        if total < spent:
            raise ValueError(f"schedule: warmup_steps + decay_steps = {spent}, must be at most the {total} steps of the Trainer")
        return {**schedule, open_key: int(total) - spent}

    # ---- text ------------------------------------------------------------------------------------------------------------

    def generate(
        self, input_ids: Tensor, max_new_tokens: int, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Continues every row; see ``models.generation.generate``. Every rank of a parallel model calls it alike."""
        return generate(self._built(), input_ids, max_new_tokens, temperature, generator)


def _config_of(model: ModelSource) -> DecoderConfig | None:
    """The config that a preset's name, a dict or a config means; None for a module or a function that makes one."""
    if isinstance(model, DecoderConfig):
        return model
    if isinstance(model, str):
        return _preset(model)
    if isinstance(model, Mapping):
        changes = dict(model)
        base = _open_values(_preset(changes.pop("preset"))) if "preset" in changes else {}
        return DecoderConfig.from_dict(base | changes)
    if isinstance(model, nn.Module) or callable(model):
        return None
    raise ValueError(f"model is a {type(model).__name__}: must be a preset's name, a DecoderConfig, its dict, a module, or a function")


def _open_values(config: DecoderConfig) -> dict[str, Any]:
    """A config's dict in which what followed from other values is open again, so that it follows their changes."""
    values = asdict(config)
    if config.num_kv_heads == config.num_heads:
        values["num_kv_heads"] = None
    if config.head_dim == config.hidden_size // config.num_heads:
        values["head_dim"] = None
    return values


def _preset(name: str) -> DecoderConfig:
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"they are {', '.join(PRESETS)}"
        raise ValueError(f"model={name!r}: no such preset; {hint}")
    return PRESETS[name]


def _check_schedule(schedule: dict[str, Any]) -> None:
    kind = schedule.get("kind", "cosine")
    later = [key for key in ("total_steps", "stable_steps") if key not in schedule]
    arguments = {key: value for key, value in schedule.items() if key != "kind"}
    check_arguments(schedule_function(kind), arguments, f"{kind} schedule", later=later)


def _seed() -> int:
    """The seed of ``seed_everything``, else that of torch's generator."""
    return int(os.environ.get("PL_GLOBAL_SEED") or torch.initial_seed() % 2**63)
