"""Comparison of policies: each combination of spares, interval, rung and prediction, over several seeds."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence

from polyreme_api.errors import InvalidConfigError
from polyreme_operator.types.reasons import Scope
from polyreme_wind_tunnel.causes import HOUR_MS, Reach
from polyreme_wind_tunnel.closed_forms import effective_share, longest_restart
from polyreme_wind_tunnel.run import Outcome, Spent, run
from polyreme_wind_tunnel.scenario import Scenario, check

ROWS_MAX = 200
"""Most combinations of one comparison."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Values that are compared, each with each."""

    spares: Sequence[int]
    intervals_ms: Sequence[int]
    rungs: Sequence[Scope]
    recalls: Sequence[float]

    def scenarios(self, base: Scenario) -> list[Scenario]:
        """Return every combination.

        Raises:
            InvalidConfigError: If there are too many, or one can't be simulated.
        """
        found = [
            dataclasses.replace(
                base,
                machines=dataclasses.replace(base.machines, spares=spares),
                saves=dataclasses.replace(base.saves, interval_ms=interval_ms),
                lowest_rung=rung,
                faults=dataclasses.replace(base.faults, recall=recall),
            )
            for spares, interval_ms, rung, recall in itertools.product(
                self.spares, self.intervals_ms, self.rungs, self.recalls
            )
        ]
        if len(found) > ROWS_MAX:
            raise InvalidConfigError(f"{len(found)} combinations are compared, at most {ROWS_MAX} are possible")
        for scenario in found:
            check(scenario)
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy, over all seeds."""

    scenario: Scenario
    effective_share: float
    """Mean of the runs' ETTR."""
    error: float
    """Its standard error; infinite for a single run."""
    shares: dict[Spent, float]
    """Of all time."""
    faults_per_day: float
    moves_per_day: float
    given_up: float
    """Share of the runs in which the failure policy gave up."""
    reason: str
    """Why the first of them did."""


def compare(scenarios: Sequence[Scenario], *, horizon_ms: int, runs: int, seed: int) -> Iterator[Row]:
    """Simulate each policy with the same seeds, one row after the other."""
    for scenario in scenarios:
        yield summed(scenario, [run(scenario, horizon_ms=horizon_ms, seed=seed + each) for each in range(runs)])


def summed(scenario: Scenario, outcomes: Sequence[Outcome]) -> Row:
    """Return the row of some runs."""
    shares = [outcome.effective_share for outcome in outcomes]
    total_ms = sum(outcome.total_ms() for outcome in outcomes)
    days = total_ms / (24 * HOUR_MS)
    stopped = [outcome for outcome in outcomes if outcome.given_up_ms is not None]
    return Row(
        scenario=scenario,
        effective_share=statistics.fmean(shares),
        error=statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.inf,
        shares={kind: sum(outcome.total_ms(kind) for outcome in outcomes) / total_ms for kind in Spent},
        faults_per_day=sum(sum(outcome.faults.values()) for outcome in outcomes) / days,
        moves_per_day=sum(outcome.moves for outcome in outcomes) / days,
        given_up=len(stopped) / len(outcomes),
        reason=stopped[0].reason if stopped else "",
    )


def formula(scenario: Scenario) -> float:
    """Return the ETTR by the closed form, with the mean restart and the mean time to a durable checkpoint.

    It knows spares without end, and neither budgets nor predictions.
    """
    saves, recovery, causes = scenario.saves, scenario.recovery, scenario.faults.causes
    total = sum(cause.weight for cause in causes)
    restart_ms = durable_ms = 0.0
    for cause in causes:
        scope = scenario.rung(Scope.PROCESS if cause.reach is Reach.NONE else Scope.POD)
        restart_ms += cause.weight / total * (recovery.seen_ms(cause) + recovery.start_ms(scope))
        durable_ms += cause.weight / total * saves.durable_after_ms(scope)
    return effective_share(
        mttf=scenario.mttf_ms,
        interval=saves.interval_ms,
        stall=saves.stall_ms,
        durable=durable_ms,
        restart=restart_ms,
    )


def frontier(base: Scenario, intervals_ms: Sequence[int], *, target: float) -> list[tuple[int, float | None]]:
    """Return for each interval the longest recovery, detection included, that keeps the target; None: none does."""
    return [
        (
            interval_ms,
            longest_restart(
                share=target,
                mttf=base.mttf_ms,
                interval=interval_ms,
                stall=base.saves.stall_ms,
                durable=base.saves.durable_ms,
            ),
        )
        for interval_ms in intervals_ms
    ]
