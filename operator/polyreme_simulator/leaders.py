"""Rules for leadership: what a replica may send, and until when."""

from __future__ import annotations

import dataclasses

from polyreme_cluster.election import LEASE_S
from polyreme_cluster.port import Manifest
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState


@dataclasses.dataclass(slots=True, eq=False)
class LeaderFacts:
    """Renewals of the operator's Lease, and what replicas send."""

    observed: ObservedState
    _renewed_s: dict[str, float] = dataclasses.field(default_factory=dict)
    _holder: str = ""
    """Last replica that had the Lease."""
    _named: str = ""
    """Holder that the Lease names; empty: it was given back."""
    _began_s: dict[str, float] = dataclasses.field(default_factory=dict)
    rules_since_s: float = 0.0
    """When the present leader sent its first write: before that it has listed every kind."""

    def renewed(self, manifest: Manifest, world: ClusterView) -> None:
        """Take a change of the operator's Lease."""
        holder = (manifest.get("spec") or {}).get("holderIdentity") or ""
        if holder != self._named:
            # A replica that takes the Lease lists every kind again, also if it gave it back itself a moment ago.
            self._began_s.pop(holder, None)
            self._named = holder
        if holder:
            self._renewed_s[holder] = world.time_s()
        if holder and self._holder and holder != self._holder:
            world.reached["another replica leads", ""] += 1
        self._holder = holder or self._holder

    def went_on(self, name: str, world: ClusterView) -> None:
        """A replica continues after a stop."""
        if self._holder != name and name in self._renewed_s:
            world.reached["an old leader continues", ""] += 1

    def sending(self, name: str, what: str, world: ClusterView) -> None:
        """A replica sends a write that only a leader may send."""
        now_s = world.time_s()
        self.rules_since_s = self._began_s.setdefault(name, now_s)
        silent_s = now_s - self._renewed_s.get(name, float("-inf"))
        if silent_s > LEASE_S:
            self.observed.broke("only the leader writes", f"{name}: {what}, {silent_s:.1f} s after its renewal", world)
