"""What the last pipeline stage logs, counts and returns reaches every rank of the pipeline, as one device would have logged it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_megascale.parallel.microbatches import merge_results, weighted_mean
from lightning_megascale.strategies import pipeline_guards as guards

_HEADER, _ROOM = 11, 53  # 5 sums, has sums, structure number, number of values, three marks; then values


@dataclass
class Entry:
    """One name logged in a step.

    Args:
        name: of ``self.log``.
        value: a 0-dim tensor, or the path of a torchmetrics object in the module.
        options: the other arguments of ``self.log``.
    """

    name: str
    value: Any
    options: dict[str, Any]

    def log(self, module: pl.LightningModule) -> None:
        """Logs it for real."""
        value: Any = module.get_submodule(self.value) if isinstance(self.value, str) else self.value
        module.log(self.name, value, **self.options)


class LogRecorder:
    """Takes the place of ``module.log`` inside a step and keeps what is logged."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self.entries: list[Entry] = []

    def __enter__(self) -> LogRecorder:
        self._outer = self._module.__dict__.get("log")
        self._module.__dict__["log"] = self._record
        return self

    def __exit__(self, *_: Any) -> None:
        del self._module.__dict__["log"]
        if self._outer is not None:
            self._module.__dict__["log"] = self._outer

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        positional = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist")
        options = {**dict(zip(positional, args)), **options}
        if isinstance(value, Tensor):
            value = value.detach()
            if value.numel() != 1:
                raise ValueError(f"self.log({name!r}) was given a tensor of shape {tuple(value.shape)}: it must be a single number")
            value = value.reshape(())
        elif hasattr(value, "compute") and hasattr(value, "update"):  # a torchmetrics object
            value = next((path for path, child in self._module.named_modules() if child is value), None)
            if value is None:
                raise ValueError(f"self.log({name!r}) was given a metric that is no child of the module: make it an attribute of it")
        else:
            value = torch.tensor(value, dtype=torch.get_default_dtype())
        self.entries.append(Entry(name, value, options))


class NoLog(LogRecorder):
    """Refuses ``module.log`` while stages run: only the step itself logs for everybody."""

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        raise ValueError(guards.LOGGED_INSIDE.format(name=name))


def merge_logs(recorders: Sequence[LogRecorder], weights: Sequence[float]) -> list[Entry]:
    """The entries of all microbatches as those of the whole batch: means by weight, sums, extremes; the last path of a metric."""
    merged: list[Entry] = []
    by_name: dict[tuple[str, int], list[tuple[Entry, float]]] = {}
    for recorder, weight in zip(recorders, weights):
        seen: dict[str, int] = {}
        for entry in recorder.entries:
            seen[entry.name] = seen.get(entry.name, 0) + 1
            by_name.setdefault((entry.name, seen[entry.name]), []).append((entry, weight))
    for (name, _), found in by_name.items():
        first = found[0][0]
        if isinstance(first.value, str):
            merged.append(first)
            continue
        options = dict(first.options)
        values = [entry.value for entry, _ in found]
        reduce = options.get("reduce_fx", "mean")
        reduce = getattr(reduce, "__name__", reduce)
        if reduce in ("sum", "min", "max"):
            value = getattr(torch.stack(values), reduce)()
        else:
            sizes = [float(entry.options["batch_size"]) for entry, _ in found if entry.options.get("batch_size") is not None]
            values = [value if value.is_floating_point() else value.to(torch.get_default_dtype()) for value in values]  # as Lightning
            value = weighted_mean(values, sizes if len(sizes) == len(found) else [weight for _, weight in found])
        if options.get("batch_size") is not None:
            options["batch_size"] = sum(entry.options["batch_size"] for entry, _ in found)
        merged.append(Entry(name, value, options))
    return merged


class Results:
    """Sends one fixed tensor per step from the last stage's rank; what the values mean travels only when it changes.

    Args:
        group: the pipeline axis.
        owner: the last stage's rank in it.
        device: where the tensor lies.
    """

    def __init__(self, group: dist.ProcessGroup, owner: int, device: torch.device) -> None:
        self._group, self._owner, self._device = group, owner, device
        self._is_owner = dist.get_rank(group) == owner
        self._structure: list[tuple[str, Any, dict[str, Any]]] = []
        self._number = 0

    def share(
        self,
        sums: Tensor | None,
        recorders: Sequence[LogRecorder],
        weights: Sequence[Any],
        error: Exception | None,
        marks: tuple[bool, ...] = (False, False, False),
    ) -> tuple[Tensor | None, list[Entry], tuple[bool, ...]]:
        """The sums, the merged log entries and three marks of the last stage, on every rank.

        Raises:
            ValueError: with the last stage's error, on every other rank; the last stage raises the error itself.
        """
        entries: list[Entry] = []
        if self._is_owner and error is None:
            try:
                entries = merge_logs(recorders, _numbers(weights))
            except Exception as raised:  # noqa: BLE001 - told to all ranks, which would wait for ever
                error = raised
        sent = self._pack(sums, entries, error)
        sent[8:11] = torch.tensor(marks, dtype=torch.float64)
        dist.broadcast(sent, group=self._group, group_src=self._owner)
        head = sent[:_HEADER].tolist()
        number, count = int(head[6]), int(head[7])
        if number != self._number or self._is_owner and self._changed:
            self._send_structure(number, error)
        values = sent[_HEADER : _HEADER + min(count, _ROOM)]
        if count > _ROOM:
            rest = sent.new_empty(count - _ROOM)
            if self._is_owner:
                rest = torch.stack([entry.value.double().to(self._device) for entry in self._numeric(entries)[_ROOM:]])
            dist.broadcast(rest, group=self._group, group_src=self._owner)
            values = torch.cat([values, rest])
        numbers = iter(values)
        found = [
            Entry(name, next(numbers).to(kind) if isinstance(kind, torch.dtype) else kind, dict(o)) for name, kind, o in self._structure
        ]
        return (sent[:5].clone() if head[5] else None), found, tuple(map(bool, head[8:11]))

    def _pack(self, sums: Tensor | None, entries: list[Entry], error: Exception | None) -> Tensor:
        sent = torch.zeros(_HEADER + _ROOM, dtype=torch.float64, device=self._device)
        self._changed = False
        if not self._is_owner:
            return sent
        structure = [(e.name, e.value if isinstance(e.value, str) else e.value.dtype, e.options) for e in entries]
        self._changed = structure != self._structure or error is not None
        if self._changed:
            self._structure = structure
            self._number += 1
        numeric = self._numeric(entries)
        if sums is not None:
            sent[:5], sent[5] = sums, 1.0
        sent[6], sent[7] = self._number, len(numeric)
        if numeric:
            values = torch.stack([entry.value.double().to(self._device) for entry in numeric[:_ROOM]])
            sent[_HEADER : _HEADER + len(values)] = values
        return sent

    @staticmethod
    def _numeric(entries: list[Entry]) -> list[Entry]:
        return [entry for entry in entries if isinstance(entry.value, Tensor)]

    def _send_structure(self, number: int, error: Exception | None) -> None:
        text = None if error is None else f"{type(error).__name__}: {error}"
        found: list[Any] = [(self._structure, text)]
        dist.broadcast_object_list(found, group_src=self._owner, group=self._group, device=self._device)
        self._structure, text = found[0]
        self._number = number
        if text is not None:
            if self._is_owner and error is not None:
                raise error
            raise ValueError(f"the step failed on the last pipeline stage: {text}")

    def share_output(self, results: Sequence[Any], weights: Sequence[Any], rows: int) -> Any:
        """What an evaluation step returned for the whole batch, on every rank."""
        found: list[Any] = [None, None]
        error: Exception | None = None
        if self._is_owner and any(result is not None for result in results):
            try:
                merged = merge_results(results, _numbers(weights), rows)
                found[0] = pickle.dumps(tree_map_only(Tensor, lambda tensor: tensor.cpu(), merged))
            except Exception as raised:  # noqa: BLE001 - told to all ranks, which would wait for ever
                error = raised
                found[1] = f"what the step returned for its microbatches cannot be put together: {type(raised).__name__}: {raised}"
        dist.broadcast_object_list(found, group_src=self._owner, group=self._group, device=self._device)
        if found[1] is not None:
            raise ValueError(found[1]) from error
        merged = None if found[0] is None else pickle.loads(found[0])
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._device), merged)


def _numbers(weights: Sequence[Any]) -> list[float]:
    """Weights on the host, with one transfer."""
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    return torch.stack(tensors).tolist() if len(tensors) == len(weights) and tensors else [float(weight) for weight in weights]


def _twin(metric: Any) -> Any:
    """A metric of the same kind without a state, which never communicates."""
    group, metric.process_group = metric.process_group, None  # it cannot be copied
    try:
        twin = metric.clone()
    finally:
        metric.process_group = group
    twin.sync_on_compute = twin._to_sync = False
    twin.reset()
    return twin


class MetricStates:
    """torchmetrics objects of a module: updated by the last stage only, so their states go to every rank after each step."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._metrics = {
            path: child for path, child in module.named_modules() if hasattr(child, "_defaults") and hasattr(child, "_update_count")
        }
        lists = [path for path, metric in self._metrics.items() if any(isinstance(d, list) for d in metric._defaults.values())]
        if lists:
            raise ValueError(guards.LIST_METRICS.format(names=", ".join(lists)))
        self._twins: dict[str, Any] = {}
        self.is_muted = False

    def snapshot(self) -> dict[str, Any]:
        """States before a step that must leave none."""
        kept = {}
        for path, metric in self._metrics.items():
            states = {key: getattr(metric, key).detach().clone() for key in metric._defaults}
            kept[path] = (metric._update_count, states, metric._forward_cache)
        return kept

    def restore(self, kept: dict[str, Any]) -> None:
        for path, (count, states, cache) in kept.items():
            metric: Any = self._metrics[path]
            metric._update_count, metric._forward_cache, metric._computed = count, cache, None
            for key, value in states.items():
                setattr(metric, key, value)

    @contextmanager
    def over_batch(self) -> Iterator[None]:
        """A metric that is called inside gets its value over all microbatches together as its value of the step."""
        handles = [metric.register_forward_hook(self._also(path), with_kwargs=True) for path, metric in self._metrics.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _also(self, path: str) -> Callable[..., None]:
        """A hook that updates the metric's twin, which counts one batch only."""
        twins = self._twins

        def hook(metric: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
            if self.is_muted:
                return
            if path not in twins:
                twins[path] = _twin(metric)
            twins[path].update(*args, **kwargs)

        return hook

    def share(self, group: dist.ProcessGroup, owner: int) -> None:
        if not self._metrics:
            return
        found: list[Any] = [None]
        if dist.get_rank(group) == owner:
            for path, twin in self._twins.items():
                if twin.update_called:
                    self._metrics[path]._forward_cache = twin.compute()
                    twin.reset()
            found = [{path: self._state(metric) for path, metric in self._metrics.items()}]
        dist.broadcast_object_list(found, group_src=owner, group=group)
        for path, (count, states, cache) in found[0].items():
            metric: Any = self._metrics[path]
            metric._update_count, metric._computed = count, None
            metric._forward_cache = cache if cache is None else cache.to(metric.device)
            for key, value in states.items():
                setattr(metric, key, value.to(metric.device))

    @staticmethod
    def _state(metric: Any) -> tuple[int, dict[str, Tensor], Any]:
        cache = metric._forward_cache
        states = {key: getattr(metric, key).detach().cpu() for key in metric._defaults}
        return metric._update_count, states, cache.detach().cpu() if isinstance(cache, Tensor) else None
