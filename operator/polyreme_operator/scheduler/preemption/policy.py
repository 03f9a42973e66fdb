"""Who may be displaced for whom: policies, protections, and quota that was only borrowed.

Within a queue, a job displaces those of lower priority (or none, or any: ``withinQueue``). Jobs of other queues are
displaced only to take back what is one's own: at the cohort where the two queues' ways meet, the preemptor's side must
stay within its quota, the preemptor included, and every queue on the victim's side must hold more than its quota when
the victim is asked. So nobody is pushed below what is theirs, and what A takes back, B can't take back in turn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.queues import Reclaim, Running, Waiting


def is_spared(job: Running, preemptor: Waiting, tree: QueueTree, now_s: float) -> bool:
    """Tell whether a job is left alone, whatever the policies say: it just began, or made way often enough."""
    queue = tree.view(job.queue)
    recent = [at_s for at_s in job.preempted_at_s if now_s - at_s < queue.preemption_window_s]
    last_s = max([job.admitted_s, *job.preempted_at_s])
    return (
        job.stopping
        or job.uid == preemptor.uid
        or preemptor.uid in job.preempted_for
        or now_s - job.admitted_s < max(job.min_runtime_s, queue.min_runtime_s)
        or now_s - last_s < queue.cooldown_s
        or len(recent) >= queue.preemptions_max
    )


def may_displace(preemptor: Waiting, queue: str, priority: int, tree: QueueTree) -> bool:
    """Tell whether the policies let a job displace one of this queue and priority, whoever borrows."""
    if not preemptor.may_preempt:
        return False
    view = tree.view(preemptor.queue)
    if queue == preemptor.queue:
        policy = view.within_queue
    elif tree.path(queue) and tree.root(queue) == tree.root(preemptor.queue):
        policy = view.reclaim
    else:
        return False
    return policy is Reclaim.ANY or (policy is Reclaim.LOWER_PRIORITY and priority < preemptor.priority)


@dataclasses.dataclass(frozen=True, slots=True)
class Books:
    """The quotas as they would be with the preemptor admitted and some victims gone."""

    _tree: QueueTree
    preemptor: Waiting
    _ledger: QuotaLedger
    _resources: tuple[str, ...]
    """Limited resources that the preemptor asks for."""
    _ways: dict[str, _Ways]

    @classmethod
    def of(cls, tree: QueueTree, ledger: QuotaLedger, preemptor: Waiting) -> Books:
        """Open books on a copy of the ledger."""
        twin = ledger.copy()
        twin.charge(preemptor.queue, preemptor.requests, preemptor.workers)
        return cls.on(tree, twin, preemptor)

    @classmethod
    def on(cls, tree: QueueTree, ledger: QuotaLedger, preemptor: Waiting) -> Books:
        """Open books on the ledger itself, on which the preemptor is charged already."""
        limited = tree.limited(preemptor.queue)
        resources = tuple(resource for resource, amount in preemptor.requests if amount > 0 and resource in limited)
        return cls(tree, preemptor, ledger, resources, {})

    def copy(self) -> Books:
        """Return books on which to try things out."""
        return dataclasses.replace(self, _ledger=self._ledger.copy())

    def release(self, job: Running) -> None:
        """Let a job go."""
        self._ledger.release(job.queue, job.requests, len(job.rows_W))

    def charge(self, job: Running) -> None:
        """Take a job back."""
        self._ledger.charge(job.queue, job.requests, len(job.rows_W))

    def fits(self) -> bool:
        """Tell whether the preemptor is within the quotas."""
        job = self.preemptor
        self._ledger.release(job.queue, job.requests, job.workers)
        fits = self._ledger.fits(job.queue, job.requests, job.workers)
        self._ledger.charge(job.queue, job.requests, job.workers)
        return fits

    def may_take(self, queue: str) -> bool:
        """Tell whether a job of this queue may be asked now, as far as quotas are concerned."""
        if queue == self.preemptor.queue:
            return True
        ways = self._ways.get(queue)
        if ways is None:
            ways = self._ways[queue] = _Ways(self._tree, self.preemptor.queue, queue)
        entitled = bool(self._resources) and all(ways.ours_over(self._ledger, name) <= 0 for name in self._resources)
        return entitled and any(ways.theirs_over(self._ledger, name) > 0 for name in self._resources)

    def allow(self, victims: Sequence[Running]) -> bool:
        """Tell whether these may be asked, all of them, and the preemptor then fits; books are left as they were.

        Own jobs go first, they make room below the own quota; then smaller before larger, so that a queue is brought
        below its quota by its last job at most.
        """
        own = self.preemptor.queue
        trial = self.copy()
        for job in sorted(victims, key=lambda job: (job.queue != own, job.devices, job.uid)):
            if not trial.may_take(job.queue):
                return False
            trial.release(job)
        return trial.fits()


class _Ways:
    """The queues on both sides of the cohort where the ways of two queues meet."""

    def __init__(self, tree: QueueTree, ours: str, theirs: str) -> None:
        path, other = tree.path(ours), tree.path(theirs)
        meet = next(at for at in other if at in path)
        self._ours, self._theirs = ours, theirs
        self._our_side = path[path.index(meet) - 1] if meet != ours else None
        """None: the preemptor waits in the cohort itself, whose own quota then counts."""
        self._their_side = other[: other.index(meet)]

    def ours_over(self, ledger: QuotaLedger, resource: str) -> int:
        """Return by how much the preemptor's side exceeds its quota."""
        if self._our_side is None:
            return ledger.over_own(self._ours, resource)
        return ledger.over(self._our_side, resource)

    def theirs_over(self, ledger: QuotaLedger, resource: str) -> int:
        """Return by how much the victim's side exceeds its quota: the least of all queues on its way."""
        if not self._their_side:
            return ledger.over_own(self._theirs, resource)
        return min(ledger.over(at, resource) for at in self._their_side)
