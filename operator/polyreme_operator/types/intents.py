"""Intents: admissions that are about to be written, recorded in one object by compare-and-swap before any job changes.

Compare-and-swap of one job does not protect capacity that two jobs share, so a batch is first written here. The next
decision, by the same process or its successor, settles every entry before it admits anything: an entry is *confirmed*
when its job has the attempt, *cancelled* when the job's ``cancelledAdmissions`` has increased since (a write in flight
then conflicts), *void* when the job is gone. While an entry is *open* nothing is admitted, so an entry need not record
its usage and stays small for a gang of any size.

If the object is missing or can't be read, it is unknown what an earlier leader may still be writing. Then every
unfinished job counts as an entry, and is cancelled before anything is admitted.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar

from polyreme_operator.types.views import JobView

INTENTS_KEY = "intents.json"
_Value = TypeVar("_Value", str, int)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """One admission, move or resize that is about to be written to its job."""

    namespace: str
    name: str
    uid: str
    attempt: int
    cancelled_admissions: int
    """The job's ``cancelledAdmissions`` when the intent was made."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Intents:
    """The newest batch. ``resource_version`` is None while the object does not exist."""

    resource_version: str | None = None
    entries: tuple[Intent, ...] = ()
    known: bool = True
    """Whether ``entries`` contain everything that an earlier leader may still be writing."""


class IntentState(StrEnum):
    """State of an entry."""

    OPEN = "open"
    CONFIRMED = "confirmed"
    CANCELLED = "cancelled"
    VOID = "void"


def next_attempt(job: JobView) -> Intent:
    """Return the entry of a job's next attempt."""
    return Intent(
        namespace=job.namespace,
        name=job.name,
        uid=job.uid,
        attempt=1 if job.attempt is None else job.attempt.number + 1,
        cancelled_admissions=job.status.cancelled_admissions,
    )


def assume_all(intents: Intents, jobs: Iterable[JobView]) -> Intents:
    """Replace unknown intents by entries for all unfinished ``jobs``; return known intents unchanged."""
    if intents.known:
        return intents
    return Intents(resource_version=intents.resource_version, entries=tuple(next_attempt(job) for job in jobs))


def intent_state(intent: Intent, jobs: Mapping[str, JobView]) -> IntentState:
    """Return the state of an entry, from its job (``jobs`` by UID)."""
    job = jobs.get(intent.uid)
    if job is None:
        return IntentState.VOID
    if job.attempt is not None and job.attempt.number >= intent.attempt:
        return IntentState.CONFIRMED
    if job.status.cancelled_admissions > intent.cancelled_admissions:
        return IntentState.CANCELLED
    return IntentState.OPEN


def render_intents(entries: tuple[Intent, ...]) -> str:
    """Serialize entries as JSON."""
    rows = [
        {
            "namespace": entry.namespace,
            "name": entry.name,
            "uid": entry.uid,
            "attempt": entry.attempt,
            "cancelledAdmissions": entry.cancelled_admissions,
        }
        for entry in entries
    ]
    return json.dumps(rows, separators=(",", ":"))


def parse_intents(text: str) -> tuple[Intent, ...]:
    """Parse entries.

    Raises:
        KeyError, TypeError, ValueError: If the text is not what ``render_intents`` writes.
    """
    return tuple(
        Intent(
            namespace=_typed(row["namespace"], str),
            name=_typed(row["name"], str),
            uid=_typed(row["uid"], str),
            attempt=_typed(row["attempt"], int),
            cancelled_admissions=_typed(row["cancelledAdmissions"], int),
        )
        for row in json.loads(text)
    )


def _typed(value: object, kind: type[_Value]) -> _Value:
    if not isinstance(value, kind):
        raise TypeError(f"an intent holds {value!r}, expected {kind.__name__}")
    return value
