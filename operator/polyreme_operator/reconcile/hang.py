"""Hang detection: a stalled attempt is reported, and restarted if the spec asks for it and a second signal agrees.

One signal is not enough to kill a gang: a long step, a slow store or a late watch look the same. The stall is measured
twice, on the leader's clock between its own records and on the operator's clock between their arrivals, and the shorter
time counts, so a Lease that is not renewed or is read late never looks like a stall. The second signal is what the
launchers observe of their ranks' processes: one is stopped (state T), or no rank of the whole gang has used CPU time.
Ranks that spin on an accelerator use CPU time, so such a hang is only reported.
"""

from __future__ import annotations

import dataclasses

from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.status import EarlierRestarts, RestartRecord
from polyreme_api.progress import ProgressRecord, RankPhase, name_stopped
from polyreme_operator.types.reasons import Cause
from polyreme_operator.types.snapshot import JobSnapshot

STOPPED_REPORTED_S = 10.0
"""Time without a step after which a stopped rank is reported, if ``stallSeconds`` is longer."""
FUTILE_MAX = 2
"""Restarts for hangs without a later step, after which hangs of a job are only reported."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """An attempt that trains but has completed no step for too long."""

    message: str
    index: int | None
    """Worker of a stopped rank; None if no rank is stopped."""
    fatal: bool
    """Whether to end the attempt: the spec asks for it, the second signal agrees, and earlier restarts helped."""


def find_stall(snapshot: JobSnapshot, spec: TrainingJobSpec, record: ProgressRecord | None) -> Stall | None:
    """Return the stall of the current attempt, if any; ``record`` is its progress record."""
    attempt, lease, hang = snapshot.job.attempt, snapshot.lease, spec.health.hang
    if attempt is None or lease is None or record is None or attempt.desired != "Run":
        return None
    if not record.released or record.phase is not RankPhase.TRAINING or record.outcome is not None or record.exits:
        return None
    stalled_s = min(lease.seen_s - lease.advanced_seen_s, record.updated_at_s - lease.advanced_said_s)
    # A stopped process is certain, so it is reported early, but restarted no earlier than any other stall.
    reported_after_s = min(STOPPED_REPORTED_S, hang.stall_seconds) if record.stopped else hang.stall_seconds
    if stalled_s < reported_after_s:
        return None
    agrees = _agrees(record, attempt.replicas * attempt.devices, devices=attempt.devices)
    stalled = stalled_s >= hang.stall_seconds
    words = [f"no new step after step {record.step} for {hang.stall_seconds if stalled else reported_after_s:g} s"]
    if agrees:
        words.append(agrees)
    status = snapshot.job.status
    futile = futile_restarts(status.restart_records, record.step, status.earlier_restarts)
    if hang.action == "Restart" and futile >= FUTILE_MAX:
        words.append(f"not restarted: {futile} restarts because of hangs reached no later step")
    fatal = stalled and hang.action == "Restart" and bool(agrees) and futile < FUTILE_MAX
    index = record.stopped[0] // attempt.devices if record.stopped else None
    return Stall(message="; ".join(words), index=index, fatal=fatal)


def futile_restarts(records: list[RestartRecord], step: int, earlier: EarlierRestarts | None = None) -> int:
    """Count restarts for hangs since the last later step; ``step`` is the newest step of the current attempt."""
    futile, best = (0, 0) if earlier is None else (earlier.hung, earlier.step)
    for record in records:
        if record.step > best:
            futile, best = 0, record.step
        futile += record.cause == Cause.HUNG
    return 0 if step > best else futile


def _agrees(record: ProgressRecord, world: int, *, devices: int) -> str:
    """Return the launchers' observation that confirms a hang; empty if none does."""
    if record.stopped:
        return name_stopped(record.stopped, devices=devices)
    return "no rank uses CPU time" if record.idle_ranks == world else ""
