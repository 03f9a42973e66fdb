"""Latest pending reason per job class, debounced.

A new reason is published to all jobs of a class at once. A message whose reason stays the same (only its numbers
change) is updated every few seconds, and only for the first jobs of each queue; later jobs get a constant message. So
15,000 waiting jobs cost no writes while they wait.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping

from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.queueing.order import first_of
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.scheduler import Batch
from polyreme_operator.scheduler.pending import DETAILED_REASONS_MAX, without_details
from polyreme_operator.types.queues import Waiting
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.snapshot import Pending, RefusedSize
from polyreme_operator.types.views import ForeignPod, JobView

MESSAGE_UPDATE_EVERY_S = 5.0
"""Shortest time between two messages with the same reason."""
MESSAGE_UPDATES_PER_S = 20.0
"""Message updates of all jobs together: the more jobs wait, the less often each message changes."""
MENTION_FREE_CAPACITY = frozenset({Reason.BEHIND_OTHERS, Reason.WAITING_FOR_TOPOLOGY})
"""Reasons that mention free capacity, outdated once it is taken. All others hold until capacity is freed."""


CLOSED = frozenset({Reason.QUEUE_MISSING, Reason.QUEUE_STOPPED})
"""Reasons that more room on nodes does not change. ``ExceedsQuota`` is another, but for elastic jobs: a smaller size
may be within the quota and lack room alone."""


@dataclasses.dataclass(slots=True)
class _ClassReason:
    latest: Pending
    published: Pending
    published_at_s: float


class PendingReasons:
    """The latest and the published pending reasons."""

    def __init__(self, jobs: JobIndex) -> None:
        self.unschedulable_classes: dict[int, Pending] = {}
        """Classes that did not fit, while no capacity has been freed since."""
        self._refused: Mapping[str, RefusedSize] = {}
        self.next_update_s: float | None = None
        """When a delayed message is due."""
        self._jobs = jobs
        self._kinds: dict[int, _ClassReason] = {}
        self._own: dict[str, Pending] = {}
        self._first: dict[str, frozenset[str]] = {}

    def take(self, batch: Batch, *, tree: QueueTree, now_s: float) -> set[str]:
        """Take the reasons of a cycle; return the UIDs of jobs whose published reason changes."""
        changed = self._take_own(batch)
        self.unschedulable_classes.update({kind: why for kind, why in batch.kinds.items() if kind not in batch.unsure})
        self._first = {}
        for kind, pending in batch.kinds.items():
            entry = self._kinds.get(kind)
            if entry is None or entry.published.reason != pending.reason:
                self._kinds[kind] = _ClassReason(latest=pending, published=pending, published_at_s=now_s)
                changed |= self._jobs.of_kind(kind)
            else:
                entry.latest = pending
        return changed | self.refresh(tree=tree, now_s=now_s)

    def refresh(self, *, tree: QueueTree, now_s: float) -> set[str]:
        """Publish delayed messages that are due; return the UIDs of their jobs."""
        changed: set[str] = set()
        self.next_update_s = None
        for kind in [kind for kind in self._kinds if not self._jobs.of_kind(kind)]:
            del self._kinds[kind]
            self.unschedulable_classes.pop(kind, None)
        readers = sum(
            min(DETAILED_REASONS_MAX, self._jobs.waiting.count(queue)) for queue in self._jobs.waiting.queues()
        )
        every_s = max(MESSAGE_UPDATE_EVERY_S, readers / MESSAGE_UPDATES_PER_S)
        for kind, entry in self._kinds.items():
            if entry.published == entry.latest:
                continue
            due_s = entry.published_at_s + every_s
            if now_s >= due_s:
                entry.published, entry.published_at_s = entry.latest, now_s
                changed |= {uid for uid in self._jobs.of_kind(kind) if self._is_first(uid, tree, now_s)}
            else:
                self.next_update_s = due_s if self.next_update_s is None else min(self.next_update_s, due_s)
        return changed

    def pending(self, job: JobView, *, tree: QueueTree, now_s: float) -> Pending | None:
        """Return the published reason of a job; None until a cycle has looked at it."""
        own = self._own.get(job.uid)
        if own is not None or job.uid not in self._jobs.waiting:
            return own
        waiting = self._jobs.waiting[job.uid]
        entry = self._kinds.get(waiting.kind)
        if entry is None:
            return None
        if self._is_first(job.uid, tree, now_s):
            return entry.published
        return without_details(entry.published, waiting.queue)

    def size_refused(self, job: JobView) -> str:
        """Return why a running job keeps its size; empty if it does not, or if this spec was not looked at yet."""
        refused = self._refused.get(job.uid)
        return refused.why if refused is not None and refused.generation == job.generation else ""

    def reason(self, waiting: Waiting) -> str:
        """Return the reason of a job without its message; empty until a cycle has looked at it."""
        own = self._own.get(waiting.uid)
        if own is not None:
            return own.reason
        entry = self._kinds.get(waiting.kind)
        return "" if entry is None else entry.published.reason

    def counts(self) -> dict[tuple[str, str], int]:
        """Count the waiting jobs by queue and reason."""
        counts: Counter[tuple[str, str]] = Counter()
        for kind, entry in self._kinds.items():
            members = self._jobs.of_kind(kind)
            if members:
                queue = self._jobs.waiting[next(iter(members))].queue
                counts[queue, entry.published.reason] += len(members)
        return dict(counts)

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._own.pop(uid, None)

    def forget_free_capacity(self) -> bool:
        """Forget reasons that mention free capacity, since some was taken; tell whether there were any."""
        gone = [kind for kind, why in self.unschedulable_classes.items() if why.reason in MENTION_FREE_CAPACITY]
        for kind in gone:
            del self.unschedulable_classes[kind]
        return bool(gone)

    def forget_helped(self, left: Iterable[ForeignPod], nodes: NodeTable) -> bool:
        """Let the next cycle try the classes for which foreign pods made room; tell whether there are any.

        A class is helped if a node could hold more of its workers than before. No quota became free, and a class that
        does not fit empty nodes still does not.
        """
        helped = set[int]()
        for pod in left:
            free = nodes.free(pod.node)
            for kind, why in self.unschedulable_classes.items():
                if not why.permanent and why.reason not in CLOSED and kind not in helped:
                    helped |= {kind for uid in sorted(self._jobs.of_kind(kind))[:1] if self._gains(uid, why, free, pod)}
        if helped:
            behind = {kind for kind, why in self.unschedulable_classes.items() if why.reason == Reason.BEHIND_OTHERS}
            for kind in helped | behind:
                del self.unschedulable_classes[kind]
        return bool(helped)

    def _gains(self, uid: str, why: Pending, free: Mapping[str, int], pod: ForeignPod) -> bool:
        job, gone = self._jobs.views[uid], dict(pod.requests)
        if why.reason == Reason.EXCEEDS_QUOTA and job.spec is not None and job.spec.workers.min_replicas is None:
            return False
        fits = [
            (free.get(resource, 0) // amount, (free.get(resource, 0) - gone.get(resource, 0)) // amount)
            for resource, amount in job.requests
            if amount > 0
        ]
        after, before = (max(0, min(counts, default=0)) for counts in zip(*fits, strict=True)) if fits else (0, 0)
        return after > before

    def forget_unschedulable(self) -> None:
        """Let the next cycle try every class, since capacity was freed or a setting changed."""
        self.unschedulable_classes.clear()

    def _take_own(self, batch: Batch) -> set[str]:
        own = dict(batch.pending)
        if batch.again:
            # A cycle that ended early has not looked at every job: earlier reasons of the others remain.
            own = {uid: why for uid, why in self._own.items() if not self._covers(uid, batch)} | own
        refused = {**self._refused, **batch.refused} if batch.again else dict(batch.refused)
        changed = {uid for uid in {*self._own, *own} if self._own.get(uid) != own.get(uid)}
        changed |= {uid for uid in {*self._refused, *refused} if self._refused.get(uid) != refused.get(uid)}
        self._own = {uid: why for uid, why in own.items() if uid in self._jobs.waiting}
        self._refused = refused
        return changed

    def _covers(self, uid: str, batch: Batch) -> bool:
        return uid in self._jobs.waiting and self._jobs.waiting[uid].kind in batch.kinds

    def _is_first(self, uid: str, tree: QueueTree, now_s: float) -> bool:
        waiting: Waiting = self._jobs.waiting[uid]
        queue = waiting.queue
        if self._jobs.waiting.count(queue) <= DETAILED_REASONS_MAX:
            return True
        first = self._first.get(queue)
        if first is None:
            jobs = first_of(self._jobs.waiting, tree, queue, now_s, limit=DETAILED_REASONS_MAX)
            first = self._first[queue] = frozenset(job.uid for job in jobs)
        return uid in first
