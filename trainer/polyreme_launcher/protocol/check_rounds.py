"""The rounds of checks as the leader runs them: each worker alone, pairs, then regrouped pairs. Pure."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from typing import Any

from polyreme_api.progress import (
    PRE_CHECK_CHARACTERS_MAX,
    PRE_CHECK_FINDINGS_MAX,
    PRE_CHECK_RUNS_MAX,
    PreCheckFinding,
    PreCheckReport,
)
from polyreme_launcher.protocol.check_verdict import (
    ALL_REDUCE,
    LOCAL_CHECKS,
    Finding,
    Limits,
    Measured,
    Pair,
    PairResult,
    bad_alone,
    bad_of_pairs,
    first_pairs,
    participants,
    second_waves,
    unexplained,
)
from polyreme_launcher.protocol.messages import Check

ROUNDS_MAX = 4
"""Alone, in pairs, and at most two waves of regrouped pairs; each has an equal share of the time."""
WARM_S = 60.0
"""Time that the first round gets beside its share: the parents of the processes may still import torch."""
REPORT_MARGIN_S = 2.0
"""How much earlier a check ends itself than the leader gives it up."""
SHOWN_MAX = 4
"""Workers that a message names."""
TIMED_OUT = "timed out"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder:
    """What the attempt asks for."""

    timeout_s: float
    limits: Limits = dataclasses.field(default_factory=Limits)
    passed: frozenset[int] = frozenset()
    """Workers whose node has passed recently."""
    warn_only: bool = False

    @property
    def round_s(self) -> float:
        """Longest time of a round."""
        return self.timeout_s / ROUNDS_MAX


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """State of the checks of one attempt."""

    indices: tuple[int, ...]
    """Workers that are checked."""
    number: int = 0
    """0: each worker alone. 1: pairs. From 2 on: regrouped pairs."""
    serial: int = 1
    """Increases with each round that is begun, so that a late answer is recognised."""
    pairs: tuple[Pair, ...] = ()
    """Pairs of this round."""
    address: str = ""
    port: int = 0
    """Where the pairs of this round meet; 0: not known yet."""
    deadline_s: float | None = None
    """None until the first tick of the round."""
    reports: Mapping[int, Measured] = dataclasses.field(default_factory=dict)
    """Of this round, by worker."""
    alone: Mapping[int, Measured] = dataclasses.field(default_factory=dict)
    results: tuple[PairResult, ...] = ()
    waves: tuple[tuple[Pair, ...], ...] = ()
    """Waves that follow."""
    bad: Mapping[int, Finding] = dataclasses.field(default_factory=dict)
    warning: str = ""
    done: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """Workers that have a part in this round."""
        if self.done:
            return ()
        return self.indices if self.number == 0 else tuple(index for pair in self.pairs for index in pair)

    @property
    def missing(self) -> tuple[int, ...]:
        """Workers whose report of this round is awaited."""
        return tuple(index for index in self.members if index not in self.reports)

    @property
    def needs_address(self) -> bool:
        """Whether this round's pairs wait for a place to meet."""
        return not self.done and self.number > 0 and self.port == 0


def begin(order: CheckOrder, *, replicas: int, serial: int) -> Rounds:
    """Begin the first round; without anything to check it is done."""
    indices = participants(replicas, order.passed)
    return Rounds(indices=indices, serial=serial, done=not indices)


def take(rounds: Rounds, index: int, serial: int, report: str) -> Rounds:
    """Take a worker's report; one of an earlier round changes nothing."""
    if serial != rounds.serial or index not in rounds.missing:
        return rounds
    return dataclasses.replace(rounds, reports={**rounds.reports, index: parse_report(report)})


def tick(rounds: Rounds, order: CheckOrder, now_s: float) -> Rounds:
    """Let time pass: workers whose report is missing at the deadline have timed out."""
    if rounds.done:
        return rounds
    if rounds.deadline_s is None:
        warm_s = WARM_S if rounds.number == 0 else 0.0
        return dataclasses.replace(rounds, deadline_s=now_s + warm_s + order.round_s)
    if now_s < rounds.deadline_s:
        return rounds
    late = Measured(failed=dict.fromkeys(LOCAL_CHECKS if rounds.number == 0 else (ALL_REDUCE,), TIMED_OUT))
    return dataclasses.replace(rounds, reports={**dict.fromkeys(rounds.missing, late), **rounds.reports})


def advance(rounds: Rounds, order: CheckOrder) -> Rounds:
    """Begin the next round when every report is there; name the bad workers after the last."""
    if rounds.done or rounds.missing:
        return rounds
    if rounds.number == 0:
        bad, warning = bad_alone(rounds.reports, order.limits)
        after = dataclasses.replace(rounds, alone=rounds.reports, bad=bad, warning=warning)
        return _next(after, first_pairs([index for index in rounds.indices if index not in bad]), order)
    results = (*rounds.results, *(_pair_result(pair, rounds.reports) for pair in rounds.pairs))
    waves = rounds.waves
    if rounds.number == 1:
        waves = second_waves([index for index in rounds.indices if index not in rounds.bad], results, order.limits)
    after = dataclasses.replace(rounds, results=results, waves=waves[1:])
    return _next(after, waves[0] if waves else (), order)


def met(rounds: Rounds, serial: int, address: str, port: int) -> Rounds:
    """Take where the pairs of this round meet; port 0: they can't, and the round is left out."""
    if serial != rounds.serial or not rounds.needs_address:
        return rounds
    if port == 0:
        warning = rounds.warning or "the all-reduce between workers was not checked: no port is free"
        return dataclasses.replace(rounds, done=True, warning=warning)
    return dataclasses.replace(rounds, address=address, port=port)


def message(rounds: Rounds, order: CheckOrder, attempt: int, index: int) -> Check | None:
    """Return what a worker is asked to do in this round; None if nothing, or nothing yet."""
    if index not in rounds.missing or rounds.needs_address:
        return None
    partners = next((pair for pair in rounds.pairs if index in pair), ())
    return Check(
        attempt=attempt,
        serial=rounds.serial,
        partners=partners,
        address=rounds.address,
        port=rounds.port,
        seconds=max(1, math.floor(order.round_s - REPORT_MARGIN_S)),
    )


def report_of(rounds: Rounds) -> PreCheckReport:
    """Return what the Lease shows."""
    findings = tuple(
        PreCheckFinding(index=each.index, reason=each.reason, message=each.why) for each in rounds.bad.values()
    )
    return PreCheckReport(
        done=rounds.done,
        passed=_runs(_passed(rounds))[:PRE_CHECK_RUNS_MAX] if rounds.done else (),
        failed=findings[:PRE_CHECK_FINDINGS_MAX] if rounds.done else (),
        warning=rounds.warning[:PRE_CHECK_CHARACTERS_MAX],
        waits="" if rounds.done else _waits(rounds),
    )


def parse_report(text: str) -> Measured:
    """Read a worker's report; one that can't be read is a failed check."""
    try:
        data: Any = json.loads(text)
        return Measured(
            rates={str(check): float(rate) for check, rate in data["rates"].items() if math.isfinite(float(rate))},
            failed={str(check): str(why) for check, why in data["failed"].items()},
            wrong={str(check): str(why) for check, why in data["wrong"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Measured(failed=dict.fromkeys((*LOCAL_CHECKS, ALL_REDUCE), "its report can't be read"))


def render_report(measured: Measured) -> str:
    """Write a worker's report."""
    return json.dumps({"rates": measured.rates, "failed": measured.failed, "wrong": measured.wrong})


def name_workers(indices: Collection[int]) -> str:
    """Name some workers; of many the first ones."""
    shown = ", ".join(map(str, sorted(indices)[:SHOWN_MAX]))
    more = f" and {len(indices) - SHOWN_MAX} more" if len(indices) > SHOWN_MAX else ""
    return f"worker{'s' if len(indices) > 1 else ''} {shown}{more}"


def _next(rounds: Rounds, pairs: tuple[Pair, ...], order: CheckOrder) -> Rounds:
    number = rounds.number + 1
    if pairs and number < ROUNDS_MAX:
        return dataclasses.replace(
            rounds,
            number=number,
            serial=rounds.serial + 1,
            pairs=pairs,
            address="",
            port=0,
            deadline_s=None,
            reports={},
        )
    bad = {**rounds.bad, **bad_of_pairs(rounds.results, order.limits)}
    warning = rounds.warning or unexplained(rounds.results, bad, order.limits)
    return dataclasses.replace(rounds, bad=dict(sorted(bad.items())), warning=warning, done=True)


def _pair_result(pair: Pair, reports: Mapping[int, Measured]) -> PairResult:
    parts = [reports[index] for index in pair]
    why = next((why for part in parts for why in (*part.wrong.values(), *part.failed.values())), "")
    rates = [part.rates[ALL_REDUCE] for part in parts if ALL_REDUCE in part.rates]
    return PairResult(pair=pair, rate=min(rates) if len(rates) == len(pair) else None, why=why)


def _passed(rounds: Rounds) -> list[int]:
    """Return the workers that passed every check that they took part in."""
    tried = {index for result in rounds.results for index in result.pair}
    good = {index for result in rounds.results if not result.why for index in result.pair}
    return [index for index in rounds.indices if index not in rounds.bad and (index in good or index not in tried)]


def _runs(indices: list[int]) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and sum(runs[-1]) == index:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((index, 1))
    return tuple(runs)


def _waits(rounds: Rounds) -> str:
    what = "compute, memory and disk" if rounds.number == 0 else "all-reduce in pairs"
    if rounds.number > 1:
        what = "all-reduce in regrouped pairs"
    waits = f"; waits for {name_workers(rounds.missing)}" if rounds.missing else ""
    return f"checking nodes: {what}{waits}"
