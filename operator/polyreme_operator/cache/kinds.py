"""Which kinds the operator watches, and what of their objects it takes into its cache."""

from __future__ import annotations

import dataclasses

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.admission import KINDS as ADMISSION_KINDS
from polyreme_operator.cache.leases import LeaseIndex
from polyreme_operator.cache.pods import PodChange
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.queues import QueueView
from polyreme_operator.types.views import JobView

WATCHED_KINDS = (
    "TrainingJob",
    "TrainingQueue",
    "ClusterTopology",
    "PriorityClass",
    *ADMISSION_KINDS,
    "Pod",
    "Node",
    "Lease",
    "ConfigMap",
    "Namespace",
)


def watched_kinds(*, health: bool) -> tuple[str, ...]:
    """Return the kinds that an operator watches, with or without the health of nodes."""
    return (*WATCHED_KINDS, labels.KIND_FAULT_POLICY) if health else WATCHED_KINDS


def pod_changes(change: PodChange) -> Changes:
    """Return the effects of a change of pods."""
    return Changes(jobs=set(change.jobs), capacity=change.freed, left=change.left)


def is_others(ref: ObjectRef, manifest: Manifest, leases: LeaseIndex) -> bool:
    """Tell whether an unknown object is of no interest: nothing of it is stored, not even its version."""
    if ref.kind == "ConfigMap":
        return ref.name != labels.INTENTS_NAME
    return ref.kind == "Lease" and leases.is_others(ref, manifest)


def begins(before: JobView, after: JobView) -> bool:
    """Tell whether another attempt has begun."""
    number = 0 if before.attempt is None else before.attempt.number
    return after.attempt is not None and after.attempt.number != number


def settled(queue: QueueView) -> QueueView:
    """Return a queue without its status, which the operator writes itself."""
    return dataclasses.replace(queue, resource_version="", used_seconds=(), used_at_s=0.0)
