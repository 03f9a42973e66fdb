"""Overview of a deleted job, as HTML: facts of its record, its loss, its spec, and earlier jobs of its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.console import markup
from polyreme.console.job_form import as_yaml
from polyreme.console.run_paths import run_links
from polyreme.plugin.console.bucket_reader import JobSteps
from polyreme.plugin.console.overview import facts, losses
from polyreme.plugin.console.past_records import DELETED, PastJob
from polyreme.report.parts import table
from polyreme.report.svg import safe
from polyreme.views.formatting import NOTHING, moment
from polyreme_api.differences import differences

EARLIER_MAX, DIFFERENCES_MAX = 20, 8
"""Earlier jobs of a name that are shown, and fields of each; their records have all."""


def deleted_overview(job: PastJob, steps: JobSteps) -> str:
    """Draw the page's content."""
    record, run = job.record, job.row.run
    parts = [
        f"<div class='actions'>{run_links(run)}</div>{markup.badge(DELETED)}<h1>{safe(run.whole)}</h1>",
        f"<p class='lead'>The API server has no job of this name; this is its record, {safe(job.url)}.</p>",
        "<p class='soft'>The pod template is not recorded: a clone starts without one.</p>",
        *losses(run, steps),
        facts(
            [
                ("Step", int(steps.curve.step[-1]) if steps.curve.step else None),
                ("Last loss", steps.figures.get("loss")),
                ("Best loss", steps.figures.get("bestLoss")),
                ("Best held-out loss", steps.figures.get("bestHeldoutLoss")),
                ("Version", record.version),
                ("Layout", record.layout),
                ("Seed", record.seed),
                ("Datasets", ", ".join(f"{name} {version}".rstrip() for name, version in record.datasets.items())),
                ("Cluster, as its pods saw it", record.cluster or "embedded (polyreme run)"),
                ("UID", record.uid),
                ("Began", moment(record.written_at_s)),
            ]
        ),
        f"<h2>Spec</h2><pre tabindex='0'>{markup.long_text(as_yaml(record.spec))}</pre>",
    ]
    return "".join(parts)


def earlier_jobs(jobs: Sequence[PastJob], newest: PastJob) -> str:
    """Draw earlier jobs of a name, each with what differs from the newest record; nothing if there are none."""
    spec = newest.record.spec if jobs else {}
    rows = [
        [
            safe(job.uid),
            moment(job.row.changed),
            safe("it is the newest record" if job is newest else _differing(spec, job.record.spec)),
            safe(job.url),
        ]
        for job in jobs[:EARLIER_MAX]
    ]
    heads = ("uid", "began", "differs from the newest record", "record")
    more = f"<p class='soft'>and {len(jobs) - EARLIER_MAX:,} more</p>" if len(jobs) > EARLIER_MAX else ""
    return f"<h2>Earlier jobs of this name</h2>{table(heads, rows)}{more}" if rows else ""


def _differing(newest: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    found = list(differences("", newest, earlier))
    shown = [
        f"{field.removeprefix('.')}={NOTHING if value is None else json.dumps(value)[:60]}"
        for field, _, value in found[:DIFFERENCES_MAX]
    ]
    more = [f"{len(found) - DIFFERENCES_MAX} more fields"] if len(found) > DIFFERENCES_MAX else []
    return ", ".join([*shown, *more]) or "no field"
