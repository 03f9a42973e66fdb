"""Verdicts on simulated faults: those of the operator's own failure policy, which reads them from a job's status."""

from __future__ import annotations

from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.status import AttemptStatus
from polyreme_api.progress import CheckpointRef, ProgressRecord
from polyreme_operator.reconcile.failure_policy import GiveUp, Restart, answer, with_restart
from polyreme_operator.reconcile.observe import Failure
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView, LeaseView

EPOCH_S = 1_700_000_000.0
"""Where the simulated clock starts: times in a status are dates."""
_UID = "simulated"


class Verdicts:
    """The job's status so far, and what the operator decides about the next failure."""

    def __init__(self, spec: TrainingJobSpec, *, nodes: int, devices: int) -> None:
        self._spec = spec
        attempt = AttemptStatus(number=1, plan_hash="", replicas=nodes, devices=devices)
        self._status = TrainingJobStatus(attempt=attempt)

    def after(self, failure: Failure, now_ms: int, *, step: int, durable_step: int) -> Restart | GiveUp:
        """Decide about a failure, and keep the restart in the status.

        Args:
            failure: Of the present attempt.
            now_ms: The simulated time.
            step: Newest step.
            durable_step: Of the newest checkpoint that is durable.
        """
        now_s = EPOCH_S + now_ms / 1000.0
        attempt = self._status.attempt
        assert attempt is not None, "the status holds one from the start"
        checkpoint = CheckpointRef(attempt=attempt.number, step=durable_step) if durable_step else None
        record = ProgressRecord(attempt=attempt.number, released=True, step=step, checkpoint=checkpoint)
        verdict = answer(self._snapshot(record), self._spec, failure, now_s)
        if isinstance(verdict, Restart):
            status = with_restart(self._status, verdict.record)
            following = attempt.model_copy(update={"number": attempt.number + 1, "scope": verdict.scope.value})
            self._status = status.model_copy(update={"attempt": following})
        return verdict

    def _snapshot(self, record: ProgressRecord) -> JobSnapshot:
        job = JobView(
            namespace="default",
            name=_UID,
            uid=_UID,
            resource_version="1",
            generation=1,
            created_s=EPOCH_S,
            deleting=False,
            spec=self._spec,
            invalid="",
            status=self._status,
        )
        lease = LeaseView(namespace="default", name=_UID, uid=_UID, resource_version="1", job_uid=_UID, record=record)
        return JobSnapshot(job=job, lease=lease)
