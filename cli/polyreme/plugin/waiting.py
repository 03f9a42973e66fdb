"""Order of the waiting jobs, computed here from what the cluster holds, by the rules that the operator itself uses."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator

from polyreme.plugin.snapshot import Snapshot
from polyreme_api.labels import MANAGER
from polyreme_operator.cache.jobs import waiting_of
from polyreme_operator.queueing.fair_share import Shares
from polyreme_operator.queueing.order import first_of, scheduling_order
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import DEFAULT_QUEUE, QueueTree
from polyreme_operator.queueing.waiting import WaitingIndex
from polyreme_operator.types.queues import Waiting
from polyreme_operator.types.reasons import ConditionType, Reason
from polyreme_operator.types.views import JobView, NodeView

ORDER_MAX = 100_000
"""Waiting jobs that are ordered at most."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueuePositions:
    """The queues at one moment."""

    tree: QueueTree
    ledger: QuotaLedger
    order: tuple[str, ...]
    """UIDs of jobs that may be admitted, in the order in which the operator looks at them."""
    by_queue: dict[str, tuple[str, ...]]
    """UIDs of the jobs that wait in each queue, in order; also in queues that admit nothing."""
    jobs: dict[str, JobView]

    def place(self, uid: str) -> tuple[int, int] | None:
        """Return the place of a waiting job in its queue, from 1, and how many wait there."""
        for uids in self.by_queue.values():
            if uid in uids:
                return uids.index(uid) + 1, len(uids)
        return None

    def before(self, uid: str) -> list[JobView]:
        """Return the jobs that the operator looks at before this one, nearest last.

        Of a queue that admits nothing these are the jobs before it there.
        """
        line = self.order if uid in self.order else next((uids for uids in self.by_queue.values() if uid in uids), ())
        return [self.jobs[other] for other in line[: line.index(uid)]] if line else []


def queue_positions(seen: Snapshot) -> QueuePositions:
    """Order everything that waits, and count what the queues hold."""
    # Whether a missing default queue is unlimited is a setting of the operator, which tells it to jobs alone.
    kept_waiting = any(_lacks_default(job) for job in seen.jobs)
    tree = QueueTree.of(seen.queues, default_unlimited=not kept_waiting)
    used = used_by_queue(seen.jobs)
    waiting = WaitingIndex(waits(seen.jobs))
    shares = Shares(tree, used, capacity(seen.nodes), seen.now_s)
    order = scheduling_order(waiting, tree, shares, seen.now_s)
    by_queue = {
        queue: tuple(job.uid for job in first_of(waiting, tree, queue, seen.now_s, limit=ORDER_MAX))
        for queue in sorted(waiting.queues())
    }
    return QueuePositions(
        tree=tree,
        ledger=QuotaLedger(tree, used),
        order=tuple(job.uid for job in itertools.islice(order, ORDER_MAX)),
        by_queue=by_queue,
        jobs={job.uid: job for job in seen.jobs},
    )


def waits(jobs: Iterable[JobView]) -> Iterator[Waiting]:
    """Yield the jobs that wait, as the order of the queue sees them; each is a class of its own here."""
    for kind, job in enumerate(jobs):
        if is_waiting(job):
            yield waiting_of(job, kind)


def is_waiting(job: JobView) -> bool:
    """Tell whether a job waits in its queue."""
    if job.spec is None or job.deleting or job.status.finished or job.admitted:
        return False
    return not job.spec.suspend and job.spec.managed_by == MANAGER and not job.queue_refusal


def _lacks_default(job: JobView) -> bool:
    queued = job.status.condition(ConditionType.QUEUED)
    missing = queued is not None and (queued.status, queued.reason) == ("True", Reason.QUEUE_MISSING)
    return missing and job.spec is not None and job.spec.queue_name == DEFAULT_QUEUE


def holds(job: JobView) -> bool:
    """Tell whether a job holds devices by its admission."""
    return job.admitted and job.attempt is not None and job.spec is not None


def used_by_queue(jobs: Iterable[JobView]) -> dict[tuple[str, str], int]:
    """Count what admitted jobs hold, by queue and resource."""
    used: dict[tuple[str, str], int] = defaultdict(int)
    for job in jobs:
        if holds(job) and job.spec is not None and job.attempt is not None:
            for resource, amount in job.requests:
                used[job.spec.queue_name, resource] += amount * job.attempt.replicas
    return dict(used)


def capacity(nodes: Iterable[NodeView]) -> dict[str, int]:
    """Sum up what the nodes give."""
    whole: dict[str, int] = defaultdict(int)
    for node in nodes:
        for resource, amount in node.allocatable:
            whole[resource] += amount
    return dict(whole)
