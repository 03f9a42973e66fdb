"""Risk of a node: decayed, weighted counts of its history, as the probability that placement reads."""

from __future__ import annotations

HALF_LIFE_S = 86_400.0
"""Half-life of what is counted."""
SCORE_MAX = 64.0
STEP = 1.0 / 16.0
"""Risks are recorded in these steps, so that decay alone rarely writes to a node."""
AT_RISK = 2.0 * STEP
PROBATION_RISK = 0.5
"""Least risk of a node in probation."""
WEIGHTS = {
    "gpu-lost": 2.0,
    "gpu-memory": 1.0,
    "gpu-hang": 1.0,
    "gpu-link": 0.5,
    "gpu-firmware": 1.0,
    "gpu-power": 1.0,
    "gpu-thermal": 0.5,
    "pcie": 0.5,
    "nic": 1.0,
    "network-link": 0.25,
    "disk": 1.0,
    "kernel": 1.0,
    "node-software": 0.25,
    "clock": 0.125,
    "node-lost": 1.0,
    "performance": 0.25,
    "application": 0.0625,
}
"""Weight of one event, by class; other classes count nothing."""


def decayed(score: float, at_s: float, now_s: float) -> float:
    """Return a score as it is now; a time in the future counts as now."""
    left: float = score * 0.5 ** (max(0.0, now_s - at_s) / HALF_LIFE_S)
    return min(SCORE_MAX, left)


def raised(score: float, fault_class: str, count: int) -> float:
    """Return a score after more events; each doubling of a burst counts as much as its first event."""
    return min(SCORE_MAX, score + WEIGHTS.get(fault_class, 0.0) * max(0, count).bit_length())


def risk_of(score: float) -> float:
    """Return the risk of a score, in steps."""
    exact: float = 1.0 - 2.0**-score
    return min(1.0, round(exact / STEP) * STEP)
