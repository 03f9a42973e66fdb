"""Whom to ask to make way: the domain that is cheapest to clear, quota and space together.

A victim costs its devices times the seconds since its last durable checkpoint: the work that is lost if it can't save
in time. Candidates are whole gangs. For each domain that could hold the preemptor a set of victims is sought: cheapest
for the room that it gives first, then more for the quota if need be, then those are let off without whom it works too.
Domains are tried in the order of their bounds (``clearing.py``) until no bound is below the best set found, so most are
never looked into. Few candidates are tried in all combinations. The search ends after ``work_units`` with the best so
far.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from polyreme_operator.placement.domains import CLUSTER, Domain
from polyreme_operator.placement.topology_request import TopologyRequest, topology_request_of
from polyreme_operator.placement.tree import tree_of
from polyreme_operator.queueing.quota import QuotaLedger
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.scheduler.preemption.policy import Books, is_spared, may_displace
from polyreme_operator.scheduler.preemption.space import Region, VictimSpace, Weights, ground_of, reachable
from polyreme_operator.types.inventory import BoolArray, GangRequest, IntArray, Inventory, Unschedulable
from polyreme_operator.types.queues import Running, Waiting

WORK_UNITS = 20_000_000
"""Nodes and holdings looked at in one search: about half a second of one core."""
EXACT_CANDIDATES = 9
"""Up to this many candidates of a domain are tried in all combinations."""
TIE_S = 1e-6
"""Seconds added to every victim's loss: of sets that cost the same, the one with fewer devices is taken."""
JOB_UNITS = 500
"""Work units of moving one job in the books: what as many nodes cost as array."""
NAMED_MAX = 3
"""Victims that the message names; the rest are counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """Whom to ask, and what that clears."""

    uids: tuple[str, ...]
    """None when those that stop already leave enough: then it is enough to wait."""
    domain: str
    """Empty for the whole cluster."""
    level: str
    cost_device_s: float
    """Device-seconds of work since the victims' last durable checkpoints."""
    reclaim: frozenset[str]
    """Those of other queues, which had borrowed."""
    message: str


def choose_victims(
    inventory: Inventory,
    request: GangRequest,
    preemptor: Waiting,
    running: Sequence[Running],
    *,
    tree: QueueTree,
    ledger: QuotaLedger,
    now_s: float,
    blocked_N: BoolArray | None = None,
    work_units: int = WORK_UNITS,
) -> Victims | None:
    """Choose the running gangs whose end lets a waiting one start; None if no choice does.

    Args:
        inventory: The nodes; what is taken of them includes all of ``running``.
        request: What the waiting gang needs.
        preemptor: The same as the queue sees it.
        running: All jobs that hold devices. What stops for another waiting job comes free for that one only.
        tree: The queues.
        ledger: Their quotas, with all of ``running`` charged; left as it is.
        now_s: The present.
        blocked_N: Nodes that this gang may not use.
        work_units: What the search may spend, in nodes and holdings looked at.
    """
    if not (preemptor.may_preempt and tree.in_order(preemptor.queue)):
        return None
    domains = tree_of(inventory)
    requested = topology_request_of(inventory, domains, request)
    if isinstance(requested, Unschedulable):
        return None
    leaving = [job for job in running if job.stopping and job.stopping_for in {"", preemptor.uid}]
    candidates = [
        job
        for job in running
        if not is_spared(job, preemptor, tree, now_s) and may_displace(preemptor, job.queue, job.priority, tree)
    ]
    candidates.sort(key=lambda job: job.uid)
    books = Books.of(tree, ledger, preemptor)
    for job in leaving:
        books.release(job)
    ground = ground_of(
        inventory,
        domains,
        requested,
        request,
        blocked_N=blocked_N,
        leaving=leaving,
        candidates=candidates,
        weight_V=_weights(candidates, now_s),
    )
    search = _Search(ground, candidates, books, work_units)
    for depth in _depths(requested):
        found = search.best(depth)
        if found is not None:
            return _victims(ground, candidates, leaving, *found, preemptor=preemptor, now_s=now_s)
    return None


def _weights(candidates: Sequence[Running], now_s: float) -> Weights:
    return np.array([job.devices * (_lost_s(job, now_s) + TIE_S) for job in candidates], dtype=np.float64)


def _lost_s(job: Running, now_s: float) -> float:
    return max(0.0, now_s - job.started_s)


def _depths(requested: TopologyRequest) -> Iterable[int]:
    """Levels to try, in turn: what is required alone; from what is preferred upwards; else the cluster as a whole."""
    if requested.required is not None:
        return (requested.required,)
    if requested.preferred is not None:
        return range(requested.preferred, CLUSTER - 1, -1)
    return (CLUSTER,)


class _Search:
    """The best set of victims so far, and what is left to spend."""

    def __init__(self, ground: VictimSpace, candidates: Sequence[Running], books: Books, work_units: int) -> None:
        self._ground = ground
        self._candidates = candidates
        self._books = books
        self._left = work_units
        self._short = not books.fits()
        """Whether victims are needed for the quota, too."""
        own = books.preemptor.queue
        self._others = {job.queue for job in candidates if job.queue != own}
        self._own = {at for at, job in enumerate(candidates) if job.queue == own}
        self._bound_to_own = bool(self._own) and not all(map(books.may_take, self._others))
        """Whether own jobs may have to go, wherever they are, before those of others may be asked."""
        self._by_cost = np.argsort(
            ground.weight_V / [max(1, job.devices) for job in candidates], kind="stable"
        ).tolist()

    def best(self, depth: int) -> tuple[Domain, list[int]] | None:
        """Return the cheapest domain of a level and its victims; None if no domain can be cleared."""
        if self._short and not self._could_fit():
            return None
        best: tuple[Domain, list[int]] | None = None
        best_cost = np.inf
        for bound, domain in reachable(self._ground, depth):
            if self._left <= 0 or bound >= best_cost:
                break
            region = Region(self._ground, domain)
            found = self._clear(region)
            cost = self._cost(found)
            if cost > bound and self._left > 0:
                found = self._try_all(region, min(cost, best_cost)) or found
                cost = self._cost(found)
            if found is not None and cost < best_cost:
                best, best_cost = (domain, found), cost
        return best

    def _cost(self, victims: Sequence[int] | None) -> float:
        return np.inf if victims is None else float(self._ground.weight_V[list(victims)].sum())

    def _could_fit(self) -> bool:
        books = self._books.copy()
        for job in self._candidates:
            books.release(job)
        return books.fits()

    def _allowed(self, victims: Sequence[Running]) -> bool:
        self._left -= JOB_UNITS * len(victims)
        return self._books.allow(victims)

    def _room(self, region: Region, victims: Iterable[int]) -> int:
        self._left -= region.work_units
        return region.room(self._gone_V(victims))

    def _gone_V(self, victims: Iterable[int]) -> BoolArray:
        gone_V = np.zeros(len(self._candidates), dtype=np.bool_)
        gone_V[list(victims)] = True
        return gone_V

    def _clear(self, region: Region) -> list[int] | None:
        """Find a good set: the cheapest for the room they give; if quotas forbid those, the largest."""
        gain_V = region.gains()[region.candidates]
        weight_V = self._ground.weight_V[region.candidates]
        with np.errstate(divide="ignore"):
            price_V = np.where(gain_V > 0, weight_V / gain_V, np.inf)
        ways_in: list[list[int]] = [[]]
        if self._bound_to_own:
            ways_in.append(self._way_in(region))
        for first in ways_in:
            for keys in ((weight_V, price_V), (weight_V, -gain_V)):
                found = self._greedy(region, first, region.candidates[np.lexsort(keys)])
                if found is not None:
                    return found
        return None

    def _way_in(self, region: Region) -> list[int]:
        """Return the cheapest own jobs without which the preemptor is entitled to take others' place in a region."""
        others = {self._candidates[at].queue for at in region.candidates.tolist()} & self._others
        books, way_in = self._books.copy(), list[int]()
        self._left -= JOB_UNITS * len(self._own)
        for at in self._by_cost:
            if any(map(books.may_take, others)):
                break
            if at in self._own:
                books.release(self._candidates[at])
                way_in.append(at)
        return way_in

    def _greedy(self, region: Region, first: list[int], order: IntArray) -> list[int] | None:
        books, allowed = self._books.copy(), list[int]()
        self._left -= JOB_UNITS * (len(first) + len(order))
        taken = set(first)
        for at in (*first, *(at for at in order.tolist() if at not in taken)):
            if books.may_take(self._candidates[at].queue):
                books.release(self._candidates[at])
                allowed.append(at)
        needed = self._ground.request.workers
        low, high = 0, len(allowed)
        if self._room(region, allowed) < needed:
            return None
        while low < high:
            middle = (low + high) // 2
            if self._room(region, allowed[:middle]) < needed:
                low = middle + 1
            else:
                high = middle
        victims = allowed[:low]
        if self._short:
            more = self._for_quota(victims)
            if more is None:
                return None
            victims += more
        return self._let_off(region, victims)

    def _for_quota(self, victims: Sequence[int]) -> list[int] | None:
        """Return who else must go, wherever they are, so that the quotas are kept; None if nobody's going does it."""
        books, more = self._books.copy(), list[int]()
        self._left -= JOB_UNITS * len(self._by_cost)
        for at in victims:
            books.release(self._candidates[at])
        taken = set(victims)
        for at in self._by_cost:
            if books.fits():
                return more
            if at not in taken and books.may_take(self._candidates[at].queue):
                books.release(self._candidates[at])
                more.append(at)
        return more if books.fits() else None

    def _let_off(self, region: Region, victims: list[int]) -> list[int]:
        """Let those off, dearest first, without whom it works as well."""
        needed, kept = self._ground.request.workers, set(victims)
        books = self._books.copy()
        for at in kept:
            books.release(self._candidates[at])
        dearest = sorted(kept, key=lambda at: (-self._ground.weight_V[at], at))
        losses_V, slack = self._losses(region, kept)
        for at in dearest:
            if self._left <= 0:
                break
            if losses_V is not None and losses_V[at] > slack:
                continue
            books.charge(self._candidates[at])
            rest = kept - {at}
            if (
                books.fits()
                and (losses_V is not None or self._room(region, rest) >= needed)
                and self._allowed([self._candidates[other] for other in rest])
            ):
                kept = rest
                losses_V, slack = self._losses(region, kept)
            else:
                books.release(self._candidates[at])
        return sorted(kept)

    def _losses(self, region: Region, victims: Iterable[int]) -> tuple[IntArray | None, int]:
        """Return what each victim's staying would cost in room, and how much room there is to spare."""
        if not region.plain:
            return None, 0
        gone_V = self._gone_V(victims)
        self._left -= 2 * region.work_units
        return region.losses(gone_V), region.room(gone_V) - self._ground.request.workers

    def _try_all(self, region: Region, cost: float) -> list[int] | None:
        """Try all combinations if there are few; None if none is cheaper than ``cost``."""
        relevant = set(region.candidates.tolist())
        if self._short or self._bound_to_own:
            relevant = set(range(len(self._candidates)))
        if len(relevant) > EXACT_CANDIDATES:
            return None
        needed, weight_V = self._ground.request.workers, self._ground.weight_V
        order = sorted(relevant, key=lambda at: (weight_V[at], at))
        best, best_cost = None, cost
        stack: list[tuple[int, tuple[int, ...], float]] = [(0, (), 0.0)]
        while stack and self._left > 0:
            at, chosen, so_far = stack.pop()
            if so_far >= best_cost:
                continue
            jobs = [self._candidates[other] for other in chosen]
            if self._room(region, chosen) >= needed and self._allowed(jobs):
                best, best_cost = sorted(chosen), so_far
                continue
            stack.extend(
                (next_ + 1, (*chosen, order[next_]), so_far + float(weight_V[order[next_]]))
                for next_ in range(at, len(order))
            )
        return best


def _victims(
    ground: VictimSpace,
    candidates: Sequence[Running],
    leaving: Sequence[Running],
    domain: Domain,
    chosen: Sequence[int],
    *,
    preemptor: Waiting,
    now_s: float,
) -> Victims:
    jobs = [candidates[at] for at in chosen]
    cost_device_s = sum(job.devices * _lost_s(job, now_s) for job in jobs)
    level = name = ""
    if domain.depth != CLUSTER:
        found = ground.tree.levels[domain.depth]
        level, name = found.name, found.names[domain.number]
    where = f" in {name}" if name else ""
    if jobs:
        message = f"asked {_named(jobs)} to make way{where}: {_devices_s(cost_device_s)} since their last checkpoints"
    else:
        message = f"waits for {_named(leaving)} to stop{where}"
    return Victims(
        uids=tuple(job.uid for job in jobs),
        domain=name,
        level=level,
        cost_device_s=cost_device_s,
        reclaim=frozenset(job.uid for job in jobs if job.queue != preemptor.queue),
        message=message,
    )


def _named(jobs: Sequence[Running]) -> str:
    names = [f"{job.namespace}/{job.name}" for job in jobs]
    if len(names) <= NAMED_MAX:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED_MAX])} and {len(names) - NAMED_MAX} more"


def _devices_s(device_s: float) -> str:
    """Render device-seconds in the unit in which people pay."""
    return f"{device_s:.0f} device-seconds" if device_s < 3600 else f"{device_s / 3600:.1f} device-hours"
