"""Seeded cases of serving, and the best plan of each by trying every split, all bits and all microbatches."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np

from polyreme_planner import serving_prices as prices
from polyreme_planner.flops import Mix
from polyreme_planner.hardware import HARDWARE, Hardware
from polyreme_planner.model_parts import Part, layer_parts, part_parameters
from polyreme_planner.serving import microbatch_sizes
from polyreme_planner.serving_prices import BITS, Phases, ServingSetting
from polyreme_planner.shapes import KIMI_VL_NANO

LAYERS = 8


def case(seed: int) -> ServingSetting:
    """Draw eight layers on three unlike devices whose memory may be short."""
    rng = random.Random(seed)
    decoder = dataclasses.replace(KIMI_VL_NANO.decoder, layers=LAYERS, dense_layers=rng.randrange(3))
    shape = dataclasses.replace(KIMI_VL_NANO, decoder=decoder)
    size = 2 * part_parameters(shape)[Part.MOE].total

    def device(name: str) -> Hardware:
        return dataclasses.replace(
            HARDWARE["h100-80g"],
            name=name,
            memory_bytes=int(size * rng.uniform(2, 8)),
            flops_per_s=10 ** rng.uniform(9, 11),
            bytes_per_s=10 ** rng.uniform(8, 10),
            far_bytes_per_s=10 ** rng.uniform(7, 9),
            launch_s=rng.choice([0.0, 1e-6]),
        )

    return ServingSetting(
        shape=shape,
        devices=tuple(device(name) for name in "abc"),
        phases=Phases(mix=Mix(sequence_tokens=16), answer_tokens=rng.choice([1, 4, 40]), batch=2),
        indicator=tuple({4: rng.uniform(0.2, 1), 8: rng.uniform(0.01, 0.1), 16: 0.0} for _ in range(LAYERS)),
        budget=rng.choice([0.1, 0.3, 0.6, 1.0]),
    )


def best_total_s(setting: ServingSetting) -> float:
    """Try everything; infinite if nothing fits."""
    best = math.inf
    sizes = microbatch_sizes(setting.phases.batch)
    choices = np.array(list(itertools.product(range(len(BITS)), repeat=LAYERS)))
    rows = np.array([[row[bits] for bits in BITS] for row in setting.indicator])
    errors = rows[np.arange(LAYERS), choices].sum(axis=1)
    choices = choices[errors <= setting.budget * setting.worst_error * (1 + 1e-9)]
    for prefill, decode in itertools.product(sizes, sizes):
        # By device, layer and bits: seconds of prefill and of decode, bytes.
        costs = {device.name: layer_costs(setting, device, prefill, decode) for device in setting.devices}
        for stages in range(1, len(setting.devices) + 1):
            for order in itertools.permutations(setting.devices, stages):
                for cuts in itertools.combinations(range(1, LAYERS), stages - 1):
                    ends = [0, *cuts, LAYERS]
                    found = price(setting, order, ends, choices, costs, prefill, decode)
                    best = min(best, found)
    return best


def layer_costs(setting: ServingSetting, device: Hardware, prefill: int, decode: int) -> np.ndarray:
    """Price each layer of a device: (layer, bits, what)."""
    shape, phases = setting.shape, setting.phases
    return np.array(
        [
            [
                (
                    prices.prefill_s(shape, part, device, phases, bits=bits, sequences=prefill),
                    prices.decode_s(shape, part, device, phases, bits=bits, sequences=decode),
                    prices.weight_bytes(shape, part, bits) + prices.cache_bytes(shape, phases),
                )
                for bits in BITS
            ]
            for part in layer_parts(shape)
        ]
    )


def price(
    setting: ServingSetting,
    order: tuple[Hardware, ...],
    ends: list[int],
    choices: np.ndarray,
    costs: dict[str, np.ndarray],
    prefill: int,
    decode: int,
) -> float:
    """Return the least time of a split over all bits that fit."""
    shape, phases = setting.shape, setting.phases
    slowest = np.zeros((len(choices), 2))
    fits = np.ones(len(choices), dtype=bool)
    for at, (device, (begin, end)) in enumerate(zip(order, itertools.pairwise(ends), strict=True)):
        layers = np.arange(begin, end)
        sums = costs[device.name][layers, choices[:, begin:end]].sum(axis=1)
        parts = [Part.TOWER, Part.EMBEDDING] if at == 0 else []
        parts += [Part.HEAD] if at == len(order) - 1 else []
        for part in parts:
            sums[:, 0] += prices.prefill_s(shape, part, device, phases, sequences=prefill)
            sums[:, 1] += prices.decode_s(shape, part, device, phases, sequences=decode)
            sums[:, 2] += prices.weight_bytes(shape, part, 16)
        if at < len(order) - 1:
            sums[:, 0] += prices.handover_s(shape, device, tokens=prefill * phases.mix.sequence_tokens)
            sums[:, 1] += prices.handover_s(shape, device, tokens=decode)
        alive = [
            prices.activation_bytes(shape, part, phases, sequences=prefill)
            for part in (*layer_parts(shape)[begin:end], *parts)
            if part is not Part.HEAD
        ]
        logits = 4 * shape.decoder.vocabulary * max(prefill, decode) if at == len(order) - 1 else 0
        fits &= sums[:, 2] + max(*alive, logits, 0) <= device.usable_bytes
        slowest = np.maximum(slowest, sums[:, :2])
    if not fits.any():
        return math.inf
    groups = [math.ceil(phases.batch / prefill), math.ceil(phases.batch / decode)]
    factors = (groups[0] + len(order) - 1, (phases.answer_tokens - 1) * max(groups[1], len(order)))
    return float((slowest[fits] @ np.array(factors)).min())
