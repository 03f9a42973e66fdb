"""Jobs of a cluster as rows of the console's list, filtered, sorted and cut into pages as a home's index does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from polyreme.console.run_fields import fields_of, spellings_of
from polyreme.console.run_source import SORTED_BY, RunList, RunQuery, RunRow
from polyreme.plugin.rows import message_of, progress_of, state_of, steps_of
from polyreme.plugin.snapshot import Snapshot
from polyreme_api.job.accounting import goodput_of
from polyreme_api.run_record import recorded_spec
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView


def row_of(seen: Snapshot, job: JobView, *, defaults: bool = False) -> RunRow:
    """Return the row of a job.

    Args:
        seen: What was read.
        job: The job.
        defaults: Whether its fields include defaults that the API server does not write, as those of records do.
    """
    spec = recorded_spec(job.spec) if defaults and job.spec is not None else seen.manifests[job.uid].get("spec") or {}
    status, record = job.status, progress_of(seen, job)
    changes = (parse_time_or(entry.last_transition_time, 0.0) for entry in status.conditions)
    return RunRow(
        namespace=job.namespace,
        name=job.name,
        state=state_of(job)[0],
        step=max(status.step, record.step if record is not None else 0),
        steps=steps_of(job, record),
        loss=record.loss if record is not None else None,
        held_out=record.held_out_loss if record is not None else None,
        goodput=goodput_of(status.accounting.table),
        attempt=job.attempt.number if job.attempt is not None else None,
        changed=max([job.created_s, *changes]),
        message=message_of(job),
        fields=dict(fields_of(spec)),
    )


def page_of(rows: Iterable[RunRow], query: RunQuery) -> RunList:
    """Return the rows that a query asks for."""
    every = list(rows)
    found = [row for row in every if _matches(row, query)]
    found.sort(key=lambda row: (row.changed, row.namespace, row.name), reverse=True)
    valued = [(_value(row, query.sort), row) for row in found]
    known = [(_order(value), row) for value, row in valued if value is not None]
    known.sort(key=lambda pair: pair[0], reverse=query.descending)
    ordered = [row for _, row in known] + [row for value, row in valued if value is None]
    return RunList(
        rows=ordered[query.offset : query.offset + query.count],
        total=len(ordered),
        states=dict(Counter(row.state for row in every)),
    )


def _matches(row: RunRow, query: RunQuery) -> bool:
    text = query.text.lower()
    named = not text or text in row.name.lower() or text in row.namespace.lower()
    in_state = not query.state or row.state == query.state
    return named and in_state and all(row.fields.get(field) in spellings_of(value) for field, value in query.where)


def _value(row: RunRow, key: str) -> Any:
    return getattr(row, key) if key in SORTED_BY else row.fields.get(key)


def _order(value: Any) -> tuple[bool, Any]:
    """Order numbers before texts."""
    return isinstance(value, str), value


def named_states() -> Sequence[str]:
    """Return the states by which a person filters."""
    return ("Queued", "Starting", "Running", "Restarting", "Degraded", "Suspended", "Succeeded", "Failed")
