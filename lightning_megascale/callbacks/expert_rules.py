"""When the balance of experts is worth a warning: what has lasted for some intervals, named once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_megascale.callbacks.expert_routers import RoutedLayer

_FEWEST = 10  # tokens an expert, on average: with fewer, an expert without any may be chance
_NAMED = 16
_LINES = 8
_REMEDY = (
    "An expert without tokens does not learn, and a busy one makes its rank the slowest. Raise balance_loss (0.01 say; of transformers: "
    "router_aux_loss_coef, with output_router_logits=True), set balance_bias_rate=0.001, or warm up for longer."
)


class BalanceRules:
    """Counts for how many intervals in a row something has been so.

    Args:
        dead_for: intervals without a token after which an expert is named; None: never.
        violation_above: MaxVio above which a layer is; None: never.
        violation_for: after how many intervals.
        every_n_steps: of an interval, for the words.
    """

    def __init__(self, dead_for: int | None, violation_above: float | None, violation_for: int, every_n_steps: int) -> None:
        self.dead_for, self.violation_above, self.violation_for, self.every_n_steps = (
            dead_for,
            violation_above,
            violation_for,
            every_n_steps,
        )
        self._dead: dict[str, dict[int, int]] = {}
        self._violated: dict[str, int] = {}

    def update(self, step: int, layers: Sequence[RoutedLayer], labels: Sequence[str], found: Sequence[Mapping[str, Any]]) -> list[str]:
        """Takes an interval in; the lines of a warning about what has lasted for exactly long enough now, none if nothing has.

        Args:
            step: of the optimizer, at the end of the interval.
            layers: in order.
            labels: their short names.
            found: their figures; a layer that counted nothing stays as it was.
        """
        dead, violated = [], []
        for layer, label, values in zip(layers, labels, found):
            if math.isnan(values["max_violation"]):
                continue
            name = layer.name if label == layer.name else f"{label.replace('_', ' ')} ({layer.name})"
            experts = self._newly_dead(layer, values)
            if experts:
                dead.append(f"- {name}: {_listed(experts)} of {layer.num_experts}")
            if self._newly_violated(layer, values):
                load = values["load"]
                busiest = sorted(range(layer.num_experts), key=load.__getitem__, reverse=True)[: layer.top_k]
                violated.append(f"- {name}: {values['max_violation']:.2f}; the busiest: {_listed(sorted(busiest))}")
        lines = []
        if dead:
            lines += [f"Up to step {step} no token came to these experts for {self._time(self.dead_for)}:", *_shortened(dead)]
        if violated:
            above = f"above {self.violation_above:g} for {self._time(self.violation_for)}"
            lines += [f"Up to step {step} the load of the busiest expert over the mean, minus 1, was {above}:", *_shortened(violated)]
        return [*lines, _REMEDY] if lines else []

    def _newly_dead(self, layer: RoutedLayer, values: Mapping[str, Any]) -> list[int]:
        if values["tokens"] * layer.top_k < _FEWEST * layer.num_experts:
            return []
        before = self._dead.get(layer.name, {})
        now = {expert: before.get(expert, 0) + 1 for expert, share in enumerate(values["load"]) if share == 0}
        self._dead[layer.name] = now
        return [expert for expert, count in now.items() if count == self.dead_for]

    def _newly_violated(self, layer: RoutedLayer, values: Mapping[str, Any]) -> bool:
        if self.violation_above is None:
            return False
        count = self._violated.get(layer.name, 0) + 1 if values["max_violation"] > self.violation_above else 0
        self._violated[layer.name] = count
        return count == self.violation_for

    def _time(self, intervals: int | None) -> str:
        times = "1 interval" if intervals == 1 else f"{intervals} intervals"
        return f"{times} of {self.every_n_steps} steps"

    def state_dict(self) -> dict[str, Any]:
        return {"dead": {name: list(counts.items()) for name, counts in self._dead.items()}, "violated": dict(self._violated)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._dead = {name: {int(e): int(n) for e, n in counts} for name, counts in state.get("dead", {}).items()}
        self._violated = {name: int(count) for name, count in state.get("violated", {}).items()}


def _listed(experts: Sequence[int]) -> str:
    more = f" and {len(experts) - _NAMED} more" if len(experts) > _NAMED else ""
    return f"{'expert' if len(experts) == 1 else 'experts'} {', '.join(map(str, experts[:_NAMED]))}{more}"


def _shortened(lines: list[str]) -> list[str]:
    more = [f"- and {len(lines) - _LINES} more layers"] if len(lines) > _LINES else []
    return [*lines[:_LINES], *more]
