"""Steps that stop coming: said so, and, where the spec asks for it and a second signal agrees, ended.

One silent signal is not enough to kill a gang: a long step, a slow store or a late watch look the same. So the stall is
measured twice, on the leader's clock between its own records and on ours between their arrivals, and the shorter time
counts: a Lease that is not renewed, or read late, never looks like a stall. The second signal is what launchers see of
their ranks' processes: one is stopped (state T), or none of the whole gang has used CPU time. Ranks that spin on an
accelerator use CPU time: a hang there is told, and left to people.
"""

from __future__ import annotations

import dataclasses

from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.status import EarlierRestarts, RestartRecord
from polyreme_api.progress import ProgressRecord, RankPhase, name_stopped
from polyreme_operator.types.reasons import Cause
from polyreme_operator.types.snapshot import JobSnapshot

STOPPED_REPORTED_S = 10.0
"""Time without a step after which a stopped rank is reported, where ``stallSeconds`` is longer."""
FUTILE_MAX = 2
"""Restarts for a hang that brought no later step; then hangs of this job are only told."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """An attempt that trains, and has brought no step for too long."""

    message: str
    index: int | None
    """Worker of a rank that is stopped; None when none is."""
    fatal: bool
    """Whether the attempt shall be ended: asked for, agreed by the second signal, and not in vain so far."""


def find_stall(snapshot: JobSnapshot, spec: TrainingJobSpec, record: ProgressRecord | None) -> Stall | None:
    """Tell whether the current attempt stalls; ``record`` is its own, None if it has none."""
    attempt, lease, hang = snapshot.job.attempt, snapshot.lease, spec.health.hang
    if attempt is None or lease is None or record is None or attempt.desired != "Run":
        return None
    if not record.released or record.phase is not RankPhase.TRAINING or record.outcome is not None or record.exits:
        return None
    stalled_s = min(lease.seen_s - lease.advanced_seen_s, record.updated_at_s - lease.advanced_said_s)
    # A stopped process is no matter of doubt: it is reported soon, and waited for as long as any other stall.
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
    """Return what launchers see that agrees with a hang; empty if nothing does."""
    if record.stopped:
        return name_stopped(record.stopped, devices=devices)
    return "no rank uses CPU time" if record.idle_ranks == world else ""
