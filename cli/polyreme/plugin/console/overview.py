"""Overview of a job, as HTML: state and why, what it waits for, facts, workers, restarts, device time, events."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyreme.console import markup
from polyreme.console.curves import curves_chart
from polyreme.console.run_source import RunName
from polyreme.plugin.console.bucket_reader import JobSteps
from polyreme.plugin.description import head, sections
from polyreme.plugin.reading import Sight
from polyreme.plugin.rows import progress_of, steps_of
from polyreme.plugin.why import Answer
from polyreme.report.parts import table
from polyreme.report.svg import safe
from polyreme.views.formatting import duration
from polyreme.views.output import text
from polyreme_operator.types.views import JobView

TOLD_ABOVE = frozenset({"Name", "State", "Why", "Note"})
"""Facts that the page's head has."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSight:
    """A job with what was read about it."""

    job: JobView
    sight: Sight
    answer: Answer
    doubt: str = ""
    left_out: Sequence[str] = ()
    """Sentences on what the user may not see."""


def overview(seen: JobSight, steps: JobSteps) -> str:
    """Draw the page's content, with the curve of its loss where it has one."""
    job, answer = seen.job, seen.answer
    record = progress_of(seen.sight.seen, job)
    reason = f" ({answer.reason})" if answer.reason and answer.reason != answer.state else ""
    parts = [
        f"{markup.badge(answer.state)}<h1>{safe(answer.job)}</h1>",
        f"<p class='lead'>{safe(answer.state + reason)}: {safe(answer.sentence or 'nothing more is known')}</p>",
        markup.progress(max(job.status.step, record.step if record else 0), steps_of(job, record)),
        *(f"<p>{safe(words)}</p>" for words in (answer.remedy, answer.resize, *answer.notes) if words),
        *_place(answer),
        *losses(RunName(namespace=job.namespace, name=job.name), steps),
        facts(head(seen.sight.seen, job, seen.doubt)),
    ]
    events = [event for event in seen.sight.events if (event.get("involvedObject") or {}).get("uid") == job.uid]
    for section in sections(seen.sight.seen, job, events):
        rows = [[safe(text(cell)) for cell in row] for row in section.rows]
        parts.append(f"<h2>{safe(section.title)}</h2>{table([each.lower() for each in section.headings], rows)}")
        parts += [f"<p class='soft'>{safe(section.more)}</p>"] if section.more else []
    parts += [markup.notice(words) for words in seen.left_out]
    return "".join(parts)


def losses(run: RunName, steps: JobSteps) -> list[str]:
    """Draw the loss over the steps that count."""
    if steps.said:
        return [markup.notice(f"Its curves are not shown: {steps.said}")]
    if not steps.curve.step:
        return []
    return [f'<div class="card">{curves_chart({run: steps.curve}, measure="loss", axis="step")}</div>']


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    """Write facts, each with its name, as a table."""
    rows = "".join(
        f'<tr><th scope="row">{safe(name.lower())}</th><td>{safe(text(value))}</td></tr>'
        for name, value in pairs
        if name not in TOLD_ABOVE and value is not None and value != ""
    )
    body = f"<table class='compare'><tbody>{rows}</tbody></table>"
    return f'<div class="card table" tabindex="0" role="region" aria-label="facts">{body}</div>'


def _place(answer: Answer) -> list[str]:
    """Write who waits before this job, and who is stopped for it."""
    parts = []
    if answer.position:
        words = f"Place {answer.position} of {answer.waiting} in queue {answer.queue}"
        parts.append(f"<p>{safe(words)}, {answer.ahead} jobs are ahead of it in all queues.</p>")
    if answer.makes_way_for:
        left = duration(max(0.0, answer.makes_way_left_s or 0.0))
        parts.append(f"<p>It is preempted by {safe(answer.makes_way_for)}, within {left}.</p>")
    if answer.before:
        rows = [[job_link(name), safe(queue), str(number), safe(why)] for name, queue, number, why in answer.before]
        parts.append(f"<h2>Ahead of it</h2>{table(('job', 'queue', '#priority', 'reason'), rows)}")
    if answer.victims:
        rows = [[job_link(each.name), duration(max(0.0, each.left_s))] for each in answer.victims]
        parts.append(f"<h2>Preempted for it</h2>{table(('job', '#within'), rows)}")
    return parts


def job_link(name: str) -> str:
    """Return a link to the page of ``namespace/name``."""
    namespace, _, short = name.partition("/")
    return markup.link(markup.run_path(namespace, short), name)
