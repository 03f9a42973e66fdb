"""What holds of every decision, whatever the cluster looks like."""

import dataclasses
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.scheduler import cluster_of, schedule
from polyreme_operator.types.actions import CreatePod, Decision, DeletePod, WriteStatus
from polyreme_operator.types.parse import parse_pod
from polyreme_operator.types.queues import QueueView, Quota
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import PodPhase
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, admitted, job, lease, node, pod, snapshot, why

NODES = st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=5)
JOBS = st.lists(
    st.tuples(st.sampled_from((1, 2, 3, 4)), st.sampled_from((1, 2, 3)), st.integers(-1, 1), st.booleans()), max_size=6
)


def build(nodes: list[tuple[int, bool]], jobs: list[tuple[int, int, int, bool]], limit: int) -> dict[str, Any]:
    """Jobs that say so already run, as far as they fit, as a scheduler before us would have let them."""
    views = tuple(node(f"n{at}", devices, unschedulable=closed) for at, (devices, closed) in enumerate(nodes))
    free = {view.name: view.capacity(DEVICE) for view in views}
    made, pods, left = [], [], limit
    for at, (replicas, devices, priority, runs) in enumerate(jobs):
        owner = job(f"j{at}", replicas=replicas, devices=devices, priority=priority)
        slots = [name for name, count in free.items() for _ in range(count // devices)][:replicas]
        if runs and owner.plan is not None and len(slots) == replicas and replicas * devices <= left:
            left -= replicas * devices
            for index, name in enumerate(slots):
                free[name] -= devices
                pods.append(pod(owner, index, where=name, devices=devices))
            owner = admitted(owner, tuple(slots))
        made.append(owner)
    queue = QueueView(name="default", quotas=(Quota(resource=DEVICE, nominal=limit),))
    return {"jobs": tuple(made), "nodes": views, "pods": tuple(pods), "queues": (queue,)}


def taken(seen: dict[str, Any], batch: Any) -> tuple[Counter[str], int]:
    after = {write.uid: write.after for write in batch.writes}
    places: dict[tuple[str, int, str], int] = {
        (p.job_uid, p.index, p.node): dict(p.requests)[DEVICE] for p in seen["pods"]
    }
    for owner in seen["jobs"]:
        status = after.get(owner.uid, owner.status)
        if status.is_true("Admitted") and status.attempt is not None:
            for index, name in enumerate(status.attempt.placement.node_by_index()):
                places[owner.uid, index, name] = status.attempt.devices
    on_node: Counter[str] = Counter()
    for (_, _, name), devices in places.items():
        on_node[name] += devices
    return on_node, sum(places.values())


@given(nodes=NODES, jobs=JOBS, limit=st.integers(0, 24))
@settings(max_examples=150)
def test_a_batch_never_takes_more_than_there_is(nodes: Any, jobs: Any, limit: int) -> None:
    seen = build(nodes, jobs, limit)
    on_node, whole = taken(seen, schedule(cluster_of(**seen), NOW_S))
    assert all(count <= nodes[int(name[1:])][0] for name, count in on_node.items())
    assert whole <= limit


@given(nodes=NODES, jobs=JOBS, limit=st.integers(0, 24), shuffle=st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_a_batch_depends_on_what_is_and_not_on_its_order(nodes: Any, jobs: Any, limit: int, shuffle: Any) -> None:
    seen = build(nodes, jobs, limit)
    mixed = dict(seen)
    for name in ("jobs", "nodes", "pods"):
        items = list(seen[name])
        shuffle.shuffle(items)
        mixed[name] = tuple(items)
    one, other = cluster_of(**mixed), cluster_of(**seen)
    first, second = schedule(one, NOW_S), schedule(other, NOW_S)
    assert (first.writes, first.intents, first.refused) == (second.writes, second.intents, second.refused)
    assert why(one, first) == why(other, second)


@given(nodes=NODES, jobs=JOBS, limit=st.integers(0, 24))
@settings(max_examples=50)
def test_exactly_the_waiting_jobs_get_a_reason(nodes: Any, jobs: Any, limit: int) -> None:
    cluster = cluster_of(**build(nodes, jobs, limit))
    batch = schedule(cluster, NOW_S)
    waiting = {owner.uid for owner in cluster.jobs.values() if not owner.admitted and owner.plan is not None}
    begun = {entry.uid for entry in batch.intents.entries} if batch.intents is not None else set()
    assert set(why(cluster, batch)) == waiting - begun


PODS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(0, 1),
        st.sampled_from(list(PodPhase)),
        st.booleans(),
        st.sampled_from(("n0", "n1")),
    ),
    max_size=5,
    unique_by=lambda entry: (entry[0], entry[1]),
)
RECORDS = st.fixed_dictionaries(
    {
        "attempt": st.integers(1, 2),
        "released": st.booleans(),
        "joined": st.integers(0, 2),
        "phase": st.sampled_from(("Starting", "Training", "Evaluating")),
        "step": st.integers(0, 50),
        "exits": st.sampled_from(([], [{"rank": 1, "signal": 9}], [{"rank": 0, "code": 7}])),
        "outcome": st.sampled_from((None, None, "Failed", "Stopped", "Succeeded")),
    }
)


def applied(seen: JobSnapshot, actions: Any) -> JobSnapshot:
    """The scene as it is when every action has done what it asked."""
    for action in actions:
        if isinstance(action, WriteStatus):
            seen = dataclasses.replace(seen, job=dataclasses.replace(seen.job, status=action.after))
        elif isinstance(action, DeletePod):
            seen = dataclasses.replace(seen, pods=tuple(p for p in seen.pods if p.uid != action.uid))
        elif isinstance(action, CreatePod):
            metadata = {**action.manifest["metadata"], "uid": "new", "resourceVersion": "9"}
            made = parse_pod({**action.manifest, "metadata": metadata})
            assert made is not None
            seen = dataclasses.replace(seen, pods=(*seen.pods, made))
    return seen


@given(pods=PODS, record=RECORDS, suspend=st.booleans(), created=st.integers(0, 2))
@settings(max_examples=300)
def test_reconcile_settles_within_a_few_passes(pods: Any, record: Any, suspend: bool, created: int) -> None:
    owner = admitted(job(suspend=suspend), replicas=created)
    views = tuple(
        pod(owner, index, replacement=number, phase=phase, deleting=going, where=where)
        for index, number, phase, going, where in pods
    )
    seen = snapshot(owner, pods=views, lease=lease(owner, **record))
    decision = Decision()
    for _ in range(8):  # three failures one after another take seven
        decision = reconcile(seen, NOW_S, defaults=PodDefaults())
        writes = [action for action in decision.actions if isinstance(action, WriteStatus)]
        assert len(writes) <= 1
        if not decision.actions:
            return
        seen = applied(seen, decision.actions)
    raise AssertionError(f"still acts: {decision.actions}")
