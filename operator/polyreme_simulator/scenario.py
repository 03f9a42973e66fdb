"""Scenario of a seed: nodes and how they lie, queues, jobs; all of it drawn before anything goes wrong."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from polyreme_api import labels
from polyreme_operator.reconcile.binding import BindingMode
from polyreme_simulator.profiles import Profile

REPLICAS = (1, 2, 2, 3, 4)
PACKS = 12
"""Divisible by every worker count that the simulation uses."""
RACK = "example.com/rack"
LARGE_RACK_MORE = 4
"""Nodes that a rack has in addition where it may be taken out whole."""
NAMESPACES = ("default", "default", "team")
WORKERS_MAX = 4
LARGEST_DEVICES = 4
CROWDED = 0.2
HIGHEST = 6
URGENT = "urgent"
"""A PriorityClass."""
MAKES_WAY = "patch TrainingJob that is preempted"
DELETES_JOBS = "delete TrainingJob"
MAKES_ROLES = ("create Role", "create RoleBinding", "create ServiceAccount")
TELLS_LEVELS = "patch ClusterTopology"
BINDS = "bind Pod"
"""Write points that few scenarios come to: a seed that aims its faults at one draws a scenario that does."""
STEPS_MIN, STEPS_MAX, SHORT_STEPS_MAX, LONG_STEPS = 10, 150, 40, (120, 300)
SET_ASIDE_S = 50
COOLDOWN_S = 5
SHORT_TTL_S = 2
BORROWER, LENDER, COHORT = "small", "large", "org"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One cluster and those who use it."""

    nodes: tuple[tuple[str, int, str], ...]
    """Name, devices and rack of each node."""
    binding: BindingMode
    launcher_rbac: bool
    racks: bool
    """Whether a ClusterTopology says what a rack is."""
    queues: dict[str, dict[str, Any]]
    """Specifications by name."""
    jobs: int
    """So many are submitted while faults last."""
    within_s: float
    """Within so much time."""
    late_jobs: int
    """How many in the calm period after them."""
    rising: bool
    """Whether each job comes with a higher priority than those before it, so that it preempts them."""
    short_lived: bool
    """Whether jobs are short and their TTL is over soon, so that they are deleted while faults last."""
    profile: Profile
    """What the seed is about."""

    @property
    def owned(self) -> bool:
        """Whether the nodes are the operator's own, so that it binds pods there itself."""
        return self.binding == "GangBinder"

    @property
    def steps(self) -> tuple[int, int]:
        """Least steps of a job, and more than the most."""
        if self.short_lived:
            return STEPS_MIN, SHORT_STEPS_MAX
        return LONG_STEPS if self.profile.long else (STEPS_MIN, STEPS_MAX)

    @property
    def largest(self) -> int:
        """All devices."""
        return sum(devices for _, devices, _ in self.nodes)


def draw_scenario(rng: random.Random, profile: Profile, *, aim: str = "") -> Scenario:
    """Draw one of a profile that comes to the write point that faults are aimed at."""
    racks = rng.random() < profile.racks or aim == TELLS_LEVELS
    rising = rng.random() < profile.rising or aim == MAKES_WAY
    crowded = rising or rng.random() < CROWDED
    sizes = (2,) if crowded else (2, 4)
    count = 2 if crowded else rng.choice((2, 3, 3))
    devices = profile.nodes or tuple(rng.choice(sizes) for _ in range(count))
    nodes = tuple((f"n{number}", room, f"r{number % 2}") for number, room in enumerate(devices))
    return Scenario(
        nodes=nodes,
        binding="GangBinder" if aim == BINDS else rng.choice(("NodeName", "NodeAffinity", "GangBinder")),
        launcher_rbac=rng.random() < 0.3 or aim in MAKES_ROLES,
        racks=racks,
        queues=draw_queues(rng, profile),
        jobs=profile.jobs or (4 if crowded else rng.choice((1, 2, 3, 3))),
        within_s=profile.within_s or (50.0 if crowded else 20.0),
        late_jobs=rng.choice((0, 0, 1, 2)),
        rising=rising,
        short_lived=aim == DELETES_JOBS,
        profile=profile,
    )


def with_large_rack(scenario: Scenario) -> Scenario:
    """Return a scenario with so many nodes in its first rack that these can fail together."""
    more = tuple((f"n{len(scenario.nodes) + number}", 2, "r0") for number in range(LARGE_RACK_MORE))
    return dataclasses.replace(scenario, nodes=(*scenario.nodes, *more), racks=True)


def draw_queues(rng: random.Random, profile: Profile) -> dict[str, dict[str, Any]]:
    """Draw no queue, one, two, or a cohort of two that lend to each other."""
    if profile.one_queue:
        # Where quota is scarce, too, it guards what nodes are held for: mostly, nodes alone shall decide.
        return {BORROWER: queue_spec(nominal=rng.choice((1, 3, 3)) * sum(profile.nodes))}
    if profile.apart:
        return {name: queue_spec(nominal=sum(profile.nodes)) for name in (BORROWER, LENDER)}
    shape = 1.0 if profile.cohort else rng.random()
    if shape < 0.35:
        return {}
    if shape < 0.55:
        return {BORROWER: queue_spec(nominal=4)}
    limits = (1, 1, 2) if profile.cohort else (None, 1, 2)
    return {
        COHORT: queue_spec(nominal=rng.choice((0, 0, 2))),
        BORROWER: queue_spec(nominal=rng.choice((1, 2, 4)), parent=COHORT, borrowing=rng.choice(limits), rng=rng),
        LENDER: queue_spec(nominal=rng.choice((2, 4)), parent=COHORT, lending=rng.choice((None, None, 1, 2)), rng=rng),
    }


def queue_spec(
    *,
    nominal: int,
    parent: str = "",
    borrowing: int | None = None,
    lending: int | None = None,
    rng: random.Random | None = None,
) -> dict[str, Any]:
    """Return a queue's specification; times are those of a world in which a step takes half a second."""
    quota: dict[str, Any] = {"resource": labels.RESOURCE_DEVICE, "nominal": nominal}
    if borrowing is not None:
        quota["borrowingLimit"] = borrowing
    if lending is not None:
        quota["lendingLimit"] = lending
    preemption = {"cooldownSeconds": COOLDOWN_S}
    spec: dict[str, Any] = {"quotas": [quota], "preemption": preemption, "setAsideSeconds": SET_ASIDE_S}
    if parent:
        spec["parent"] = parent
    if rng is not None and rng.random() < 0.3:
        spec["preemption"]["reclaim"] = rng.choice(("Never", "LowerPriority"))
    return spec


def draw_job(name: str, scenario: Scenario, rng: random.Random, *, before: list[dict[str, Any]]) -> dict[str, Any]:
    """Draw a job that fits the whole cluster.

    Args:
        name: Its name.
        scenario: Where it is submitted.
        rng: Every draw.
        before: Specifications of the jobs that were submitted before it.
    """
    steps = rng.randrange(*scenario.steps)
    if before and rng.random() < scenario.profile.twins:
        spec = {**rng.choice(before), "training": {"steps": steps, "packsPerStep": PACKS}}
    else:
        spec = _draw_spec(scenario, rng, steps=steps, number=len(before))
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {"name": name, "namespace": rng.choice(NAMESPACES)},
        "spec": spec,
    }


def _draw_spec(scenario: Scenario, rng: random.Random, *, steps: int, number: int) -> dict[str, Any]:
    sizes = scenario.profile.sizes
    replicas, devices = sizes[number % len(sizes)] if sizes else (rng.choice(REPLICAS), rng.choice((1, 1, 2)))
    most = scenario.largest if sizes else min(scenario.largest, LARGEST_DEVICES)
    while replicas * devices > most:
        replicas, devices = max(1, replicas - 1), 1
    workers: dict[str, Any] = {"replicas": replicas, "devices": devices}
    if rng.random() < 0.3:
        workers |= {"minReplicas": rng.randint(1, replicas), "maxReplicas": rng.randint(replicas, WORKERS_MAX)}
    return {
        "model": {"preset": "kimi-vl-nano"},
        "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
        "training": {"steps": steps, "packsPerStep": PACKS},
        "workers": workers,
        "topology": _topology(scenario, replicas * devices, rng),
        "queueName": _queue(scenario, rng, number),
        "priority": min(number, HIGHEST) if scenario.rising else rng.choice((0, 0, 1, 2)),
        **({"priorityClassName": URGENT} if rng.random() < 0.1 else {}),
        "failurePolicy": _failure_policy(scenario.profile, rng),
        **_ttl(scenario, rng),
        "checkpoint": {"preemptionGraceSeconds": 10},
        "health": {
            "heartbeatTimeoutSeconds": 10,
            "nodeLostSeconds": 8,
            "startTimeoutSeconds": 40,
            "hang": {"action": rng.choice(("Notify", "Restart", "Restart")), "stallSeconds": rng.choice((5, 8))},
        },
    }


def _queue(scenario: Scenario, rng: random.Random, number: int) -> str:
    names, turns = sorted(scenario.queues), scenario.profile.turns
    if turns:
        return names[turns[number % len(turns)]]
    return rng.choice(names) if names and rng.random() < scenario.profile.queued else "default"


def _topology(scenario: Scenario, devices: int, rng: random.Random) -> dict[str, Any]:
    if not scenario.racks or rng.random() < 0.5:
        return {}
    rooms = {rack: sum(d for _, d, r in scenario.nodes if r == rack) for _, _, rack in scenario.nodes}
    if rng.random() < scenario.profile.exclusive:
        return {"exclusive": rng.choice(("rack", "host"))}
    return {"required": "rack"} if max(rooms.values()) >= devices else {"preferred": "rack"}


def _ttl(scenario: Scenario, rng: random.Random) -> dict[str, Any]:
    if scenario.short_lived:
        return {"ttlSecondsAfterFinished": SHORT_TTL_S}
    return {} if rng.random() < 0.75 else {"ttlSecondsAfterFinished": 20}


def _failure_policy(profile: Profile, rng: random.Random) -> dict[str, Any]:
    strict = rng.random() < profile.strict
    return {
        "maxRestarts": 4 if strict else 200,
        "noProgressMax": 3 if strict and profile.progress_counts else 100,
        "inPlaceMax": rng.choice((0, 1, 2)),
        "backoff": {"initialSeconds": 1, "maxSeconds": 8},
    }


def class_manifest(value: int) -> dict[str, Any]:
    """Return the PriorityClass."""
    return {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": URGENT},
        "value": value,
    }


def topology_manifest(levels: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the ClusterTopology that counts."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "ClusterTopology",
        "metadata": {"name": "default"},
        "spec": {"levels": [{"name": name, "nodeLabel": label} for name, label in levels]},
    }
