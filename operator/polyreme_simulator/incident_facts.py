"""Rules for the history of nodes: each time that a node is out has one incident, and their number is bounded."""

from __future__ import annotations

import dataclasses

from polyreme_cluster.election import LEASE_NAME, RENEW_S
from polyreme_cluster.port import Manifest, WatchEventType
from polyreme_local.api_server.record import Change
from polyreme_operator.health.incidents import Incident, concerns, name_of, parse_incident
from polyreme_operator.health.record import HEALTH, parse
from polyreme_simulator.cluster_history import BLIND_S, ClusterHistory
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState

OF_NODE_MAX = 2
"""Incidents of a node that the simulated installation keeps; few, so that seeds reach it."""
OF_ALL_MAX = 16
SHORT_S = 2.0 * BLIND_S
"""An outage that ends sooner may go by unwritten while one leader after the other is stopped: 72 s were seen."""
HANDOVER_S = 30.0
"""Longest time from the end of a leader to the next one's Lease."""
RACING = 2
"""By how many two leaders may exceed the limits while faults last."""


@dataclasses.dataclass(slots=True)
class _Reign:
    """When a replica led."""

    leader: str
    began_s: float
    renewed_s: float
    """When it renewed its Lease last."""


@dataclasses.dataclass(slots=True, eq=False)
class IncidentFacts:
    """Times that nodes were out, and their incidents."""

    observed: ObservedState
    history: ClusterHistory
    _outages: dict[str, float] = dataclasses.field(default_factory=dict)
    """Since when each outage was on record, by the name of its incident; not those that nothing can tell of."""
    _ended_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Until when it was."""
    _reigns: list[_Reign] = dataclasses.field(default_factory=list)
    """When each replica led."""
    _now: dict[str, str] = dataclasses.field(default_factory=dict)
    """The outage that each node's record shows."""
    _concerned: set[str] = dataclasses.field(default_factory=set)
    """Nodes that are out or on probation."""
    _ever: set[str] = dataclasses.field(default_factory=set)
    _incidents: dict[str, Incident] = dataclasses.field(default_factory=dict)
    _written: set[str] = dataclasses.field(default_factory=set)

    def changed(self, change: Change, world: ClusterView) -> None:
        """Take a change of a node or an incident."""
        deleted = change.type is WatchEventType.DELETED
        match change.record.kind:
            case "Node":
                self._node_changed(change.record.name, None if deleted else change.record.manifest, world)
            case "NodeIncident":
                self._incident_changed(change.record.name, change.record.manifest, deleted=deleted, world=world)
            case "Lease" if change.record.name == LEASE_NAME:
                holder = (change.record.manifest.get("spec") or {}).get("holderIdentity") or ""
                if not self._reigns or self._reigns[-1].leader != holder:
                    self._reigns.append(_Reign(holder, began_s=world.time_s(), renewed_s=world.time_s()))
                self._reigns[-1].renewed_s = world.time_s()
            case _:
                pass

    def _node_changed(self, name: str, node: Manifest | None, world: ClusterView) -> None:
        metadata = {} if node is None else node["metadata"]
        record, broken = parse((metadata.get("annotations") or {}).get(HEALTH))
        tainted = node is not None and any(
            taint["key"] == HEALTH for taint in (node.get("spec") or {}).get("taints") or ()
        )
        before = self._now.get(name)
        (self._concerned.add if concerns(record) else self._concerned.discard)(name)
        if node is None or broken:
            # What was on record only for a short while may be known to nothing any more.
            if before is not None and world.time_s() - self._outages.get(before, 0.0) < SHORT_S:
                self._outages.pop(before, None)
            self._over(name, world)
        elif record is None or not record.state.is_out:
            self._over(name, world)
        elif tainted:
            outage = name_of(name, record.since_s)
            if self._now.get(name) != outage:
                self._over(name, world)
            self._now[name] = outage
            if outage not in self._ever:
                self._ever.add(outage)
                self._outages[outage] = world.time_s()

    def _over(self, name: str, world: ClusterView) -> None:
        """Note that a node's record shows its outage no longer."""
        outage = self._now.pop(name, None)
        if outage is not None:
            self._ended_s[outage] = world.time_s()

    def _may_be_lost(self, outage: str) -> bool:
        """Tell whether a short outage was known only to a replica that has ended before it could be written."""
        began_s, ended_s = self._outages[outage], self._ended_s.get(outage, float("inf"))
        if ended_s - began_s >= SHORT_S:
            return False
        # The next one may come long after the last renewal of the one that knew, while writes fail; and that one ended
        # between this renewal and the one that it did not write.
        ends_s = [reign.began_s for reign in self._reigns]
        ends_s += [reign.renewed_s + RENEW_S for reign in self._reigns[:-1]]
        return any(began_s <= at_s <= ended_s + HANDOVER_S for at_s in ends_s)

    def _incident_changed(self, name: str, manifest: Manifest, *, deleted: bool, world: ClusterView) -> None:
        incident = parse_incident(manifest)
        if incident is None:
            self.observed.broke("an incident can be read", name, world)
            return
        if deleted:
            self._incidents.pop(name, None)
            if incident.is_open:
                self.observed.broke("no open incident is deleted", name, world)
            world.reached["incident deleted", ""] += 1
            return
        new = name not in self._incidents
        self._incidents[name] = incident
        if not new:
            return
        self._written.add(name)
        world.reached["incident written", ""] += 1
        node = incident.spec.node
        if name != name_of(node, incident.since_s) or name not in self._ever:
            self.observed.broke("an incident is of a time that its node was out", name, world)
        slack = RACING if self.history.blind(world) else 0
        of_node = sum(each.spec.node == node for each in self._incidents.values())
        if of_node > OF_NODE_MAX + slack or len(self._incidents) > OF_ALL_MAX + slack:
            self.observed.broke("the history is bounded", f"{of_node} of {node}, {len(self._incidents)}", world)

    def check_end(self, world: ClusterView) -> None:
        """Check the history once nothing has happened for long."""
        for outage in sorted(self._outages.keys() - self._written):
            if self._may_be_lost(outage):
                world.reached["incident lost with its leader", ""] += 1
                continue
            self.observed.broke("each time that a node was out has an incident", outage, world)
        for name, incident in sorted(self._incidents.items()):
            if incident.is_open and incident.spec.node not in self._concerned:
                self.observed.broke("an incident ends with its taint", f"{name}: {incident.status.state}", world)
            if incident.waits and not incident.is_open:
                world.reached["incident's cost open at the end", ""] += 1
            if incident.status.lost_seconds:
                world.reached["incident with a cost", ""] += 1
