"""Cache of the cluster, kept up to date by watch events, lists, and the answers to our own writes.

Of two states of an object the one with the larger resource version is kept, whatever its source. (Resource versions of
one kind are ordered integers: KEP-5504.) Indices that decisions need are updated with each event, so the cost of a
decision depends on what it looks at and not on the size of the cluster.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef, WatchEvent, WatchEventType
from polyreme_operator.cache.admission import AdmissionIndex
from polyreme_operator.cache.health import HealthIndex
from polyreme_operator.cache.intents import IntentIndex
from polyreme_operator.cache.job_kind import JobKind
from polyreme_operator.cache.job_notes import JobNotes
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.kinds import Kind
from polyreme_operator.cache.leases import LeaseIndex
from polyreme_operator.cache.node_kind import NodeKind
from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.cache.plan_book import PlanBook
from polyreme_operator.cache.pod_kind import PodKind
from polyreme_operator.cache.pods import PodIndex
from polyreme_operator.cache.policies import PolicyKind
from polyreme_operator.cache.priorities import PriorityIndex
from polyreme_operator.cache.queues import QueueIndex
from polyreme_operator.cache.seen_objects import VOID, SeenObjects
from polyreme_operator.cache.topology import TopologyIndex
from polyreme_operator.cache.usage import UsageLedger
from polyreme_operator.publishing.pending_reasons import PendingReasons
from polyreme_operator.reconcile.quarantine import fault_message
from polyreme_operator.scheduler import Batch
from polyreme_operator.settings import Settings
from polyreme_operator.types.changes import Changes, Unreadable
from polyreme_operator.types.job_keys import JobKeys
from polyreme_operator.types.parse import parse_job_view
from polyreme_operator.types.plans import JobPlans, PlanRequest
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.views import JobView

_log = logging.getLogger(__name__)
_UNUSED = Kind()


class ClusterCache:
    """Views by object, with the indices that decisions need; ``snapshots.py`` puts them together for a decision."""

    def __init__(self, settings: Settings | None = None, *, keys: JobKeys | None = None) -> None:
        settings, keys = settings or Settings(), keys or JobKeys()
        self.seen = SeenObjects()
        self.nodes = NodeTable()
        self.ledger = UsageLedger(self.nodes)
        self.jobs = JobIndex(self.ledger)
        self.notes = JobNotes(self.jobs)
        self.plans = PlanBook()
        self.pods = PodIndex(self.nodes, self.ledger)
        self.leases = LeaseIndex(keys, self.jobs.at)
        self.queues = QueueIndex(self.jobs, default_unlimited=settings.default_unlimited)
        self.intents = IntentIndex(self.jobs)
        self.health = HealthIndex()
        self.topology = TopologyIndex(self.nodes, self.health)
        self.node_kind = NodeKind(self.nodes, self.ledger, self.health if settings.node_health else None)
        self.pending_reasons = PendingReasons(self.jobs)
        for forget in (self.leases.drop, self.pending_reasons.forget):
            self.jobs.when_removed(forget)
        self._kinds = self._all_kinds(settings, keys)

    def _all_kinds(self, settings: Settings, keys: JobKeys) -> Mapping[str, Kind]:
        """Return how objects enter and leave the cache, by kind."""
        admission, priorities = AdmissionIndex(self.jobs), PriorityIndex(self.jobs)
        parse = functools.partial(
            parse_job_view, priorities=priorities.values, data_gate=settings.data_gate, key_ids=keys.ids
        )
        return {
            labels.KIND_JOB: JobKind(
                self.jobs, self.leases, self.pods, notes=self.notes, plans=self.plans, admission=admission, parse=parse
            ),
            "Pod": PodKind(self.pods, self.jobs, admission),
            "Node": self.node_kind,
            "Lease": self.leases,
            "ConfigMap": self.intents,
            "TrainingQueue": self.queues,
            "Namespace": self.queues,
            "ClusterTopology": self.topology,
            "PriorityClass": priorities,
            "LimitRange": admission,
            "RuntimeClass": admission,
            labels.KIND_FAULT_POLICY: PolicyKind(self.health),
        }

    def _kind(self, ref: ObjectRef) -> Kind:
        return self._kinds.get(ref.kind) or _UNUSED

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
        if ref not in self.seen and self._kind(ref).is_others(ref, manifest):
            return Changes()
        if listed_at is not None and self.seen.shows_restore(ref, version, listed_at=listed_at):
            self.void_versions(f"{ref} is listed at version {version} and was seen at {self.seen.of(ref)}")
        known = self.seen.of(ref)
        if version < known or (version == known and not (reread and not self.seen.is_present(ref))):
            return Changes()
        self.seen.take(ref, version)
        self.seen.present[ref.kind].add(ref)
        try:
            changes = self._kind(ref).put(ref, manifest, now_s)
            changes = self._forget(ref) if changes is None else changes
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
                change = self.jobs.put(self.plans.attach(job))
                # The scheduler may have to decide about a size that was requested before its plan existed.
                changes |= Changes(jobs={uid}, capacity=change.freed, asks=True)
        return self._noted(changes)

    def remove(self, ref: ObjectRef, *, version: int | None) -> Changes:
        """Remove an object that was deleted at ``version``; None: a read did not find it."""
        if version is not None:
            if version < self.seen.of(ref):
                return Changes()
            self.seen.take(ref, version)
        return self._noted(self._forget(ref))

    def forget_unlisted(self, kind: str, listed: AbstractSet[ObjectRef], *, version: int) -> Changes:
        """Remove objects that a complete list lacks, unless they are newer: a watch may miss deletions."""
        changes = Changes()
        for ref in sorted(self.seen.present[kind] - listed):
            if self.seen.of(ref) <= version:
                changes |= self._noted(self._forget(ref))
        self.seen.drop_deleted(kind, version=version)
        return changes

    def void_versions(self, why: str) -> None:
        """Accept lower versions from now on, since the cluster was restored from a backup."""
        _log.warning("the cluster was restored from a backup, discarding known versions: %s", why)
        self.seen.void()
        self.leases.void()
        for uid, job in self.jobs.views.items():
            # The same generation may now belong to another spec.
            self.jobs.views[uid] = dataclasses.replace(job, generation=VOID)

    def decided(self, batch: Batch, *, now_s: float) -> set[str]:
        """Store the scheduler's reasons; return the UIDs of jobs whose published reason changes."""
        return self.pending_reasons.take(batch, tree=self.queues.tree, now_s=now_s)

    def job(self, uid: str) -> JobView | None:
        """Return a job by UID."""
        return self.jobs.views.get(uid)

    def refresh(self, *, now_s: float) -> set[str]:
        """Publish delayed pending reasons that are due; return the UIDs of their jobs."""
        return self.pending_reasons.refresh(tree=self.queues.tree, now_s=now_s)

    def hold_fences(self, held: bool) -> Changes:
        """Count no node as lost, or count them again."""
        return self._noted(self.node_kind.hold_fences(held))

    def _put_unreadable(self, ref: ObjectRef, manifest: Manifest, why: str) -> Changes:
        """Keep what is known of an object that can't be read, or remove it."""
        changes = self._kind(ref).put_unreadable(ref, manifest, why)
        if changes is None:
            changes = self._forget(ref)
            # It still exists, and the next list contains it.
            self.seen.present[ref.kind].add(ref)
        uid = str(manifest["metadata"].get("uid", ""))
        return changes | Changes(unreadable=(Unreadable(ref=ref, uid=uid, why=why),))

    def _forget(self, ref: ObjectRef) -> Changes:
        self.seen.present[ref.kind].discard(ref)
        return self._kind(ref).remove(ref)

    def _noted(self, changes: Changes) -> Changes:
        # A foreign pod's end may also change which nodes are spares.
        if changes.capacity or (changes.left and self.topology.spares):
            changes.capacity = True
            self.pending_reasons.forget_unschedulable()
        elif changes.left:
            moves = bool(self.notes.asking or self.jobs.resizing)
            changes.capacity = self.pending_reasons.forget_helped(changes.left, self.nodes) or moves
        changes.taken |= self.nodes.booked
        self.nodes.booked = False
        return changes
