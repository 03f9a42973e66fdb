"""Spikes of the loss in the report: which steps jumped, what the run did then, and what they trained on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from polyreme.report.data import ReportData, StepPacks
from polyreme.report.parts import code, table
from polyreme.report.preview_page import pack_section
from polyreme.report.svg import safe
from polyreme_api.mixture import Rejection
from polyreme_api.progress import StepRecord

PICTURE_BYTES_MAX = 8 * 2**20
"""All images of spikes in a report; of later ones it says their size alone."""
Step = tuple[int, int]
"""An attempt, and a step of it."""


def steps_of(
    steps: Sequence[StepRecord], thrown_away: Sequence[StepRecord], rejections: Sequence[Rejection]
) -> list[Step]:
    """Return the spikes in their order."""
    answered = {(of.attempt, of.spike_step) for of in rejections}
    return sorted(answered | {(of.attempt, of.step) for of in itertools.chain(steps, thrown_away) if _is_spike(of)})


def spikes(data: ReportData) -> str:
    """List the spikes by attempt and step; empty without one."""
    found = [
        (record.attempt, record.step, _seen(record), _answer(record))
        for record in (*data.steps, *data.thrown_away)
        if _is_spike(record)
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
    listed = table(("#attempt", "#step", "seen", "what followed"), rows)
    left = [PICTURE_BYTES_MAX]
    return "<h3>Spikes</h3>" + listed + "".join(_packs(of, data.title, left) for of in data.spike_packs)


def _is_spike(record: StepRecord) -> bool:
    return record.spike_limit is not None or bool(record.recomputed)


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
