"""Checks of nodes before training, as the operator asks for them and answers them.

A worker that fails is moved before the first step; its node is tainted only if a NodeFaultPolicy enforces that.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.status import AttemptStatus, PreCheckOrder, replacement_runs
from polyreme_api.progress import Outcome, ProgressRecord
from polyreme_operator.types.reasons import Cause
from polyreme_operator.types.views import JobView, NodeView

SKEW_S = 5.0
"""Largest accepted difference between the clocks of two operators."""
WARM_S = 60.0
"""Longest start of the processes that check; the launcher's own limit is the same."""


def moves(status: TrainingJobStatus) -> int:
    """Count the newest restarts in a row that pre-checks caused."""
    return sum(
        1 for _ in itertools.takewhile(lambda each: each.cause == Cause.PRE_CHECK, reversed(status.restart_records))
    )


def order(spec: TrainingJobSpec, status: TrainingJobStatus, *, passed: Collection[int]) -> PreCheckOrder | None:
    """Return the checks of an attempt that begins; None if the job asks for none.

    Args:
        spec: The job's.
        status: Its status, with the restart that begins the attempt.
        passed: Workers whose node has passed recently.
    """
    asked = spec.pre_checks
    if not asked.enabled or spec.workers.runtime.mode == "Environment":
        return None
    exhausted = moves(status) >= asked.max_moves
    return PreCheckOrder(
        passed=replacement_runs(dict.fromkeys(passed, 1)), warn_only=exhausted and asked.when_exhausted == "Train"
    )


def with_passed(
    job: JobView, after: TrainingJobStatus, nodes: Mapping[str, NodeView], now_s: float
) -> TrainingJobStatus:
    """Return a status whose attempt, if it begins one, names the workers whose node has passed recently."""
    attempt, spec = after.attempt, job.spec
    begins = attempt is not None and (job.attempt is None or attempt.number > job.attempt.number)
    if attempt is None or attempt.pre_checks is None or spec is None or not begins:
        return after
    passed = [
        index
        for index, name in enumerate(attempt.placement.node_by_index())
        if (view := nodes.get(name)) is not None and is_fresh(view, spec, now_s) and not view.check_failed
    ]
    order = attempt.pre_checks.model_copy(update={"passed": replacement_runs(dict.fromkeys(passed, 1))})
    return after.model_copy(update={"attempt": attempt.model_copy(update={"pre_checks": order})})


def is_fresh(view: NodeView, spec: TrainingJobSpec, now_s: float) -> bool:
    """Tell whether a node was checked less than ``maxAgeSeconds`` ago; a time in the future does not count."""
    return view.checked_s is not None and now_s - spec.pre_checks.max_age_seconds < view.checked_s <= now_s + SKEW_S


def exhausted(spec: TrainingJobSpec, status: TrainingJobStatus) -> bool:
    """Tell whether the job fails if one more check fails."""
    return spec.pre_checks.when_exhausted == "Fail" and moves(status) >= spec.pre_checks.max_moves


def failed_workers(attempt: AttemptStatus, record: ProgressRecord | None) -> tuple[int, ...]:
    """Return the workers for whose failed checks the attempt was not released."""
    report = None if record is None else record.pre_check
    if record is None or report is None or record.released or record.outcome is not Outcome.FAILED:
        return ()
    # The Lease is written by a pod of the job: only places that the attempt has count.
    return tuple(sorted({each.index for each in report.failed if each.index < attempt.replicas}))


def message(record: ProgressRecord) -> str:
    """Describe the failed checks."""
    report = record.pre_check
    found = () if report is None else report.failed
    return "; ".join(
        f"worker {each.index} failed a check of its node ({each.reason}): {each.message}" for each in found
    )


def start_extension_s(spec: TrainingJobSpec, attempt: AttemptStatus) -> float:
    """Return by how much the checks may delay an attempt's release."""
    return 0.0 if attempt.pre_checks is None else spec.pre_checks.timeout_seconds + WARM_S
