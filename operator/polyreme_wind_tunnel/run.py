"""One run of a wind tunnel: a job on a simulated clock, from fault to fault, until the horizon.

The clock is in whole milliseconds, and each of them is charged once: what a run returns adds up to its horizon.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from enum import StrEnum

from polyreme_api.exit_codes import ExitCode
from polyreme_api.job.accounting import Use
from polyreme_operator.reconcile.failure_policy import GiveUp
from polyreme_operator.reconcile.observe import Failure
from polyreme_operator.types.reasons import Cause, Scope
from polyreme_wind_tunnel.causes import FaultCause, Reach
from polyreme_wind_tunnel.faults import FaultProcess
from polyreme_wind_tunnel.nodes import Nodes
from polyreme_wind_tunnel.scenario import Scenario
from polyreme_wind_tunnel.verdicts import EPOCH_S, Verdicts


class Spent(StrEnum):
    """What a job's time went into; names that the accounting of jobs has too mean the same."""

    PRODUCTIVE = Use.PRODUCTIVE.value
    """Training that is kept."""
    CHECKPOINT = Use.CHECKPOINT.value
    RECOMPUTED = Use.RECOMPUTED.value
    """Training that is repeated."""
    DETECTING = "Detecting"
    """From a fault to the decision."""
    BACKOFF = "Backoff"
    WAITING = "WaitingForNodes"
    STARTING = Use.STARTING.value
    FAILED = "Failed"
    """After the failure policy gave up."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one run."""

    spent_ms: dict[tuple[Spent, str], int]
    """By what it went into, and the fault that called for it; together the horizon."""
    faults: dict[str, int]
    """Interruptions of the job, by cause."""
    moves: int
    """Planned moves, of predicted faults and of false predictions."""
    given_up_ms: int | None
    """When the failure policy gave up; None if it did not."""
    reason: str
    """Why it did."""

    def total_ms(self, *kinds: Spent) -> int:
        """Return the time of some kinds; of all without one."""
        return sum(taken for (kind, _), taken in self.spent_ms.items() if not kinds or kind in kinds)

    @property
    def effective_share(self) -> float:
        """Effective training time ratio (ETTR): kept training over all time."""
        return self.total_ms(Spent.PRODUCTIVE) / self.total_ms()


@dataclasses.dataclass(frozen=True, slots=True)
class _Hit:
    """A fault that ends the attempt."""

    cause: FaultCause
    planned: bool
    workers: list[int]
    """On whose nodes it happened."""

    def failure(self) -> Failure:
        """Return what the operator would see of it."""
        lost = self.cause.reach is not Reach.NONE
        by_itself = Cause.HUNG if self.cause.silent else Cause.NODE_LOST if lost else Cause.RANK_EXITED
        return Failure(
            cause=Cause.NODE_FAULT if self.planned else by_itself,
            message=self.cause.name,
            index=self.workers[0],
            code=int(ExitCode.INTERNAL) if by_itself is Cause.RANK_EXITED else None,
            replace=frozenset(self.workers if lost or self.planned else ()),
        )


def run(scenario: Scenario, *, horizon_ms: int, seed: int) -> Outcome:
    """Simulate one job until the horizon, or until it fails."""
    tunnel = _Tunnel(scenario, horizon_ms, FaultProcess(scenario, seed))
    scope, charged = Scope.START, "start"
    while tunnel.now_ms < horizon_ms and tunnel.outcome is None:
        tunnel.wait_for_nodes(charged)
        hit = tunnel.start(scope, charged) or tunnel.train()
        if hit is not None:
            scope, charged = tunnel.recover(hit), hit.cause.name
    return tunnel.result()


class _Tunnel:
    """The clock, the nodes, and what was charged so far."""

    def __init__(self, scenario: Scenario, horizon_ms: int, faults: FaultProcess) -> None:
        machines = scenario.machines
        self.now_ms = 0
        self.outcome: GiveUp | None = None
        self._scenario, self._horizon_ms, self._process = scenario, horizon_ms, faults
        self._nodes = Nodes(machines)
        self._verdicts = Verdicts(scenario.spec, nodes=machines.nodes, devices=machines.devices)
        self._spent, self._faults = Counter[tuple[Spent, str]](), Counter[str]()
        self._moves = self._kept_ms = 0
        self._elapsed_ms = 0
        """Training of the present attempt that is not charged yet."""

    def result(self) -> Outcome:
        """Return what became of the run; the rest of a failed one is charged to its failure."""
        given_up_ms = None if self.outcome is None else self.now_ms
        if self.outcome is not None:
            self._pass(self._horizon_ms - self.now_ms, Spent.FAILED, self.outcome.reason.value)
        return Outcome(
            spent_ms={key: taken for key, taken in self._spent.items() if taken},
            faults={name: count for name, count in self._faults.items() if count},
            moves=self._moves,
            given_up_ms=given_up_ms,
            reason="" if self.outcome is None else self.outcome.message,
        )

    def wait_for_nodes(self, charged: str) -> None:
        """Wait until the gang has its nodes."""
        self._nodes.fill(self.now_ms)
        while not self._nodes.whole and self.now_ms < self._horizon_ms:
            back_ms = self._nodes.next_return_ms()
            assert back_ms is not None, "a node that is missing is away"
            self._pass(min(back_ms, self._process.next_ms) - self.now_ms, Spent.WAITING, charged)
            self._fault_of_now()
            self._nodes.fill(self.now_ms)

    def start(self, scope: Scope, charged: str) -> _Hit | None:
        """Start an attempt; return the fault that ends it before its first step."""
        return self._spend(self._scenario.recovery.start_ms(scope), Spent.STARTING, charged, running=True)

    def train(self) -> _Hit | None:
        """Train until a fault or the horizon; what is kept of it is charged when that is known."""
        hit = None
        while hit is None and self.now_ms < self._horizon_ms:
            until_ms = int(min(self._horizon_ms, self._process.next_ms))
            self._elapsed_ms += until_ms - self.now_ms
            self.now_ms = until_ms
            hit = self._fault_of_now()
        if hit is None:
            self._settle(self._elapsed_ms, cause="")
        return hit

    def recover(self, hit: _Hit) -> Scope:
        """See the fault, ask the failure policy, and wait as it says; return the scope of the next attempt."""
        saves, name = self._scenario.saves, hit.cause.name
        self._moves += hit.planned
        self._faults[name] += not hit.planned
        reached_ms = self._kept_ms + self._elapsed_ms
        saved_ms = self._elapsed_ms if hit.planned else self._saved_ms(saves.durable_ms)
        if hit.planned:
            self._pass(saves.stall_ms + saves.durable_ms if self._elapsed_ms else 0, Spent.CHECKPOINT, name)
        else:
            self._spend(self._scenario.recovery.seen_ms(hit.cause), Spent.DETECTING, name)
        verdict = self._verdicts.after(
            hit.failure(), self.now_ms, step=reached_ms // 1000, durable_step=(self._kept_ms + saved_ms) // 1000
        )
        if isinstance(verdict, GiveUp):
            self._settle(saved_ms, cause=name)
            self.outcome = verdict
            return Scope.GANG
        scope = self._scenario.rung(verdict.scope)
        if not hit.planned:
            saved_ms = self._saved_ms(saves.durable_after_ms(scope))
        self._settle(saved_ms, cause=name)
        self._spend(round((verdict.due_s - EPOCH_S) * 1000) - self.now_ms, Spent.BACKOFF, name)
        return scope

    def _saved_ms(self, durable_ms: int) -> int:
        """Return the attempt's time up to its newest checkpoint, if each is durable so long after its stall."""
        saves = self._scenario.saves
        cycle_ms = saves.interval_ms + saves.stall_ms
        return max(0, self._elapsed_ms - durable_ms) // cycle_ms * cycle_ms

    def _settle(self, saved_ms: int, *, cause: str) -> None:
        """Charge the attempt's training: what is kept, its saves, and what is repeated."""
        saves = self._scenario.saves
        stalls_ms = saved_ms // (saves.interval_ms + saves.stall_ms) * saves.stall_ms
        self._spent[Spent.PRODUCTIVE, ""] += saved_ms - stalls_ms
        self._spent[Spent.CHECKPOINT, ""] += stalls_ms
        self._spent[Spent.RECOMPUTED, cause] += self._elapsed_ms - saved_ms
        self._kept_ms += saved_ms - stalls_ms
        self._elapsed_ms = 0

    def _spend(self, length_ms: int, kind: Spent, cause: str, *, running: bool = False) -> _Hit | None:
        """Let time pass; return the fault that ends it early, which only an attempt that runs can meet."""
        until_ms = min(self._horizon_ms, self.now_ms + length_ms)
        while self.now_ms < until_ms:
            self._pass(min(until_ms, self._process.next_ms) - self.now_ms, kind, cause)
            hit = self._fault_of_now()
            if hit is not None and running:
                return hit
        return None

    def _pass(self, taken_ms: float, kind: Spent, cause: str) -> None:
        taken = int(min(taken_ms, self._horizon_ms - self.now_ms))
        self._spent[kind, cause] += taken
        self.now_ms += taken

    def _fault_of_now(self) -> _Hit | None:
        """Carry out the fault that is due, if one is; return it if it hits the gang."""
        while self._process.next_ms <= self.now_ms:
            fault, nodes = self._process.pop(), self._nodes
            reach = fault.cause.reach
            struck = nodes.of_rack(fault.node) if reach is Reach.RACK else {fault.node}
            workers = nodes.workers_on(struck)
            if reach is not Reach.NONE:
                nodes.lose(struck, until_ms=self.now_ms + fault.repair_ms)
            if workers:
                return _Hit(fault.cause, fault.planned, workers)
        return None
