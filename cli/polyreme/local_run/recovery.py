"""Rebuilds a run's job where the embedded cluster's journal is damaged or gone: from what else the run left.

What a job must keep is its UID, by which its data is pinned, and the numbers of its attempts: an attempt whose number
was used before is fenced. The UID is in the run's identity, the numbers in the checkpoint root. Pods, Lease and secret
are recreated for the next attempt; restart records and accounting are kept where the journal still has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from polyreme_api.job import TrainingJob, parse_job
from polyreme_api.job.placement import Placement
from polyreme_api.job.status import AttemptStatus
from polyreme_api.labels import KIND_JOB
from polyreme_api.store import ObjectStore
from polyreme_api.times import rfc3339
from polyreme_planner.plan import plan_for

_NUMBERED = re.compile(r"(?:attempts/|steps/a|a)([0-9]{6,7})[.\-]")


def newest_attempt(store: ObjectStore) -> int:
    """Return the highest attempt number that left a trace in a checkpoint root, 0 where none did."""
    numbers = [int(match[1]) for info in store.list("") if (match := _NUMBERED.match(info.key)) is not None]
    return max(numbers, default=0)


def rebuilt(
    manifests: Iterable[Mapping[str, Any]], job: TrainingJob, *, uid: str, attempt: int, node: str, now_s: float
) -> list[dict[str, Any]]:
    """Return the objects to begin with: the job, as if it had been stopped after its newest attempt.

    Args:
        manifests: What could be read of the journal.
        job: The job as it was applied.
        uid: Its UID, where the journal does not say.
        attempt: Number of its newest attempt, where the journal does not know of a newer one; 0: there was none.
        node: Node of its workers.
        now_s: The time.
    """
    known = next((manifest for manifest in manifests if manifest["kind"] == KIND_JOB), None)
    job = job if known is None else parse_job(dict(known))
    status = job.status
    if not status.finished:
        number = max(attempt, status.attempt.number if status.attempt else 0)
        stopped = None if number == 0 else _stopped(job, number, node, now_s)
        changed: dict[str, Any] = {"conditions": [], "attempt": stopped, "ready_replicas": 0, "replicas": 0}
        status = status.model_copy(update=changed | {"retry_at": None})
    manifest: dict[str, Any] = job.to_object()
    manifest["metadata"] |= {
        "uid": job.metadata.uid or uid,
        "generation": manifest["metadata"].get("generation") or 1,
        "resourceVersion": str(manifest["metadata"].get("resourceVersion") or 1),
        "creationTimestamp": manifest["metadata"].get("creationTimestamp") or rfc3339(now_s),
    }
    manifest["status"] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return [manifest]


def _stopped(job: TrainingJob, number: int, node: str, now_s: float) -> AttemptStatus:
    """An attempt that is known only by its number."""
    plan = plan_for(job.spec)
    return AttemptStatus(
        number=number,
        plan_hash=plan.hash,
        replicas=plan.replicas,
        devices=plan.devices,
        desired="Stop",
        placement=Placement.of([node] * plan.replicas),
        started_at=rfc3339(now_s),
    )
