"""Kinds that the operator watches, and the parts of their objects that it caches."""

from __future__ import annotations

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.types.changes import Changes

WATCHED_KINDS = (
    "TrainingJob",
    "TrainingQueue",
    "ClusterTopology",
    "PriorityClass",
    "LimitRange",
    "RuntimeClass",
    "Pod",
    "Node",
    "Lease",
    "ConfigMap",
    "Namespace",
)


class Kind:
    """How objects of a kind enter and leave the cache. By default nothing of them is kept."""

    def is_others(self, ref: ObjectRef, manifest: Manifest) -> bool:
        """Tell whether an unknown object is of no interest: nothing of it is stored, not even its version."""
        del ref, manifest
        return False

    def put(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes | None:
        """Add or replace an object; None if it is to be removed, since it is of no interest any more.

        Raises:
            Exception: If it can't be read.
        """
        del ref, manifest, now_s
        return Changes()

    def put_unreadable(self, ref: ObjectRef, manifest: Manifest, why: str) -> Changes | None:
        """Keep what is known of an object that can't be read any more; None if it is to be removed."""
        del ref, manifest, why
        return None

    def remove(self, ref: ObjectRef) -> Changes:
        """Remove an object."""
        del ref
        return Changes()


def watched_kinds(*, health: bool) -> tuple[str, ...]:
    """Return the kinds that an operator watches, with or without the health of nodes."""
    return (*WATCHED_KINDS, labels.KIND_FAULT_POLICY) if health else WATCHED_KINDS
