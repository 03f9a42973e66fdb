"""The verdict on a hang: an attempt that makes no progress is reported, and restarted if two signals agree.

The evidence is the leader's launcher's, which sees all ranks (``polyreme_launcher.protocol.hang_evidence``): what no
longer advances, which ranks hold up the others, and whether a second signal agrees. The verdict is made here, since the
policy of the job and its budgets are. This operator's own clock must not contradict the evidence: if it saw a step that
is newer than half of the time that the evidence claims, it waits.
"""

from __future__ import annotations

import dataclasses

from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.status import EarlierRestarts, RestartRecord
from polyreme_api.progress import ProgressRecord
from polyreme_operator.types.reasons import Cause
from polyreme_operator.types.snapshot import JobSnapshot

FUTILE_MAX = 2
"""Restarts for hangs without a later step, after which hangs of a job are only reported."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """An attempt whose ranks make no progress."""

    message: str
    index: int | None
    """Worker of the first rank that holds up the others; None if no such rank is known."""
    fatal: bool
    """Whether to end the attempt: the spec asks for it, the second signal agrees, and earlier restarts helped."""


def find_stall(snapshot: JobSnapshot, spec: TrainingJobSpec, record: ProgressRecord | None) -> Stall | None:
    """Return the stall of the current attempt, if any; ``record`` is its progress record."""
    attempt, lease, hang = snapshot.job.attempt, snapshot.lease, spec.health.hang
    if attempt is None or lease is None or record is None or record.stall is None or attempt.desired != "Run":
        return None
    if not record.released or record.outcome is not None or record.exits:
        return None
    evidence = record.stall
    stalled_s = min(lease.seen_s - lease.advanced_seen_s, record.updated_at_s - lease.advanced_said_s)
    if stalled_s < evidence.quiet_seconds / 2:
        return None
    words = [evidence.message]
    status = snapshot.job.status
    futile = futile_restarts(status.restart_records, record.step, status.earlier_restarts)
    if hang.action == "Restart" and futile >= FUTILE_MAX:
        words.append(f"not restarted: {futile} restarts because of hangs reached no later step")
    fatal = evidence.confirmed and hang.action == "Restart" and futile < FUTILE_MAX
    index = evidence.suspects[0] // attempt.devices if evidence.suspects else None
    return Stall(message="; ".join(words), index=index, fatal=fatal)


def futile_restarts(records: list[RestartRecord], step: int, earlier: EarlierRestarts | None = None) -> int:
    """Count restarts for hangs since the last later step; ``step`` is the newest step of the current attempt."""
    futile, best = (0, 0) if earlier is None else (earlier.hung, earlier.step)
    for record in records:
        if record.step > best:
            futile, best = 0, record.step
        futile += record.cause == Cause.HUNG
    return 0 if step > best else futile
