"""Preemption policy: which jobs may be preempted for which, their protection, and reclaiming borrowed quota.

Within a queue, a job preempts jobs of lower priority (or none, or any: ``withinQueue``). Jobs of other queues are
preempted only to reclaim quota: below the closest cohort that both queues belong to, the preemptor's side must stay
within its quota, the preemptor included, and every queue on the victim's side must exceed its quota when the victim is
preempted. So no queue is pushed below its quota, and a reclaim is never reversed by another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.queues import QueueView, Reclaim, Running, Waiting


def min_runtime_s(job: Running | Waiting, view: QueueView) -> float:
    """Return how long a job runs undisturbed: its own setting, and at least its queue's."""
    return max(job.min_runtime_s, view.min_runtime_s)


def protected_until_s(job: Running | Waiting, view: QueueView, *, admitted_s: float, preempted_s: float = 0.0) -> float:
    """Return when a job that was admitted then may be preempted: after its minimum runtime and its cooldown.

    Args:
        job: The job.
        view: Its queue.
        admitted_s: When it was admitted, or would be.
        preempted_s: When it was last preempted.
    """
    return max(admitted_s + min_runtime_s(job, view), max(admitted_s, preempted_s) + view.cooldown_s)


def is_protected(job: Running, preemptor: Waiting, tree: QueueTree, now_s: float) -> bool:
    """Tell whether a job must not be preempted, whatever the policies say: it just began, or was preempted enough."""
    view = tree.view(job.queue)
    recent = [at_s for at_s in job.preempted_at_s if now_s - at_s < view.preemption_window_s]
    preempted_s = max(job.preempted_at_s, default=0.0)
    return (
        job.stopping
        or job.uid == preemptor.uid
        or preemptor.uid in job.preempted_for
        or now_s < protected_until_s(job, view, admitted_s=job.admitted_s, preempted_s=preempted_s)
        or len(recent) >= view.preemptions_max
    )


def may_displace(preemptor: Waiting, queue: str, priority: int, tree: QueueTree) -> bool:
    """Tell whether the policies let a job preempt one of this queue and priority; quotas are checked separately."""
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
class QuotaTrial:
    """The quotas as they would be with the preemptor admitted and some victims removed."""

    _tree: QueueTree
    preemptor: Waiting
    _ledger: QuotaLedger
    _resources: tuple[str, ...]
    """Limited resources that the preemptor asks for."""
    _sides: dict[str, _Sides]

    @classmethod
    def of(cls, tree: QueueTree, ledger: QuotaLedger, preemptor: Waiting) -> QuotaTrial:
        """Return a trial on a copy of the ledger."""
        twin = ledger.copy()
        twin.charge(preemptor.queue, preemptor.requests, preemptor.workers)
        return cls.on(tree, twin, preemptor)

    @classmethod
    def on(cls, tree: QueueTree, ledger: QuotaLedger, preemptor: Waiting) -> QuotaTrial:
        """Return a trial on the ledger itself, to which the preemptor is already charged."""
        limited = tree.limited(preemptor.queue)
        resources = tuple(resource for resource, amount in preemptor.requests if amount > 0 and resource in limited)
        return cls(tree, preemptor, ledger, resources, {})

    def copy(self) -> QuotaTrial:
        """Return an independent copy."""
        return dataclasses.replace(self, _ledger=self._ledger.copy())

    def release(self, job: Running) -> None:
        """Remove a victim."""
        self._ledger.release(job.queue, job.requests, len(job.rows_W))

    def charge(self, job: Running) -> None:
        """Put a victim back."""
        self._ledger.charge(job.queue, job.requests, len(job.rows_W))

    def fits(self) -> bool:
        """Tell whether the preemptor is within the quotas."""
        job = self.preemptor
        self._ledger.release(job.queue, job.requests, job.workers)
        fits = self._ledger.fits(job.queue, job.requests, job.workers)
        self._ledger.charge(job.queue, job.requests, job.workers)
        return fits

    def may_take(self, queue: str) -> bool:
        """Tell whether the quotas let the preemptor preempt a job of this queue now."""
        if queue == self.preemptor.queue:
            return True
        sides = self._sides.get(queue)
        if sides is None:
            sides = self._sides[queue] = _Sides(self._tree, self.preemptor.queue, queue)
        entitled = bool(self._resources) and all(sides.ours_over(self._ledger, name) <= 0 for name in self._resources)
        return entitled and any(sides.theirs_over(self._ledger, name) > 0 for name in self._resources)

    def allow(self, victims: Sequence[Running]) -> bool:
        """Tell whether all of these may be preempted and the preemptor then fits; the trial itself is left unchanged.

        Jobs of the preemptor's own queue come first, since they free its own quota; then smaller ones before larger
        ones, so that only the last victim may bring a queue below its quota.
        """
        own = self.preemptor.queue
        trial = self.copy()
        for job in sorted(victims, key=lambda job: (job.queue != own, job.devices, job.uid)):
            if not trial.may_take(job.queue):
                return False
            trial.release(job)
        return trial.fits()


class _Sides:
    """The queues on both sides of the closest common cohort of two queues."""

    def __init__(self, tree: QueueTree, ours: str, theirs: str) -> None:
        path, other = tree.path(ours), tree.path(theirs)
        meet = next(at for at in other if at in path)
        self._ours, self._theirs = ours, theirs
        self._our_side = path[path.index(meet) - 1] if meet != ours else None
        """None: the preemptor's queue is that cohort itself, and its own quota counts."""
        self._their_side = other[: other.index(meet)]

    def ours_over(self, ledger: QuotaLedger, resource: str) -> int:
        """Return by how much the preemptor's side exceeds its quota."""
        if self._our_side is None:
            return ledger.over_own(self._ours, resource)
        return ledger.over(self._our_side, resource)

    def theirs_over(self, ledger: QuotaLedger, resource: str) -> int:
        """Return by how much the victim's side exceeds its quota: the minimum over its queues."""
        if not self._their_side:
            return ledger.over_own(self._theirs, resource)
        return min(ledger.over(at, resource) for at in self._their_side)
