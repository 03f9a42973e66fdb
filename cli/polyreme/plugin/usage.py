"""Device time of jobs added up, as `kubectl polyreme usage` shows it: by queue, label, node, day, job or use.

The operator charges the time; here sums are only added. A job that was deleted is in no sum: Prometheus keeps those
(``polyreme_device_seconds_total``).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, TypeAlias

from rich.table import Table as RichTable

from polyreme.plugin.printing import columns
from polyreme.plugin.snapshot import Snapshot
from polyreme.views.formatting import share
from polyreme_api.job.accounting import DayTime, Table, Use, ettr_of, goodput_of, is_queued, table_of
from polyreme_api.times import rfc3339
from polyreme_operator.types.views import JobView

Part: TypeAlias = tuple[str, Table]
"""What a part of a job's time belongs to, and that part."""
HELD = "Held"
"""What of the time of a day that was not productive: days keep no more."""
NONE = "(none)"
_HOUR_MS, _SECOND_MS = 3_600_000, 1_000


class By(StrEnum):
    """What the sums are made by."""

    QUEUE = "queue"
    NAMESPACE = "namespace"
    JOB = "job"
    NODE = "node"
    DAY = "day"
    USE = "use"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Device time of one queue, node, ..."""

    key: str
    jobs: int
    table: Table

    def to_object(self) -> dict[str, Any]:
        """Return it for programs: times in device-seconds."""
        productive, held, queued = _sums(self.table)
        return {
            "key": self.key,
            "jobs": self.jobs,
            "productiveDeviceSeconds": productive / _SECOND_MS,
            "heldDeviceSeconds": held / _SECOND_MS,
            "queuedDeviceSeconds": queued / _SECOND_MS,
            "goodputRatio": goodput_of(self.table),
            "ettrRatio": ettr_of(self.table),
        }


NOTHING = UsageRow(key="", jobs=0, table={})
"""A row without time: its fields are those of every row."""


def usage_rows(seen: Snapshot, *, by: By, label: str = "", since_s: float | None = None) -> list[UsageRow]:
    """Add up the device time of jobs, the largest sums first; days in their order.

    Args:
        seen: The jobs.
        by: What the sums are made by.
        label: Key of the label that they are made by instead.
        since_s: Only what was charged since the day of this time; None: all.
    """
    first = "" if since_s is None else rfc3339(since_s)[:10]
    sums: dict[str, Counter[tuple[str, str]]] = {}
    jobs: Counter[str] = Counter()
    for job in seen.jobs:
        parts = [(_label_of(seen, job, label), _whole(job, first))] if label else _PARTS[by](job, first)
        found: dict[str, Counter[tuple[str, str]]] = {}
        for key, table in parts:
            found.setdefault(key, Counter()).update(table)
        for key, added in found.items():
            if added.total():
                sums.setdefault(key, Counter()).update(added)
                jobs[key] += 1
    rows = [UsageRow(key=key, jobs=jobs[key], table=table) for key, table in sums.items()]
    if by is By.DAY and not label:
        return sorted(rows, key=lambda row: row.key)
    return sorted(rows, key=lambda row: (-sum(row.table.values()), row.key))


def usage_table(rows: Iterable[UsageRow], *, heading: str) -> RichTable:
    """Return the table of ``usage``, in device-hours."""
    headings = (heading.upper(), "JOBS", "PRODUCTIVE", "HELD", "QUEUED", "GOODPUT", "ETTR", "MOST LOST TO")
    return columns(headings, (_cells(row) for row in rows))


def _cells(row: UsageRow) -> list[Any]:
    hours = [f"{time / _HOUR_MS:,.2f} h" for time in _sums(row.table)]
    return [row.key, row.jobs, *hours, share(goodput_of(row.table)), share(ettr_of(row.table)), _worst(row.table)]


def _worst(table: Table) -> str | None:
    """Name what most of the time was lost to; None where the sums do not say."""
    lost = {pair: time for pair, time in table.items() if pair[0] not in {Use.PRODUCTIVE, Use.QUEUED, HELD}}
    what, why = max(sorted(lost), key=lambda pair: lost[pair], default=("", ""))
    return _use(what, why) or None


def _use(what: str, why: str) -> str:
    return what if why in {"", what} else f"{what} ({why})"


def _sums(table: Table) -> tuple[int, int, int]:
    productive = sum(time for (what, _), time in table.items() if what == Use.PRODUCTIVE)
    held = sum(time for (what, _), time in table.items() if what != Use.QUEUED)
    return productive, held, sum(time for pair, time in table.items() if is_queued(*pair))


def _whole(job: JobView, first: str) -> Table:
    """Return a job's time: all of it, or that of the days from the first on."""
    accounts, found = job.status.accounting, Counter[tuple[str, str]]()
    if not first:
        return accounts.table
    for day in accounts.days:
        if day.day >= first:
            found.update(_of_day(day))
    return found


def _of_day(day: DayTime) -> Table:
    productive = day.productive_device_milliseconds
    return {
        (Use.PRODUCTIVE.value, ""): productive,
        (HELD, ""): day.held_device_milliseconds - productive,
        (Use.QUEUED.value, ""): day.queued_device_milliseconds,
    }


def _by_queue(job: JobView, first: str) -> Iterator[Part]:
    yield NONE if job.spec is None else job.spec.queue_name, _whole(job, first)


def _by_day(job: JobView, first: str) -> Iterator[Part]:
    yield from ((day.day, _of_day(day)) for day in job.status.accounting.days if day.day >= first)


def _by_use(job: JobView, first: str) -> Iterator[Part]:
    yield from ((_use(*pair), {pair: time}) for pair, time in _whole(job, first).items())


def _by_node(job: JobView, first: str) -> Iterator[Part]:
    """Divide what is settled of an attempt in progress over its nodes; what is stored of earlier ones names none."""
    settled, attempt = job.status.accounting.settled, job.attempt
    if settled is None or attempt is None or settled.attempt != attempt.number or settled.at[:10] < first:
        return
    share_of = {pair: time // attempt.replicas for pair, time in table_of(settled.cells).items()}
    yield from ((node, share_of) for node in attempt.placement.node_by_index())


_PARTS: Mapping[By, Callable[[JobView, str], Iterable[Part]]] = {
    By.QUEUE: _by_queue,
    By.NAMESPACE: lambda job, first: [(job.namespace, _whole(job, first))],
    By.JOB: lambda job, first: [(f"{job.namespace}/{job.name}", _whole(job, first))],
    By.NODE: _by_node,
    By.DAY: _by_day,
    By.USE: _by_use,
}


def _label_of(seen: Snapshot, job: JobView, label: str) -> str:
    return str((seen.manifests[job.uid]["metadata"].get("labels") or {}).get(label, NONE))
