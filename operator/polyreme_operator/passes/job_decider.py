"""Decides about one job, and reports what it has seen of it."""

from __future__ import annotations

from polyreme_operator.node_marks import NodeMarks
from polyreme_operator.passes.context import PassContext
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.snapshots import job_snapshot
from polyreme_operator.types.actions import Decision


class JobDecider:
    """The decision about a job as it is now.

    Args:
        context: What passes share.
        marks: Takes what is known of a job's nodes.
    """

    def __init__(self, context: PassContext, marks: NodeMarks) -> None:
        self._cache, self._clock, self._settings = context.cluster.cache, context.clock, context.settings
        self._marks, self._observer = marks, context.observer

    def decide(self, uid: str, *, lease_read: bool = False) -> Decision:
        """Return what to do; nothing for a job that does not exist.

        Args:
            uid: UID of the job.
            lease_read: Whether its Lease was just read.
        """
        now_s = self._clock.now_s()
        snapshot = job_snapshot(self._cache, uid, lease_read=lease_read, now_s=now_s, runs=self._settings.pod_runs)
        if snapshot is None:
            return Decision()
        self._marks.look(snapshot)
        self._observer.on_job_observed(snapshot)
        return reconcile(snapshot, now_s, defaults=self._settings.defaults)
