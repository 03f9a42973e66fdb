"""Snapshots of the health of nodes: the cache, and what was read of incidents and of the Jobs of repairs.

Incidents are listed and Jobs are read one by one, so that the operator needs no right to watch either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from polyreme_cluster.port import Manifest
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.health.facts import NodeFacts
from polyreme_operator.health.incidents import Incident, Kept, parse_incident, time_of
from polyreme_operator.health.record import NodeState, parse
from polyreme_operator.health.repair import JobSight
from polyreme_operator.health_decision.history import open_jobs
from polyreme_operator.health_decision.snapshot import Limits, Memory, NodeView, Said, Snapshot
from polyreme_operator.reconcile.incident_cost import JobFacts
from polyreme_operator.reconcile.observe import current_record
from polyreme_operator.settings import Settings
from polyreme_operator.snapshots import job_snapshot


class HealthObserver:
    """What is known of nodes, and what was read that the cache lacks.

    Args:
        cache: What is known of the cluster.
        settings: Settings of the installation.
    """

    def __init__(self, cache: ClusterCache, settings: Settings) -> None:
        self._cache = cache
        self._limits = Limits(
            repairs=settings.repairs,
            namespace=settings.repairs_namespace,
            of_node=settings.incidents_per_node,
            of_all=settings.incidents_max,
        )
        self.memory = Memory()
        self.said: dict[str, Said] = {}
        """By node, what was decided when its record was written, until the next snapshot."""
        self.jobs: dict[str, JobSight] = {}
        """By node, what was last read of the Job of its repair."""
        self.evictions: dict[str, tuple[int, float]] = {}
        """By node, how many rounds of evictions were refused in a row, and when the last one was."""
        self.kept: dict[str, Kept] = {}
        """Every stored incident, by name."""
        self.refused: set[str] = set()
        """Incidents that the API server refuses, until they are listed again."""
        self._incidents: dict[str, dict[str, Incident]] = defaultdict(dict)

    def list_incidents(self, manifests: Iterable[Manifest]) -> set[str]:
        """Replace the incidents by those that are stored; return the nodes whose record and history may differ."""
        self.kept.clear()
        self.refused.clear()
        self._incidents.clear()
        for manifest in manifests:
            self.put_incident(manifest)
        nodes = {incident.spec.node for each in self._incidents.values() for incident in each.values()}
        gone = {name for name, seen in self.memory.nodes.items() if seen.incidents}
        return nodes | gone | self._cache.health.tainted

    def put_incident(self, manifest: Manifest) -> int:
        """Note an incident as it is stored; return by how many device-seconds its cost has grown."""
        incident = parse_incident(manifest)
        if incident is None:
            return 0
        node, ended_s = incident.spec.node, None if incident.is_open else time_of(incident.status.ended_at)
        self.kept[incident.name] = Kept(name=incident.name, node=node, uid=incident.uid, ended_s=ended_s)
        before, ours = self._incidents[node].get(incident.name), self.memory.nodes.get(node)
        if incident.is_open or incident.waits or (ours is not None and incident.name in ours.incidents):
            self._incidents[node][incident.name] = incident
        return incident.status.lost_seconds - (0 if before is None else before.status.lost_seconds)

    def remove_incident(self, name: str, node: str) -> None:
        """Forget an incident that is deleted."""
        self.kept.pop(name, None)
        self._incidents[node].pop(name, None)

    def snapshot(self, due: Collection[str], now_s: float, *, writable: bool) -> Snapshot:
        """Return what is known now.

        Args:
            due: Nodes to decide about.
            now_s: The time.
            writable: Whether the incidents are read, and none is being written.
        """
        cache = self._cache
        open_uids = {
            uid
            for name in due
            for incident in (self.memory.nodes[name].incidents.values() if name in self.memory.nodes else ())
            for uid in open_jobs(incident)
        }
        said, self.said = self.said, {}
        return Snapshot(
            now_s=now_s,
            limits=self._limits,
            due=due,
            view=lambda name: self._view(name, now_s),
            said=said,
            present=cache.health.nodes.keys(),
            tainted=cache.health.tainted,
            not_ready_since_s=cache.health.not_ready_since_s.values(),
            policies=cache.health.policies,
            levels=tuple((level.name, level.node_label) for level in cache.topology.levels),
            jobs=cache.jobs.views,
            costs={uid: self._cost(uid, now_s) for uid in open_uids},
            incidents=self._incidents,
            writable=writable,
            kept=self.kept,
            refused=self.refused,
            memory=self.memory,
        )

    def _view(self, name: str, now_s: float) -> NodeView | None:
        cache = self._cache
        node = cache.health.nodes.get(name)
        if node is None:
            self.jobs.pop(name, None)
            return None
        jobs = sorted(cache.ledger.jobs_on(name))
        record, broken = parse(node.annotation)
        is_repaired = record is not None and (record.repair is not None or record.state is NodeState.REPAIRING)
        counted = self._limits.repairs and is_repaired
        others = tuple(cache.pods.others_on(name)) if counted else ()
        if not others:
            self.evictions.pop(name, None)
        refused, evicted_s = self.evictions.get(name, (0, 0.0))
        facts = NodeFacts(
            name=name,
            record=record,
            broken=broken,
            tainted=node.tainted,
            workers=len(jobs),
            loaded=cache.pods.runs_on(name, jobs),
            repairs=self._limits.repairs,
            claimed=node.claimed,
            others=len(others) if counted else None,
            job=self.jobs.get(name),
        )
        return NodeView(
            node=node,
            facts=facts,
            silent=cache.health.is_silent(name, now_s),
            jobs=tuple(cache.jobs.views[uid] for uid in jobs if uid in cache.jobs.views),
            others=others,
            refused=refused,
            evicted_s=evicted_s,
        )

    def _cost(self, uid: str, now_s: float) -> JobFacts | None:
        snapshot = job_snapshot(self._cache, uid, now_s=now_s)
        return None if snapshot is None else JobFacts(job=snapshot.job, progress=current_record(snapshot))
