"""The state of a rank, as its memory page and its process show it: what the detections of hangs and slow ranks read.

Ranks write the numbers of ``PAGE_FIELDS`` to a page of memory that they share with their launcher; launchers send them
to the leader's, with what the kernel says of the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from enum import IntEnum
from typing import Any


class RankActivity(IntEnum):
    """What a rank is busy with; each has a deadline of its own."""

    STARTING = 0
    LOADING = 1
    FIRST_STEP = 2
    """The first step of an attempt or of a curriculum stage: kernels and buffers are made."""
    STEP = 3
    DATA_WAIT = 4
    SCORING = 5
    EVALUATING = 6
    CHECKPOINTING = 7
    EXPORTING = 8
    DONE = 9


class RankWait(IntEnum):
    """What a rank waits for, as far as its code knows."""

    NOTHING = 0
    EXCHANGE = 1
    """A collective exchange with other ranks."""
    FORWARD = 2
    """The output of the previous pipeline stage."""
    BACKWARD = 3
    """The gradient from the next pipeline stage."""


class ExchangeKind(IntEnum):
    """Groups of ranks whose exchanges are timed apart; each is a block of neighbouring ranks."""

    STAGE = 0
    """Ranks of a pipeline stage, and parts of it that hold copies or shares of parameters."""
    EXPERTS = 1
    """Ranks that together hold all experts."""
    CONTEXT = 2
    """Ranks that share a stream of tokens."""
    TENSOR = 3
    """Ranks that share the widths of layers."""


ACTIVITY, STEP, WAIT, STAGE, MICROBATCH, MOVES, EXCHANGES, SENT_FORWARD, SENT_BACKWARD, MOVED_NS = range(10)
"""Places of the numbers on a page."""
COMPUTED_US, WORK, EXCHANGED_US = 10, 11, 12
"""The same of the last step: its time, its work, and its time in exchanges, one number for each ``ExchangeKind``."""
PAGE_FIELDS = EXCHANGED_US + len(ExchangeKind)
UNTIL_NS = 511
"""The last place, which the launcher writes: until when the rank may begin steps; 0: without end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank at one look."""

    rank: int
    activity: RankActivity = RankActivity.STARTING
    step: int = 0
    """The step that it works on."""
    wait: RankWait = RankWait.NOTHING
    stage: int = 0
    """Pipeline stage that it entered last, or whose input it waits for."""
    microbatch: int = 0
    """The same of the microbatch."""
    moves: int = 0
    """Writes to its page: this number rises for as long as the rank advances."""
    exchanges: int = 0
    """Exchanges that it has entered."""
    sent_forward: int = 0
    """Outputs of stages that it has sent in this step."""
    sent_backward: int = 0
    """Gradients that it has sent to earlier stages in this step."""
    quiet_ms: int = 0
    """Time since its last write."""
    computed_us: int = 0
    """Time of its last step without waits for data and other ranks; 0 before the second step of a curriculum stage."""
    work: int = 0
    """Operations of that step, as far as they differ between ranks of a pipeline stage."""
    stage_us: int = 0
    """Time of that step in exchanges of each ``ExchangeKind``."""
    experts_us: int = 0
    context_us: int = 0
    tensor_us: int = 0
    watched: bool = True
    """Whether its page can be read."""
    idle: bool = False
    """It has used no CPU time since the look before."""
    stopped: bool = False
    """Its process is stopped (state T)."""

    def numbers(self) -> tuple[int, ...]:
        """Write the state as integers, for a message."""
        return tuple(int(getattr(self, name)) for name in _NAMES)


_NAMES = tuple(field.name for field in dataclasses.fields(RankState))


def states_of(numbers: Sequence[int]) -> tuple[RankState, ...]:
    """Read states that were written one after the other; what does not fit is left out."""
    width = len(_NAMES)
    found = []
    for begin in range(0, len(numbers) - width + 1, width):
        values = dict(zip(_NAMES, numbers[begin : begin + width], strict=True))
        known: dict[str, Any] = dict(values)
        try:
            known |= {"activity": RankActivity(values["activity"]), "wait": RankWait(values["wait"])}
        except ValueError:
            continue
        found.append(RankState(**known | {name: bool(values[name]) for name in ("watched", "idle", "stopped")}))
    return tuple(found)
