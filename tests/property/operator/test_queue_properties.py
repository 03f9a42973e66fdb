"""Quota, order and index of the queues against definitions that are slow and plain."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_operator.queueing.fair_share import Shares
from polyreme_operator.queueing.order import first_of, scheduling_order
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.queueing.waiting import WaitingIndex
from polyreme_operator.types.queues import QueueView, Quota, Waiting
from tests.unit.operator.queue_scenes import GPU, gpus, queue, waiting

LIMIT = st.none() | st.integers(0, 4)
NODE = st.tuples(st.integers(0, 6), st.none() | st.integers(0, 6), LIMIT, LIMIT)


@st.composite
def forests(draw: Any) -> list[QueueView]:
    """Up to six queues; each lies below one before it, or is a root."""
    queues: list[QueueView] = []
    for at, (parent, nominal, borrow, lend) in enumerate(draw(st.lists(NODE, min_size=1, max_size=6))):
        above = f"q{parent}" if parent < at else ""
        queues.append(queue(f"q{at}", nominal, above, borrow=borrow, lend=lend))
    return queues


def cuts(tree: QueueTree, name: str) -> Iterator[tuple[set[str], list[str]]]:
    """Every connected part of the tree that has this queue on top, with the children that are cut off."""
    options = [[({name}, list[str]())]]
    for child in tree.children(name):
        without = (set[str](), [child])
        options.append([without, *cuts(tree, child)])
    for choice in itertools.product(*options):
        yield set().union(*(part for part, _ in choice)), [child for _, off in choice for child in off]


def slack(tree: QueueTree, used: dict[str, int], top: str, part: set[str], cut: list[str]) -> int | None:
    """What a part of the tree has, may borrow from above and be lent from below, less what it uses."""
    quotas = {name: tree.views[name].quota(GPU) or Quota(resource=GPU, nominal=0) for name in (*part, *cut)}
    inflows = [0 if len(tree.path(top)) == 1 else quotas[top].borrowing_limit]
    inflows += [quotas[name].lending_limit for name in cut]
    bounded = [limit for limit in inflows if limit is not None]
    if len(bounded) < len(inflows):
        return None
    return sum(bounded) + sum(quotas[name].nominal - used[name] for name in part)


def room_by_cuts(tree: QueueTree, used: dict[str, int], name: str) -> int | None:
    """The least slack of any part that holds the queue: max-flow by min-cut, every cut tried."""
    if GPU not in tree.limited(name):
        return None
    limited = {other: used[other] if GPU in tree.limited(other) else 0 for other in tree.views}
    slacks = [
        slack(tree, limited, top, part, cut) for top in tree.path(name) for part, cut in cuts(tree, top) if name in part
    ]
    return min(found for found in slacks if found is not None)


@given(queues=forests(), steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.booleans()), max_size=25))
@settings(max_examples=400)
def test_admitted_jobs_are_never_over_any_quota(queues: list[QueueView], steps: Any) -> None:
    tree = QueueTree.of(queues)
    ledger, used = QuotaLedger(tree, {}), dict.fromkeys(tree.views, 0)
    for at, count, admits in steps:
        name = f"q{at % len(queues)}"
        room = room_by_cuts(tree, used, name)
        assert ledger.room(name, GPU) == room
        assert ledger.fits(name, gpus(count), 1) == (room is None or count <= room)
        if admits and ledger.fits(name, gpus(count), 1):
            ledger.charge(name, gpus(count), 1)
            used[name] += count
        elif not admits and used[name] >= count:
            ledger.release(name, gpus(count), 1)
            used[name] -= count
        for top in tree.views:
            for part, cut in cuts(tree, top):
                left = slack(tree, {n: used[n] if GPU in tree.limited(n) else 0 for n in used}, top, part, cut)
                assert left is None or left >= 0
    fresh = QuotaLedger(tree, {(name, GPU): count for name, count in used.items()})
    assert all(fresh.room(name, GPU) == ledger.room(name, GPU) for name in used)


JOB = st.tuples(st.integers(0, 5), st.integers(-1, 1), st.integers(0, 40), st.integers(0, 2))


def jobs_of(drawn: list[tuple[int, int, int, int]], queues: int) -> list[Waiting]:
    """A kind is of one queue: its number says so."""
    return [
        waiting(f"j{at}", f"q{where % queues}", priority=priority, since_s=since, kind=3 * (where % queues) + kind)
        for at, (where, priority, since, kind) in enumerate(drawn)
    ]


def next_by_definition(left: list[Waiting], tree: QueueTree, shares: Shares, now_s: float) -> Waiting:
    """Sort everything again for each job."""

    def points(job: Waiting) -> int:
        aging_s = tree.view(job.queue).aging_s
        return job.priority + (int((now_s - job.since_s) // aging_s) if aging_s else 0)

    most = max(points(job) for job in left)
    level = [job for job in left if points(job) == most]
    return next_below("", level, tree, shares)


def next_below(cohort: str, level: list[Waiting], tree: QueueTree, shares: Shares) -> Waiting:
    """Of the next job below each child: the one whose child has the least share, then the oldest."""
    rivals: dict[tuple[float, str, bool], list[Waiting]] = defaultdict(list)
    for job in level:
        path = ("", *reversed(tree.path(job.queue)))
        at = path.index(cohort)
        own = at + 1 == len(path)
        child = cohort if own else path[at + 1]
        rivals[shares.own(child) if own else shares.of(child), child, own].append(job)
    firsts = [
        (share, min(jobs, key=age_of) if own else next_below(child, jobs, tree, shares))
        for (share, child, own), jobs in rivals.items()
    ]
    return min(firsts, key=lambda first: (first[0], *age_of(first[1])))[1]


def age_of(job: Waiting) -> tuple[float, str]:
    return job.since_s, job.uid


@given(
    queues=forests(),
    drawn=st.lists(JOB, max_size=20),
    aging=st.sampled_from((0.0, 7.0)),
    weights=st.lists(st.integers(1, 3), min_size=6, max_size=6),
    deeds=st.lists(st.sampled_from(("admit", "refuse", "pass")), min_size=20, max_size=20),
)
@settings(max_examples=300)
def test_the_lazy_order_is_the_defined_one(
    queues: list[QueueView], drawn: Any, aging: float, weights: list[int], deeds: list[str]
) -> None:
    queues = [dataclasses.replace(q, aging_s=aging, weight=weights[at]) for at, q in enumerate(queues)]
    tree, jobs = QueueTree.of(queues), jobs_of(drawn, len(queues))
    shares, ours = (Shares(tree, {("q0", GPU): 2}, {GPU: 10}, 50.0) for _ in range(2))
    order, left = scheduling_order(jobs, tree, ours, 50.0), list(jobs)
    for deed in deeds:
        if not left:
            break
        job = next(order)
        assert job == next_by_definition(left, tree, shares, 50.0)
        left.remove(job)
        if deed == "admit":
            order.admitted(job)
            shares.charge(job.queue, job.requests, job.workers)
        elif deed == "refuse":
            order.refuse(job.kind)
            left = [other for other in left if other.kind != job.kind]
    if not left:
        assert next(order, None) is None


@given(drawn=st.lists(JOB, max_size=20), out=st.lists(st.integers(0, 19)), back=st.lists(st.integers(0, 19)))
@settings(max_examples=200)
def test_an_updated_index_equals_a_rebuilt_one(drawn: Any, out: list[int], back: list[int]) -> None:
    jobs = jobs_of(drawn, 3)
    index, kept = WaitingIndex(jobs), {job.uid: job for job in jobs}
    for at in out:
        index.remove(f"j{at}")
        kept.pop(f"j{at}", None)
    for at in back:
        if at < len(jobs):
            changed = dataclasses.replace(jobs[at], priority=at % 2)
            index.add(changed)
            kept[changed.uid] = changed
    tree = QueueTree.of([queue(f"q{at}") for at in range(3)])
    again = WaitingIndex(kept.values())
    assert len(index) == len(kept)
    assert index.queues() == again.queues()
    for name in ("q0", "q1", "q2"):
        assert index.count(name) == again.count(name)
        found = first_of(index, tree, name, 50.0, limit=100)
        assert found == first_of(again, tree, name, 50.0, limit=100)
        mine = [job for job in kept.values() if job.queue == name]
        assert found == sorted(mine, key=lambda job: (-job.priority, job.since_s, job.uid))
