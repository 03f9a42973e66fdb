"""Escalation of repeated faults: fatal errors of one device, repairs in a row, recurrences in probation."""

from __future__ import annotations

from collections.abc import Mapping

from polyreme_operator.health.record import DEVICES_MAX, FATAL_TIMES_MAX, REPAIRS_MAX

FATAL_MAX = 5
"""Fatal errors of one device within ``FATAL_WINDOW_S`` after which only a replacement helps (source S)."""
FATAL_WINDOW_S = 86_400.0
REPAIRS_WINDOW_S = 7 * 86_400.0
"""Window in which ``REPAIRS_MAX`` returns to service retire the node (source S)."""
RECURRENCES_MAX = 3
"""Recurrence in probation that retires the node."""
REPLACE = "Replace"


def with_fatal(
    fatal_s: Mapping[str, tuple[float, ...]], device: str, count: int, now_s: float
) -> dict[str, tuple[float, ...]]:
    """Add fatal errors of one device; the device seen least recently is dropped where there are too many."""
    known = [at_s for at_s in fatal_s.get(device, ()) if now_s - at_s < FATAL_WINDOW_S]
    times = (*known, *[now_s] * min(count, FATAL_TIMES_MAX))[-FATAL_TIMES_MAX:]
    after = {**{name: value for name, value in fatal_s.items() if name != device}, device: times}
    while len(after) > DEVICES_MAX:
        del after[min(after, key=lambda name: (after[name][-1] if after[name] else 0.0, name))]
    return after


def is_worn_out(fatal_s: Mapping[str, tuple[float, ...]], device: str, now_s: float) -> bool:
    """Tell whether a device had so many fatal errors that resets don't help."""
    times = [at_s for at_s in fatal_s.get(device, ()) if 0.0 <= now_s - at_s < FATAL_WINDOW_S]
    return len(times) >= FATAL_MAX


def with_repair(repairs_s: tuple[float, ...], now_s: float) -> tuple[float, ...]:
    """Add a return to service."""
    known = [at_s for at_s in repairs_s if now_s - at_s < REPAIRS_WINDOW_S]
    return (*known, now_s)[-REPAIRS_MAX:]


def retires(repairs_s: tuple[float, ...], recurrences: int, now_s: float) -> bool:
    """Tell whether a node that fails again is retired."""
    lately = sum(0.0 <= now_s - at_s < REPAIRS_WINDOW_S for at_s in repairs_s)
    return recurrences >= RECURRENCES_MAX or lately >= REPAIRS_MAX
