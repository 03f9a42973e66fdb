"""Verdict on workers, from what the checks measured: pure.

Compute, memory and disk are measured on each worker alone. The all-reduce needs two: workers are paired, and each
worker of a pair that failed is paired again with one of a pair that passed. A worker is bad if it failed with two
partners and one of them is known to be good; so a bad link between two good workers names neither.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence

ALL_REDUCE = "AllReduce"
LOCAL_CHECKS = ("Compute", "Memory", "Disk")
UNITS = {"Compute": "Gflop/s", "Memory": "MB/s", "Disk": "MB/s", ALL_REDUCE: "MB/s"}
SECOND_WAVES_MAX = 2
"""Sets of disjoint pairs in the second round."""
PARTNERS_MIN = 2
"""Workers with known good nodes that are checked with those that need it: a median and a second partner need two."""
WHY_CHARACTERS_MAX = 200
Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a healthy worker reaches."""

    percent_of_median: int = 50
    minimums: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Least rate by check."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one worker measured alone."""

    rates: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Rate of its slowest device, by check."""
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Why a check could not be done, or did not end in time, by check."""
    wrong: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Results that are not what arithmetic or memory must give, by check."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """All-reduce of two workers."""

    pair: Pair
    rate: float | None = None
    why: str = ""
    """Why it failed; empty: it ended with the right sum."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A bad worker."""

    index: int
    reason: str
    """Code in the fault table."""
    why: str


def participants(replicas: int, passed: Collection[int]) -> tuple[int, ...]:
    """Return the workers to check: those whose node has not passed, and as many others as they need as partners."""
    due = [index for index in range(replicas) if index not in passed]
    if not due:
        return ()
    partners = sorted(passed)[: max(PARTNERS_MIN, len(due))]
    return tuple(sorted({*due, *(index for index in partners if index < replicas)}))


def first_pairs(indices: Sequence[int]) -> tuple[Pair, ...]:
    """Pair the workers; of an odd number the last one is left for the second round."""
    return tuple((indices[at], indices[at + 1]) for at in range(0, len(indices) - 1, 2))


def second_waves(indices: Sequence[int], first: Sequence[PairResult], limits: Limits) -> tuple[tuple[Pair, ...], ...]:
    """Pair each suspect with a worker that has passed: a worker of a failed pair once, one without a pair twice.

    Each wave is a set of disjoint pairs. Without any worker that has passed, suspects are paired with each other.
    """
    failing = [result for result in first if _failing(result, first, limits)]
    paired = {index for result in first for index in result.pair}
    bad = {index for result in failing for index in result.pair}
    good = [index for index in indices if index in paired and index not in bad]
    alone = [index for index in indices if index not in paired]
    if not first or not (bad or alone):
        return ()
    if not good:
        return _among_suspects([result.pair for result in failing], alone)
    suspects = [*alone, *sorted(bad)]
    waves = [tuple(zip(suspects[: len(good)], good, strict=False))]
    partner_after = good[1:] + good[:1]
    again = [(index, partner_after[at]) for at, index in enumerate(alone) if len(good) > 1]
    rest = suspects[len(good) :]
    used = {partner for _, partner in again}
    free = [index for index in good if index not in used]
    waves.append((*again, *zip(rest, free, strict=False)))
    return tuple(wave for wave in waves if wave)[:SECOND_WAVES_MAX]


def _among_suspects(pairs: Sequence[Pair], alone: Sequence[int]) -> tuple[tuple[Pair, ...], ...]:
    if alone:
        # Three workers: each of the failed pair with the third.
        left, right = pairs[0]
        return ((left, alone[0]),), ((right, alone[0]),)
    if len(pairs) == 1:
        return ()
    rotated = tuple((pair[0], pairs[(at + 1) % len(pairs)][1]) for at, pair in enumerate(pairs))
    return (rotated,)


def bad_of_pairs(results: Sequence[PairResult], limits: Limits) -> dict[int, Finding]:
    """Name the workers that failed with two partners, at least one of them good."""
    failed: dict[int, dict[int, str]] = {}
    good: set[int] = set()
    for result in results:
        why = _failing(result, results, limits)
        if not why:
            good.update(result.pair)
            continue
        for index, partner in (result.pair, result.pair[::-1]):
            failed.setdefault(index, {})[partner] = why
    found = {}
    for index, by_partner in sorted(failed.items()):
        if index not in good and len(by_partner) > 1 and good & by_partner.keys():
            partners = " and ".join(str(partner) for partner in sorted(by_partner))
            why = f"all-reduce with workers {partners} failed: {by_partner[max(by_partner)]}"
            found[index] = Finding(index=index, reason="PreCheckAllReduce", why=why[:WHY_CHARACTERS_MAX])
    return found


def unexplained(results: Sequence[PairResult], bad: Collection[int], limits: Limits) -> str:
    """Describe the first pair that failed although neither worker is named as bad; empty if there is none."""
    for result in results:
        why = _failing(result, results, limits)
        if why and not any(index in bad for index in result.pair):
            left, right = result.pair
            return f"all-reduce between workers {left} and {right} failed, and neither is known to be bad: {why}"[
                :WHY_CHARACTERS_MAX
            ]
    return ""


def bad_alone(measured: Mapping[int, Measured], limits: Limits) -> tuple[dict[int, Finding], str]:
    """Name the workers that fail a check of their own, and describe checks that most of them could not do.

    Wrong results and rates below a minimum always count. A check that could not be done counts unless most workers
    could not do it: then the software or the job's limits are the cause, and no node is.
    """
    found: dict[int, Finding] = {}
    warning = ""
    for check in LOCAL_CHECKS:
        undone = {index: each.failed[check] for index, each in measured.items() if check in each.failed}
        if 2 * len(undone) > len(measured):
            index = min(undone)
            warning = warning or f"check {check} could not be done on {len(undone)} workers: {undone[index]}"
            undone = {}
        rates = [each.rates[check] for each in measured.values() if check in each.rates]
        for index, each in sorted(measured.items()):
            slow = _slow(check, each.rates[check], rates, limits) if check in each.rates else ""
            failure = _alone(check, each, undone.get(index, ""), slow)
            if failure is not None:
                why = f"{check.lower()}: {failure[1]}"[:WHY_CHARACTERS_MAX]
                found.setdefault(index, Finding(index=index, reason=failure[0], why=why))
    return found, warning[:WHY_CHARACTERS_MAX]


def _alone(check: str, measured: Measured, undone: str, slow: str) -> tuple[str, str] | None:
    """Return code and reason of what a worker fails; None if it passes the check."""
    code = f"PreCheck{check}"
    if check in measured.wrong:
        return ("PreCheckComputeWrong" if check == "Compute" else code), measured.wrong[check]
    if undone:
        return code, undone
    return (("PreCheckComputeSlow" if check == "Compute" else code), slow) if slow else None


def _failing(result: PairResult, results: Sequence[PairResult], limits: Limits) -> str:
    if result.why:
        return result.why
    if result.rate is None:
        return "no result"
    return _slow(ALL_REDUCE, result.rate, _best_rates(results), limits)


def _best_rates(results: Sequence[PairResult]) -> list[float]:
    """Return the best rate of each worker: with few workers, one that is slow is in most of the pairs."""
    best: dict[int, float] = {}
    for result in results:
        for index in result.pair if result.rate is not None else ():
            best[index] = max(best.get(index, 0.0), result.rate or 0.0)
    return list(best.values())


def _slow(check: str, rate: float, rates: Sequence[float], limits: Limits) -> str:
    unit, least = UNITS[check], limits.minimums.get(check)
    if least is not None and rate < least:
        return f"{rate:.4g} {unit}, the minimum is {least:.4g}"
    # Of two, the faster one is the measure.
    median = statistics.median_high(rates)
    if 100.0 * rate < limits.percent_of_median * median:
        return (
            f"{rate:.4g} {unit}, the gang's median is {median:.4g}, at least {limits.percent_of_median} % are expected"
        )
    return ""
