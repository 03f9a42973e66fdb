"""Spikes of the loss in the report: which steps jumped, what the run did then, and what they trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from polyreme.report.data import ReportData, StepPacks
from polyreme.report.parts import code, table
from polyreme.report.preview_page import pack_section
from polyreme.report.svg import safe
from polyreme_api.mixture import Rejection
from polyreme_api.progress import StepRecord
from polyreme_api.step_columns import table_of

PICTURE_BYTES_MAX = 8 * 2**20
"""All images of spikes in a report; of later ones it says their size alone."""


class Spike(NamedTuple):
    """One spike, in words."""

    attempt: int
    step: int
    seen: str
    answer: str


def spikes_of(parts: Iterable[Sequence[StepRecord]], rejections: Iterable[Rejection]) -> list[Spike]:
    """Return the spikes by attempt and step.

    Args:
        parts: Steps, those that were trained again included.
        rejections: Spikes for which the run went back.
    """
    found = [Spike(of.attempt, of.spike_step, of.why, _way_back(of)) for of in rejections]
    for steps in map(table_of, parts):
        again = (at for at, words in enumerate(steps.column("recomputed")) if words)
        records = [steps[at] for at in {*steps.sparse("spike_limit"), *again}]
        found += [Spike(of.attempt, of.step, _seen(of), _answer(of)) for of in records]
    return sorted(found)


def spikes(data: ReportData) -> str:
    """List the spikes, and what the last of them trained on; empty without one."""
    found = spikes_of((data.steps, data.thrown_away), data.rejections)
    if not found:
        return ""
    rows = [(f"{of.attempt}", f"{of.step:,}", safe(of.seen), safe(of.answer)) for of in found]
    listed = table(("#attempt", "#step", "seen", "what followed"), rows)
    left = [PICTURE_BYTES_MAX]
    return "<h3>Spikes</h3>" + listed + "".join(_packs(of, data.title, left) for of in data.spike_packs)


def _packs(of: StepPacks, run: str, left: list[int]) -> str:
    """Show what a step trained on, folded."""
    shown = f"{len(of.packs)} of {of.of_packs:,} packs"
    command = code(f"polyreme data preview --job {run} --step {of.step} --pack {len(of.packs)}")
    more = f"<p class='soft'>Later packs: {command}</p>" if of.of_packs > len(of.packs) else ""
    packs = "".join(pack_section(pack, left, heading="h4") for pack in of.packs)
    return (
        f"<details><summary>What step {of.step:,} of attempt {of.attempt} trained on ({shown})</summary>"
        f"{packs}{more}</details>"
    )


def _seen(record: StepRecord) -> str:
    update = "" if record.update_norm is None else f", update norm {record.update_norm:.4g}"
    limit = "" if record.spike_limit is None else f", limit {record.spike_limit:.4g}"
    return f"loss {record.loss:.4g}, gradient norm {record.gradient_norm:.4g}{update}{limit}"


def _answer(record: StepRecord) -> str:
    answer = "skipped" if record.skipped else "trained on"
    return f"{record.recomputed}; {answer}" if record.recomputed else answer


def _way_back(of: Rejection) -> str:
    return f"rolled back; data of steps {of.from_step:,} to {of.from_step + of.skip_steps - 1:,} skipped"
