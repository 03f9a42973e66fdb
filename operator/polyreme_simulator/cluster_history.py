"""Current and recent state of the cluster that decides whether a job has room: queues, domains, nodes, others' pods.

The operator decides on what it has seen, which may be old: so rules ask what it may have known.
"""

from __future__ import annotations

import dataclasses

from polyreme_cluster.port import Manifest, WatchEventType
from polyreme_local.api_server.record import Change
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.domains import Domains
from polyreme_simulator.nodes import devices_of, opted_in_only, takes_pods
from polyreme_simulator.ownership import owner_uid
from polyreme_simulator.quotas import Queues

BLIND_S = 60.0
"""How stale the operator's view may be when its write lands, while faults last and shortly after."""
SETTLED_S = 45.0
"""Time after the last fault from which on the operator's view is current."""
KNOWN_S = 3.0
"""How stale its view may be then."""
ENDED = frozenset({"Succeeded", "Failed"})


@dataclasses.dataclass(slots=True, eq=False)
class ClusterHistory:
    """The present and the latest past of the cluster."""

    queues: Queues = dataclasses.field(default_factory=lambda: Queues({}))
    domains: Domains = dataclasses.field(default_factory=lambda: Domains({}, []))
    opted_in_only: frozenset[str] = frozenset()
    """Nodes that only jobs with ``acceptProbation`` use."""
    foreign: dict[str, tuple[str, int, float]] = dataclasses.field(default_factory=dict)
    """Node, devices and time of binding of pods that are none of ours, by UID."""
    changed_s: float = 0.0
    """When last something changed that decides who waits, and why."""
    _past: list[tuple[float, Queues, Domains]] = dataclasses.field(default_factory=list)
    """Queues and domains of the past, with the time until which they applied."""
    _usable: frozenset[str] = frozenset()
    """Nodes to which new pods may go."""
    _usable_past: list[tuple[float, frozenset[str]]] = dataclasses.field(default_factory=list)
    """The same until when."""
    _foreign_past: list[tuple[float, str, int]] = dataclasses.field(default_factory=list)
    """Until when such pods were there, where, and with how many devices."""

    def note(self, change: Change, world: ClusterView) -> None:
        """Take a change of a queue, a topology, a node, or a pod that is none of ours."""
        deleted, record = change.type is WatchEventType.DELETED, change.record
        match record.kind:
            case "Pod" if not owner_uid(record.manifest):
                self._foreign_changed(record.uid, record.manifest, deleted, world)
            case "TrainingQueue":
                specs = {name: spec for name, spec in self.queues.specs.items() if name != record.name}
                if not deleted:
                    specs[record.name] = record.manifest["spec"]
                if specs != self.queues.specs:
                    self._keep(world)
                    self.queues = Queues(specs)
            case "Node" | "ClusterTopology":
                domains = self.domains.after(record.kind, record.manifest, deleted=deleted)
                if domains != self.domains:
                    self._keep(world)
                    self.domains = domains
                if record.kind == "Node":
                    self._node_changed(record.name, usable=not deleted and takes_pods(record.manifest), world=world)
                    self._probation_changed(record.name, not deleted and opted_in_only(record.manifest), world)
            case _:
                pass

    def blind(self, world: ClusterView) -> bool:
        """Tell whether faults last, or ended so lately that what the operator knows may be old."""
        return world.faulty or world.time_s() - world.calm_since_s < SETTLED_S

    def possible(self, world: ClusterView) -> list[tuple[Queues, Domains]]:
        """Return the queues and domains that the operator's decision may rest on."""
        since_s = self.known_since_s(world)
        past = [(queues, domains) for until_s, queues, domains in self._past if until_s >= since_s]
        return [(self.queues, self.domains), *past]

    def known_since_s(self, world: ClusterView) -> float:
        """Return the time since which what the operator knows may not have changed."""
        return world.time_s() - (BLIND_S if self.blind(world) else KNOWN_S)

    def usable_always(self, world: ClusterView) -> frozenset[str]:
        """Return the nodes that took pods all the time that the operator's decision may rest on."""
        return self._usable.intersection(*self._usable_lately(world))

    def usable_ever(self, world: ClusterView) -> frozenset[str]:
        """Return the nodes that took pods at some time that its decision may rest on."""
        return self._usable.union(*self._usable_lately(world))

    def foreign_lately(self, world: ClusterView) -> list[tuple[str, int]]:
        """Return node and devices of others' pods that are gone, which it may not know yet."""
        since_s = self.known_since_s(world)
        return [(node, count) for until_s, node, count in self._foreign_past if until_s >= since_s]

    def _usable_lately(self, world: ClusterView) -> list[frozenset[str]]:
        since_s = self.known_since_s(world)
        return [names for until_s, names in self._usable_past if until_s >= since_s]

    def _keep(self, world: ClusterView) -> None:
        """Remember the queues and domains of until now."""
        now_s = world.time_s()
        self._past = [entry for entry in self._past if now_s - entry[0] < BLIND_S]
        if now_s > 0.0:
            # While the cluster is made there is no operator yet. Later ones see of many changes at once each by itself.
            self._past.append((now_s, self.queues, self.domains))
        self.changed_s = now_s

    def _node_changed(self, name: str, *, usable: bool, world: ClusterView) -> None:
        names = self._usable | {name} if usable else self._usable - {name}
        if names != self._usable:
            now_s = world.time_s()
            self._usable_past = [entry for entry in self._usable_past if now_s - entry[0] < BLIND_S]
            if now_s > 0.0:
                self._usable_past.append((now_s, self._usable))
            self._usable, self.changed_s = names, now_s

    def _probation_changed(self, name: str, only: bool, world: ClusterView) -> None:
        names = self.opted_in_only | {name} if only else self.opted_in_only - {name}
        if names != self.opted_in_only:
            self.opted_in_only, self.changed_s = names, world.time_s()

    def _foreign_changed(self, uid: str, pod: Manifest, deleted: bool, world: ClusterView) -> None:
        node = pod["spec"].get("nodeName")
        if deleted or not node or (pod.get("status") or {}).get("phase") in ENDED:
            gone = self.foreign.pop(uid, None)
            if gone is not None:
                self.changed_s = now_s = world.time_s()
                self._foreign_past = [entry for entry in self._foreign_past if now_s - entry[0] < BLIND_S]
                self._foreign_past.append((now_s, gone[0], gone[1]))
        elif uid not in self.foreign:
            self.foreign[uid] = (node, devices_of(pod), world.time_s())
            self.changed_s = world.time_s()
