"""Statuses of queues and the topology, written only when they change."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal, Protocol

from polyreme_api.fields import Condition
from polyreme_api.queue import (
    HEAD_MAX,
    QUOTAS_MAX,
    DecayedUsage,
    QueuedJob,
    ResourceUsage,
    TrainingQueueStatus,
)
from polyreme_api.times import rfc3339
from polyreme_api.topology import SPARES_SHOWN_MAX, UNLABELLED_MAX, ClusterTopologyStatus, LevelCount
from polyreme_cluster.port import ObjectRef
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.placement.topology import Arrangement
from polyreme_operator.publishing.queue_resources import RESOURCES_NAMED, named_resources
from polyreme_operator.queueing.fair_share import decayed
from polyreme_operator.queueing.order import first_of
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.actions import EmitEvent, WriteQueueStatus
from polyreme_operator.types.inventory import CPU, MEMORY, PODS
from polyreme_operator.types.queues import QueueView, Waiting
from polyreme_operator.types.views import TopologyView

READY = "Ready"
DECAY_WRITTEN_EVERY_S = 300.0
"""How often the decayed usage is written while nothing else changes."""
_OF_EVERY_NODE = frozenset({CPU, MEMORY, PODS, "ephemeral-storage"})
_AGED = ("decayed", "decayedAt")


class Reasons(Protocol):
    """Source of pending reasons."""

    def reason(self, waiting: Waiting) -> str:
        """Return the pending reason of a job."""
        ...


def queue_statuses(
    views: Mapping[str, QueueView],
    tree: QueueTree,
    jobs: JobIndex,
    used: Mapping[tuple[str, str], int],
    reasons: Reasons,
    *,
    now_s: float,
    offered: AbstractSet[str] = frozenset(),
) -> list[WriteQueueStatus]:
    """Return the status writes of changed queues; ``offered`` are the resources that nodes have."""
    below: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for (queue, resource), count in used.items():
        for at in tree.path(queue) or (queue,):
            below[at][resource] += count
    ledger = QuotaLedger(tree, used)
    admitted = Counter(job.spec.queue_name for uid in jobs.running if (job := jobs.views[uid]).spec is not None)
    refused = Counter(job.spec.queue_name for uid in jobs.refused if (job := jobs.views[uid]).spec is not None)
    reserving = Counter(jobs.waiting[uid].queue for uid in jobs.victims_of if uid in jobs.waiting)
    writes = []
    for name, view in sorted(views.items()):
        own = {resource: count for (queue, resource), count in used.items() if queue == name}
        shown = [
            resource
            for resource, count in sorted(below[name].items())
            if resource in tree.limited(name) or (count and resource not in _OF_EVERY_NODE)
        ]
        status = TrainingQueueStatus(
            observed_generation=view.generation,
            conditions=[_queue_ready(view, tree, now_s), *_resources_named(view, tree, offered, now_s)],
            pending=jobs.waiting.count(name),
            admitted=admitted[name],
            reserving=reserving[name],
            refused=refused[name],
            usage=[
                ResourceUsage(resource=each, used=below[name][each], borrowed=ledger.borrowed(name, each))
                for each in shown[:QUOTAS_MAX]
            ],
            decayed=[
                DecayedUsage(resource=resource, seconds=f"{seconds:.3f}")
                for resource, seconds in decayed(view, own, now_s)[:QUOTAS_MAX]
            ],
            decayed_at=rfc3339(now_s),
            head=_head(jobs, tree, view, reasons, now_s),
        )
        patch = _difference(view.status, status.model_dump(mode="json", by_alias=True, exclude_none=True))
        aged = now_s - view.used_at_s >= DECAY_WRITTEN_EVERY_S
        if patch.keys() - set(_AGED) or (patch and aged):
            ref = ObjectRef(kind="TrainingQueue", name=name)
            events = _warnings(view, ref, patch.get("conditions") or ())
            writes.append(
                WriteQueueStatus(ref=ref, resource_version=view.resource_version, status=patch, events=events)
            )
    return writes


def topology_status(
    view: TopologyView, arrangement: Arrangement, *, now_s: float, spares: Sequence[str] = ()
) -> list[WriteQueueStatus]:
    """Return the status write of the topology if it has changed."""
    problem = arrangement.problems[0] if arrangement.problems else None
    condition = _condition(
        view.status,
        holds=problem is None,
        reason=READY if problem is None else problem.reason,
        message="" if problem is None else "; ".join(each.message for each in arrangement.problems),
        generation=view.generation,
        now_s=now_s,
    )
    status = ClusterTopologyStatus(
        observed_generation=view.generation,
        conditions=[condition],
        domains=[
            LevelCount(level=level, count=len(names))
            for level, names in zip(arrangement.levels, arrangement.domain_names, strict=True)
        ],
        nodes=len(arrangement.names) - len(arrangement.unlabelled),
        unlabelled=len(arrangement.unlabelled),
        unlabelled_nodes=list(arrangement.unlabelled[:UNLABELLED_MAX]),
        spares=len(spares),
        spare_nodes=list(spares[:SPARES_SHOWN_MAX]),
    )
    patch = _difference(view.status, status.model_dump(mode="json", by_alias=True, exclude_none=True))
    ref = ObjectRef(kind="ClusterTopology", name=view.name)
    return [WriteQueueStatus(ref=ref, resource_version=view.resource_version, status=patch)] if patch else []


def _queue_ready(view: QueueView, tree: QueueTree, now_s: float) -> Condition:
    problem = tree.problems.get(view.name)
    return _condition(
        view.status,
        holds=problem is None,
        reason=READY if problem is None else problem.reason,
        message="" if problem is None else problem.message,
        generation=view.generation,
        now_s=now_s,
    )


def _resources_named(
    view: QueueView, tree: QueueTree, offered: AbstractSet[str], now_s: float
) -> tuple[Condition, ...]:
    if view.name in tree.problems:
        return ()
    found = named_resources(view, tree, offered)
    condition = _condition(
        view.status,
        kind=RESOURCES_NAMED,
        holds=found.holds,
        reason=found.reason,
        message=found.message,
        generation=view.generation,
        now_s=now_s,
    )
    return (condition,)


def _warnings(view: QueueView, ref: ObjectRef, conditions: Iterable[Mapping[str, Any]]) -> tuple[EmitEvent, ...]:
    """Return the warning that devices are unlimited or unknown, whenever the reason or the resources change."""
    known = {entry.get("message") for entry in view.status.get("conditions") or ()}
    return tuple(
        EmitEvent(
            ref=ref,
            uid=view.uid,
            reason=entry["reason"],
            message=entry["message"],
            warning=True,
            key=f"{view.generation}-{entry['reason']}".lower(),
        )
        for entry in conditions
        if (entry["type"], entry["status"]) == (RESOURCES_NAMED, "False") and entry["message"] not in known
    )


def _condition(
    before: Mapping[str, Any],
    *,
    kind: str = READY,
    holds: bool,
    reason: str,
    message: str,
    generation: int,
    now_s: float,
) -> Condition:
    truth: Literal["True", "False"] = "True" if holds else "False"
    entries = before.get("conditions") or ()
    known: Mapping[str, Any] = next((entry for entry in entries if entry.get("type") == kind), {})
    moved = known.get("status") != truth or not known.get("lastTransitionTime")
    return Condition(
        type=kind,
        status=truth,
        reason=str(reason),
        message=message,
        last_transition_time=rfc3339(now_s) if moved else known["lastTransitionTime"],
        observed_generation=generation,
    )


def _head(jobs: JobIndex, tree: QueueTree, view: QueueView, reasons: Reasons, now_s: float) -> list[QueuedJob]:
    first: Sequence[Waiting] = first_of(jobs.waiting, tree, view.name, now_s, limit=HEAD_MAX)
    return [
        QueuedJob(
            position=position,
            namespace=jobs.views[waiting.uid].namespace,
            name=jobs.views[waiting.uid].name,
            priority=waiting.priority + _points(view, waiting, now_s),
            reason=reasons.reason(waiting),
        )
        for position, waiting in enumerate(first, start=1)
    ]


def _points(view: QueueView, waiting: Waiting, now_s: float) -> int:
    return int(max(0.0, now_s - waiting.since_s) // view.aging_s) if view.aging_s > 0 else 0


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changed fields, whole; None for removed ones."""
    changed = {name: value for name, value in after.items() if before.get(name) != value}
    return {**changed, **{name: None for name in before if name not in after}}
