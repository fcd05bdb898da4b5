"""Public scripts on one device and on ranks: the same module, the same rows, the same Trainer; only the strategy argument differs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_megascale import MegascaleStrategy
from tests.harness import full, run_ranks, worst

ROWS, STEPS = 8, 3
QUIET: dict[str, Any] = dict(
    accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)


@dataclass(frozen=True, eq=False)
class Script:
    """A script as people publish it.

    Args:
        module: makes the LightningModule.
        rows: the training (and evaluation) dataset.
        collate: of its DataLoader.
        options: of its Trainer.
        evaluates: it has a validation loader.
        tests: ``trainer.test`` follows the fit.
        tied: names of parameters that pipeline stages hold as further copies of another.
    """

    module: Callable[[], L.LightningModule]
    rows: Callable[[], Dataset]
    collate: Callable[[list[Any]], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    evaluates: bool = False
    tests: bool = False
    tied: tuple[str, ...] = ()


def play(script: Script, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Runs a script on one device with Lightning's own strategy (None), or on these ranks with ours.

    Returns:
        ``state`` (whole parameters by name) and ``metrics`` (what callbacks see), on this rank.
    """
    ranks = 1 if arguments is None else int(os.environ["WORLD_SIZE"])
    strategy: Any = "auto" if arguments is None else MegascaleStrategy(**arguments)
    peers = 1 if arguments is None else arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
    shares = ranks // peers

    def loader() -> DataLoader:
        """The batches of a step are together the batch of one device, in the same order."""
        rows = script.rows()
        share = 0 if arguments is None else int(os.environ["RANK"]) // peers
        sampler = DistributedSampler(rows, num_replicas=shares, rank=share, shuffle=False)  # type: ignore[arg-type]
        return DataLoader(rows, batch_size=ROWS // shares, sampler=sampler, collate_fn=script.collate)

    module = script.module()
    trainer = L.Trainer(devices=ranks, strategy=strategy, use_distributed_sampler=False, **{"max_epochs": 1, **QUIET, **script.options})
    trainer.fit(module, loader(), loader() if script.evaluates else None)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    state = {name: full(value) for name, value in module.named_parameters()}
    if script.tests:
        metrics |= trainer.test(module, loader(), verbose=False)[0]
    return {"state": state, "metrics": metrics}


Cases = Mapping[str, tuple[Script, Mapping[str, Any]]]


def play_all(cases: Cases) -> dict[str, Any]:
    """Runs cases one after the other on these ranks; an error of a case is its result."""
    found: dict[str, Any] = {}
    for name, (script, arguments) in cases.items():
        print("case", name, flush=True)  # a hang shows the log's last lines
        try:
            found[name] = play(script, arguments)
        except (ValueError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class Pool:
    """Cases that share ranks: started once, when the first of them is asked for.

    Args:
        cases: name -> (script, arguments of the strategy).
        timeout: seconds for all of them together.
    """

    def __init__(self, cases: Cases, timeout: float = 120) -> None:
        self.cases, self._timeout = cases, timeout

    @functools.cached_property
    def _results(self) -> list[dict[str, Any]]:
        return run_ranks(play_all, 2, self.cases, timeout=self._timeout)

    def results(self, name: str) -> list[dict[str, Any]]:
        """Of each rank; an error it had is raised."""
        found = [result[name] for result in self._results]
        for result in found:
            assert not isinstance(result, str), result
        return found

    def refusals(self, name: str) -> list[str]:
        """What each rank was told."""
        return [result[name] if isinstance(result[name], str) else "no error" for result in self._results]

    def assert_equals_one_device(self, name: str, tolerance: float = 1e-10, of_metrics: float = 1e-10) -> None:
        """Parameters and metrics of every rank are those of one device with the whole batch."""
        script, _ = self.cases[name]
        reference, results = _on_one_device(script), self.results(name)
        state = {key: value for result in results for key, value in result["state"].items()}  # pipeline stages hold different ones
        off, where = worst(reference["state"], {key: value for key, value in state.items() if key not in script.tied})
        assert off < tolerance, f"{name}: {where} is off by {off:.2e}"
        for rank, result in enumerate(results):
            assert result["metrics"].keys() == reference["metrics"].keys()
            for key, value in reference["metrics"].items():
                got = result["metrics"][key]
                assert abs(got - value) < of_metrics * max(1.0, abs(value)), f"{name}, rank {rank}: {key} is {got}, one device has {value}"


@functools.cache
def _on_one_device(script: Script) -> dict[str, Any]:
    return play(script, None)
