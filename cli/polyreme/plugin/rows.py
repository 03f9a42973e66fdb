"""Jobs in columns: ``get`` says how they stand, ``top`` how they get on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from polyreme.plugin.printing import columns
from polyreme.plugin.snapshot import Snapshot
from polyreme.views.formatting import duration, rate, share
from polyreme_api.fields import Condition
from polyreme_api.job.accounting import ettr_of, goodput_of
from polyreme_api.progress import ProgressRecord
from polyreme_operator.types.views import JobView

_RANKED = ("Succeeded", "Failed", "Degraded", "Suspended", "Restarting", "Running", "PodsReady", "Admitted", "Queued")
_WORDS = {"PodsReady": "Starting", "Admitted": "Starting"}
GET = ("NAME", "STATE", "QUEUE", "READY", "ATTEMPT", "STEP", "AGE", "REASON")
GET_WIDE = ("PRIORITY", "RESTARTS", "LAYOUT", "CHECKPOINT", "NODES", "MESSAGE")
TOP = ("NAME", "STATE", "STEP", "STEP TIME", "TOKENS", "LOSS", "GOODPUT", "ETTR", "DEVICES", "LEFT")


def get_table(jobs: Iterable[JobView], *, now_s: float, wide: bool, namespaced: bool) -> Table:
    """Return the table of ``get``."""
    headings = (("NAMESPACE",) if namespaced else ()) + GET + (GET_WIDE if wide else ())
    return columns(headings, (_get_row(job, now_s, wide=wide, namespaced=namespaced) for job in jobs))


def top_rows(seen: Snapshot, jobs: Iterable[JobView]) -> list[dict[str, Any]]:
    """Return how admitted jobs get on, the fastest users of devices first."""
    rows = [_top_row(job, progress_of(seen, job)) for job in jobs if job.admitted and not job.status.finished]
    return sorted(rows, key=lambda row: (-row["devices"], row["namespace"], row["name"]))


def top_table(rows: Iterable[dict[str, Any]], *, namespaced: bool) -> Table:
    """Return the table of ``top``."""
    headings = (("NAMESPACE",) if namespaced else ()) + TOP
    return columns(headings, ([*([row["namespace"]] if namespaced else []), *_top_cells(row)] for row in rows))


def state_of(job: JobView) -> tuple[str, Condition | None]:
    """Return a job's state in one word, with the condition that it comes from."""
    status = job.status
    if _never_runs(job):
        return "Misconfigured", status.condition("Queued")
    if status.preemption is not None and job.admitted:
        return "Preempting", status.condition("Preempted")
    for kind in _RANKED:
        condition = status.condition(kind)
        if condition is not None and condition.status == "True":
            return _WORDS.get(kind, kind), condition
    # Between a resume and its place in the queue, nothing holds.
    return "Queued" if status.conditions else "New", status.condition("Queued")


def reason_of(job: JobView) -> str:
    """Return the reason for a job's state: one of a finite set."""
    state, condition = state_of(job)
    if _never_runs(job):
        return "Misconfigured"
    ranks = job.status.condition("Running")
    if state == "Starting" and ranks is not None:
        return ranks.reason
    return condition.reason if condition else "-"


def message_of(job: JobView) -> str:
    """Return the reason for a job's state, for people."""
    state, condition = state_of(job)
    if _never_runs(job):
        return job.invalid
    pods = job.status.condition("PodsReady")
    if state == "Starting" and pods is not None and pods.status != "True" and pods.message:
        return pods.message
    return condition.message if condition else ""


def refusal_of(job: JobView) -> str:
    """Say why the number of workers that the spec asks for is refused, and how to withdraw it; empty if it is not."""
    refused = job.status.condition("ResizeRefused")
    if refused is None or not job.is_resize_refused:
        return ""
    undo = f"`kubectl polyreme scale {job.name} --replicas {job.replicas_in_force}` withdraws the request"
    return f"{refused.message}; {undo}"


def _never_runs(job: JobView) -> bool:
    """Tell whether a job waits with a spec that can't be read; one that runs continues as it was admitted."""
    return bool(job.invalid) and not job.status.finished and not job.admitted


def progress_of(seen: Snapshot, job: JobView) -> ProgressRecord | None:
    """Return the newest record of a job's present attempt."""
    lease = seen.leases.get(job.uid)
    record = None if lease is None else lease.record
    return record if record is not None and job.attempt is not None and record.attempt == job.attempt.number else None


def ready_of(job: JobView) -> str:
    """Say how many workers have joined, of how many."""
    if job.attempt is not None:
        return job.status.ready
    return f"{job.status.ready_replicas}/{job.spec.workers.replicas if job.spec is not None else 0}"


def age(seconds: float) -> str:
    """Write an age as kubectl does: ``45s``, ``12m``, ``5h``, ``3d``."""
    whole = max(0, int(seconds))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def _get_row(job: JobView, now_s: float, *, wide: bool, namespaced: bool) -> list[Any]:
    spec, status, attempt = job.spec, job.status, job.attempt
    row: list[Any] = [job.namespace] if namespaced else []
    steps = spec.training.steps if spec is not None and spec.training is not None else None
    row += [
        job.name,
        state_of(job)[0],
        spec.queue_name if spec is not None else None,
        ready_of(job),
        attempt.number if attempt is not None else None,
        f"{status.step}/{steps}" if steps else status.step,
        age(now_s - job.created_s),
        reason_of(job),
    ]
    if wide:
        checkpoint = status.last_checkpoint
        row += [
            job.priority,
            status.restarts,
            status.layout or None,
            checkpoint.step if checkpoint is not None else None,
            len(set(attempt.placement.node_by_index())) if attempt is not None and job.admitted else None,
            message_of(job) or None,
        ]
    return row


def steps_of(job: JobView, record: ProgressRecord | None) -> int | None:
    """Return the steps of a run: by which its ranks train, or those of its spec; None while they are not counted."""
    training = job.spec.training if job.spec is not None else None
    return (record.steps if record is not None else 0) or (training.steps if training is not None else None)


def _top_row(job: JobView, record: ProgressRecord | None) -> dict[str, Any]:
    attempt = job.attempt
    steps = steps_of(job, record)
    step = max(job.status.step, record.step if record is not None else 0)
    pace_s = record.step_seconds if record is not None else None
    return {
        "namespace": job.namespace,
        "name": job.name,
        "state": state_of(job)[0],
        "step": step,
        "steps": steps,
        "stepSeconds": pace_s,
        "tokensPerSecond": record.tokens_per_second if record is not None else None,
        "stage": record.stage or None if record is not None else None,
        "loss": record.loss if record is not None else None,
        "heldOutLoss": record.held_out_loss if record is not None else None,
        "goodputRatio": goodput_of(job.status.accounting.table),
        "ettrRatio": ettr_of(job.status.accounting.table),
        "devices": attempt.replicas * attempt.devices if attempt is not None else 0,
        "leftSeconds": (steps - step) * pace_s if steps and pace_s and step < steps else None,
        "updatedAtSeconds": record.updated_at_s if record is not None else None,
    }


def _top_cells(row: dict[str, Any]) -> list[Any]:
    return [
        row["name"],
        row["state"],
        f"{row['step']}/{row['steps']}" if row["steps"] else row["step"],
        duration(row["stepSeconds"]),
        rate(row["tokensPerSecond"]),
        row["loss"],
        share(row["goodputRatio"]),
        share(row["ettrRatio"]),
        row["devices"],
        duration(row["leftSeconds"]),
    ]
