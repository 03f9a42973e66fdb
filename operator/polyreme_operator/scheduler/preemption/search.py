"""Search for the cheapest set of victims: the domain that is cheapest to free, checking quota and space together.

Candidates are whole gangs; ``cost.py`` prices them. For each domain that could hold the preemptor, the cheapest set of
victims is chosen by room alone (``bundles.py``). If the quotas forbid that one, or if room is not a sum over nodes, or
if many jobs are connected by shared nodes, a set is chosen greedily too: cheapest per freed room first, then more for
the quota if needed, then unnecessary ones are removed. Domains are tried in the order of their lower bounds
(``space.py``) until no bound is below the best set found, so most are never searched. Up to ``EXACT_CANDIDATES``
candidates are tried in all combinations. The search ends after ``work_units`` with the best set so far.
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
from polyreme_operator.scheduler.preemption.bundles import cheapest_victims
from polyreme_operator.scheduler.preemption.cost import lost_device_s, victim_costs
from polyreme_operator.scheduler.preemption.policy import QuotaTrial, is_protected, may_displace
from polyreme_operator.scheduler.preemption.space import Region, VictimSpace, reachable, victim_space
from polyreme_operator.types.inventory import BoolArray, GangRequest, IntArray, Inventory, Unschedulable
from polyreme_operator.types.queues import Running, Waiting

WORK_UNITS = 20_000_000
"""Node and holding lookups of one search: about half a second of one core."""
EXACT_CANDIDATES = 9
"""Up to this many candidates of a domain are tried in all combinations."""
JOB_UNITS = 500
"""Work units of charging or releasing one job in a quota trial."""
NAMED_MAX = 3
"""Victims named by the message; the others are counted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Victims:
    """The chosen victims, and the domain that they free."""

    uids: tuple[str, ...]
    """Empty when the jobs that already stop free enough."""
    domain: str
    """Empty for the whole cluster."""
    level: str
    cost_device_s: float
    """Device-seconds of work since the victims' last durable checkpoints."""
    reclaim: frozenset[str]
    """Those of other queues, which had borrowed quota."""
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
    """Choose the running gangs to preempt so that a waiting one can start; None if no choice suffices.

    Args:
        inventory: The nodes; what is taken of them includes all of ``running``.
        request: What the waiting gang needs.
        preemptor: The same as the queue sees it.
        running: All jobs that hold devices. Jobs that stop for another preemptor free nothing for this one.
        tree: The queues.
        ledger: Their quotas, with all of ``running`` charged; left as it is.
        now_s: The present.
        blocked_N: Nodes that this gang may not use.
        work_units: Budget of the search.
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
        if not is_protected(job, preemptor, tree, now_s) and may_displace(preemptor, job.queue, job.priority, tree)
    ]
    candidates.sort(key=lambda job: job.uid)
    trial = QuotaTrial.of(tree, ledger, preemptor)
    for job in leaving:
        trial.release(job)
    space = victim_space(
        inventory,
        domains,
        requested,
        request,
        blocked_N=blocked_N,
        leaving=leaving,
        candidates=candidates,
        cost_V=victim_costs(candidates, now_s),
    )
    search = _Search(space, candidates, trial, work_units)
    for depth in _depths(requested):
        found = search.best(depth)
        if found is not None:
            return _victims(space, candidates, leaving, *found, preemptor=preemptor, now_s=now_s)
    return None


def _depths(requested: TopologyRequest) -> Iterable[int]:
    """Return the levels to try in turn: the required one; else the preferred one and up; else the whole cluster."""
    if requested.required is not None:
        return (requested.required,)
    if requested.preferred is not None:
        return range(requested.preferred, CLUSTER - 1, -1)
    return (CLUSTER,)


class _Search:
    """The best set of victims so far, and the budget that is left."""

    def __init__(self, space: VictimSpace, candidates: Sequence[Running], trial: QuotaTrial, work_units: int) -> None:
        self._space = space
        self._candidates = candidates
        self._trial = trial
        self._left = work_units
        self._short = not trial.fits()
        """Whether victims are needed for the quota too."""
        own = trial.preemptor.queue
        self._others = {job.queue for job in candidates if job.queue != own}
        self._own = {at for at, job in enumerate(candidates) if job.queue == own}
        self._own_first = bool(self._own) and not all(map(trial.may_take, self._others))
        """Whether jobs of the own queue may have to be preempted before other queues' jobs may be."""
        self._by_cost = np.argsort(space.cost_V / [max(1, job.devices) for job in candidates], kind="stable").tolist()

    def best(self, depth: int) -> tuple[Domain, list[int]] | None:
        """Return the cheapest domain of a level and its victims; None if no domain can be freed."""
        if self._short and not self._could_fit():
            return None
        best: tuple[Domain, list[int]] | None = None
        best_cost = np.inf
        for bound, domain in reachable(self._space, depth):
            if self._left <= 0 or bound >= best_cost:
                break
            region = Region(self._space, domain)
            found = self._choose(region)
            cost = self._cost(found)
            if cost > bound and self._left > 0:
                found = self._try_all(region, min(cost, best_cost)) or found
                cost = self._cost(found)
            if found is not None and cost < best_cost:
                best, best_cost = (domain, found), cost
        return best

    def _cost(self, victims: Sequence[int] | None) -> float:
        return np.inf if victims is None else float(self._space.cost_V[list(victims)].sum())

    def _could_fit(self) -> bool:
        trial = self._trial.copy()
        for job in self._candidates:
            trial.release(job)
        return trial.fits()

    def _allowed(self, victims: Sequence[Running]) -> bool:
        self._left -= JOB_UNITS * len(victims)
        return self._trial.allow(victims)

    def _room(self, region: Region, victims: Iterable[int]) -> int:
        self._left -= region.work_units
        return region.room(self._gone_V(victims))

    def _gone_V(self, victims: Iterable[int]) -> BoolArray:
        gone_V = np.zeros(len(self._candidates), dtype=np.bool_)
        gone_V[list(victims)] = True
        return gone_V

    def _choose(self, region: Region) -> list[int] | None:
        """Choose the cheapest set by room alone if the quotas allow it, else a good one."""
        best, exact = self._by_room(region) if region.plain else (None, False)
        if exact and best is not None:
            return best
        found = self._cheap(region)
        return min((best, found), key=self._cost)

    def _by_room(self, region: Region) -> tuple[list[int] | None, bool]:
        """Choose the cheapest set by room alone; None if the quotas forbid it. Tell also whether no set costs less."""
        choice = cheapest_victims(region, self._space.cost_V, self._space.request.workers, work_units=self._left)
        self._left -= choice.work_units
        victims, exact = choice.victims, choice.exact
        if victims is None:
            return None, False
        more = self._for_quota(victims) if self._short else []
        if more is None:
            return None, False
        if more or not exact:
            victims, exact = self._prune(region, [*victims, *more]), False
        return (victims, exact) if self._allowed([self._candidates[at] for at in victims]) else (None, False)

    def _cheap(self, region: Region) -> list[int] | None:
        """Choose the cheapest per freed room; if the quotas forbid it, the largest jobs."""
        gain_V = region.gains()[region.candidates]
        cost_V = self._space.cost_V[region.candidates]
        with np.errstate(divide="ignore"):
            price_V = np.where(gain_V > 0, cost_V / gain_V, np.inf)
        starts: list[list[int]] = [[]]
        if self._own_first:
            starts.append(self._own_victims(region))
        for first in starts:
            for keys in ((cost_V, price_V), (cost_V, -gain_V)):
                found = self._greedy(region, first, region.candidates[np.lexsort(keys)])
                if found is not None:
                    return found
        return None

    def _own_victims(self, region: Region) -> list[int]:
        """Return the cheapest jobs of the own queue whose preemption entitles the preemptor to reclaim in a region."""
        others = {self._candidates[at].queue for at in region.candidates.tolist()} & self._others
        trial, own = self._trial.copy(), list[int]()
        self._left -= JOB_UNITS * len(self._own)
        for at in self._by_cost:
            if any(map(trial.may_take, others)):
                break
            if at in self._own:
                trial.release(self._candidates[at])
                own.append(at)
        return own

    def _greedy(self, region: Region, first: list[int], order: IntArray) -> list[int] | None:
        trial, allowed = self._trial.copy(), list[int]()
        self._left -= JOB_UNITS * (len(first) + len(order))
        taken = set(first)
        for at in (*first, *(at for at in order.tolist() if at not in taken)):
            if trial.may_take(self._candidates[at].queue):
                trial.release(self._candidates[at])
                allowed.append(at)
        needed = self._space.request.workers
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
        return self._prune(region, victims)

    def _for_quota(self, victims: Sequence[int]) -> list[int] | None:
        """Return further victims, anywhere, that are needed to satisfy the quotas; None if no set does."""
        trial, more = self._trial.copy(), list[int]()
        self._left -= JOB_UNITS * len(self._by_cost)
        for at in victims:
            trial.release(self._candidates[at])
        taken = set(victims)
        for at in self._by_cost:
            if trial.fits():
                return more
            if at not in taken and trial.may_take(self._candidates[at].queue):
                trial.release(self._candidates[at])
                more.append(at)
        return more if trial.fits() else None

    def _prune(self, region: Region, victims: list[int]) -> list[int]:
        """Remove unnecessary victims, most expensive first."""
        needed, kept = self._space.request.workers, set(victims)
        trial = self._trial.copy()
        for at in kept:
            trial.release(self._candidates[at])
        most_expensive_first = sorted(kept, key=lambda at: (-self._space.cost_V[at], at))
        losses_V, slack = self._losses(region, kept)
        for at in most_expensive_first:
            if self._left <= 0:
                break
            if losses_V is not None and losses_V[at] > slack:
                continue
            trial.charge(self._candidates[at])
            rest = kept - {at}
            if (
                trial.fits()
                and (losses_V is not None or self._room(region, rest) >= needed)
                and self._allowed([self._candidates[other] for other in rest])
            ):
                kept = rest
                losses_V, slack = self._losses(region, kept)
            else:
                trial.release(self._candidates[at])
        return sorted(kept)

    def _losses(self, region: Region, victims: Iterable[int]) -> tuple[IntArray | None, int]:
        """Return the room lost by keeping each victim, and the room to spare."""
        if not region.plain:
            return None, 0
        gone_V = self._gone_V(victims)
        self._left -= 2 * region.work_units
        return region.losses(gone_V), region.room(gone_V) - self._space.request.workers

    def _try_all(self, region: Region, cost: float) -> list[int] | None:
        """Try all combinations of few candidates; None if none is cheaper than ``cost``."""
        relevant = set(region.candidates.tolist())
        if self._short or self._own_first:
            relevant = set(range(len(self._candidates)))
        if len(relevant) > EXACT_CANDIDATES:
            return None
        needed, cost_V = self._space.request.workers, self._space.cost_V
        order = sorted(relevant, key=lambda at: (cost_V[at], at))
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
                (next_ + 1, (*chosen, order[next_]), so_far + float(cost_V[order[next_]]))
                for next_ in range(at, len(order))
            )
        return best


def _victims(
    space: VictimSpace,
    candidates: Sequence[Running],
    leaving: Sequence[Running],
    domain: Domain,
    chosen: Sequence[int],
    *,
    preemptor: Waiting,
    now_s: float,
) -> Victims:
    jobs = [candidates[at] for at in chosen]
    cost_device_s = sum(lost_device_s(job, now_s) for job in jobs)
    level = name = ""
    if domain.depth != CLUSTER:
        found = space.tree.levels[domain.depth]
        level, name = found.name, found.names[domain.number]
    where = f" in {name}" if name else ""
    if jobs:
        message = f"preempting {_named(jobs)}{where}: {_devices_s(cost_device_s)} since the last checkpoints"
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
    """Render device-seconds in the unit of the bill."""
    return f"{device_s:.0f} device-seconds" if device_s < 3600 else f"{device_s / 3600:.1f} device-hours"
