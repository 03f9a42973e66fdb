"""The record that the leader keeps on the Lease: what is told at once, what rank 0 adds, which ends count."""

from __future__ import annotations

from collections.abc import Sequence

from polyreme_api.errors import ExitCode
from polyreme_api.launch.messages import Exited
from polyreme_api.progress import ProgressRecord

CODE_STOPPED = 75
_FROM_RANK = frozenset(
    {
        "phase", "step", "steps", "stage", "loss", "held_out_loss", "held_out_step", "routing",
        "tokens_per_second", "step_seconds", "checkpoint", "message",
    }
)  # fmt: skip


def is_urgent(before: ProgressRecord | None, now: ProgressRecord) -> bool:
    """Tell whether a change is told at once: attempt, phase, checkpoint, exit, outcome; steps wait for a renewal."""
    if before is None or before is now:
        return before is None
    return _told(before) != _told(now)


def _told(record: ProgressRecord) -> tuple[object, ...]:
    """What of a record is told at once when it changes."""
    return (
        record.attempt,
        record.phase,
        record.released,
        record.checkpoint,
        record.exits,
        record.outcome,
        record.resumed_from_step,
        record.message,
    )


def with_word_of_rank(known: ProgressRecord, said: ProgressRecord) -> ProgressRecord:
    """Take over what rank 0 says of its attempt."""
    update = {name: getattr(said, name) for name in _FROM_RANK}
    if known.exits:
        # What is said of a failure is not overwritten by a rank that has not noticed it yet.
        update["message"] = known.message
    # A checkpoint once durable stays so, also when a record does not repeat it.
    update["checkpoint"] = said.checkpoint or known.checkpoint
    return known.model_copy(update=update)


def cause_of(failed: Sequence[Exited]) -> str:
    """Return the message of the exit that tells the cause: the first one, or that of a rank that found damaged data.

    What the others say is mostly that they lost that rank, and some of them may be reported before it.
    """
    damaged = [exited for exited in failed if exited.code == ExitCode.DATA_DAMAGED]
    return next((exited.message for exited in [*damaged, *failed]), "")


def tells(exited: Exited, *, run: bool) -> bool:
    """Tell whether an exit is a failure: while ranks shall stop, being killed and the code for it are as asked."""
    if run:
        return exited.code != 0
    return exited.signal is None and exited.code not in {0, CODE_STOPPED}
