"""Numbers as the report and the live table write them: times, rates, sizes, shares."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

NOTHING = "-"
WEIGHTS_MAX = 4
"""Sources that a mark in a picture names."""


def duration(seconds: float | None) -> str:
    """Write a length of time: ``0.42 s``, ``48 s``, ``3 min 05 s``, ``2 h 14 min``, ``3 d 04 h``."""
    if seconds is None:
        return NOTHING
    if seconds < 10:
        return f"{max(seconds, 0):.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600:02d} h"


def clock(seconds: float) -> str:
    """Write a time on an axis: ``0:30``, ``12:05``, ``3:20:00``."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole % 3600 // 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def share(ratio: float | None) -> str:
    """Write a ratio in percent; never 100 % for less than all."""
    if ratio is None:
        return NOTHING
    percent = ratio * 100
    text = f"{percent:.1f}"
    return f"{min(percent, 99.9):.1f} %" if ratio < 1 and text == "100.0" else f"{text.removesuffix('.0')} %"


def rate(per_second: float | None) -> str:
    """Write tokens a second."""
    return NOTHING if per_second is None else f"{per_second:,.0f} tok/s"


def size(size_bytes: int) -> str:
    """Write a size in binary units."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def shortened(words: str, most: int) -> str:
    """Cut a text to so many characters; one that was cut ends with an ellipsis."""
    return words if len(words) <= most else words[: most - 1] + "…"


def short_weights(weights: Mapping[str, int]) -> str:
    """Write a mixture in a few characters: ``one 1 · two 1``; sources of weight 0 are left out."""
    given = [f"{name} {weight}" for name, weight in weights.items() if weight]
    return " · ".join(given[:WEIGHTS_MAX]) + (" …" if len(given) > WEIGHTS_MAX else "")


def mixture_change(step: int, weights: Mapping[str, int], skip_steps: int) -> str:
    """Write a change of the mixture: ``step 33: one 1 · two 1``, with the steps whose samples it skips."""
    skipped = f" (samples of {skip_steps} steps skipped)" if skip_steps else ""
    return f"step {step}: {short_weights(weights)}{skipped}"


def moment(at_s: float) -> str:
    """Write a point in time, in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def in_words(name: str) -> str:
    """Write a name of a record in words: ``rewardMargin`` as ``reward margin``."""
    return re.sub(r"(?<=[a-z])[A-Z]", lambda letter: f" {letter.group().lower()}", name)
