"""Jobs that run at another worker count than they wish: which counts fit, and when growing back pays.

``spec.workers.replicas`` stays the wish. With ``minReplicas`` a job starts smaller rather than wait; with
``maxReplicas`` it may use idle room beyond its wish. Every count has a plan of its own; an Explicit layout scales its
dp only.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec, TrainingJobStatus
from polyreme_api.plan.plan import Plan, plan_for
from polyreme_api.progress import ProgressRecord, RankPhase
from polyreme_api.training_stages import packs_common
from polyreme_operator.types.reasons import Cause
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

SIZES_MAX = 32
"""Worker counts that are offered for one job."""
PLANS_KEPT = 8192
GROW_COOLDOWN_S = 300.0
"""Time that an attempt is left alone before it is ended to grow."""
GAIN_FACTOR = 2.0
"""What is gained must be worth this many times what the resize costs: the estimate of the rest is rough."""
RESIZE_COST_S = 60.0
"""What a resize costs before any was measured: checkpoint, new pods, load, first step."""
MILLISECONDS = 1000


class _SameSpec:
    """A spec as a key: equal only to itself. Views of one generation share their spec."""

    __slots__ = ("spec",)

    def __init__(self, spec: TrainingJobSpec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return id(self.spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameSpec) and other.spec is self.spec


def sizes(job: JobView) -> Sequence[int]:
    """Return the worker counts that a job accepts to start with, best first: its wish, then smaller ones that fit."""
    spec = job.spec
    if spec is None:
        return ()
    wish = spec.workers.replicas
    least = wish if spec.workers.min_replicas is None else min(spec.workers.min_replicas, wish)
    return _fitting(_SameSpec(spec), range(wish, least - 1, -1))


def larger_sizes(job: JobView, current: int) -> Sequence[int]:
    """Return the worker counts above ``current`` that a running job may grow to, largest first."""
    spec = job.spec
    if spec is None:
        return ()
    most = max(spec.workers.replicas, spec.workers.max_replicas or 0)
    return _fitting(_SameSpec(spec), range(most, current, -1))


def plan_at(job: JobView, replicas: int) -> Plan | None:
    """Return the plan for a worker count; None where no layout fits."""
    if job.plan is not None and job.plan.replicas == replicas:
        return job.plan
    if job.spec is None:
        return None
    return _plan(_SameSpec(job.spec), replicas)


def worth_growing(record: ProgressRecord | None, job: JobView, *, current: int, larger: int, now_s: float) -> bool:
    """Tell whether ending an attempt to go on with more workers saves more time than it costs.

    The rest of the run is taken to shrink in proportion to the workers; steps are counted on rank 0's own clock.
    """
    attempt = job.attempt
    if attempt is None or record is None or record.step_seconds is None or larger <= current:
        return False
    if record.phase is not RankPhase.TRAINING or record.outcome is not None or not record.released:
        return False
    if now_s - parse_time_or(attempt.started_at, now_s) < GROW_COOLDOWN_S:
        return False
    rest_s = max(0, record.steps - record.step) * record.step_seconds
    gained_s = rest_s * (1.0 - current / larger)
    return gained_s > GAIN_FACTOR * resize_cost_s(job.status)


def resize_cost_s(status: TrainingJobStatus) -> float:
    """Return what beginning an attempt has cost this job on average; a guess before the first is over."""
    attempt = status.attempt
    lost = {entry.cause: entry.milliseconds for entry in status.accounting.lost}
    began = lost.get(Cause.STARTING, 0) + lost.get(Cause.RESIZE, 0)
    closed = 0 if attempt is None else attempt.number - 1
    if closed <= 0 or began <= 0:
        return RESIZE_COST_S
    return began / MILLISECONDS / closed


@functools.lru_cache(maxsize=PLANS_KEPT)
def _fitting(key: _SameSpec, counts: range) -> tuple[int, ...]:
    found = (count for count in _candidates(key.spec, counts) if _plan(key, count) is not None)
    return tuple(itertools.islice(found, SIZES_MAX))


def _candidates(spec: TrainingJobSpec, counts: range) -> Iterator[int]:
    """Yield the counts whose dp divides the batch and the ranks: cheap, and true of few; and, of mode Auto, the wish.

    The planner may cut layers or packs for a wish of other ranks; for every count it would mostly search in vain.
    """
    asked = spec.parallelism
    stage = (asked.pp or 1) * (asked.cp or 1) * (asked.tp or 1)
    packs = packs_common(spec) if spec.workers.runtime.mode == "Launcher" else 0
    for count in counts:
        world = count * spec.workers.devices
        wished = count == spec.workers.replicas and asked.mode == "Auto"
        if wished or (world % stage == 0 and packs % (world // stage) == 0):
            yield count


@functools.lru_cache(maxsize=PLANS_KEPT)
def _plan(key: _SameSpec, replicas: int) -> Plan | None:
    try:
        return plan_for(key.spec, replicas=replicas)
    except InvalidConfigError:
        return None
