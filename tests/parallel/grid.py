"""Layouts in which the gradient of one process is looked for again: each dimension alone, pairs, and folded together.

``ALWAYS`` runs with the tests, and so does one of ``IN_TURN`` by the commit; ``make soak-grid`` runs all.
"""

from __future__ import annotations

import itertools
from typing import Any

TOLERANCE = 1e-5
"""Largest difference of a tensor's gradient, relative to the largest gradient of that tensor."""

Degrees = dict[str, int]

ALWAYS: tuple[Degrees, ...] = (
    {"cp": 4},
    {"dp": 4, "ep": 2},
    {"cp": 2, "tp": 2, "ep": 4},
    {"dp": 2, "cp": 2, "ulysses": 2, "ep": 4},
)


def _all() -> tuple[Degrees, ...]:
    """Every layout of 2, 4 and 8 ranks that fits the small model: 4 heads, 8 experts, 4 packs per step."""
    found: list[Degrees] = []
    for dp, cp, tp in itertools.product((1, 2, 4), (1, 2, 4, 8), (1, 2, 4)):
        shards = dp * cp * tp
        if shards not in {2, 4, 8}:
            continue
        for ep, ulysses in itertools.product((1, 2, 4, 8), (1, 2, 4)):
            if shards % ep == 0 and cp % ulysses == 0 and 4 // tp % ulysses == 0:
                degrees = {"dp": dp, "cp": cp, "tp": tp, "ep": ep, "ulysses": ulysses}
                found.append({name: degree for name, degree in degrees.items() if degree > 1})
    return tuple(found)


ALL = _all()
IN_TURN = tuple(layout for layout in ALL if layout not in ALWAYS)


def turn(number: int) -> Degrees:
    """The layout whose turn it is."""
    return IN_TURN[number % len(IN_TURN)]


def name(layout: Degrees) -> str:
    """``dp2 cp2``."""
    return " ".join(f"{axis}{degree}" for axis, degree in layout.items()) or "one process"


def ways(number: int) -> dict[str, Any]:
    """Every other layout takes the ways of large models: sums of their own, tiles without a mask, logits in chunks.

    One layout after the other holds everything, recomputes something, or everything; one in four shards its update,
    and one in four holds rows of its parameters.
    """
    large: dict[str, Any] = {} if number % 2 else {"fused_bytes_max": 0, "dense_tokens_max": 0, "logits_max": 1 << 13}
    if number % 4 == 2:
        large["optimizer"] = {"zero1": True, "bucket_scalars": 40_000}
    if number % 4 == 1:
        large["parameter_sharding"] = "FSDP2"
    return {**large, "recompute": ("none", "selective", "full")[number % 3]}


UNEVEN: dict[str, Any] = {"seeing": 1, "hole_every": 4}
"""One pack of a step has all images, and some of its samples are damaged."""

CAPACITY = 0.75
"""Less than an even share: every layer drops rows, on every rank."""
CAPACITY_ALWAYS: tuple[Degrees, ...] = ({"dp": 4, "ep": 4}, {"cp": 2, "tp": 2, "ep": 2})


def senders_key(layout: Degrees) -> tuple[int, ...]:
    """What decides which rows are dropped: layouts of one key drop the same."""
    return tuple(layout.get(axis, 1) for axis in ("dp", "cp", "ulysses", "tp"))
