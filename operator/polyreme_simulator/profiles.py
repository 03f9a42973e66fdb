"""Profiles of seeds, which lead to situations that the mixture of everything seldom comes to.

Seeds take turns among them, so that each gets its share of any range. A profile moves chances and weights; all else is
drawn as in the mixture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

BEGINS = "patch TrainingJob that begins an attempt"
"""A write point: admissions, restarts, moves and resizes."""
NODE_TROUBLE = (
    "foreign pod",
    "node cordoned",
    "node cut off",
    "node dies",
    "node out of service",
    "node removed",
    "node tainted",
)
"""After each of these it is unknown for a while what the operator takes nodes to hold."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Chances, weights and sizes of one kind of seed."""

    name: str
    nodes: tuple[int, ...] = ()
    """Devices of each node; drawn if there are none."""
    racks: float = 0.5
    """Chance of a ClusterTopology."""
    exclusive: float = 0.3
    """Share of the jobs with a wish for their topology that want a domain for themselves."""
    cohort: bool = False
    """Whether there are always queues that lend to each other, and limits to it."""
    one_queue: bool = False
    """Whether there is always one queue."""
    apart: bool = False
    """Whether there are always two queues that share nothing."""
    queued: float = 0.7
    """Share of the jobs that name a queue that exists."""
    turns: tuple[int, ...] = ()
    """Which of the queues, of one job after the other; drawn if there are none."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Workers and devices of each, of one job after the other; drawn if there are none."""
    rising: float = 0.3
    """Chance that each job comes with a higher priority than those before it, so that it preempts them."""
    twins: float = 0.0
    """Chance that a job asks for the same as one before it."""
    jobs: int = 0
    """How many are submitted while faults last; drawn if 0."""
    within_s: float = 0.0
    """Within so much time; drawn if 0."""
    at_s: tuple[float, ...] = ()
    """From when on, for one job after the other; from the beginning on if there are none."""
    long: bool = False
    """Whether jobs last longer than the faults."""
    strict: float = 0.25
    """Share of the jobs that may fail a few times only."""
    progress_counts: bool = True
    """Whether strict jobs also fail when they make no progress."""
    events_min: int = 0
    favours: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Weights of what goes wrong and of what people change, in place of the usual ones."""
    calm_changes: tuple[int, ...] = (0, 1, 2, 4)
    """How many changes people make in the calm period after the faults."""
    calm_jobs: bool = False
    """Whether a job is submitted after each such change."""
    final_save_s: float = 0.3
    """Longest time until the checkpoint of a gang that was asked to stop begins to be written."""
    late_puts: float = 0.3
    """Share of a checkpoint's markers that land late while faults last, whatever became of the rank that sent them."""
    store_fails: float = 0.4
    """Chance that the checkpoint root fails a leader while faults last, half of the time after the write."""
    api_faults: float = 1.0
    """Chances of the API's faults, over the usual ones."""
    aims: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Weight by rare point, in place of the usual ones."""


MIXED = Profile(name="mixed")
RACKS = Profile(
    name="racks",
    nodes=(4, 2, 4, 2),
    racks=1.0,
    exclusive=0.6,
    sizes=((2, 1), (1, 1), (2, 1), (3, 1)),
    jobs=5,
    calm_jobs=True,
)
OTHERS = Profile(
    name="others' pods",
    nodes=(2, 2, 2),
    sizes=((1, 2), (2, 1), (1, 1), (3, 1)),
    favours={"foreign pod": 30},
    calm_changes=(4, 6),
    calm_jobs=True,
)
RANKS = Profile(
    name="ranks",
    nodes=(4, 4),
    jobs=2,
    within_s=3.0,
    long=True,
    strict=0.8,
    progress_counts=False,
    events_min=14,
    favours={"rank killed": 60, "rank exits": 30, "gang pauses": 30, "launcher killed": 10},
    late_puts=0.8,
    store_fails=0.5,
    api_faults=0.2,
    aims={"": 1},
)
QUOTAS = Profile(
    name="quotas",
    nodes=(4, 4, 4),
    cohort=True,
    queued=1.0,
    sizes=((1, 1), (2, 1), (1, 1), (1, 2)),
    jobs=6,
    long=True,
)
WAYS = Profile(
    name="preemption",
    nodes=(2, 2, 2),
    one_queue=True,
    queued=1.0,
    sizes=((2, 1), (1, 2), (2, 1), (4, 1), (2, 2), (3, 2)),
    rising=1.0,
    twins=0.3,
    jobs=7,
    long=True,
    favours={"suspend": 16, "node out of service": 6},
    final_save_s=5.0,
)
WRITES = Profile(
    name="writes",
    nodes=(2, 2),
    jobs=5,
    rising=0.6,
    favours={"replica crashes": 12, "both replicas crash": 6},
    aims={BEGINS: 3, "patch ConfigMap": 1, "create ConfigMap": 1},
)
PODS = Profile(
    name="pods",
    nodes=(4, 4, 4),
    jobs=2,
    long=True,
    strict=0.0,
    events_min=10,
    favours={"pod deleted": 20, "launcher stopped": 12, "launcher killed": 8, "node cut off": 6, "suspend": 6},
)
HOLDS = Profile(
    name="what is held",
    nodes=(2, 2),
    racks=0.0,
    apart=True,
    turns=(0, 0, 1, 0, 0, 0, 0),
    sizes=((1, 2), (1, 2), (1, 1), (2, 2), (1, 2), (2, 2), (1, 2)),
    rising=1.0,
    jobs=7,
    at_s=(0.0, 0.0, 10.0, 18.0, 20.0, 50.0, 52.0),
    within_s=1.0,
    long=True,
    favours={"launcher stopped": 12, "suspend": 8, **dict.fromkeys(NODE_TROUBLE, 0)},
    final_save_s=8.0,
    api_faults=0.1,
)
"""Two are preempted for a third, one of them sooner than the other, when a fourth comes that goes before it and exceeds
the quota: then nothing but what is held for the third keeps a lesser job of another queue from what came free first."""
_ONE_TURN = (RACKS, OTHERS, RANKS, QUOTAS, WAYS, WRITES, PODS)
PROFILES = (MIXED, *_ONE_TURN, HOLDS, *_ONE_TURN)


def profile_of(seed: int) -> Profile:
    """Return what a seed is about."""
    return PROFILES[seed % len(PROFILES)]
