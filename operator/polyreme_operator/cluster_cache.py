"""Cache of the cluster, kept up to date by watch events, lists, and the answers to our own writes.

Of two states of an object the one with the larger resource version is kept, whatever its source. (Resource versions of
one kind are ordered integers: KEP-5504.) Indices that decisions need are updated with each event, so the cost of a
decision depends on what it looks at and not on the size of the cluster.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import ChainMap, defaultdict
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef, WatchEvent, WatchEventType
from polyreme_operator.cache.absent_nodes import AbsentNodes
from polyreme_operator.cache.access import AccessIndex
from polyreme_operator.cache.admission import AdmissionIndex
from polyreme_operator.cache.children import ChildIndex
from polyreme_operator.cache.health import HealthIndex
from polyreme_operator.cache.jobs import JobIndex, is_ours
from polyreme_operator.cache.kinds import begins, is_others, pod_changes, settled
from polyreme_operator.cache.leases import LeaseIndex
from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.cache.plan_book import PlanBook, with_plans
from polyreme_operator.cache.pods import PodIndex
from polyreme_operator.cache.priorities import PriorityIndex
from polyreme_operator.cache.refusals import RefusalIndex
from polyreme_operator.cache.seen_versions import VOID, SeenVersions
from polyreme_operator.cache.usage import UsageLedger
from polyreme_operator.publishing.pending_reasons import PendingReasons
from polyreme_operator.publishing.queue_status import queue_statuses, topology_status
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.reconcile.quarantine import fault_message
from polyreme_operator.scheduler import Batch, ClusterSnapshot
from polyreme_operator.settings import Settings
from polyreme_operator.types.actions import WriteQueueStatus
from polyreme_operator.types.changes import Changes, Unreadable
from polyreme_operator.types.intents import Intents, assume_all
from polyreme_operator.types.job_keys import JobKeys
from polyreme_operator.types.observer import CycleReport
from polyreme_operator.types.parse import (
    parse_foreign_pod,
    parse_intents_object,
    parse_job_view,
    parse_node,
    parse_pod,
    parse_unreadable_job,
)
from polyreme_operator.types.parse_node import parse_health_node
from polyreme_operator.types.parse_settings import (
    parse_fault_policy,
    parse_queue,
    parse_topology,
)
from polyreme_operator.types.plans import JobPlans, PlanRequest
from polyreme_operator.types.priority import parse_priority_class
from polyreme_operator.types.queues import QueueView
from polyreme_operator.types.reasons import Reason, Scope
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView, NodeView, TopologyView

_log = logging.getLogger(__name__)


class ClusterCache:
    """Views by object, with the indices that decisions need."""

    def __init__(self, settings: Settings | None = None, *, keys: JobKeys | None = None) -> None:
        self._keys, self._settings = keys or JobKeys(), settings or Settings()
        self.health = HealthIndex()
        self.fences_held = False
        """Whether no node counts as lost, since too many are not ready at once."""
        self.nodes = NodeTable()
        self.ledger = UsageLedger(self.nodes)
        self.jobs = JobIndex(self.ledger)
        self.queues: dict[str, QueueView] = {}
        self.topology: TopologyView | None = None
        self.pending_reasons = PendingReasons(self.jobs)
        self.plans = PlanBook()
        self.versions = SeenVersions()
        self._present: dict[str, set[ObjectRef]] = defaultdict(set)
        self._job_refs: dict[ObjectRef, str] = {}
        self.pods = PodIndex(self.nodes, self.ledger)
        self.leases = LeaseIndex(self._keys, self._job_at)
        self._absent_nodes = AbsentNodes(lambda node: bool(self.ledger.jobs_on(node)))
        self._priorities = PriorityIndex(self.jobs)
        self._admission = AdmissionIndex(self.jobs)
        self._tree = QueueTree.of((), default_unlimited=self._settings.default_unlimited)
        self._access = AccessIndex(self.jobs, self._tree)
        self._intents = Intents(known=False)
        self._settled: set[str] = set()
        """Jobs of the intents whose admission needs no cancellation any more."""
        self.children = ChildIndex()
        self.refusals = RefusalIndex()
        self._asking: set[str] = set()
        self._bookings = 0

    def apply(self, event: WatchEvent, *, now_s: float) -> Changes:
        """Apply one watch event."""
        if event.type is WatchEventType.BOOKMARK:
            return Changes()
        if event.type is WatchEventType.DELETED:
            return self.remove(ObjectRef.of(event.object), version=int(event.resource_version))
        return self.put(event.object, now_s=now_s)

    def put(self, manifest: Manifest, *, now_s: float, listed_at: int | None = None, reread: bool = False) -> Changes:
        """Store one object, unless a newer state is known; ``listed_at`` is the version of the list that it is from.

        ``reread``: it was just read by its name, which also finds an object that watches no longer select.
        """
        ref, version = ObjectRef.of(manifest), int(manifest["metadata"]["resourceVersion"])
        if ref not in self.versions and is_others(ref, manifest, self.leases):
            return Changes()
        if listed_at is not None and self.versions.shows_restore(ref, version, listed_at=listed_at):
            self.void_versions(f"{ref} is listed at version {version} and was seen at {self.versions.of(ref)}")
        known = self.versions.of(ref)
        if version < known or (version == known and not (reread and ref not in self._present[ref.kind])):
            return Changes()
        self.versions.take(ref, version)
        self._present[ref.kind].add(ref)
        try:
            changes = self._parse(ref, manifest, now_s)
        except Exception as error:  # noqa: BLE001 - whatever is stored must not stop the operator
            _log.warning("can't parse object: %s, %s", ref, fault_message(error))
            changes = self._put_unreadable(ref, manifest, fault_message(error))
        return self._noted(changes)

    def quarantine(self, uid: str, why: str, *, in_cycle: bool, reason: Reason = Reason.INTERNAL_ERROR) -> Changes:
        """Quarantine a job; an empty ``why`` ends its quarantine."""
        job = self.jobs.views.get(uid)
        if job is None:
            return Changes()
        in_cycle = in_cycle and why != ""
        change = self.jobs.put(dataclasses.replace(job, fault=why, fault_reason=reason, fault_in_cycle=in_cycle))
        return self._noted(Changes(jobs={uid}, capacity=change.freed, asks=change.asks))

    def take_plans(self, request: PlanRequest, answer: JobPlans) -> Changes:
        """Store the answer to a request for plans."""
        waited, turned_away = self.plans.put(request, answer)
        changes = Changes()
        for uid in sorted(waited | turned_away):
            job = self.jobs.views.get(uid)
            if job is not None and job.planning is not None:
                change = self.jobs.put(self._with_plans(job))
                # The scheduler may have to decide about a size that was requested before its plan existed.
                changes |= Changes(jobs={uid}, capacity=change.freed, asks=True)
        return self._noted(changes)

    def _with_plans(self, job: JobView) -> JobView:
        """Attach a job's plans if they are known, and request them otherwise."""
        if job.planning is None:
            return job
        answer = self.plans.answer(job.planning)
        if answer is not None:
            return with_plans(job, answer)
        self.plans.want(job.planning, job.uid)
        return job

    def remove(self, ref: ObjectRef, *, version: int | None) -> Changes:
        """Remove an object that was deleted at ``version``; None: a read did not find it."""
        if version is not None:
            if version < self.versions.of(ref):
                return Changes()
            self.versions.take(ref, version)
        return self._noted(self._forget(ref))

    def forget_unlisted(self, kind: str, listed: AbstractSet[ObjectRef], *, version: int) -> Changes:
        """Remove objects that a complete list lacks, unless they are newer: a watch may miss deletions."""
        changes = Changes()
        for ref in sorted(self._present[kind] - listed):
            if self.versions.of(ref) <= version:
                changes |= self._noted(self._forget(ref))
        self.versions.drop_deleted(kind, self._present[kind], version=version)
        return changes

    def void_versions(self, why: str) -> None:
        """Accept lower versions from now on, since the cluster was restored from a backup."""
        _log.warning("the cluster was restored from a backup, discarding known versions: %s", why)
        self.versions.void()
        self.leases.void()
        for uid, job in self.jobs.views.items():
            # The same generation may now belong to another spec.
            self.jobs.views[uid] = dataclasses.replace(job, generation=VOID)

    def decided(self, batch: Batch, *, now_s: float) -> set[str]:
        """Store the scheduler's reasons; return the UIDs of jobs whose published reason changes."""
        return self.pending_reasons.take(batch, tree=self._tree, now_s=now_s)

    def is_intended(self, uid: str) -> bool:
        """Tell whether the intents name a job whose outcome is not settled."""
        return uid not in self._settled and any(entry.uid == uid for entry in self._intents.entries)

    def settle(self, uid: str) -> None:
        """Note that a job's intended write can't be applied any more: a later write was accepted, or it was refused."""
        self._settled.add(uid)

    def ask(self, uid: str, *, asks: bool) -> Changes:
        """Note whether a job needs another place, which only the scheduler assigns."""
        if not asks:
            self._asking.discard(uid)
            return Changes()
        self._asking.add(uid)
        return Changes(asks=True)

    def note_refusal(self, uid: str, kind: str, message: str, *, now_s: float) -> Changes:
        """Remember that an object of a job's current attempt was refused."""
        news = self.refusals.note(self.jobs.views.get(uid), kind, message, now_s=now_s)
        return Changes(jobs={uid} if news else set())

    def note_bound(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        """Remember that a pod was bound until the watch shows it, so that it is not bound twice."""
        self.pods.note_bound(ref, uid=uid, node=node)

    def job(self, uid: str) -> JobView | None:
        """Return a job by UID."""
        return self.jobs.views.get(uid)

    def snapshot(
        self, uid: str, *, now_s: float, lease_read: bool = False, runs: Callable[[str], bool] = lambda _: False
    ) -> JobSnapshot | None:
        """Return the snapshot from which one job is reconciled; None for a job that does not exist."""
        job = self.job(uid)
        if job is None:
            return None
        pods, names, known = self.pods.by_job.get(uid, {}), self._places(uid), self.nodes.views
        until_s = self.children.until_s(uid)
        return JobSnapshot(
            job=job,
            pods=tuple(sorted(pods.values(), key=lambda pod: (pod.namespace, pod.name))),
            nodes={name: known[name] for name in names if name in known} | self._absent(names, now_s),
            lease=self.leases.by_job.get(uid),
            pending=self.pending_reasons.pending(job, tree=self._tree, now_s=now_s),
            refused=self.pending_reasons.size_refused(job),
            children=self.children.known(uid, now_s=now_s),
            children_until_s=until_s if until_s is not None and until_s > now_s else None,
            refusals=self.refusals.of(job),
            lease_read=lease_read,
            leaders_running=frozenset(pod.uid for pod in pods.values() if pod.index == 0 and runs(pod.uid)),
            levels=() if self.topology is None else self.topology.levels,
            start_limit_s=0.0 if job.spec is None else self._tree.set_aside_s(job.spec.queue_name),
        )

    def cluster(self, *, now_s: float, leases_read: frozenset[str] = frozenset()) -> ClusterSnapshot:
        """Return the snapshot from which the scheduler decides."""
        jobs = self.jobs
        self._intents = assume_all(self._intents, (job for job in jobs.views.values() if is_ours(job)))
        asking = {name for uid in self._asking for name in self._places(uid)}
        return ClusterSnapshot(
            inventory=self.nodes.snapshot(),
            jobs=jobs.views,
            waiting=jobs.waiting,
            running=jobs.running,
            resizing=jobs.resizing,
            exclusive=jobs.exclusive,
            victims_of=jobs.victims_of,
            asking=self._asking,
            pods=self.pods.by_job,
            leases=self.leases.by_job,
            nodes=ChainMap(self._absent(asking, now_s), self.nodes.views),
            tree=self._tree,
            used=self.ledger.used,
            refused=self.pending_reasons.unschedulable_classes,
            intents=self._intents,
            settled=self._settled,
            leases_read=leases_read,
            spares=None if self.topology is None else self.topology.spares,
        )

    def refresh(self, *, now_s: float) -> set[str]:
        """Publish delayed pending reasons that are due; return the UIDs of their jobs."""
        return self.pending_reasons.refresh(tree=self._tree, now_s=now_s)

    def queue_status_writes(self, *, now_s: float) -> list[WriteQueueStatus]:
        """Return the status writes of queues and topology that have changed."""
        views, used, offered = self.queues, self.ledger.used, self.nodes.offered
        found = queue_statuses(views, self._tree, self.jobs, used, self.pending_reasons, now_s=now_s, offered=offered)
        if self.topology is not None:
            spares = self.nodes.spares(self.topology.spares)
            found += topology_status(self.topology, self.nodes.arrangement(), spares=spares, now_s=now_s)
        return found

    def seen(self, *, cycle_s: float, placement_s: tuple[float, ...]) -> CycleReport:
        """Return the figures of a scheduling cycle, for metrics."""
        return CycleReport(
            cycle_s=cycle_s,
            placement_s=placement_s,
            waiting=self.pending_reasons.counts(),
            used=dict(self.ledger.used),
            quota={
                (queue.name, quota.resource): quota.nominal for queue in self.queues.values() for quota in queue.quotas
            },
            objects={kind: len(refs) for kind, refs in self._present.items()},
            quarantined=len(self.jobs.quarantined),
        )

    def _job_at(self, ref: ObjectRef) -> JobView | None:
        return self.jobs.views.get(self._job_refs.get(ref, ""))

    def _places(self, uid: str) -> set[str]:
        """Return the nodes that a job's pods and placement name."""
        job = self.job(uid)
        names = {pod.place for pod in self.pods.by_job.get(uid, {}).values() if pod.place}
        if job is not None and job.attempt is not None:
            names.update(job.attempt.placement.node_by_index())
        return names

    def _absent(self, names: AbstractSet[str], now_s: float) -> dict[str, NodeView]:
        # Not as a difference of sets: that would walk all nodes.
        return self._absent_nodes.absent([name for name in names if name not in self.nodes.views], now_s)

    def _noted(self, changes: Changes) -> Changes:
        # A foreign pod's end may also change which nodes are spares.
        if changes.capacity or (changes.left and self.topology is not None and self.topology.spares):
            changes.capacity = True
            self.pending_reasons.forget_unschedulable()
        elif changes.left:
            moves = bool(self._asking or self.jobs.resizing)
            changes.capacity = self.pending_reasons.forget_helped(changes.left, self.nodes) or moves
        changes.taken |= self.nodes.bookings != self._bookings
        self._bookings = self.nodes.bookings
        return changes

    def _parse(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes:
        match ref.kind:
            case "TrainingJob":
                known = self._job_at(ref)
                additions = functools.partial(self._admission.of, ref.namespace)
                gated = self._settings.data_gate
                parse = functools.partial(parse_job_view, seen_s=now_s, data_gate=gated, additions=additions)
                view = parse(manifest, known, priorities=self._priorities.values, key_ids=self._keys.ids)
                return self._put_job(ref, view)
            case "Pod":
                pod = parse_pod(manifest, seen_s=now_s, known=self.pods.known(ref))
                job = None if pod is None else self.jobs.views.get(pod.job_uid)
                changes = pod_changes(self.pods.put(ref, pod, job, foreign=lambda: parse_foreign_pod(manifest)))
                return changes | self._admission.learn(job, () if pod is None else (pod,))
            case "Node":
                changes = self._put_node(self._absent_nodes.seen(parse_node(manifest), now_s))
                if self._settings.node_health:
                    changes.health = self.health.put_node(parse_health_node(manifest), now_s)
                return changes
            case "Lease":
                return self.leases.put(ref, manifest, seen_s=now_s) or self._forget(ref)
            case "ConfigMap":
                intents = parse_intents_object(manifest)
                if intents is not None:
                    self._intents, self._settled = intents, set()
                return Changes(asks=intents is not None)
            case _:
                return self._put_setting(ref, manifest)

    def _put_unreadable(self, ref: ObjectRef, manifest: Manifest, why: str) -> Changes:
        """Store an unreadable object: keep known jobs, pods and nodes (which get no new pods), remove others."""
        unreadable = Unreadable(ref=ref, uid=str(manifest["metadata"].get("uid", "")), why=why)
        pod, node = self.pods.known(ref), self.nodes.views.get(ref.name) if ref.kind == "Node" else None
        if ref.kind == "TrainingJob":
            changes = self._put_unreadable_job(ref, manifest, why)
        elif pod is not None and pod.uid == unreadable.uid:
            changes = Changes()
        elif node is not None:
            changes = self._put_node(dataclasses.replace(node, unschedulable=True))
        else:
            changes = self._forget(ref)
            # It still exists, and the next list contains it.
            self._present[ref.kind].add(ref)
        return changes | Changes(unreadable=(unreadable,))

    def _put_unreadable_job(self, ref: ObjectRef, manifest: Manifest, why: str) -> Changes:
        known = self._job_at(ref)
        try:
            return self._put_job(ref, parse_unreadable_job(manifest, known, why))
        except Exception as error:  # noqa: BLE001 - as above: then the job is ignored
            _log.warning("can't parse anything of this job: %s, %s", ref, fault_message(error))
            return self._forget(ref)

    def _put_setting(self, ref: ObjectRef, manifest: Manifest) -> Changes:
        """Store an object that configures queueing and placement."""
        match ref.kind:
            case "TrainingQueue":
                before, self.queues[ref.name] = self.queues.get(ref.name), parse_queue(manifest)
                return self._queues_changed(before, self.queues[ref.name])
            case "ClusterTopology":
                topology = parse_topology(manifest)
                return Changes() if topology is None else self._put_topology(topology)
            case "PriorityClass":
                return self._priorities.put(ref.name, parse_priority_class(manifest))
            case "LimitRange" | "RuntimeClass":
                return self._admission.put(ref, manifest)
            case "Namespace":
                return self._access.put_namespace(ref.name, manifest)
            case labels.KIND_FAULT_POLICY:
                return Changes(health=self.health.put_policy(parse_fault_policy(manifest)))
            case _:
                return Changes()

    def _put_job(self, ref: ObjectRef, job: JobView) -> Changes:
        changes = Changes(jobs={job.uid})
        if self._job_refs.get(ref, job.uid) != job.uid:
            changes |= self._forget(ref)
            self._present[ref.kind].add(ref)
        if is_new := self._job_refs.get(ref) is None:
            changes |= self.leases.adopt(job) | pod_changes(self.pods.adopt(job))
        self._job_refs[ref] = job.uid
        before, attempt = self.jobs.views.get(job.uid), job.attempt
        if attempt is None:
            self.refusals.saw_before_first_attempt(job.uid)
        if before is not None and attempt is not None and attempt.scope != Scope.PROCESS and begins(before, job):
            self.children.begin(job.uid)
            self.refusals.begin(job.uid)
        change = self.jobs.put(self._with_plans(job))
        changes |= Changes(capacity=change.freed, asks=change.asks)
        pods = self.pods.by_job.get(job.uid, {}).values() if is_new else ()
        return changes | self._admission.learn(self.jobs.views[job.uid], pods)

    def hold_fences(self, held: bool) -> Changes:
        """Count no node as lost, or count them again."""
        self.fences_held, changes = held, Changes()
        for node in [view for view in self.nodes.views.values() if not view.ready]:
            changes |= self._put_node(node)
        return self._noted(changes)

    def _put_node(self, node: NodeView) -> Changes:
        if node.held != (self.fences_held and not node.ready):
            node = dataclasses.replace(node, held=not node.held)
        before = self.nodes.put(node)
        if before == node:
            return Changes()
        health_changed = before is None or before.health != node.health
        return Changes(jobs=set(self.ledger.jobs_on(node.name)) if health_changed else set(), capacity=True)

    def _queues_changed(self, before: QueueView | None, after: QueueView | None) -> Changes:
        if before is not None and after is not None and settled(before) == settled(after):
            return Changes()
        in_order = sorted(self.queues.values(), key=lambda queue: queue.name)
        self._tree = QueueTree.of(in_order, default_unlimited=self._settings.default_unlimited)
        return self._access.use(self._tree) | Changes(capacity=True)

    def _put_topology(self, topology: TopologyView | None) -> Changes:
        before, self.topology = self.topology, topology
        levels = () if topology is None else topology.levels
        self.nodes.set_levels(levels)
        known = None if before is None else (before.levels, before.spares)
        moved = (known is None or known[0] != levels) and self.health.touch_all()
        return Changes(capacity=topology is None or known != (levels, topology.spares), health=moved)

    def _forget(self, ref: ObjectRef) -> Changes:
        was_present = ref in self._present[ref.kind]
        self._present[ref.kind].discard(ref)
        match ref.kind:
            case "TrainingJob":
                return self._forget_job(ref)
            case "Pod":
                return pod_changes(self.pods.remove(ref))
            case "Node":
                jobs = set(self.ledger.jobs_on(ref.name))
                gone = self.nodes.remove(ref.name) is not None
                return Changes(jobs=jobs, capacity=gone, health=self.health.remove_node(ref.name))
            case "Lease":
                return Changes(jobs=self.leases.remove(ref))
            case "ConfigMap" if was_present and ref.name == labels.INTENTS_NAME:
                _log.warning("%s is missing: every unfinished admission is cancelled before the next one", ref)
                self._intents, self._settled = Intents(known=False), set()
                return Changes(asks=True)
            case _:
                return self._forget_setting(ref)

    def _forget_setting(self, ref: ObjectRef) -> Changes:
        match ref.kind:
            case "TrainingQueue":
                before = self.queues.pop(ref.name, None)
                return Changes() if before is None else self._queues_changed(before, None)
            case "ClusterTopology":
                known = self.topology is not None and self.topology.name == ref.name
                return self._put_topology(None) if known else Changes()
            case "PriorityClass":
                return self._priorities.put(ref.name, None)
            case "LimitRange" | "RuntimeClass":
                return self._admission.remove(ref)
            case "Namespace":
                return self._access.remove_namespace(ref.name)
            case labels.KIND_FAULT_POLICY:
                return Changes(health=self.health.remove_policy(ref.name))
            case _:
                return Changes()

    def _forget_job(self, ref: ObjectRef) -> Changes:
        uid = self._job_refs.pop(ref, None)
        if uid is None:
            return Changes()
        self.leases.drop(uid)
        self.children.forget(uid)
        self.refusals.forget(uid)
        self._settled.discard(uid)
        self._asking.discard(uid)
        self.pending_reasons.forget(uid)
        return Changes(jobs={uid}, capacity=self.jobs.remove(uid).freed)
