"""Measured bubble of each pipeline schedule against theory: 4 ranks, whose stages sleep instead of computing, so that all take as long.

Run: ``python -m tests.benchmarks.pipeline_bubble [schedules=GPipe,1F1B] [microbatches=4,8,16,32] [milliseconds=200] [repeats=2]``.
A rank's stages together sleep that long for a microbatch in each of: forward (F), backward of the inputs (I), backward of the weights (W).
The target is a step within 5% of theory's. What is over it is a millisecond or so for each action and message, whose share shrinks with
longer sleeps; the column "bubble / theory" holds it against the waiting alone.

Theory. With p ranks, m microbatches and v stages a rank, each stage taking 1/v of a rank's F + I + W for a microbatch, a rank works
m (F + I + W) and waits

- (p - 1) (F + I + W) under GPipe and 1F1B, (p - 1) (F + I + W) / v under Interleaved1F1B. Source: Narayanan et al. 2021, "Efficient
  large-scale language model training on GPU clusters using Megatron-LM", sections 2.2.1 and 2.2.2.
- (p - 1) (F + I - W) under ZB-H1, over v for InterleavedZeroBubble, which is that schedule over several stages a rank. Source: Qi et al.
  2023, "Zero bubble pipeline parallelism", section 2.
- nothing under ZBVZeroBubble between the first and the last of its work, when F = I = W and m >= 2p - 1 (Qi et al., section 6); the last
  rank's first work comes (p - 1) F / v after the first rank's.

For all of them, and alone for ZBVZeroBubble with fewer microbatches, theory is the critical path of the very order that torch runs
(``critical_path``); where there is a closed form the two are checked to be equal. torch runs the first stage's I within its W: nobody waits
for the gradient of the model's input.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, ScheduleGPipe

from lightning_megascale.layout import ModelLayout
from lightning_megascale.parallel.pipeline import split_into_stages
from lightning_megascale.parallel.pipeline_schedule import Boundary, CallStage, build_schedule, run_schedule
from lightning_megascale.parallel.pipeline_split import Stages, owners_of
from lightning_megascale.support import SCHEDULES
from tests.harness import run_ranks

RANKS, WIDTH = 4, 8
LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")  # two stages on each rank
Action = tuple[str, int, int]  # F, B (I and W at once), I or W; stage; microbatch


# ---- theory ------------------------------------------------------------------------------------------------------------------------


def critical_path(order: Mapping[int, Sequence[Action]], seconds: Callable[[str, int], float]) -> tuple[float, list[float]]:
    """When the last rank is done if every action begins as soon as it can, by discrete events.

    An action waits for the one before it on its rank and for what it needs: F for F of the stage before; B or I for that of the stage
    behind, on the last stage for its own F; W for its own I. Messages take no time and no one waits until one is received.

    Args:
        order: for each rank its actions, first one first.
        seconds: (kind of action, stage) -> how long it takes.

    Returns:
        (seconds until all have finished, seconds of work of each rank).

    Raises:
        ValueError: for an order in which ranks wait for one another.
    """
    last = max(stage for actions in order.values() for _, stage, _ in actions)
    done: dict[Action, float] = {}
    clock, busy, place = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0.0), dict.fromkeys(order, 0)

    def needed(kind: str, stage: int, number: int) -> Action | None:
        if kind == "F":
            return ("F", stage - 1, number) if stage else None
        if kind == "W":
            return ("I", stage, number)
        return ("F", stage, number) if stage == last else (kind, stage + 1, number)

    while any(place[rank] < len(order[rank]) for rank in order):
        moved = False
        for rank, actions in order.items():
            while place[rank] < len(actions):
                action = actions[place[rank]]
                need = needed(*action)
                if need is not None and need not in done:
                    break
                took = seconds(action[0], action[1])
                clock[rank] = max(clock[rank], done[need] if need else 0.0) + took
                busy[rank] += took
                done[action] = clock[rank]
                place[rank] += 1
                moved = True
        if not moved:
            raise ValueError("the ranks wait for one another")
    return max(clock.values()), list(busy.values())


def closed_form(schedule: str, ranks: int, microbatches: int) -> float | None:
    """Waiting over working time with F = I = W and two stages on each rank where a schedule takes several; None where none is exact."""
    if schedule == "ZBVZeroBubble" and microbatches < 2 * ranks - 1:
        return None
    share = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 1 / 2, "InterleavedZeroBubble": 1 / 6, "ZBVZeroBubble": 1 / 6}[schedule]
    return share * (ranks - 1) / microbatches


def actions_of(schedule: Any, microbatches: int) -> dict[int, list[Action]]:
    """The order in which a schedule of torch's runs, for all ranks, as data.

    With one stage on each rank the order is written out here: GPipe does all forwards first, 1F1B as many as ranks are left; torch runs
    these two without a list, and the one it can make for 1F1B leaves out a forward of the last rank.
    """
    if isinstance(schedule, PipelineScheduleSingle):
        ahead = {rank: microbatches if isinstance(schedule, ScheduleGPipe) else min(microbatches, RANKS - rank) for rank in range(RANKS)}
        return {rank: _one_stage(rank, ahead[rank], microbatches) for rank in ahead}
    found = {}
    for rank, actions in schedule.pipeline_order.items():
        present = [(action.computation_type.value, action.stage_index, action.microbatch_index) for action in actions if action is not None]
        found[rank] = [action for action in present if action[0] in ("F", "B", "I", "W")]
    return found


def _one_stage(stage: int, ahead: int, microbatches: int) -> list[Action]:
    """``ahead`` forwards, then a backward and a forward in turn."""
    actions: list[Action] = [("F", stage, number) for number in range(ahead)]
    for number in range(microbatches):
        actions.append(("B", stage, number))
        if ahead + number < microbatches:
            actions.append(("F", stage, ahead + number))
    return actions


# ---- stages that sleep -------------------------------------------------------------------------------------------------------------


class Clock:
    """How long one stage sleeps for each kind of work (zero while warming up), and when its present sleep began.

    Sleeps are counted from the beginning of the action, so that what Python does within a stage is part of the stage's time.
    """

    seconds = 0.0
    begun = 0.0

    @classmethod
    def sleep(cls) -> None:
        cls.begun += cls.seconds
        time.sleep(max(0.0, cls.begun - time.perf_counter()))


class Forward(torch.autograd.Function):
    """Sleeps once forward, and once backward for the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        Clock.sleep()
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Clock.sleep()
        return gradient.contiguous()  # of a sum it is expanded, and gloo sends no such tensor


class Weight(torch.autograd.Function):
    """Sleeps backward, for the gradient of a weight. A node of its own: torch runs it apart when it splits the backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Clock.sleep()
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return Forward.apply(hidden) + Weight.apply(self.weight)


class Sleeper(nn.Module):
    """A model whose blocks take all the time; the embedding's weight makes the first stage work backward through its block too."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Identity()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.embed(rows)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def stages_for(schedule: str, total: int) -> Stages:
    """One block on each stage."""
    units = [[f"layers.{number}"] for number in range(total)]
    units[0].insert(0, "embed")
    units[-1].append("head")
    return Stages(tuple(map(tuple, units)), owners_of(total, RANKS, schedule))


# ---- measuring ---------------------------------------------------------------------------------------------------------------------


class Working:
    """Adds up the seconds that a rank's stages work in one step."""

    def __init__(self, stages: Iterable[CallStage]) -> None:
        self.seconds = 0.0
        for stage in stages:
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(stage, name, self._timed(getattr(stage, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            Clock.begun = begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def steps(name: str, microbatches: int, seconds: float, repeats: int) -> dict[str, Any]:
    """Runs on each rank: (seconds until all ranks have finished, seconds this one worked) of each repeat, and the theory's two."""
    per_rank = 2 if name in LOOPED else 1
    stages, group, rank = stages_for(name, RANKS * per_rank), dist.group.WORLD, dist.get_rank()
    assert group is not None
    layout = ModelLayout(blocks="layers.*", first="embed", last="head")
    pipeline = split_into_stages(Sleeper(len(stages)), layout, stages, rank)
    schedule, calls = build_schedule(
        pipeline,
        name,
        microbatches,
        [Boundary((1, WIDTH), torch.float32)] * (len(stages) - 1),
        device=torch.device("cpu"),
        group=group,
        loss_fn=lambda output, _: output[0].sum(),
        before_forward=lambda *_: None,
        before_backward=lambda number: None,
        train=True,
    )
    working, found = Working(calls), []
    for repeat in range(repeats + 1):
        Clock.seconds = seconds / per_rank if repeat else 0.0  # the first step sets up the connections
        gc.collect()
        dist.barrier()
        working.seconds, begin = 0.0, time.perf_counter()
        run_schedule(schedule, calls, [((torch.ones(1, WIDTH),), {})] * microbatches, pipeline.has_last)
        worked = working.seconds
        dist.barrier()
        if repeat:
            found.append((time.perf_counter() - begin, worked))

    def planned(kind: str, stage: int) -> float:
        first = {"I": 0, "W": 2} if stage == 0 else {}
        return seconds / per_rank * {"F": 1, "B": 2, "I": 1, "W": 1, **first}[kind]

    return {"steps": found, "theory": critical_path(actions_of(schedule, microbatches), planned)}


def row(name: str, microbatches: int, seconds: float, repeats: int) -> list[str]:
    results = run_ranks(steps, RANKS, name, microbatches, seconds, repeats, timeout=600)
    planned, work = results[0]["theory"]
    exact = closed_form(name, RANKS, microbatches)
    ideal = statistics.mean(work)
    wanted = planned / ideal - 1
    assert exact is None or abs(exact - wanted) < 1e-9, f"{name}: the order's critical path waits {wanted}, theory {exact}"
    # the quickest step: other programs on the machine can only add to it
    took = min(max(result["steps"][number][0] for result in results) for number in range(repeats))
    idle = min(statistics.mean(result["steps"][number][0] - result["steps"][number][1] for result in results) for number in range(repeats))
    measured = took / ideal - 1
    off = took / planned - 1
    bubble = f"{measured / wanted:.3f}" if wanted > 1e-9 else "-"
    return [
        name,
        str(microbatches),
        "closed form" if exact is not None else "critical path",
        f"{planned * 1e3:.0f}",
        f"{took * 1e3:.0f}",
        f"{took / planned:.3f}{'' if abs(off) <= 0.05 else ' MISSED'}",
        f"{wanted:.2%}",
        f"{measured:.2%}",
        f"{idle / ideal:.2%}",
        bubble,
    ]


def main(arguments: list[str]) -> None:
    options = dict(argument.split("=") for argument in arguments)
    seconds, repeats = float(options.get("milliseconds", 200)) / 1e3, int(options.get("repeats", 2))
    table = Table(
        *(
            "schedule",
            "microbatches",
            "theory by",
            "ms, theory",
            "ms",
            "ms / theory",
            "bubble, theory",
            "bubble",
            "idle",
            "bubble / theory",
        ),
        title=f"{RANKS} ranks, {seconds * 1e3:.0f} ms each of F, I and W; bubble: waiting over working time (step / work - 1); idle: "
        "seconds outside of all stages, mean over ranks, over the work",
    )
    for name in options.get("schedules", ",".join(SCHEDULES)).split(","):
        for microbatches in map(int, options.get("microbatches", "4,8,16,32").split(",")):
            table.add_row(*row(name, microbatches, seconds, repeats))
    Console(width=160).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
