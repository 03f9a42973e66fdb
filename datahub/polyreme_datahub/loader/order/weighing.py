"""Whole weights of a mixture by the sizes of its sources: shares of tokens, and temperature.

A source's share is its weight, multiplied by its size to the power of 1 / temperature where there is a temperature
(T = 1: every sample comes as often; a high T: the weights alone; N. Arivazhagan et al., "Massively Multilingual Neural
Machine Translation in the Wild", 2019, section 4.2). Shares of tokens become shares of samples by the mean length of a
source's samples. All of it is decimal arithmetic of one precision, so every rank gets the same weights to the last one.
"""

from __future__ import annotations

import dataclasses
import functools
from decimal import ROUND_HALF_EVEN, Context, Decimal

from polyreme_api.job.data import Data
from polyreme_datahub.loader.order.plan import OrderPlan

WEIGHING_VERSION = 1
"""Goes up when the same sizes give other weights: states of another version are refused."""
PERIOD = 65_536
"""Sum of the whole weights, about. Shares are rounded to it, and none becomes nothing."""
WEIGHTS_KEPT = 2048
"""Results in memory: as many as a schedule and stages have changes; each is needed again when one is appended."""
_EXACT = Context(prec=40, rounding=ROUND_HALF_EVEN)


def weighed(plan: OrderPlan, data: Data) -> OrderPlan:
    """Return an order's plan whose segments have the weights by which slots are given out.

    Args:
        plan: With the weights that the job gives.
        data: Says what they mean.
    """
    if data.weights_by == "Samples" and data.temperature is None:
        return plan
    power = None if data.temperature is None else _EXACT.divide(Decimal(1), Decimal(data.temperature))
    by_packs = {tokens: _sizes(plan, tokens) for tokens in {plan.sample_tokens_in(of) for of in plan.segments}}
    segments = [
        dataclasses.replace(
            segment,
            weights=_whole_weights(
                segment.weights,
                by_packs[plan.sample_tokens_in(segment)],
                by_tokens=data.weights_by == "Tokens",
                power=power,
            ),
        )
        for segment in plan.segments
    ]
    return dataclasses.replace(plan, segments=tuple(segments))


def _sizes(plan: OrderPlan, tokens_max: int) -> tuple[tuple[int, int], ...]:
    """Return the samples of each source that fit some packs, and their tokens."""
    return tuple((int(lengths.size), int(lengths.sum())) for lengths in plan.fitting_lengths(tokens_max))


@functools.lru_cache(maxsize=WEIGHTS_KEPT)
def _whole_weights(
    weights: tuple[int, ...], sizes: tuple[tuple[int, int], ...], *, by_tokens: bool, power: Decimal | None
) -> tuple[int, ...]:
    shares: list[Decimal] = []
    for weight, (samples, tokens) in zip(weights, sizes, strict=True):
        share = Decimal(weight)
        if weight and samples:
            if power is not None:
                share = _EXACT.multiply(share, _EXACT.power(Decimal(tokens if by_tokens else samples), power))
            if by_tokens:
                share = _EXACT.divide(_EXACT.multiply(share, Decimal(samples)), Decimal(tokens))
        shares.append(share)
    total = functools.reduce(_EXACT.add, shares)
    parts = [_EXACT.divide(_EXACT.multiply(share, Decimal(PERIOD)), total) for share in shares]
    return tuple(max(1, int(part.to_integral_value(context=_EXACT))) if part else 0 for part in parts)
