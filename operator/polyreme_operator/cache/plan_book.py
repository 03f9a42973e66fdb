"""Plans of a job at every worker count that it accepts: what is planned, and where answers are kept.

Planning takes seconds of processor time for a large elastic job, so no round and no pass does it. The model asks for
what a job lacks; the shell (``polyreme_operator.plan_worker``) has it planned elsewhere and hands the answer back.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterator

from polyreme_api import labels
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec, parse_job
from polyreme_operator.types.plans import JobPlans, PlanRequest
from polyreme_operator.types.views import JobView
from polyreme_planner.curriculum import packs_common
from polyreme_planner.plan import PLAN_CHARACTERS_MAX, Plan, plan_for

SIZES_MAX = 32
"""Worker counts up to the requested, and above it, that are planned for one job."""
ANSWERS_KEPT = 1024
"""Answers that are kept for jobs with an equal spec."""
WANTED_MAX = 20_000
"""Requests that wait. A job beyond them asks again when one was answered."""


def plan_sizes(request: PlanRequest) -> JobPlans:
    """Plan a job at every worker count that it accepts.

    Whatever a planner raises refuses that job, with the sentence: it must not stop the others.
    """
    document = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {"name": "any"},
        "spec": json.loads(request.spec_json),
    }
    try:
        spec = parse_job(document).spec
        requested = _plan_requested(spec, rescaled=request.rescaled)
        others = (_plan_or_none(spec, count) for count in _other_sizes(spec))
        return JobPlans(plans=(requested, *(plan for plan in others if plan is not None)))
    except InvalidConfigError as error:
        return JobPlans(refused=str(error))
    except Exception as error:  # noqa: BLE001 - a bug of the planner that one job meets refuses that job alone
        return JobPlans(refused=f"planner failed: {type(error).__name__}: {error}; this is a bug in polyreme")


def with_plans(job: JobView, answer: JobPlans) -> JobView:
    """Return the view of a job that waited for this answer."""
    plan = answer.plans[0] if answer.plans else None
    return dataclasses.replace(job, plan=plan, plans=answer.plans, invalid=answer.refused, planning=None)


def planned(job: JobView) -> JobView:
    """Return the view of a job with its plans, made here and now: for whoever may take the time."""
    return job if job.planning is None else with_plans(job, plan_sizes(job.planning))


class PlanBook:
    """Answers that are known, and requests that wait, in the order in which they came."""

    def __init__(self) -> None:
        self._answers: collections.OrderedDict[PlanRequest, JobPlans] = collections.OrderedDict()
        self._wanted: dict[PlanRequest, set[str]] = {}
        """UIDs of the jobs that wait, by request."""
        self._turned_away: set[str] = set()

    def answer(self, request: PlanRequest) -> JobPlans | None:
        """Return the answer to a request, if it is known."""
        known = self._answers.get(request)
        if known is not None:
            self._answers.move_to_end(request)
        return known

    def want(self, request: PlanRequest, uid: str) -> None:
        """Ask for the plans of a job."""
        if request in self._wanted or len(self._wanted) < WANTED_MAX:
            self._wanted.setdefault(request, set()).add(uid)
        else:
            self._turned_away.add(uid)

    def next(self) -> PlanRequest | None:
        """Return the request that has waited longest."""
        return next(iter(self._wanted), None)

    def put(self, request: PlanRequest, answer: JobPlans) -> tuple[set[str], set[str]]:
        """Take an answer.

        Returns:
            UIDs of the jobs that waited for it, and of jobs that found no place to wait and shall ask again.
        """
        self._answers[request] = answer
        if len(self._answers) > ANSWERS_KEPT:
            self._answers.popitem(last=False)
        turned_away, self._turned_away = self._turned_away, set()
        return self._wanted.pop(request, set()), turned_away


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
    """Refuse a plan that a status can't carry."""
    if (size := len(plan.to_json())) > PLAN_CHARACTERS_MAX:
        raise InvalidConfigError(
            f"plan is too long: {size} characters, expected at most {PLAN_CHARACTERS_MAX}", field="spec.parallelism"
        )
    return plan


def _other_sizes(spec: TrainingJobSpec) -> Iterator[int]:
    """Yield the worker counts beside the requested, nearest to what is wanted first: smaller ones, then the largest."""
    workers = spec.workers
    requested = workers.replicas
    least = requested if workers.min_replicas is None else min(workers.min_replicas, requested)
    most = max(requested, workers.max_replicas or 0)
    yield from itertools.islice(_even_sizes(spec, range(requested - 1, least - 1, -1)), SIZES_MAX - 1)
    yield from itertools.islice(_even_sizes(spec, range(most, requested, -1)), SIZES_MAX)


def _even_sizes(spec: TrainingJobSpec, counts: range) -> Iterator[int]:
    """Yield the counts whose dp divides the batch and the ranks: cheap to say, and true of few.

    The planner may cut layers or packs for a wish of other ranks; for every count it would mostly search in vain.
    """
    asked = spec.parallelism
    stage = (asked.pp or 1) * (asked.cp or 1) * (asked.tp or 1)
    packs = packs_common(spec) if spec.workers.runtime.mode == "Launcher" else 0
    for count in counts:
        world = count * spec.workers.devices
        if world % stage == 0 and packs % (world // stage) == 0:
            yield count
