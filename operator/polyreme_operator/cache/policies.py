"""NodeFaultPolicies, which the index of nodes' health keeps."""

from __future__ import annotations

from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.health import HealthIndex
from polyreme_operator.cache.kinds import Kind
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.parse_settings import parse_fault_policy


class PolicyKind(Kind):
    """Policies by name."""

    def __init__(self, health: HealthIndex) -> None:
        self._health = health

    def put(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes:
        """Add or replace a policy."""
        del ref, now_s
        return Changes(health=self._health.put_policy(parse_fault_policy(manifest)))

    def remove(self, ref: ObjectRef) -> Changes:
        """Remove a policy."""
        return Changes(health=self._health.remove_policy(ref.name))
