"""Accounting of a job in a status: device time by what it was spent on and why, and the ratios that follow from it.

The operator alone charges time; everybody else reads these sums. They are integers of device-milliseconds (time x
devices held), since the time of an elastic job says nothing without its devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, TypeAlias

from pydantic import Field, computed_field

from polyreme_api.fields import StatusPart, Time

CAUSES_MAX = 32
CELLS_MAX = 128
"""Most pairs of what and why; the operator's own are fewer."""
DAYS_MAX = 31
"""Days that are kept apart; the first one holds those before it too."""
OTHER = "Other"
"""Why of cells that were folded together."""
SUSPENDED = "Suspend"
"""Why of the time for which the user has the job wait."""


class Use(StrEnum):
    """What device time was spent on."""

    PRODUCTIVE = "Productive"
    """Steps that are history, without what they waited for data."""
    RECOMPUTED = "Recomputed"
    """Steps that were trained and lost, since no checkpoint held them."""
    CHECKPOINT = "CheckpointStall"
    """Ranks waited for a save; what is written in the background costs nothing."""
    DATA_WAIT = "DataWait"
    STARTING = "Starting"
    """From the release of the ranks to the first step, and what nothing else accounts for."""
    EVALUATING = "Evaluating"
    WAITING_FOR_PODS = "WaitingForPods"
    """From the beginning of an attempt until all of its workers have joined."""
    QUEUED = "Queued"
    """No devices were held: the time counts with the devices that the job asks for."""
    HANG = "Hang"
    """From the last step of an attempt that hung to its end."""
    PRE_CHECK = "PreCheck"
    RESIZE = "Resize"
    """Start of an attempt with another number of workers."""


Table: TypeAlias = Mapping[tuple[str, str], int]
"""Device-milliseconds by what and why."""


class LostTime(StatusPart):
    """Time lost to one cause."""

    cause: Annotated[str, Field(max_length=63)]
    """Cause."""
    milliseconds: Annotated[int, Field(ge=0)]
    """Time lost."""


class TimeCell(StatusPart):
    """Device time spent on one thing for one cause."""

    what: Annotated[str, Field(max_length=32)]
    """What it was spent on."""
    why: Annotated[str, Field(max_length=63)] = ""
    """Cause; empty for what needs none."""
    device_milliseconds: Annotated[int, Field(ge=0)]
    """Time x devices."""


class DayTime(StatusPart):
    """Device time that was charged on one day (UTC)."""

    day: Annotated[str, Field(max_length=10)]
    """Date; the first entry holds earlier days too."""
    productive_device_milliseconds: Annotated[int, Field(ge=0)] = 0
    """Productive."""
    held_device_milliseconds: Annotated[int, Field(ge=0)] = 0
    """Of all attempts."""
    queued_device_milliseconds: Annotated[int, Field(ge=0)] = 0
    """In the queue, without suspensions."""


class SettledTime(StatusPart):
    """The part of the attempt in progress that the sums already include; it is recomputed at the next settlement."""

    attempt: Annotated[int, Field(ge=1)]
    """Which attempt."""
    at: Time
    """When it was settled last."""
    effective_milliseconds: Annotated[int, Field(ge=0)] = 0
    """Time of its steps that a durable checkpoint holds, without what they waited for data."""
    data_wait_milliseconds: Annotated[int, Field(ge=0)] = 0
    """Time in which those steps waited for data."""
    cause: Annotated[str, Field(max_length=63)]
    """Why the attempt started; its time without steps counts as lost to this cause."""
    lost_milliseconds: Annotated[int, Field(ge=0)] = 0
    """That time."""
    cells: Annotated[list[TimeCell], Field(max_length=CELLS_MAX)] = Field(default_factory=list)
    """The same in device time."""


class Accounting(StatusPart):
    """Where the job's time went, since it was created."""

    effective_milliseconds: Annotated[int, Field(ge=0)] = 0
    """Time spent on steps that are part of the history, without what they waited for data."""
    lost: Annotated[list[LostTime], Field(max_length=CAUSES_MAX)] = Field(default_factory=list)
    """Time of attempts that was lost, by cause."""
    cells: Annotated[list[TimeCell], Field(max_length=CELLS_MAX)] = Field(default_factory=list)
    """Device time, by what it was spent on and why."""
    days: Annotated[list[DayTime], Field(max_length=DAYS_MAX)] = Field(default_factory=list)
    """The same by the day on which it was charged."""
    until: Time = ""
    """Until when all time is charged, but for what is settled of the attempt in progress."""
    settled: SettledTime | None = None
    """What of these sums is of the attempt in progress."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def goodput(self) -> Annotated[str, Field(max_length=8)]:
        """Productive share of the device time of all attempts, such as ``0.9312``; for people."""
        return _text(goodput_of(self.table))

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ettr(self) -> Annotated[str, Field(max_length=8)]:
        """Effective training time ratio: as goodput, of the time in the queue too, but not of suspensions."""
        return _text(ettr_of(self.table))

    @property
    def table(self) -> Table:
        """Device time by what and why. Sums of an operator of 0.1.0 count as those of one device."""
        return self.table_with(devices=1)

    def table_with(self, *, devices: int) -> Counter[tuple[str, str]]:
        """Return the table; sums of an operator of 0.1.0 count as those of so many devices."""
        return table_of(self.cells) if self.cells else self.converted(devices=devices)

    def converted(self, *, devices: int) -> Counter[tuple[str, str]]:
        """Return the time by cause that an operator of 0.1.0 kept, as device time by what and why."""
        found: Counter[tuple[str, str]] = Counter()
        if self.effective_milliseconds:
            found[Use.PRODUCTIVE.value, ""] = self.effective_milliseconds * devices
        for entry in self.lost:
            found[_CONVERTED.get(entry.cause, Use.RECOMPUTED).value, entry.cause] += entry.milliseconds * devices
        return found


_CONVERTED = {"DataWait": Use.DATA_WAIT, "Hung": Use.HANG, "Resize": Use.RESIZE, "Starting": Use.STARTING}
"""Uses that the causes of 0.1.0 stood for; time of any other cause was trained and lost."""


def table_of(cells: Sequence[TimeCell]) -> Counter[tuple[str, str]]:
    """Return cells as a table."""
    found: Counter[tuple[str, str]] = Counter()
    for cell in cells:
        found[cell.what, cell.why] += cell.device_milliseconds
    return found


def cells_of(table: Table) -> list[TimeCell]:
    """Return a table as cells; of too many, the smallest are folded together, so that nothing is lost."""
    kept = Counter({pair: time for pair, time in table.items() if time})
    if len(kept) > CELLS_MAX:
        for pair, time in kept.most_common()[CELLS_MAX - len(Use) :]:
            del kept[pair]
            kept[pair[0], OTHER] += time
    return [TimeCell(what=what, why=why, device_milliseconds=time) for (what, why), time in sorted(kept.items())]


def is_queued(what: str, why: str) -> bool:
    """Tell whether the time of a cell was spent in the queue, and not suspended by the user."""
    return what == Use.QUEUED and why != SUSPENDED


def goodput_of(table: Table) -> float | None:
    """Return productive device time over that of all attempts; None before anything is charged."""
    return _share(table, sum(time for (what, _), time in table.items() if what != Use.QUEUED))


def ettr_of(table: Table) -> float | None:
    """Return productive device time over all but that for which users suspended their jobs; None before any."""
    return _share(table, sum(time for pair, time in table.items() if pair[0] != Use.QUEUED or is_queued(*pair)))


def _share(table: Table, whole: int) -> float | None:
    return sum(time for (what, _), time in table.items() if what == Use.PRODUCTIVE) / whole if whole else None


def _text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.4f}"
