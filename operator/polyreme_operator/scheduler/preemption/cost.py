"""Cost of a victim: the device-seconds since its last durable checkpoint, lost if it can't save in time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyreme_operator.types.queues import Running

Float64Array = NDArray[np.float64]

TIE_S = 1e-6
"""Seconds added to every victim's loss: of sets of equal cost, the one with fewer devices is chosen."""


def lost_device_s(job: Running, now_s: float) -> float:
    """Return the device-seconds that a job loses at most if it is preempted now."""
    return job.devices * max(0.0, now_s - job.started_s)


def victim_costs(candidates: Sequence[Running], now_s: float) -> Float64Array:
    """Return the cost of each candidate, with ties broken by devices."""
    return np.array([lost_device_s(job, now_s) + job.devices * TIE_S for job in candidates], dtype=np.float64)
