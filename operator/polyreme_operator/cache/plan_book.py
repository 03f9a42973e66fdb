"""Plans of jobs at every worker count that they accept: requests and cached answers.

Planning takes seconds of CPU time for a large elastic job, so no scheduling cycle and no pass does it. The cache
requests missing plans; ``polyreme_operator.plan_worker`` computes them in another process.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator

from polyreme_api import labels
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec, parse_job
from polyreme_operator.types.plans import JobPlans, PlanRequest
from polyreme_operator.types.views import JobView
from polyreme_planner.curriculum import kinds_of_packs
from polyreme_planner.layout import gives_each_packs
from polyreme_planner.plan import PLAN_CHARACTERS_MAX, Plan, plan_for

SIZES_MAX = 32
"""Planned worker counts up to the requested one, and as many above it."""
ANSWERS_KEPT = 1024
"""Cached answers, for jobs with equal specs."""
WANTED_MAX = 20_000
"""Queued requests. A job beyond them requests again after the next answer."""


def plan_sizes(request: PlanRequest) -> JobPlans:
    """Plan a job at every worker count that it accepts.

    An error of the planner refuses that job with a message and does not affect others.
    """
    document = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {"name": "any"},
        "spec": json.loads(request.spec_json),
    }
    try:
        spec = parse_job(document).spec
        refused, accepted, plan = _accepted(spec, request)
        smaller = [count for count in request.in_force if count < accepted.workers.replicas]
        counts = dict.fromkeys([*_other_sizes(accepted), *smaller])
        others = (_plan_or_none(accepted, count) for count in counts)
        return JobPlans(plans=(plan, *(other for other in others if other is not None)), refused=refused)
    except InvalidConfigError as error:
        return JobPlans(refused=str(error))
    except Exception as error:  # noqa: BLE001 - a bug of the planner refuses only the job that meets it
        return JobPlans(refused=f"planner failed: {type(error).__name__}: {error}; this is a bug in polyreme")


def with_plans(job: JobView, answer: JobPlans) -> JobView:
    """Return the view of a job that waited for this answer."""
    kept = bool(answer.plans)
    invalid, size_refused = ("", answer.refused) if kept else (answer.refused, "")
    return dataclasses.replace(job, plans=answer.plans, invalid=invalid, size_refused=size_refused, planning=None)


def planned(job: JobView) -> JobView:
    """Return the view of a job with its plans, computed synchronously."""
    return job if job.planning is None else with_plans(job, plan_sizes(job.planning))


class PlanBook:
    """Cached answers, and queued requests in order of arrival."""

    def __init__(self) -> None:
        self._answers: collections.OrderedDict[PlanRequest, JobPlans] = collections.OrderedDict()
        self._wanted: dict[PlanRequest, set[str]] = {}
        """UIDs of the waiting jobs, by request."""
        self._rejected: set[str] = set()

    def answer(self, request: PlanRequest) -> JobPlans | None:
        """Return the answer to a request, if it is known."""
        known = self._answers.get(request)
        if known is not None:
            self._answers.move_to_end(request)
        return known

    def want(self, request: PlanRequest, uid: str) -> None:
        """Request the plans of a job."""
        if request in self._wanted or len(self._wanted) < WANTED_MAX:
            self._wanted.setdefault(request, set()).add(uid)
        else:
            self._rejected.add(uid)

    def attach(self, job: JobView) -> JobView:
        """Attach a job's plans if they are known, and request them otherwise."""
        if job.planning is None:
            return job
        answer = self.answer(job.planning)
        if answer is not None:
            return with_plans(job, answer)
        self.want(job.planning, job.uid)
        return job

    def next(self) -> PlanRequest | None:
        """Return the oldest request."""
        return next(iter(self._wanted), None)

    def put(self, request: PlanRequest, answer: JobPlans) -> tuple[set[str], set[str]]:
        """Store an answer.

        Returns:
            UIDs of the jobs that waited for it, and of jobs that must request again because the queue was full.
        """
        self._answers[request] = answer
        if len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)
        turned_away, self._rejected = self._rejected, set()
        return self._wanted.pop(request, set()), turned_away


def _accepted(spec: TrainingJobSpec, request: PlanRequest) -> tuple[str, TrainingJobSpec, Plan]:
    """Plan the requested worker count, or else the first in force that has a plan.

    Returns:
        Why the requested count has no plan (empty if it has one), the spec with the count that has, and its plan.

    Raises:
        InvalidConfigError: If none has a plan; the message is about the requested one.
    """
    try:
        return "", spec, _plan_requested(spec, rescaled=request.rescaled)
    except InvalidConfigError as error:
        for count in request.in_force:
            kept = spec.model_copy(update={"workers": spec.workers.model_copy(update={"replicas": count})})
            with contextlib.suppress(InvalidConfigError):
                return str(error), kept, _plan_requested(kept, rescaled=True)
        raise


def _plan_requested(spec: TrainingJobSpec, *, rescaled: bool) -> Plan:
    try:
        return _bounded(plan_for(spec))
    except InvalidConfigError:
        if not rescaled:
            raise
    return _bounded(plan_for(spec, replicas=spec.workers.replicas))


def _plan_or_none(spec: TrainingJobSpec, replicas: int) -> Plan | None:
    try:
        return _bounded(plan_for(spec, replicas=replicas))
    except InvalidConfigError:
        return None


def _bounded(plan: Plan) -> Plan:
    """Reject a plan that is too long for a status."""
    if (size := len(plan.to_json())) > PLAN_CHARACTERS_MAX:
        raise InvalidConfigError(
            f"plan is too long: {size} characters, expected at most {PLAN_CHARACTERS_MAX}", field="spec.parallelism"
        )
    return plan


def _other_sizes(spec: TrainingJobSpec) -> Iterator[int]:
    """Yield the other worker counts by preference: smaller ones in descending order, then the largest ones."""
    workers = spec.workers
    requested = workers.replicas
    least = requested if workers.min_replicas is None else min(workers.min_replicas, requested)
    most = max(requested, workers.max_replicas or 0)
    yield from itertools.islice(_even_sizes(spec, range(requested - 1, least - 1, -1)), SIZES_MAX - 1)
    yield from itertools.islice(_even_sizes(spec, range(most, requested, -1)), SIZES_MAX)


def _even_sizes(spec: TrainingJobSpec, counts: range) -> Iterator[int]:
    """Yield the counts whose dp divides the ranks and gives each of them packs, which is a cheap and strict filter.

    For most other counts the planner would search without a result.
    """
    asked = spec.parallelism
    stage = (asked.pp or 1) * (asked.cp or 1) * (asked.tp or 1)
    shared = [packs.per_step for packs in kinds_of_packs(spec)] if spec.workers.runtime.mode == "Launcher" else []
    for count in counts:
        world = count * spec.workers.devices
        if world % stage == 0 and all(gives_each_packs(packs, world // stage) for packs in shared):
            yield count
