"""The record that the leader keeps on the Lease: which changes are urgent, rank 0's part, which exits count."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from polyreme_api.exit_codes import ExitCode, distance_from_cause
from polyreme_api.progress import (
    EXITS_MAX,
    MESSAGE_CHARACTERS_MAX,
    Outcome,
    ProgressRecord,
    RankExit,
    RankPhase,
)
from polyreme_launcher.protocol.messages import Exited

_FROM_RANK = frozenset(
    {
        "phase", "step", "steps", "stage", "loss", "held_out_loss", "held_out_step", "routing", "objective",
        "tokens_per_second", "step_seconds", "data_wait_seconds", "trained_seconds", "checkpoint_seconds",
        "evaluation_seconds", "checkpoint", "message", "notice", "stopped_early",
    }
)  # fmt: skip


def is_urgent(before: ProgressRecord | None, now: ProgressRecord) -> bool:
    """Return whether a change is urgent: attempt, phase, checkpoint, exit, outcome; steps wait for a renewal."""
    if before is None or before is now:
        return before is None
    return _urgent(before) != _urgent(now)


def _urgent(record: ProgressRecord) -> tuple[object, ...]:
    """The fields of a record that are written at once when they change."""
    return (
        record.attempt,
        record.phase,
        record.released,
        record.checkpoint,
        record.exits,
        record.outcome,
        record.resumed_from_step,
        record.message,
        record.stall,
        record.stragglers,
        record.pre_check is not None and (record.pre_check.done, record.pre_check.failed),
    )


def with_rank_record(known: ProgressRecord, reported: ProgressRecord) -> ProgressRecord:
    """Merge rank 0's record of its attempt."""
    update = {name: getattr(reported, name) for name in _FROM_RANK}
    if known.exits:
        # A rank that has not noticed a failure yet must not overwrite its description.
        update["message"] = known.message
    # A checkpoint once durable stays so, even if a record does not repeat it.
    update["checkpoint"] = reported.checkpoint or known.checkpoint
    return known.model_copy(update=update)


def with_leaving(known: ProgressRecord, index: int) -> ProgressRecord:
    """Add a worker whose launcher was asked to end."""
    leaving = tuple(dict.fromkeys((*known.leaving, index)))[:EXITS_MAX]
    return known.model_copy(update={"leaving": leaving})


def cause_of(failed: Sequence[Exited]) -> str:
    """Return the message of the exit that shows the cause; the others mostly report that they lost that rank."""
    return min(failed, key=lambda exited: distance_from_cause(exited.code)).message if failed else ""


def failure_exits(exits: Iterable[Exited], *, run: bool, leaving: Collection[int], devices: int) -> list[Exited]:
    """Choose the exits that are failures.

    While ranks shall stop, a kill and its exit code are as requested. When a worker leaves, all ranks stop after the
    same step as its own: if that were reported before those have ended, the answer would be an attempt that lacks a
    worker again a moment later.

    Args:
        exits: Exits of the attempt's ranks, in the order in which they were received.
        run: Whether ranks shall run.
        leaving: Workers whose launcher was asked to end.
        devices: Ranks of a worker.
    """

    def is_failure(one: Exited) -> bool:
        if not run:
            return one.signal is None and one.code not in {ExitCode.OK, ExitCode.STOPPED}
        stopped_with_another = bool(leaving) and one.code == ExitCode.STOPPED and one.rank // devices not in leaving
        return one.code != ExitCode.OK and not stopped_with_another

    return [one for one in exits if is_failure(one)][:EXITS_MAX]


def concluded(
    record: ProgressRecord,
    exits: Mapping[int, Exited],
    *,
    run: bool,
    ranks: int,
    devices: int,
    announced: bool,
    success_recorded: bool,
    cause_may_come: bool,
) -> ProgressRecord:
    """Put the exits that show a cause, and the outcome once there is one, on the record.

    Args:
        record: The record so far.
        exits: Exits of the attempt's ranks, by rank.
        run: Whether ranks shall run.
        ranks: Ranks of the attempt.
        devices: Ranks of a worker.
        announced: Whether the followers were notified of the release.
        success_recorded: Whether rank 0's last record says that the attempt succeeded.
        cause_may_come: Whether exits of ranks that lost another are withheld while others run. Were they reported
            first, the answer would be an attempt that lacks the lost pod a moment later.
    """
    shown = list(exits.values())
    if run and cause_may_come and len(exits) < ranks:
        shown = [exited for exited in shown if exited.code != ExitCode.ENVIRONMENT]
    failures = failure_exits(shown, run=run, leaving=record.leaving, devices=devices)
    failed = tuple(RankExit(rank=exited.rank, code=exited.code, signal=exited.signal) for exited in failures)
    changes: dict[str, object] = {}
    if failed != record.exits:
        changes = {"exits": failed, "message": cause_of(failures)[:MESSAGE_CHARACTERS_MAX]}
    ended = len(exits) == ranks
    all_zero = ended and all(exited.code == ExitCode.OK for exited in exits.values())
    if all_zero and success_recorded:
        changes |= {"outcome": Outcome.SUCCEEDED, "phase": RankPhase.DONE}
    elif not run and (ended or not announced):
        changes["outcome"] = Outcome.STOPPED
    elif all_zero and record.outcome is None:
        message = "every rank exited with 0, but rank 0's last record does not report success"
        changes |= {"outcome": Outcome.FAILED, "message": message}
    return record.model_copy(update=changes) if changes else record
