"""Precision of each layer on a slow device that trains in step with faster ones, each with a copy of the model.

The allocation of QSync (IPDPS 2024): all layers begin with the fewest bits. As long as the slow device's step stays
within that of the fast one and its memory holds, the layer that removes most variance for its time gets more. Where
even the fewest bits are slower than the fast device, the step of all becomes no longer than that.

Of the variance that the best choice removes, at least half is removed if memory is not short: raises are taken in the
order of a fractional knapsack, or begin with the largest one alone (Dantzig, Operations Research 5(2), 1957).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.costs import Recompute, Setting, products_s
from polyreme_planner.flops import Mix
from polyreme_planner.hardware import Hardware, Numerics
from polyreme_planner.layout import Layout
from polyreme_planner.memory import kept_numbers, size_words
from polyreme_planner.model_parts import Part, all_parts, layer_parts, parameter_count, part_parameters
from polyreme_planner.serving_prices import ROUNDING, relative_error
from polyreme_planner.shapes import ModelShape

WIDTHS = (8, 16, 32)
"""Bits in which a layer may compute: integers, bfloat16, float32."""
INT8_SHARE = 2.0
"""Speed of products of 8-bit integers over bfloat16: by the data sheets of all devices here that have them."""
STATE_BYTES = 16
"""Of a parameter, whatever computes: float32 weight, gradient and two moments (AdamW)."""
VARIANCE: Mapping[int, float] = {8: relative_error(8) ** 2, 16: 2.0**-14 / 24, 32: 2.0**-46 / 24}
"""Variance of the rounding error over that of the numbers. A number with m bits after the point lies between steps of
2^-m of its leading power of two, and the error of a step is its square over 12; half of that over all mantissas."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What a layer costs in one width."""

    step_s: float
    memory_bytes: float
    variance: float


Costs = Mapping[int, Cost]
"""Of one layer, by width."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Width of each layer of the slow device, and what they cost."""

    widths: tuple[int, ...]
    step_s: float
    limit_s: float
    """Step of the fast device, or of the slow one with the fewest bits where that is longer."""
    memory_bytes: float
    variance: float


def precision_for(
    shape: ModelShape,
    mix: Mix,
    *,
    slow: Hardware,
    fast: Hardware,
    packs: int,
    state_bytes: float | None = None,
) -> Allocation:
    """Choose the width of each layer of the slow device; tower, embedding and head are in bfloat16.

    Args:
        shape: The model; each device holds a copy.
        mix: Content of a pack.
        slow: The device whose layers may have fewer bits.
        fast: The device that it trains with, in bfloat16.
        packs: Of a step on each of them.
        state_bytes: Memory of weights, gradients and moments; None without any sharding.

    Raises:
        InvalidConfigError: If the memory of the slow device is short with the fewest bits.
    """
    by_part = {part: _costs(shape, mix, slow, part, packs) for part in dict.fromkeys(layer_parts(shape))}
    rows = [by_part[part] for part in layer_parts(shape)]
    ends = [_costs(shape, mix, slow, part, packs)[16] for part in all_parts(shape) if part not in by_part]
    fast_s = sum(_costs(shape, mix, fast, part, packs)[16].step_s for part in all_parts(shape))
    state = STATE_BYTES * parameter_count(shape) if state_bytes is None else state_bytes
    fixed = Cost(sum(cost.step_s for cost in ends), state + sum(cost.memory_bytes for cost in ends), 0.0)
    found = allocate(rows, fixed=fixed, limit_s=fast_s, memory_bytes=slow.usable_bytes)
    if found.memory_bytes > slow.usable_bytes:
        short = size_words(found.memory_bytes - slow.usable_bytes)
        raise InvalidConfigError(
            f"{shape.name} does not fit {slow.name}: with {WIDTHS[0]} bits in all layers its memory is {short} short",
            field="packs or the slow device",
        )
    return found


def allocate(rows: Sequence[Costs], *, fixed: Cost, limit_s: float, memory_bytes: float) -> Allocation:
    """Raise layers from the fewest bits while the limits hold.

    Args:
        rows: Costs of each layer.
        fixed: Costs of everything else.
        limit_s: The step shall not be longer, unless it is with the fewest bits.
        memory_bytes: What the device holds.
    """
    low = [min(row) for row in rows]
    limit_s = max(limit_s, _total(rows, low, fixed).step_s)

    def fits(widths: Sequence[int]) -> bool:
        total = _total(rows, widths, fixed)
        return total.step_s <= limit_s * (1 + ROUNDING) and total.memory_bytes <= memory_bytes

    def raised(widths: list[int]) -> list[int]:
        while found := [one for one in _raises(rows, widths) if fits(one[1])]:
            widths = max(found, key=lambda one: one[0])[1]
        return widths

    alone = [widths for _, widths in _raises(rows, low) if fits(widths)]
    largest = min(alone, key=lambda widths: _total(rows, widths, fixed).variance, default=low)
    widths = min((raised(low), raised(largest)), key=lambda one: _total(rows, one, fixed).variance)
    total = _total(rows, widths, fixed)
    return Allocation(
        widths=tuple(widths),
        step_s=total.step_s,
        limit_s=limit_s,
        memory_bytes=total.memory_bytes,
        variance=total.variance,
    )


def _raises(rows: Sequence[Costs], widths: list[int]) -> list[tuple[float, list[int]]]:
    """List what one layer more with its next width gives: variance removed over time added, and the widths."""
    found = []
    for at, (row, width) in enumerate(zip(rows, widths, strict=True)):
        wider = [other for other in sorted(row) if other > width]
        if wider:
            removed = row[width].variance - row[wider[0]].variance
            added_s = row[wider[0]].step_s - row[width].step_s
            density = removed / added_s if added_s > 0 else float("inf")
            found.append((density, [*widths[:at], wider[0], *widths[at + 1 :]]))
    return found


def _total(rows: Sequence[Costs], widths: Sequence[int], fixed: Cost) -> Cost:
    chosen = [fixed, *(row[width] for row, width in zip(rows, widths, strict=True))]
    return Cost(
        sum(cost.step_s for cost in chosen),
        sum(cost.memory_bytes for cost in chosen),
        sum(cost.variance for cost in chosen),
    )


def _costs(shape: ModelShape, mix: Mix, hardware: Hardware, part: Part, packs: int) -> dict[int, Cost]:
    """Price one part of a step in each width; what the state takes is not in it."""
    rates = {8: INT8_SHARE * hardware.flops_per_s, 16: hardware.flops_per_s, 32: hardware.at("float32").flops_per_s}
    tokens = packs * mix.sequence_tokens * (mix.patches_per_token(shape) if part is Part.TOWER else 1)
    numbers = kept_numbers(shape, recompute=Recompute.NONE)[part] * tokens + part_parameters(shape)[part].total
    found = {}
    for width in WIDTHS:
        setting = Setting(
            shape=shape,
            mix=mix,
            hardware=dataclasses.replace(hardware, flops_per_s=rates[width]),
            numerics=Numerics(weight_bytes=width // 8, activation_bytes=width // 8),
        )
        times = products_s(setting, Layout(dp=1), packs=packs)[part]
        found[width] = Cost(times.total_s, numbers * width / 8, VARIANCE[width])
    return found
