"""Exit codes of every polyreme process, in one table; docs/reference/exit-codes.md is generated from it."""

from __future__ import annotations

import enum
from typing import Self

SIGNAL_BASE = 128
"""A process ended by signal ``n`` is reported with code 128 + n, as shells and Kubernetes do."""


class ExitCode(enum.IntEnum):
    """Exit code of a process: number, the processes that use it, its meaning, and what the user does next."""

    processes: str
    meaning: str
    remedy: str

    def __new__(cls, number: int, processes: str, meaning: str, remedy: str) -> Self:
        """Make the member of this number."""
        code = int.__new__(cls, number)
        code._value_ = number
        code.processes, code.meaning, code.remedy = processes, meaning, remedy
        return code

    OK = (0, "all", "Success.", "Nothing.")
    INTERNAL = (
        1,
        "all",
        "An unexpected error: a bug in polyreme, or code of yours that a rank runs.",
        "Report it, with the traceback from standard error or the log.",
    )
    USAGE = (
        2,
        "all",
        "The command line, the spec or the configuration is wrong; nothing was started.",
        "Change the option or field that the message names.",
    )
    NOT_FOUND = (
        3,
        "commands, ranks, data worker",
        "There is no run, dataset, checkpoint or file of that name.",
        "Check the name; the message lists the names that exist, where it can.",
    )
    REFUSED = (
        4,
        "commands, ranks, data worker",
        "The current state forbids the request: an edited spec, a finished run, a damaged checkpoint.",
        "Change what the message names, or use a new name.",
    )
    TIMEOUT = (
        5,
        "commands",
        "What the command waited for did not happen in time.",
        "Look at the state, then repeat the command with a longer timeout.",
    )
    CANCELLED = (
        6,
        "commands",
        "Stopped on request: Ctrl-C, SIGTERM or `polyreme runs stop`.",
        "Repeat `polyreme run` with the same file; it resumes.",
    )
    ENVIRONMENT = (
        7,
        "all",
        "The machine or a store failed, after bounded retries: a full disk, an unreachable store, a port in use.",
        "Fix what the message names, then repeat the command; a run resumes.",
    )
    DATA_DAMAGED = (
        8,
        "commands, ranks, data worker",
        "Stored training data is damaged or missing.",
        "Restore the data or process it again, then repeat the command; a run resumes.",
    )
    FENCED = (
        17,
        "launcher, ranks",
        (
            "A newer attempt, or a newer pod of the same worker, has replaced this one, or nothing has said for 60 s "
            "that none has; it writes nothing more."
        ),
        "Nothing: the newer one continues.",
    )
    STOPPED = (
        75,
        "ranks",
        "Stopped on request, after a checkpoint was saved.",
        "Nothing: the next attempt resumes from that checkpoint.",
    )
    RUN_FAILED = (
        100,
        "commands, ranks",
        "The run itself failed, for example with a loss that is not finite or with too little device memory.",
        "Read the reason in the status or the report, and change the job.",
    )
    STEP_FAILED = (
        101,
        "ranks",
        "A step can't be trained: its loss or gradient is not finite, or it has nothing to learn from.",
        "Nothing: it is retried once from the newest checkpoint. If that fails too, change what the message names.",
    )
    ROLLED_BACK = (
        102,
        "ranks",
        "A spike of the loss ended the attempt (`health.loss.action: Rollback`).",
        "Nothing: the next attempt resumes before the spike and skips its data.",
    )
    SPIKES_PERSIST = (
        103,
        "ranks",
        "The loss spiked again after three rollbacks in a row.",
        "Look at the learning rate and the data; the job is paused until its spec changes.",
    )
    COPIES_DIFFER = (
        104,
        "ranks",
        "Parameters of the rank differ from the copies of other ranks: its memory or its device changed them.",
        "Look at its node; the run resumes from the newest checkpoint, which was saved while all copies were equal.",
    )


def code_of_signal(number: int) -> int:
    """Return the exit code that reports a process ended by a signal."""
    return SIGNAL_BASE + number


def distance_from_cause(code: int | None) -> int:
    """Rank the failed ranks of an attempt by their exit codes: the first one with the lowest number shows the cause.

    Damaged data goes first. Ranks that lost a peer or a server go last, since they may be reported before the rank
    that they lost.

    Args:
        code: The rank's exit code; None: it was killed by a signal.
    """
    if code == ExitCode.DATA_DAMAGED:
        return 0
    return 2 if code == ExitCode.ENVIRONMENT else 1
