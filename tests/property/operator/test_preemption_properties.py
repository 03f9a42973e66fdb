"""The choice of victims against all choices there are, on clusters small enough to try them."""

import dataclasses
import itertools
from typing import Any

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from polyreme_api.job.workers import Topology
from polyreme_operator.placement.place import charge, place
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.scheduler.preemption.bundles import SUBSETS_MAX
from polyreme_operator.scheduler.preemption.search import EXACT_CANDIDATES, Victims, choose_victims
from polyreme_operator.types.inventory import GangRequest, Inventory, Placed
from polyreme_operator.types.queues import QueueView, Reclaim, Running, Waiting
from tests.unit.operator.queue_scenes import GPU, inventory, queue, running, used_by, waiting

NOW_S = 1000.0
COST_FACTOR = 1.0
"""Against the cheapest choice: so few candidates are all tried."""
TOPOLOGIES = (
    Topology(),
    Topology(required="rack"),
    Topology(preferred="rack"),
    Topology(slice_size=2, slice_level="rack"),
    Topology(exclusive="rack"),
    Topology(required="rack", exclusive="rack"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    nodes: Inventory
    queues: tuple[QueueView, ...]
    jobs: tuple[Running, ...]
    preemptor: Waiting
    request: GangRequest


@st.composite
def cases(draw: Any, *, packed: bool) -> Case:
    """Two to four racks, three queues of one cohort, up to seven jobs; some may stop already.

    When packed, jobs fill whatever they can, nearly all of them borrow, and ``a`` owns what it asks for: then it is
    about who exactly may be asked, and who is the cheapest.
    """
    racks = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    devices = draw(st.sampled_from((1, 2, 4)))
    free = [devices] * sum(racks)
    jobs: list[Running] = []
    for at in range(7 if packed else draw(st.integers(0, 7))):
        each = draw(st.integers(1, devices))
        spots = [row for row in range(sum(racks)) for _ in range(free[row] // each)]
        if not spots:
            break
        size = min(draw(st.integers(1, 3)), len(spots))
        first = 0 if packed else draw(st.integers(0, len(spots) - size))
        taken = spots[first : first + size]
        for row in taken:
            free[row] -= each
        jobs.append(
            running(
                f"j{at}",
                draw(st.sampled_from("abbcc" if packed else "abc")),
                taken,
                devices=each,
                priority=draw(st.integers(-1, 1)),
                started_s=draw(st.sampled_from((0.0, 500.0, 800.0, 900.0, 1000.0))),
                stopping=draw(st.integers(0, 9 if packed else 4)) == 0,
            )
        )
    foreign = {row: left for row, left in enumerate(free) if draw(st.integers(0, 3 if packed else 9)) == 0}
    topology = draw(st.sampled_from(TOPOLOGIES))
    workers = draw(st.integers(1, 3)) * (topology.slice_size or 1)
    preemptor = waiting("p", "a", workers=workers, devices=draw(st.integers(1, devices)))
    request = GangRequest(workers=workers, devices=1, requests=preemptor.requests, topology=topology)
    needs = workers * preemptor.requests[0][1]
    policy = st.just(Reclaim.ANY) if packed else st.sampled_from(tuple(Reclaim))
    nominal = {name: draw(st.integers(0, 6)) for name in "abc"}
    if packed:
        nominal |= {"a": needs + draw(st.integers(0, 3)), "b": draw(st.integers(0, 4)), "c": draw(st.integers(0, 4))}
    queues = tuple(queue(name, nominal[name], "top", within_queue=draw(policy), reclaim=draw(policy)) for name in "abc")
    top = queue("top", draw(st.sampled_from((0, 8))))
    nodes = inventory(racks, devices=devices, jobs=jobs, foreign=foreign)
    return Case(nodes, (*queues, top), tuple(jobs), preemptor, request)


def starts_without(case: Case, gone: set[str]) -> bool:
    """Whether the gang could start on the spot if these jobs had never been."""
    left = [job for job in case.jobs if job.uid not in gone]
    ledger = QuotaLedger(QueueTree.of(case.queues), used_by(left))
    job = case.preemptor
    if not ledger.fits(job.queue, job.requests, job.workers):
        return False
    nodes = dataclasses.replace(case.nodes, used_NR=case.nodes.used_NR.copy(), busy_N=case.nodes.busy_N.copy())
    for other in case.jobs:
        if other.uid in gone:
            worker = dataclasses.replace(case.request, requests=other.requests)
            charge(nodes, worker, other.rows_W, sign=-1)
    return isinstance(place(nodes, case.request), Placed)


def permitted(case: Case, victims: tuple[Running, ...]) -> bool:
    """Whether there is an order in which each of them may be asked."""
    views = {view.name: view for view in case.queues}
    nominal = {name: quota.nominal for name, view in views.items() if (quota := view.quota(GPU))}
    policies = {True: views["a"].within_queue, False: views["a"].reclaim}
    need = case.preemptor.workers * case.preemptor.requests[0][1]
    for order in itertools.permutations(victims):
        held = dict.fromkeys(views, 0)
        for job in case.jobs:
            held[job.queue] += 0 if job.stopping else job.devices
        for job in order:
            policy = policies[job.queue == "a"]
            if job.stopping or policy is Reclaim.NEVER or (policy is Reclaim.LOWER_PRIORITY and job.priority >= 0):
                return False
            if job.queue != "a" and (held["a"] + need > nominal["a"] or held[job.queue] <= nominal[job.queue]):
                break
            held[job.queue] -= job.devices
        else:
            return True
    return False


def cost(jobs: tuple[Running, ...]) -> float:
    return sum(job.devices * (NOW_S - job.started_s) for job in jobs)


def cheapest(case: Case) -> float | None:
    stopping = {job.uid for job in case.jobs if job.stopping}
    choices = [some for count in range(len(case.jobs) + 1) for some in itertools.combinations(case.jobs, count)]
    for victims in sorted(choices, key=cost):
        if starts_without(case, stopping | {job.uid for job in victims}) and permitted(case, victims):
            return cost(victims)
    return None


def choose(case: Case) -> Victims | None:
    tree = QueueTree.of(case.queues)
    ledger = QuotaLedger(tree, used_by(case.jobs))
    return choose_victims(case.nodes, case.request, case.preemptor, case.jobs, tree=tree, ledger=ledger, now_s=NOW_S)


@given(case=st.booleans().flatmap(lambda packed: cases(packed=packed)))
@settings(max_examples=500)
def test_the_choice_is_as_good_as_any(case: Case) -> None:
    before = case.nodes.used_NR.copy(), case.nodes.busy_N.copy()
    found, least = choose(case), cheapest(case)
    event("none" if found is None else "waits" if not found.uids else "reclaims" if found.reclaim else "displaces")
    assert np.array_equal(before[0], case.nodes.used_NR)
    assert np.array_equal(before[1], case.nodes.busy_N)
    assert (found is None) == (least is None)
    if found is None or least is None:
        return
    victims = tuple(job for job in case.jobs if job.uid in found.uids)
    stopping = {job.uid for job in case.jobs if job.stopping}
    assert len(victims) == len(found.uids)
    assert starts_without(case, stopping | set(found.uids))
    assert permitted(case, victims)
    assert found.cost_device_s == cost(victims)
    assert found.reclaim == {job.uid for job in victims if job.queue != "a"}
    if case.request.topology.preferred is None:
        assert found.cost_device_s <= COST_FACTOR * least


@st.composite
def crowds(draw: Any) -> Case:
    """One or two racks and up to 14 jobs of one queue; mostly few of them share nodes."""
    racks = draw(st.sampled_from(([8, 8], [9, 6], [15])))
    devices, together = draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((True, True, True, False)))
    free = [devices] * sum(racks)
    jobs: list[Running] = []
    for at in range(14):
        each = draw(st.integers(1, devices))
        spots = [row for row in range(sum(racks)) for _ in range(free[row] // each)]
        if not spots:
            break
        first, workers = draw(st.integers(0, len(spots) - 1)), draw(st.sampled_from((1, 1, 2, 3)))
        taken = (
            spots[first : first + workers] if together else [*spots[first:], *spots[:first]][:: devices + 1][:workers]
        )
        for row in taken:
            free[row] -= each
        started_s = float(draw(st.integers(0, int(NOW_S))))
        jobs.append(running(f"j{at:02}", "a", taken, devices=each, priority=-1, started_s=started_s))
    preemptor = waiting("p", "a", workers=draw(st.integers(1, 6)), devices=draw(st.integers(1, devices)))
    request = GangRequest(
        workers=preemptor.workers, devices=1, requests=preemptor.requests, topology=Topology(required="rack")
    )
    nodes = inventory(racks, devices=devices, jobs=jobs)
    return Case(nodes, (queue("a", 1_000),), tuple(jobs), preemptor, request)


def least_in_a_rack(case: Case) -> float | None:
    """Of all sets of jobs, the cost of the cheapest without which one rack holds the gang."""
    sets_OV = np.arange(1 << len(case.jobs))[:, None] >> np.arange(len(case.jobs)) & 1
    held_VN = np.zeros((len(case.jobs), len(case.nodes.names)), dtype=np.int64)
    for at, job in enumerate(case.jobs):
        np.add.at(held_VN[at], job.rows_W, job.requests[0][1])
    free_N = case.nodes.capacity_NR[:, 0] - case.nodes.used_NR[:, 0]
    slots_ON = (free_N + sets_OV @ held_VN) // case.preemptor.requests[0][1]
    rack_N = case.nodes.domain_LN[0]
    room_OD = np.stack([slots_ON[:, rack_N == rack].sum(axis=1) for rack in range(rack_N.max() + 1)], axis=1)
    cost_O = sets_OV @ np.array([cost((job,)) for job in case.jobs], dtype=np.float64)
    enough_O = (room_OD >= case.preemptor.workers).any(axis=1)
    return float(cost_O[enough_O].min()) if enough_O.any() else None


def bundle_max(jobs: tuple[Running, ...]) -> int:
    """Return how many jobs at most are connected by shared nodes."""
    groups: list[tuple[set[str], set[int]]] = []
    for job in jobs:
        rows = set(job.rows_W.tolist())
        near = [group for group in groups if group[1] & rows]
        groups = [group for group in groups if group not in near]
        groups.append(({job.uid}.union(*(uids for uids, _ in near)), rows.union(*(other for _, other in near))))
    return max((len(uids) for uids, _ in groups), default=0)


@given(case=crowds())
@settings(max_examples=300)
def test_of_many_jobs_the_cheapest_are_preempted(case: Case) -> None:
    found, least = choose(case), least_in_a_rack(case)
    assert (found is None) == (least is None)
    if found is None or least is None:
        return
    assert starts_without(case, set(found.uids))
    few = bundle_max(case.jobs) <= SUBSETS_MAX
    event("exact" if few and len(case.jobs) > EXACT_CANDIDATES else "bundle too large" if not few else "few jobs")
    assert found.cost_device_s >= least - 1e-6
    if few:
        assert abs(found.cost_device_s - least) < 1e-6
