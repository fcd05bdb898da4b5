"""Goodput: the share of wall time that a run turns into training it keeps, given failures, checkpoints and recovery.

The objective of the planner is ``seconds_per_useful_step``: the step time over that share. Failures come independently and at a constant
rate (exponential times between them), also while the run recovers. M is the mean time between failures in seconds, R the time of a
recovery, C the stall of a checkpoint, P how long it takes from then on until it can be read, tau the useful time between two checkpoints.

Goodput is what papers call the effective training time ratio, ETTR.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

SECONDS_PER_YEAR = 365.25 * 86400


@dataclass(frozen=True)
class Reliability:
    """How often a cluster fails and how long it takes to go on.

    Args:
        failures_per_node_year: of a node that stop the job: hardware, host, network. 1,000 node-days are 2.738 node-years; 3.79 a 1,000
            node-days (the default) are Llama 3's, 6.5 those of Meta's research cluster, 3 to 15 what is published.
        job_failures_per_year: of the whole job, whatever its size: software, file systems, people.
        detection_seconds: until a failure is noticed and found.
        restart_seconds: until the processes stand on healthy nodes: spare or repaired node, start, imports, compilation.
        group_startup_seconds_per_rank: communicators are set up in a time that grows with the ranks.
        replica_recovery: a run with replicas goes on without the one that lost a node, and hands it the state over the network once its
            node is replaced. The rows of the missing replica are computed by the others, so the batch stays.

    Raises:
        ValueError: for a negative or infinite value.

    Source: Llama Team 2024, "The Llama 3 herd of models", table 5 (419 unexpected interruptions of 2,048 nodes in 54 days); Kokolis et al.
        2024, "Revisiting reliability in large-scale machine learning research clusters", arXiv 2410.21680 (6.50); Jiang et al. 2024,
        "MegaScale", sections 3.5 (groups in below 30 s on more than 10,000 GPUs, that is 3 ms a rank) and 6.3 (a failure is found in
        below 10 minutes). Five minutes each for detection and restart are an assumption of ours within that: give your own.
    """

    failures_per_node_year: float = 3.79 * 365.25 / 1000
    job_failures_per_year: float = 0.0
    detection_seconds: float = 300.0
    restart_seconds: float = 300.0
    group_startup_seconds_per_rank: float = 0.003
    replica_recovery: bool = False

    def __post_init__(self) -> None:
        _check(self, "reliability", positive=())

    @classmethod
    def from_mtbf(cls, hours: float, nodes: int, **others: float) -> Reliability:
        """From the mean time between failures of a job on so many nodes.

        Args:
            hours: the mean time.
            nodes: of that job.
            others: further arguments of the class.
        """
        if not (hours > 0 and nodes >= 1):
            raise ValueError(f"mtbf hours={hours}, nodes={nodes}: must be above 0, and at least 1 node")
        return cls(failures_per_node_year=SECONDS_PER_YEAR / 3600 / hours / nodes, **others)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Storage:
    """How fast a checkpoint is written and read, in GB (1e9 bytes) per second.

    Args:
        write_gb_per_s: of the storage, for all nodes together.
        read_gb_per_s: likewise.
        node_gb_per_s: of one node, to or from storage.
        gpu_to_host_gb_per_s: of one GPU into host memory; a checkpoint that is written in the background stalls the run for this long.
        background: checkpoints are written while training goes on; otherwise the run waits until they are.

    Raises:
        ValueError: for a value that is not positive.
    """

    write_gb_per_s: float
    read_gb_per_s: float
    node_gb_per_s: float
    gpu_to_host_gb_per_s: float = 25.0
    background: bool = True

    def __post_init__(self) -> None:
        _check(self, "storage", positive=("write_gb_per_s", "read_gb_per_s", "node_gb_per_s", "gpu_to_host_gb_per_s"))


@dataclass(frozen=True)
class Footprint:
    """What a plan means for failures and recovery.

    Args:
        step_seconds: of an optimizer step without failures.
        gpus, nodes: that the plan uses.
        checkpoint_bytes: of parameters and optimizer state, once for the whole model.
        replicas: copies of that state that are trained together (dp_replicate).
        network_gb_per_s: of one node to others, over which a replica is handed the state.

    Raises:
        ValueError: for a value below its rule.
    """

    step_seconds: float
    gpus: int
    nodes: int
    checkpoint_bytes: float
    replicas: int = 1
    network_gb_per_s: float = 50.0

    def __post_init__(self) -> None:
        _check(self, "footprint", positive=("step_seconds", "gpus", "nodes", "checkpoint_bytes", "replicas", "network_gb_per_s"))
        if self.nodes > self.gpus or self.nodes % self.replicas:
            raise ValueError(
                f"footprint: nodes={self.nodes}, gpus={self.gpus}, replicas={self.replicas}: at least a GPU a node, and replicas "
                "must divide nodes, so that a failure costs one of them; with smaller replicas give replicas=1"
            )


@dataclass(frozen=True)
class Goodput:
    """What is to be expected.

    Args:
        share: of wall time that becomes kept training.
        seconds_per_useful_step: step time over ``share``, what plans are ranked by.
        mtbf_seconds: mean time between failures of any kind.
        stall_seconds: C of one checkpoint.
        persist_seconds: P of one checkpoint.
        steps_between_checkpoints: the best number by Daly's interval.
        checkpoint_share: of wall time, stalled by checkpoints that were kept.
        recovery_share: from a failure until training goes on.
        lost_share: computed and lost, or slowed by a missing replica.
    """

    share: float
    seconds_per_useful_step: float
    mtbf_seconds: float
    stall_seconds: float
    persist_seconds: float
    steps_between_checkpoints: int
    checkpoint_share: float
    recovery_share: float
    lost_share: float


def young_interval(stall_seconds: float, mtbf_seconds: float) -> float:
    """Useful seconds between checkpoints, to first order: sqrt(2 C M).

    Source: Young 1974, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), its result.
    """
    return math.sqrt(2 * stall_seconds * mtbf_seconds)


def daly_interval(stall_seconds: float, mtbf_seconds: float) -> float:
    """Useful seconds between checkpoints: sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C, or M where C is 2M or more.

    Source: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
        22(3), equation 37; his figures 3 to 5 are in the tests.
    """
    if stall_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = stall_seconds / (2 * mtbf_seconds)
    return young_interval(stall_seconds, mtbf_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds


def productive_share(interval: float, stall: float, mtbf: float, recovery: float, persist: float = 0.0) -> float:
    """Of wall time, what becomes kept training: tau / (M exp((R + P) / M) (exp((tau + C) / M) - 1)); arguments in seconds.

    Between two failures the k-th checkpoint counts where the time until the failure is above k (tau + C) + P: its expected number of
    successes sums to exp(-P / M) / (exp((tau + C) / M) - 1). A recovery that starts again when it fails takes M (exp(R / M) - 1) on
    average, and M follows it. With P = 0 this is Daly's complete model; P is what writing in the background adds.

    Args:
        interval: tau, useful time between checkpoints.
        stall: C.
        mtbf: M; infinite for none.
        recovery: R.
        persist: P, at most tau + C.

    Source: Daly 2006 (above), the complete cost function: total time M exp(R / M) (exp((tau + C) / M) - 1) T / tau; P is derived here.
    """
    if math.isinf(mtbf):
        return interval / (interval + stall)
    exponent = (interval + stall) / mtbf
    return math.exp(-(recovery + persist) / mtbf - exponent) * interval / (mtbf * -math.expm1(-exponent))


def checkpoint_seconds(storage: Storage, footprint: Footprint) -> tuple[float, float]:
    """(C, P): how long a checkpoint stalls the run, and how long after that it can be read. One replica writes."""
    writers = footprint.nodes / footprint.replicas
    write = footprint.checkpoint_bytes / (1e9 * min(storage.write_gb_per_s, writers * storage.node_gb_per_s))
    if not storage.background:
        return write, 0.0
    bytes_per_gpu = footprint.checkpoint_bytes * footprint.replicas / footprint.gpus
    return bytes_per_gpu / (1e9 * storage.gpu_to_host_gb_per_s), write


def recovery_seconds(reliability: Reliability, storage: Storage, footprint: Footprint) -> float:
    """R, from a failure until training goes on from a checkpoint, which every replica reads."""
    rate = min(storage.read_gb_per_s, footprint.nodes * storage.node_gb_per_s)
    read = footprint.replicas * footprint.checkpoint_bytes / (1e9 * rate)
    groups = reliability.group_startup_seconds_per_rank * footprint.gpus
    return reliability.detection_seconds + reliability.restart_seconds + groups + read


def estimate_goodput(reliability: Reliability, storage: Storage, footprint: Footprint) -> Goodput:
    """The expected share of a plan on a cluster, with checkpoints at Daly's interval in whole steps.

    Without spare replicas every failure goes back to the last checkpoint. With them (``replica_recovery``, replicas of 2 or more) only
    failures of the whole job and of all replicas at once do; ``_spare_replicas`` says what the others cost.
    """
    stall, persist = checkpoint_seconds(storage, footprint)
    node_rate = reliability.failures_per_node_year * footprint.nodes / SECONDS_PER_YEAR
    job_rate = reliability.job_failures_per_year / SECONDS_PER_YEAR
    speed, pausing, all_lost = 1.0, 0.0, node_rate
    if reliability.replica_recovery and footprint.replicas > 1:
        speed, pausing, all_lost = _spare_replicas(reliability, footprint, node_rate)
    mtbf = _mean_time(job_rate + all_lost)
    steps = _steps_between(footprint.step_seconds / speed, stall, persist, mtbf)
    wall = steps * footprint.step_seconds / speed
    recovery = _recovery_between(recovery_seconds(reliability, storage, footprint), mtbf, _mean_time(node_rate + job_rate))
    kept = productive_share(wall, stall, mtbf, recovery, persist)
    share, checkpoints = kept * speed, kept * stall / wall
    recovering = -math.expm1(-recovery / mtbf) + math.exp(-recovery / mtbf) * pausing
    return Goodput(
        share=share,
        seconds_per_useful_step=footprint.step_seconds / share if share > 0 else math.inf,
        mtbf_seconds=_mean_time(node_rate + job_rate),
        stall_seconds=stall,
        persist_seconds=persist,
        steps_between_checkpoints=steps,
        checkpoint_share=checkpoints,
        recovery_share=recovering,
        lost_share=1 - share - checkpoints - recovering,
    )


def _spare_replicas(reliability: Reliability, footprint: Footprint, node_rate: float) -> tuple[float, float, float]:
    """What failures of nodes cost a run that goes on without the replica they hit.

    Each costs the step it hits and a pause: detection, two set-ups of the groups (to go on, and to let the replica in again), and the copy
    of the state from another replica. For ``restart_seconds`` the replica is missing, and its places do not fail. Of r replicas i are
    missing in a share of the time that is proportional to binomial(r, i) load^i, i < r, where load is the rate of failures of one replica
    times that; the last is lost at its rate where r - 1 are missing.

    Source: Engset 1918, the loss system of finitely many sources, which depends on the mean of ``restart_seconds`` alone.

    Returns:
        (speed: useful share of the time between two failures that go back to a checkpoint, pausing: share of it in pauses, rate at which
        the last replica is lost, per second).
    """
    replicas, step = footprint.replicas, footprint.step_seconds
    groups = reliability.group_startup_seconds_per_rank * footprint.gpus
    copy = footprint.checkpoint_bytes / (1e9 * footprint.network_gb_per_s * footprint.nodes / replicas)
    pause = reliability.detection_seconds + 2 * groups + copy
    load = node_rate / replicas * reliability.restart_seconds
    logs = [away * math.log(load) - math.lgamma(away + 1) - math.lgamma(replicas - away + 1) for away in range(replicas)] if load else [0.0]
    weights = [math.exp(log - max(logs)) for log in logs]  # binomials and powers may be beyond a float
    missing = sum(away * weight for away, weight in enumerate(weights)) / sum(weights) / replicas
    all_lost = weights[-1] / sum(weights) * node_rate / replicas if load else 0.0
    mtbf = _mean_time(node_rate * (1 - missing))
    speed = (1 - missing) * productive_share(step, 0.0, mtbf, pause)
    if speed < 1e-6:
        raise ValueError(
            f"goodput: a node fails every {mtbf:.3g} s and each failure costs a pause of {pause:.3g} s with replica_recovery=True: the run "
            "never gets on; lower failures_per_node_year, detection_seconds or group_startup_seconds_per_rank, or use fewer nodes"
        )
    return speed, -math.expm1(-pause / mtbf), all_lost


def _recovery_between(recovery: float, mtbf: float, any_mtbf: float) -> float:
    """The R that stands for a recovery in ``productive_share`` when more failures start it again than lead to one.

    On average it takes D = M' (exp(R / M') - 1), M' being the mean time between failures of any kind; M (exp(R'' / M) - 1) is the same.
    """
    if mtbf == any_mtbf or math.isinf(mtbf):
        return recovery
    return mtbf * math.log1p(any_mtbf * math.expm1(min(recovery / any_mtbf, 700.0)) / mtbf)


def _steps_between(step_wall_seconds: float, stall: float, persist: float, mtbf: float) -> int:
    """Daly's interval in whole steps, and long enough that a checkpoint is written before the next begins.

    At most a year: without failures nothing asks for checkpoints.
    """
    best = daly_interval(stall, min(mtbf, SECONDS_PER_YEAR**2 / (2 * stall)))
    return max(1, math.ceil((persist - stall) / step_wall_seconds), round(best / step_wall_seconds))


def _mean_time(rate: float) -> float:
    return 1 / rate if rate > 0 else math.inf


def _check(values: object, name: str, positive: tuple[str, ...]) -> None:
    """Every number is finite and not negative, those of ``positive`` above 0, those declared int whole."""
    wrong = []
    for field in fields(values):  # type: ignore[arg-type]
        value = getattr(values, field.name)
        if field.type == "bool":
            continue
        right = isinstance(value, int if field.type == "int" else int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not right or value < 0 or (field.name in positive and value == 0):
            kind = "an integer" if field.type == "int" else "a finite number"
            wrong.append(f"{field.name}={value!r}: must be {kind}, {'above' if field.name in positive else 'not below'} 0")
    if wrong:
        raise ValueError(f"{name}:\n  " + "\n  ".join(wrong))
