"""Launchers without ranks: KWOK's pods run nothing, so this writes on the jobs' Leases what launchers would write."""

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_api import labels
from polyreme_api.job.status import AttemptStatus
from polyreme_api.ownership import job_object_metadata
from polyreme_api.progress import CheckpointRef, Outcome, ProgressRecord, RankPhase
from polyreme_cluster.port import ClusterPort, ConflictError, Manifest, NotFoundError, ObjectRef
from tests.leaders import Leaders

LOOK_S = 0.2


@dataclasses.dataclass(slots=True)
class Orders:
    """What the launchers of one job do."""

    obeys: bool = True
    """Whether they checkpoint and stop when they are asked to."""
    joins: bool = True
    """Whether they join at all."""
    succeeds: bool = False
    """Whether they end well as soon as they train."""
    record: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of what they say that are to be other than they would be."""


class HollowLaunchers:
    """The launchers of all jobs of a namespace that have launchers."""

    def __init__(self, cluster: ClusterPort, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self.leaders = Leaders()
        self.orders: dict[str, Orders] = {}
        """By the job's name."""
        self.said: dict[str, ProgressRecord] = {}
        """Last word by the job's name."""
        self.stopped_at_step: dict[str, int] = {}
        """Step of the checkpoint with which a job stopped, by its name."""

    def order(self, job: str) -> Orders:
        """Return what the launchers of a job do, to be changed."""
        return self.orders.setdefault(job, Orders())

    async def run(self, ended: asyncio.Event) -> None:
        """Look and speak until the end."""
        while not ended.is_set():
            jobs = (await self._cluster.list(labels.KIND_JOB, namespace=self._namespace)).items
            up = {node["metadata"]["name"] for node in (await self._cluster.list("Node")).items if _is_ready(node)}
            pods = (await self._cluster.list("Pod", namespace=self._namespace)).items
            # A machine that is off says nothing, whatever the API server holds of its pods.
            heard = [pod for pod in pods if pod["spec"].get("nodeName") in up]
            for job in jobs:
                await self._look(job, heard)
            await asyncio.sleep(LOOK_S)

    async def _look(self, job: Manifest, pods: Sequence[Manifest]) -> None:
        spec, status = job["spec"], job.get("status") or {}
        mode = (spec["workers"].get("runtime") or {}).get("mode", "Launcher")
        if status.get("attempt") is None or mode != "Launcher":
            return
        attempt = AttemptStatus.model_validate(status["attempt"])
        alive = _alive(job, attempt, pods)
        name = job["metadata"]["name"]
        said = self.said.get(name)
        if 0 not in alive or (said is not None and said.attempt == attempt.number and said.outcome is not None):
            return
        orders = self.order(name)
        checkpoint = None if said is None else said.checkpoint
        before = said if said is not None and said.attempt == attempt.number else None
        record = _next(attempt, before, checkpoint, len(alive), orders, steps=spec["training"]["steps"])
        if not await self._put(job, record):
            return
        self.said[name] = record
        if record.outcome is Outcome.STOPPED and record.checkpoint is not None:
            self.stopped_at_step[name] = record.checkpoint.step

    async def _put(self, job: Manifest, record: ProgressRecord) -> bool:
        own = job["metadata"]["name"], job["metadata"]["uid"]
        ref = ObjectRef(kind="Lease", namespace=self._namespace, name=labels.job_object_name(*own))
        secret = job["status"]["attempt"].get("secretName") or ref.name
        try:
            key = await self._cluster.get(ObjectRef(kind="Secret", namespace=self._namespace, name=secret))
            annotations = self.leaders.annotations(job, record, [key], at_s=time.time())
            await self._cluster.patch(ref, {"metadata": {"annotations": annotations, **job_object_metadata(*own)}})
        except (NotFoundError, ConflictError):
            return False
        return True


def _is_ready(node: Manifest) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"].get("conditions") or ())


def _alive(job: Manifest, attempt: AttemptStatus, pods: Sequence[Manifest]) -> set[int]:
    """Return the indices whose pod of this attempt runs."""
    found = set()
    for pod in pods:
        tags = pod["metadata"].get("labels") or {}
        if tags.get(labels.LABEL_JOB_UID) != job["metadata"]["uid"] or pod["metadata"].get("deletionTimestamp"):
            continue
        index, replacement = int(tags[labels.LABEL_INDEX]), int(tags[labels.LABEL_REPLACEMENT])
        if pod["status"]["phase"] == "Running" and replacement == attempt.replacement(index):
            found.add(index)
    return found


def _next(
    attempt: AttemptStatus,
    before: ProgressRecord | None,
    checkpoint: CheckpointRef | None,
    joined: int,
    orders: Orders,
    *,
    steps: int,
) -> ProgressRecord:
    """Return what an attempt says next: it joins, is released, trains a step at a look, and stops if it is asked to."""
    resumed = 0 if checkpoint is None else checkpoint.step
    released = (before is not None and before.released) or (orders.joins and joined == attempt.replicas)
    step = resumed if before is None else min(steps, before.step + 1) if before.released else before.step
    outcome = None
    if released and orders.succeeds:
        outcome, step = Outcome.SUCCEEDED, steps
    elif attempt.desired == "Stop" and orders.obeys:
        outcome = Outcome.STOPPED
        if attempt.checkpoint_requested and released:
            checkpoint = CheckpointRef(attempt=attempt.number, step=step)
    record = ProgressRecord(
        attempt=attempt.number,
        replacement=attempt.replacement(0),
        phase=RankPhase.TRAINING if released else RankPhase.STARTING,
        released=released,
        joined=joined if orders.joins else 0,
        step=step,
        steps=steps,
        step_seconds=LOOK_S,
        checkpoint=checkpoint,
        resumed_from_step=resumed or None,
        outcome=outcome,
    )
    return record.model_copy(update=dict(orders.record))
