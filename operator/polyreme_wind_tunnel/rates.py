"""Rates of a job's own faults, and its own times, from what the operator keeps in its status."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.accounting import Use
from polyreme_operator.types.reasons import Cause
from polyreme_wind_tunnel.causes import HOUR_MS, REPLACE_MS, FaultCause, Reach

_OF_NODES = {Cause.NODE_LOST, Cause.NODE_FAULT, Cause.POD_LOST, Cause.POD_STUCK, Cause.PRE_CHECK}
_OF_PROCESSES = {Cause.RANK_EXITED, Cause.RANK_KILLED, Cause.STEP_FAILED, Cause.POD_FAILED, Cause.LEADER_SILENT}
_NORMAL_QUANTILE = 1.96


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What a job's status says about its faults and times."""

    nodes: int
    devices: int
    faults: int
    """Restarts for faults; resizes, preemptions and what else is no fault are left out."""
    device_hours: float
    """Of all attempts."""
    causes: tuple[FaultCause, ...]
    restart_ms: int
    """Mean time of an attempt until its first step."""
    stall_ms: int
    """Mean time that a save held up the steps."""
    interval_ms: int
    effective_share: float
    """Measured, without the queue."""

    @property
    def device_mttf_hours(self) -> float:
        """Device hours for each fault."""
        return self.device_hours / self.faults

    @property
    def mttf_range_hours(self) -> tuple[float, float]:
        """Where that lies with 95 % (Poisson's limits by Wilson and Hilferty, 1931)."""
        return self.device_hours / _limit(self.faults + 1, 1.0), self.device_hours / _limit(self.faults, -1.0)


def fitted(spec: TrainingJobSpec, status: TrainingJobStatus) -> Fitted:
    """Read rates and times.

    Raises:
        InvalidConfigError: If the job has not trained, or met no fault.
    """
    attempt, accounting = status.attempt, status.accounting
    world = 0 if attempt is None else attempt.replicas * attempt.devices
    used: Counter[str] = Counter()
    for (what, _), taken_ms in accounting.table_with(devices=world).items():
        used[what] += taken_ms
    held_ms = used.total() - used[Use.QUEUED.value]
    if attempt is None or not held_ms or not status.step or not used[Use.PRODUCTIVE.value]:
        raise InvalidConfigError("the job has not trained, so its status says nothing of faults", field="--fit")
    counts = Counter(record.cause for record in status.restart_records)
    causes = tuple(found for name, count in sorted(counts.items()) if (found := _cause(name, count)) is not None)
    kept = sum(cause.weight for cause in causes)
    if not kept:
        raise InvalidConfigError(
            "the job has met no fault, so no rate can be read from it; give --device-mttf-hours", field="--fit"
        )
    # Records are bounded: the causes of older restarts are taken to be the same.
    faults = round(status.restarts * kept / len(status.restart_records))
    starting_ms = sum(used[use.value] for use in (Use.STARTING, Use.WAITING_FOR_PODS, Use.PRE_CHECK, Use.RESIZE))
    saves = status.step / spec.checkpoint.every_steps
    step_ms = used[Use.PRODUCTIVE.value] / world / status.step
    return Fitted(
        nodes=attempt.replicas,
        devices=attempt.devices,
        faults=faults,
        device_hours=held_ms / HOUR_MS,
        causes=causes,
        restart_ms=round(starting_ms / world / attempt.number),
        stall_ms=round(used[Use.CHECKPOINT.value] / world / max(1.0, saves)),
        interval_ms=max(1, round(step_ms * spec.checkpoint.every_steps)),
        effective_share=used[Use.PRODUCTIVE.value] / held_ms,
    )


def _cause(name: str, count: int) -> FaultCause | None:
    """Return a cause of restarts as one of faults; None if it is none."""
    if name in _OF_NODES:
        return FaultCause(name, count, Reach.NODE, REPLACE_MS)
    if name in _OF_PROCESSES or name == Cause.HUNG:
        return FaultCause(name, count, Reach.NONE, silent=name == Cause.HUNG)
    return None


def _limit(count: int, sign: float) -> float:
    """Return a limit of the mean of a Poisson variable where so many were counted."""
    if not count:
        return 0.0
    return count * (1.0 - 1.0 / (9.0 * count) + sign * _NORMAL_QUANTILE / (3.0 * math.sqrt(count))) ** 3
