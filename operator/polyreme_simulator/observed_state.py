"""The jobs, pods and attempts that the store's log showed so far, and the rules that were broken."""

from __future__ import annotations

import dataclasses
from collections import Counter

from polyreme_cluster.port import Manifest
from polyreme_simulator.cluster_view import ClusterView

REPORTED_MAX = 3
"""Violations of one rule that are reported."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFact:
    """One attempt, as its record said."""

    replicas: int
    devices: int
    replacements: dict[int, int]
    nodes: list[str]


class ObservedState:
    """What every rule reads, and where it notes a violation."""

    def __init__(self) -> None:
        self.violations: list[str] = []
        self._broken: Counter[str] = Counter()
        self.attempts: dict[tuple[str, int], AttemptFact] = {}
        """By UID of the job and number."""
        self.jobs: dict[str, Manifest] = {}
        """By UID."""
        self.pods: dict[str, Manifest] = {}
        """Worker pods, by UID; those of others are the capacity's."""
        self.conditions: dict[str, frozenset[str]] = {}
        """Conditions that hold, by UID of the job."""
        self.reached: Counter[tuple[str, str]] = Counter()
        """How often each fault or situation came about."""
        self.sent_s = 0.0
        """When the write of the operator that landed last was sent."""

    def true(self, uid: str, *kinds: str) -> bool:
        """Tell whether one of these conditions of a job holds."""
        return not self.conditions[uid].isdisjoint(kinds)

    def broke(self, rule: str, what: str, world: ClusterView) -> None:
        """Note a broken rule, a few times each."""
        self._broken[rule] += 1
        if self._broken[rule] <= REPORTED_MAX:
            self.violations.append(f"t={world.time_s():.3f} {rule}: {what}")
