"""Recovery ladder: restart ranks in place, replace pods, move the gang; or wait, or fail the job.

Budgets: ``maxRestarts`` in a window; no more than ``noProgressMax`` restarts in a row that brought neither a newer
durable checkpoint nor a later step; exponential backoff between those, the first at once (a crash of one rank costs
milliseconds, a crash loop costs little). The records in the status are the only memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TypeAlias

from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.job.policy import FailureRule
from polyreme_api.job.status import COUNTED_RESTARTS_MAX, RESTART_RECORDS_MAX, EarlierRestarts, RestartRecord
from polyreme_api.times import rfc3339
from polyreme_operator.reconcile import environment_runtime, failed_nodes, pre_checks
from polyreme_operator.reconcile.hang import futile_restarts
from polyreme_operator.reconcile.observe import (
    Failure,
    current_record,
    find_failure,
    find_refusal,
)
from polyreme_operator.types.reasons import RUNGS, Cause, Reason, Scope
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.timestamps import parse_time_or


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """Nothing to do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """Begin a new attempt."""

    failure: Failure
    scope: Scope
    replace: frozenset[int]
    """Indices that get a new pod."""
    record: RestartRecord
    due_s: float
    """Not before this time."""

    @property
    def move(self) -> frozenset[int]:
        """Indices that need another node."""
        return self.failure.move

    @property
    def avoid(self) -> frozenset[int]:
        """Those of these whose node failed them."""
        return self.failure.avoid


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The job fails for good."""

    failure: Failure
    reason: Reason
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """The job gives its devices back and waits for a person."""

    failure: Failure
    record: RestartRecord


Verdict: TypeAlias = Healthy | Restart | GiveUp | Pause

EXCUSED = frozenset(
    {
        Cause.HOST_RESTARTED,
        Cause.UNSCHEDULABLE,
        Cause.EVICTED,
        Cause.CREATE_REFUSED,
        Cause.NODE_FAULT,
        Cause.POD_REJECTED,
        Cause.POD_STUCK,
        Cause.PRE_CHECK,
        Cause.KEY_LOST,
        Cause.LOSS_SPIKE,
    }
)
"""Causes outside the job: they count against no budget, but each repetition waits longer."""
QUICK_MOVES_MAX = 3
"""Moves in a row away from nodes that failed that happen at once; later ones wait longer each time."""
REFUSALS_MAX = 20
"""Consecutive refusals (``CreateRefused``) after which a job fails even if ``maxRestarts`` allows more."""


def judge(snapshot: JobSnapshot, spec: TrainingJobSpec, now_s: float) -> Verdict:
    """Decide about the current attempt: continue, restart, pause or fail the job."""
    if environment_runtime.is_used(spec):
        failure = environment_runtime.find_failure(snapshot, spec, now_s)
    else:
        failure = find_failure(snapshot, spec, now_s)
    failure = failure or find_refusal(snapshot, now_s)
    if failure is None:
        return Healthy()
    if failure.code == ExitCode.SPIKES_PERSIST and _matching_rule(snapshot, spec, failure) is None:
        record = _record(snapshot, failure, Scope.PROCESS, counts=False, now_s=now_s)
        return Pause(failure=failure, record=record)
    return answer(snapshot, spec, failure, now_s)


def answer(snapshot: JobSnapshot, spec: TrainingJobSpec, failure: Failure, now_s: float) -> Restart | GiveUp:
    """Decide what follows a failure: on which rung and when the next attempt begins, or that there is none."""
    if failure.cause is Cause.PRE_CHECK and pre_checks.exhausted(spec, snapshot.job.status):
        moved = pre_checks.moves(snapshot.job.status)
        words = f"workers were moved {moved} times in a row because of failed checks; last: {failure.message}"
        return GiveUp(failure=failure, reason=Reason.CHECKS_FAILED, message=words)
    rule = _matching_rule(snapshot, spec, failure)
    if rule is not None and rule.action == "Fail":
        return GiveUp(failure=failure, reason=Reason.FAILURE_POLICY, message=f"{_rule_name(rule)}: {failure.message}")
    if rule is None and failure.code in _FINAL and not environment_runtime.is_used(spec):
        return GiveUp(failure=failure, reason=_FINAL[failure.code], message=failure.message)
    if rule is None and failure.cause is Cause.STEP_FAILED and _was_retried(snapshot):
        words = f"{failure.message}; a retry from the newest checkpoint ended in the same way"
        return GiveUp(failure=failure, reason=Reason.RUN_FAILED, message=words)
    excused = failure.cause in EXCUSED
    counts = not excused and (rule is None or (rule.count_towards_max and rule.action != "Ignore"))
    scope = _scope(snapshot, spec, failure, rule)
    record = _record(snapshot, failure, scope, counts=counts, now_s=now_s)
    status = snapshot.job.status
    idle = restarts_without_progress([*status.restart_records, record], status.earlier_restarts)
    given_up = _budget_spent(status, spec, failure, counts=counts, idle=idle, now_s=now_s)
    if given_up is not None and not excused:
        return given_up
    refused = failure.cause is Cause.CREATE_REFUSED and not _has_grown(status)
    if refused and (most := _refusals_allowed(status, spec)) <= _refusals(status):
        message = f"refused {most + 1} times in a row, at most {most} retries are allowed; last: {failure.message}"
        return GiveUp(failure=failure, reason=Reason.CREATE_REFUSED, message=message)
    return Restart(
        failure=failure,
        scope=scope,
        replace=_replaced(snapshot, failure, scope),
        record=record,
        due_s=_due_s(status, spec, failure, idle=idle, now_s=now_s),
    )


def restarts_without_progress(records: list[RestartRecord], earlier: EarlierRestarts | None = None) -> int:
    """Count the newest restarts in a row whose attempts reached no later step and no newer durable checkpoint."""
    earlier = earlier or EarlierRestarts()
    streak, best_step, best_checkpoint = earlier.idle, earlier.step, earlier.checkpoint_step
    for record in records:
        progressed = record.step > best_step or record.checkpoint_step > best_checkpoint
        excused = record.cause in EXCUSED
        streak = 0 if progressed else streak if excused else streak + 1
        # After a rollback, steps that were trained before count as progress again.
        rejected = record.cause == Cause.LOSS_SPIKE
        best_step = 0 if rejected else max(best_step, record.step)
        best_checkpoint = 0 if rejected else max(best_checkpoint, record.checkpoint_step)
    return streak


def with_restart(status: TrainingJobStatus, record: RestartRecord) -> TrainingJobStatus:
    """Record a restart; what budgets need of records that are no longer kept is summed up."""
    records, earlier = [*status.restart_records, record], status.earlier_restarts
    while len(records) > RESTART_RECORDS_MAX:
        earlier = _with_earlier(earlier, records.pop(0))
    update = {
        "restart_records": records,
        "earlier_restarts": earlier,
        "restarts": status.restarts + 1,
        "retry_at": None,
    }
    return status.model_copy(update=update)


def _with_earlier(earlier: EarlierRestarts, record: RestartRecord) -> EarlierRestarts:
    counted = [*earlier.counted_at, round(parse_time_or(record.at, 0.0))] if record.counts else earlier.counted_at
    return EarlierRestarts(
        idle=restarts_without_progress([record], earlier),
        step=max(earlier.step, record.step),
        checkpoint_step=max(earlier.checkpoint_step, record.checkpoint_step),
        hung=futile_restarts([record], record.step, earlier),
        counted_at=counted[-COUNTED_RESTARTS_MAX:],
    )


def _in_a_row(status: TrainingJobStatus, cause: Cause, *, since_s: float = 0.0) -> int:
    """Count the newest restarts in a row of one cause."""
    newest = itertools.takewhile(lambda record: record.cause == cause, reversed(status.restart_records))
    return sum(parse_time_or(record.at, 0.0) >= since_s for record in newest)


def _refusals(status: TrainingJobStatus) -> int:
    """Count the newest attempts in a row that were refused, since the newest durable checkpoint."""
    durable = 0 if status.last_checkpoint is None else status.last_checkpoint.step
    newest = itertools.takewhile(
        lambda record: record.cause == Cause.CREATE_REFUSED and record.checkpoint_step == durable,
        reversed(status.restart_records),
    )
    return sum(1 for _ in newest)


def _was_retried(snapshot: JobSnapshot) -> bool:
    """Tell whether a step that failed was retried since the newest durable checkpoint."""
    durable = _durable_step(snapshot)
    return any(
        record.cause == Cause.STEP_FAILED and record.checkpoint_step >= durable
        for record in snapshot.job.status.restart_records
    )


def _durable_step(snapshot: JobSnapshot) -> int:
    record, durable = current_record(snapshot), snapshot.job.status.last_checkpoint
    steps = [0 if durable is None else durable.step]
    if record is not None and record.checkpoint is not None:
        steps.append(record.checkpoint.step)
    return max(steps)


def _has_grown(status: TrainingJobStatus) -> bool:
    """Tell whether the attempt has more workers than the job has trained with: the next one then has fewer."""
    return status.attempt is not None and 0 < status.replicas_in_force < status.attempt.replicas


def _refusals_allowed(status: TrainingJobStatus, spec: TrainingJobSpec) -> int:
    return min(spec.failure_policy.restarts_allowed(_devices(status)), REFUSALS_MAX)


def _devices(status: TrainingJobStatus) -> int:
    attempt = status.attempt
    return 0 if attempt is None else attempt.replicas * attempt.devices


def _matching_rule(snapshot: JobSnapshot, spec: TrainingJobSpec, failure: Failure) -> FailureRule | None:
    held = {pair for pod in snapshot.pods for pair in pod.conditions}
    for rule in spec.failure_policy.rules:
        codes = rule.on_exit_codes
        if codes is not None:
            code = failure.pod_code if failure.code is None else failure.code
            if code is not None and (code in codes.values) == (codes.operator == "In"):
                return rule
        elif any((wanted.type, wanted.status) in held for wanted in rule.on_pod_conditions):
            return rule
    return None


def _rule_name(rule: FailureRule) -> str:
    return f"rule {rule.name}" if rule.name else "a failure rule"


def _scope(snapshot: JobSnapshot, spec: TrainingJobSpec, failure: Failure, rule: FailureRule | None) -> Scope:
    """Choose the scope: the failure requires at least one, a rule or repeated failures may raise it."""
    attempt = snapshot.job.attempt
    replicas = 0 if attempt is None else attempt.replicas
    if failure.replace:
        whole = len(failure.replace) == replicas and replicas > 1
        lowest = Scope.GANG if whole else Scope.POD
    else:
        lowest = Scope.PROCESS
    if rule is not None and rule.action in {"RestartProcess", "RestartPod", "RestartGang"}:
        return max(lowest, Scope(rule.action), key=RUNGS.index)
    tries = _in_place_tries(snapshot.job.status, failure.index)
    if lowest is Scope.PROCESS and failure.index is not None and tries >= spec.failure_policy.in_place_max:
        return Scope.POD
    return lowest


_FINAL: dict[int, Reason] = {
    ExitCode.USAGE: Reason.MISCONFIGURED,
    ExitCode.DATA_DAMAGED: Reason.DATA_DAMAGED,
    ExitCode.RUN_FAILED: Reason.RUN_FAILED,
}
"""Exit codes of ranks after which another attempt would fail in the same way."""
SKEW_S = 5.0
"""Largest accepted difference between the clocks of two machines."""


def _in_place_tries(status: TrainingJobStatus, index: int | None) -> int:
    """Count the newest consecutive restarts in place that one worker caused."""
    tries = 0
    for record in reversed(status.restart_records):
        if record.index != index or record.scope != Scope.PROCESS:
            break
        tries += 1
    return tries


def _replaced(snapshot: JobSnapshot, failure: Failure, scope: Scope) -> frozenset[int]:
    attempt = snapshot.job.attempt
    if scope is Scope.GANG and attempt is not None:
        return frozenset(range(attempt.replicas))
    if scope is Scope.POD and not failure.replace:
        return frozenset() if failure.index is None else frozenset({failure.index})
    return failure.replace


def _record(snapshot: JobSnapshot, failure: Failure, scope: Scope, *, counts: bool, now_s: float) -> RestartRecord:
    attempt, record = snapshot.job.attempt, current_record(snapshot)
    return RestartRecord(
        attempt=0 if attempt is None else attempt.number,
        at=rfc3339(now_s),
        cause=failure.cause.value,
        scope=scope.value,
        index=failure.index,
        step=0 if record is None else record.step,
        checkpoint_step=_durable_step(snapshot),
        counts=counts,
        message=failure.message,
    )


def _budget_spent(
    status: TrainingJobStatus, spec: TrainingJobSpec, failure: Failure, *, counts: bool, idle: int, now_s: float
) -> GiveUp | None:
    policy = spec.failure_policy
    environment = failure.cause is Cause.ENVIRONMENT_FAILED
    if idle > policy.no_progress_max:
        most = policy.no_progress_max
        words = (
            f"{idle - 1} restarts in a row reached no newer checkpoint and no later step, at most {most} are allowed"
        )
        reason = Reason.ENVIRONMENT_FAILED if environment else Reason.NO_PROGRESS
        return GiveUp(failure=failure, reason=reason, message=f"{words}; last: {failure.message}")
    spent = _counted_restarts(status, window_s=policy.window_seconds, now_s=now_s)
    if counts and spent >= (most := policy.restarts_allowed(_devices(status))):
        words = f"{spent} restarts in {policy.window_seconds} s, at most {most} are allowed"
        reason = Reason.ENVIRONMENT_FAILED if environment else Reason.MAX_RESTARTS_EXCEEDED
        return GiveUp(failure=failure, reason=reason, message=f"{words}; last: {failure.message}")
    return None


def _counted_restarts(status: TrainingJobStatus, *, window_s: int, now_s: float) -> int:
    """Count the restarts in the window; the records always cover the largest budget."""
    kept = [parse_time_or(record.at, 0.0) for record in status.restart_records if record.counts]
    return sum(now_s - at_s < window_s for at_s in (*status.earlier_restarts.counted_at, *kept))


def recorded_retry_s(status: TrainingJobStatus, spec: TrainingJobSpec, now_s: float) -> float | None:
    """Return the time of the next attempt that is on record; None if there is none.

    A wait that would last longer than any may was written by a clock that is ahead of ours: it is over.
    """
    known_s = parse_time_or(status.retry_at, None)
    latest_s = now_s + spec.failure_policy.backoff.max_seconds + SKEW_S
    return now_s if known_s is not None and known_s > latest_s else known_s


def _due_s(status: TrainingJobStatus, spec: TrainingJobSpec, failure: Failure, *, idle: int, now_s: float) -> float:
    """When the next attempt may begin. A wait that is on record does not begin again."""
    backoff = spec.failure_policy.backoff
    known_s = recorded_retry_s(status, spec, now_s)
    if known_s is not None:
        return known_s
    if failure.cause is Cause.CREATE_REFUSED:
        # An immediate retry would be refused too, so even the first one waits.
        waits = _refusals(status) + 1
    elif failure.cause in failed_nodes.CAUSES & EXCUSED:
        moves = _in_a_row(status, failure.cause, since_s=now_s - failed_nodes.REMEMBERED_S)
        # As long as the wait for a node that has failed as often.
        waits = 0 if moves < QUICK_MOVES_MAX else moves + 1
    elif failure.cause in EXCUSED:
        waits = _in_a_row(status, failure.cause)
    else:
        waits = idle - (0 if failure.cause is Cause.ENVIRONMENT_FAILED else 1)
    if waits <= 0 or failure.cause in {Cause.HOST_RESTARTED, Cause.LOSS_SPIKE}:
        return now_s
    return now_s + min(float(backoff.max_seconds), backoff.initial_seconds * 2.0 ** min(waits - 1, 30))
