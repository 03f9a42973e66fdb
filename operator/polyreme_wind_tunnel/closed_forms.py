"""Closed forms for what checkpoints and faults cost, against which the simulation is checked.

Sources: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps (FGCS 22, 2006),
equations 20 and 37; for background saves the same renewal argument with a checkpoint that counts L seconds later.

Symbols: ``mttf`` M, ``interval`` of training between saves, ``stall`` s, ``durable`` L, ``restart`` R, all in one unit.
"""

from __future__ import annotations

import math

STEPS_MAX = 200


def effective_share(*, mttf: float, interval: float, stall: float, durable: float, restart: float) -> float:
    """Return the share of time that is training which is kept (ETTR).

    With a blocking save of length d: ``stall`` d and ``durable`` 0, which is Daly's.
    """
    cycle = interval + stall
    kept = math.exp(-(cycle + durable) / mttf) / -math.expm1(-cycle / mttf)
    return interval * kept / (mttf * math.exp(restart / mttf))


def best_interval(*, mttf: float, stall: float, durable: float, restart: float) -> float:
    """Return the interval with the largest share, by golden-section search; the share has one maximum.

    A checkpoint must be durable before the next one is saved, so no shorter interval is looked at.
    """
    low, high = max(durable - stall, 1e-9 * mttf), 4.0 * mttf + durable
    ratio = (math.sqrt(5.0) - 1.0) / 2.0

    def share(interval: float) -> float:
        return effective_share(mttf=mttf, interval=interval, stall=stall, durable=durable, restart=restart)

    for _ in range(STEPS_MAX):
        if high - low <= 1e-9 * mttf:
            break
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if share(left) >= share(right) else (left, high)
    return (low + high) / 2.0


def longest_restart(*, share: float, mttf: float, interval: float, stall: float, durable: float) -> float | None:
    """Return the longest restart that keeps a share; None if even an instant one does not."""
    best = effective_share(mttf=mttf, interval=interval, stall=stall, durable=durable, restart=0.0)
    return None if best < share else mttf * math.log(best / share)
