"""Everything that is known of one job, on one page."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from polyreme.plugin.printing import columns, facts
from polyreme.plugin.rows import age, message_of, progress_of, ready_of, reason_of, state_of, steps_of
from polyreme.plugin.snapshot import Snapshot
from polyreme.run_files.stacks import StackGroup
from polyreme.views.formatting import duration, rate, share
from polyreme_api.job.accounting import ettr_of, goodput_of
from polyreme_api.job.status import AttemptStatus
from polyreme_api.progress import ProgressRecord
from polyreme_cluster.port import Manifest
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

EVENTS_MAX = 20
NODES_MAX = 16
RESTARTS_MAX = 10
STACKS_MAX, FRAMES_MAX = 4, 6
"""Groups of ranks with equal stacks, and calls of each, the most recent first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table of the page."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    more: str = ""
    """What the rows leave out."""


def render(
    seen: Snapshot, job: JobView, events: Sequence[Manifest], *, doubt: str = "", stacks: Sequence[StackGroup] = ()
) -> RenderableType:
    """Draw the page.

    Args:
        seen: The job with its pods and its Lease.
        job: The job.
        events: Its events.
        doubt: Why its state may be old.
        stacks: Of the ranks of its newest attempt that hung.
    """
    parts: list[RenderableType] = [facts(head(seen, job, doubt))]
    for section in [*sections(seen, job, events), *_stacks(stacks)]:
        parts += [Text(), Text(section.title, style="bold"), columns(section.headings, section.rows)]
        parts += [Text(section.more)] if section.more else []
    return Group(*parts)


def sections(seen: Snapshot, job: JobView, events: Sequence[Manifest]) -> list[Section]:
    """Return the tables of the page that have rows."""
    found = [_conditions(seen, job), _workers(seen, job), _restarts(seen, job), _spent(job), _events(seen, events)]
    return [section for section in found if section is not None and section.rows]


def head(seen: Snapshot, job: JobView, doubt: str) -> list[tuple[str, object]]:
    """Return the facts at the top, each with its name; what has no value is left out by those who show them."""
    spec, status, attempt, record = job.spec, job.status, job.attempt, progress_of(seen, job)
    steps = steps_of(job, record)
    step = status.step if record is None or status.finished else max(status.step, record.step)
    checkpoint = status.last_checkpoint
    pace = f"{duration(record.step_seconds)} a step, {rate(record.tokens_per_second)}" if record is not None else None
    trains, state = record is not None and not status.finished, state_of(job)[0]
    return [
        ("Name", f"{job.namespace}/{job.name}"),
        ("State", state if reason_of(job) in {"-", state} else f"{state} ({reason_of(job)})"),
        ("Why", message_of(job)),
        ("Note", doubt),
        ("Queue", spec.queue_name if spec is not None else None),
        ("Priority", job.priority),
        ("Workers", f"{ready_of(job)} ready{_size(job)}"),
        ("Devices", f"{spec.workers.devices} {spec.workers.device_resource} each" if spec is not None else None),
        ("Layout", status.layout),
        ("Recompute", status.recompute or None),
        ("Attempt", _attempt(job, attempt) if attempt is not None else None),
        ("Step", f"{step} of {steps}" if steps else step),
        ("Phase", record.phase.value if record is not None and trains else None),
        ("Pace", pace if trains else None),
        ("Stage", record.stage or None if record is not None and trains else None),
        ("Loss", record.loss if record is not None else None),
        ("Held out", _held_out(record)),
        ("Checkpoint", f"step {checkpoint.step} of attempt {checkpoint.attempt}" if checkpoint is not None else None),
        ("Restarts", status.restarts),
        ("Preemptions", status.preemption_count or None),
        ("Goodput", share(ratio) if (ratio := goodput_of(status.accounting.table)) is not None else None),
        ("ETTR", share(ratio) if (ratio := ettr_of(status.accounting.table)) is not None else None),
        ("Age", age(seen.now_s - job.created_s)),
    ]


def _attempt(job: JobView, attempt: AttemptStatus) -> str:
    asked = ", asked to stop" if attempt.desired == "Stop" and job.admitted else ""
    return f"{attempt.number}, {attempt.scope}{asked}"


def _size(job: JobView) -> str:
    """Say what the number of workers may be, and whether the spec asks for another one."""
    if job.spec is None or job.status.finished:
        return ""
    workers, words = job.spec.workers, ""
    if workers.min_replicas or workers.max_replicas:
        words = f", from {workers.min_replicas or '-'} to {workers.max_replicas or '-'}"
    present = job.replicas_in_force
    if present and workers.replicas != present:
        words += f", {workers.replicas} asked for{' and refused' if job.is_resize_refused else ''}"
    return words


def _held_out(record: ProgressRecord | None) -> str | None:
    if record is None or record.held_out_loss is None:
        return None
    return f"loss {record.held_out_loss:.4f} after step {record.held_out_step}"


def _conditions(seen: Snapshot, job: JobView) -> Section:
    rows = [
        (
            entry.type,
            entry.status,
            entry.reason,
            age(seen.now_s - parse_time_or(entry.last_transition_time, seen.now_s)),
            entry.message or None,
        )
        for entry in job.status.conditions
    ]
    return Section(title="Conditions", headings=("TYPE", "STATUS", "REASON", "SINCE", "MESSAGE"), rows=rows)


def _workers(seen: Snapshot, job: JobView) -> Section | None:
    """Say how many workers sit on which node, and how their pods are."""
    if job.attempt is None or not job.admitted:
        return None
    nodes = job.attempt.placement.node_by_index()
    phases: dict[str, Counter[str]] = {}
    for pod in seen.pods:
        if pod.job_uid == job.uid:
            word = "Terminating" if pod.deleting else pod.phase.value
            phases.setdefault(pod.place, Counter())[word] += 1
    counts = Counter(nodes)
    rows = [
        (node, count, ", ".join(f"{word} {n}" for word, n in sorted(phases.get(node, Counter()).items())) or None)
        for node, count in list(counts.items())[:NODES_MAX]
    ]
    more = len(counts) - NODES_MAX
    words = f"and {more} more nodes" if more > 0 else ""
    return Section(title="Workers", headings=("NODE", "WORKERS", "PODS"), rows=rows, more=words)


def _restarts(seen: Snapshot, job: JobView) -> Section:
    rows = [
        (
            record.attempt,
            record.cause,
            record.scope,
            record.step,
            record.checkpoint_step,
            age(seen.now_s - parse_time_or(record.at, seen.now_s)),
            record.message or None,
        )
        for record in list(job.status.restart_records)[-RESTARTS_MAX:]
    ]
    headings = ("ATTEMPT", "CAUSE", "SCOPE", "STEP", "CHECKPOINT", "AGE", "MESSAGE")
    return Section(title="Restarts", headings=headings, rows=rows)


def _spent(job: JobView) -> Section:
    """Say what the devices' time was spent on, and why."""
    spent = sorted(job.status.accounting.table.items(), key=lambda cell: -cell[1])
    rows = [(what, why or None, duration(time_ms / 1_000)) for (what, why), time_ms in spent]
    return Section(title="Device time", headings=("WHAT", "WHY", "TIME x DEVICES"), rows=rows)


def _stacks(stacks: Sequence[StackGroup]) -> list[Section]:
    rows: list[tuple[object, ...]] = []
    for each in stacks[:STACKS_MAX]:
        frames = [line.strip() for line in each.lines[:FRAMES_MAX]] or ["none: stopped, or ended before"]
        rows += [(each.attempt, ", ".join(map(str, each.ranks)), frames[0]), *(("", "", frame) for frame in frames[1:])]
    return [Section(title="Stacks", headings=("ATTEMPT", "RANKS", "STACK"), rows=rows)] if rows else []


def _events(seen: Snapshot, events: Sequence[Manifest]) -> Section:
    def at_s(event: Manifest) -> float:
        said = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
        return parse_time_or(said, 0.0)

    newest = sorted(events, key=at_s)[-EVENTS_MAX:]
    rows = [
        (age(seen.now_s - at_s(event)), event.get("type"), event.get("reason"), event.get("message"))
        for event in newest
    ]
    return Section(title="Events", headings=("AGE", "TYPE", "REASON", "MESSAGE"), rows=rows)
