"""Spikes of the loss in the report: which steps jumped, and what the run did then."""

from __future__ import annotations

from polyreme.report.data import ReportData
from polyreme.report.parts import table
from polyreme.report.svg import safe
from polyreme_api.progress import StepRecord


def spikes(data: ReportData) -> str:
    """List the spikes by attempt and step; empty without one."""
    found = [
        (record.attempt, record.step, _seen(record), _answer(record))
        for record in (*data.steps, *data.thrown_away)
        if record.spike_limit is not None or record.recomputed
    ]
    found += [
        (
            of.attempt,
            of.spike_step,
            of.why,
            f"rolled back; data of steps {of.from_step:,} to {of.from_step + of.skip_steps - 1:,} skipped",
        )
        for of in data.rejections
    ]
    if not found:
        return ""
    rows = [(f"{attempt}", f"{step:,}", safe(seen), safe(answer)) for attempt, step, seen, answer in sorted(found)]
    return "<h3>Spikes</h3>" + table(("#attempt", "#step", "seen", "what followed"), rows)


def _seen(record: StepRecord) -> str:
    update = "" if record.update_norm is None else f", update norm {record.update_norm:.4g}"
    limit = "" if record.spike_limit is None else f", limit {record.spike_limit:.4g}"
    return f"loss {record.loss:.4g}, gradient norm {record.gradient_norm:.4g}{update}{limit}"


def _answer(record: StepRecord) -> str:
    answer = "skipped" if record.skipped else "trained on"
    return f"{record.recomputed}; {answer}" if record.recomputed else answer
