"""Serving on unlike devices: which layers on which device, with how many bits, in which microbatches.

The choice of LLM-PQ (arXiv:2403.01136). Devices are the stages of a pipeline, in the best order; a stage has contiguous
layers. Prefill of K microbatches on P stages takes ``K + P - 1`` times the slowest stage, a step of decode
``max(K, P)`` times: the pipeline fills at the pace of its slowest stage. The sum of the layers' errors stays within a
budget, the share of what the fewest bits everywhere would cost.

The search is exact. For given limits on a stage's prefill and decode, a dynamic program over devices and layers finds
the least error. Limits that no stage meets exactly need not be tried, and of two limits the looser never needs more
error: so the best are found by bisection.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.hardware import HARDWARE, IN_MEMORY, PROCESSOR, Hardware
from polyreme_planner.memory import size_words
from polyreme_planner.serving_prices import BITS, ROUNDING, ServingSetting
from polyreme_planner.serving_segments import Option, Place, Seconds, Segments, Sequences, unlinked

SERVING_DEVICES: Mapping[str, Hardware] = {
    name: hardware for name, hardware in {**HARDWARE, **IN_MEMORY}.items() if name != PROCESSOR
}
"""Devices that a model is served on."""
ORDERS_MAX = 64
"""Orders of the devices that are tried, those with most devices first."""
PREFILL, DECODE = 0, 1
NO_LIMITS: Seconds = (math.inf, math.inf)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One device of a plan."""

    hardware: Hardware
    bits: tuple[int, ...]
    """Of its layers, in order."""
    memory_bytes: float
    seconds: Seconds
    """Of one microbatch in prefill, and of one step of one in decode."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """A choice, and what it costs."""

    stages: tuple[Stage, ...]
    sequences: Sequences
    """Of a microbatch in prefill and in decode."""
    seconds: Seconds
    """Of a whole batch: prefill, and all tokens after the first."""
    error: float
    """Share of the error with the fewest bits everywhere."""
    orders_left_out: int = 0

    @property
    def total_s(self) -> float:
        """Time of a batch."""
        return sum(self.seconds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Devices in an order, and sizes of microbatches."""

    segments: Segments
    devices: tuple[Hardware, ...]
    sequences: Sequences

    def place(self, at: int) -> Place:
        """Return a device with its place."""
        return Place(self.devices[at], first=at == 0, last=at == len(self.devices) - 1)

    def spans(self, at: int, begin: int) -> range:
        """List where layers of a device may end that begin there: each later device gets one at least."""
        layers, after = len(self.segments.parts), len(self.devices) - at - 1
        return range(begin + 1, layers - after + 1) if after else range(layers, layers + 1)

    def factors(self) -> tuple[int, int]:
        """Return how often the slowest stage counts: in prefill, and in all steps of decode."""
        phases, stages = self.segments.setting.phases, len(self.devices)
        prefills, decodes = (math.ceil(phases.batch / (size or phases.batch)) for size in self.sequences)
        return prefills + stages - 1, (phases.answer_tokens - 1) * max(decodes, stages)

    def least_error(self, limits: Seconds = NO_LIMITS) -> tuple[float, tuple[Option, ...]]:
        """Find the segments with the least error whose stages stay within the limits; infinite if there are none."""
        before: dict[int, tuple[float, Any]] = {0: (0.0, None)}
        for at in range(len(self.devices)):
            place, now = self.place(at), dict[int, tuple[float, Any]]()
            seen: dict[int, Option | None] = {}
            for begin, (error, chosen) in before.items():
                kinds = self.segments.kinds[begin]
                for end in self.spans(at, begin):
                    if (kind := kinds[end]) not in seen:
                        options = self.segments.options(place, begin, end, self.sequences)
                        seen[kind] = next((option for option in options if option.within(limits)), None)
                    option = seen[kind]
                    if option is not None and (end not in now or error + option.error < now[end][0]):
                        now[end] = (error + option.error, (option, chosen))
            before = now
        error, chosen = before.get(len(self.segments.parts), (math.inf, None))
        return error, unlinked(chosen)

    def meets(self, limits: Seconds) -> bool:
        """Return whether the budget allows stages within the limits."""
        setting = self.segments.setting
        return self.least_error(limits)[0] <= setting.budget * setting.worst_error * (1 + ROUNDING)

    def stage_seconds(self, phase: int) -> list[float]:
        """List what some stage may take in a phase, the least first."""
        found: set[float] = set()
        for at in range(len(self.devices)):
            begins = range(at, len(self.segments.parts)) if at else (0,)
            spans = {self.segments.kinds[begin][end]: (begin, end) for begin in begins for end in self.spans(at, begin)}
            for begin, end in spans.values():
                options = self.segments.options(self.place(at), begin, end, self.sequences)
                found |= {option.seconds[phase] for option in options}
        return sorted(found)

    def fastest_s(self, phase: int, *, below_s: float) -> float:
        """Find the least time of the slowest stage in a phase, whatever the other takes; infinite if none is below."""

        def meets(limit_s: float) -> bool:
            return self.meets((limit_s, math.inf) if phase == PREFILL else (math.inf, limit_s))

        seconds = [taken_s for taken_s in self.stage_seconds(phase) if taken_s < below_s]
        if not seconds or not meets(seconds[-1]):
            return math.inf
        return seconds[bisect.bisect_left(seconds, True, key=meets)]

    def plan(self, options: Sequence[Option]) -> ServingPlan:
        """Price a choice of segments."""
        prefills, decodes = self.factors()
        return ServingPlan(
            stages=tuple(
                Stage(
                    hardware=hardware,
                    bits=unlinked(option.bits),
                    memory_bytes=option.memory_bytes,
                    seconds=option.seconds,
                )
                for hardware, option in zip(self.devices, options, strict=True)
            ),
            sequences=self.sequences,
            seconds=(
                prefills * max(option.seconds[PREFILL] for option in options),
                decodes * max(option.seconds[DECODE] for option in options),
            ),
            error=sum(option.error for option in options) / self.segments.setting.worst_error,
        )


def plan_serving(setting: ServingSetting) -> ServingPlan:
    """Find the fastest choice within the budget.

    Raises:
        InvalidConfigError: If nothing fits: by how much the memory is short, or which budget would be enough.
    """
    segments = Segments(setting)
    orders = list(itertools.islice(_orders(setting), ORDERS_MAX))
    _check_memory(segments, orders)
    best: ServingPlan | None = None
    # Few devices are soon tried, and what they reach cuts the search of more.
    for devices in reversed(orders):
        for bound_s, decode_s, pipeline in _promising(segments, devices, math.inf if best is None else best.total_s):
            if bound_s < (math.inf if best is None else best.total_s):
                best = _faster(pipeline, decode_s, best)
    if best is None:
        raise _too_little_budget(segments, orders)
    return dataclasses.replace(best, orders_left_out=order_count(setting) - len(orders))


def _promising(segments: Segments, devices: tuple[Hardware, ...], best_s: float) -> list[tuple[float, float, Pipeline]]:
    """List the microbatches of an order that may be faster than the best, the most promising first.

    With each comes the least time that it could take, each phase by itself, and that of decode's slowest stage.
    """
    sizes = microbatch_sizes(segments.setting.phases.batch)

    def pipeline(*sequences: int) -> Pipeline:
        return Pipeline(segments=segments, devices=devices, sequences=(sequences[0], sequences[1]))

    def least(phase: int, rest_s: float) -> dict[int, tuple[float, float]]:
        """Map sizes to the least time of the phase, and that of its slowest stage."""
        found = {}
        for size in sizes:
            one = pipeline(size, 0) if phase == PREFILL else pipeline(0, size)
            times = one.factors()[phase]
            stage_s = one.fastest_s(phase, below_s=rest_s / times if times else math.inf)
            if stage_s < math.inf:
                found[size] = (times * stage_s, stage_s)
        return found

    prefills = least(PREFILL, best_s)
    decodes = least(DECODE, best_s - min((taken_s for taken_s, _ in prefills.values()), default=best_s))
    pairs = itertools.product(prefills.items(), decodes.items())
    found = [
        (first[0] + second[0], second[1], pipeline(prefill, decode)) for (prefill, first), (decode, second) in pairs
    ]
    return sorted(found, key=lambda one: one[0])


def _faster(pipeline: Pipeline, decode_s: float, best: ServingPlan | None) -> ServingPlan | None:
    """Return the best plan of a pipeline if it is faster than the best so far, else that.

    Args:
        pipeline: Devices and microbatches.
        decode_s: What its slowest stage takes at least in decode.
        best: The best plan so far.
    """
    prefills, decodes = pipeline.factors()
    limits = pipeline.stage_seconds(DECODE) if decodes else [math.inf]
    for prefill_s in pipeline.stage_seconds(PREFILL):
        best_s = math.inf if best is None else best.total_s
        left_s = best_s - prefills * prefill_s
        if left_s <= (decodes * decode_s if decodes else 0):
            break
        # More time for prefill needs no more for decode: only limits that make the whole faster are left.
        limits = [limit for limit in limits if decodes * limit < left_s] if decodes else limits
        if limits and pipeline.meets((prefill_s, limits[-1])):

            def meets(limit_s: float, prefill_s: float = prefill_s) -> bool:
                return pipeline.meets((prefill_s, limit_s))

            limit_s = limits[bisect.bisect_left(limits, True, key=meets)]
            best = pipeline.plan(pipeline.least_error((prefill_s, limit_s))[1])
    return best


def even_plan(setting: ServingSetting, bits: int) -> ServingPlan | None:
    """Price an even split over all devices as they are given, all layers with the same bits; None if it does not fit.

    Microbatches are the best ones for it; the budget is not looked at.
    """
    segments = Segments(setting)
    each, more = divmod(len(segments.parts), len(setting.devices))
    counts = [each + (at < more) for at in range(len(setting.devices))]
    begins = list(itertools.accumulate(counts, initial=0))
    found = []
    sizes = microbatch_sizes(setting.phases.batch)
    for sequences in itertools.product(sizes, sizes):
        pipeline = Pipeline(segments=segments, devices=setting.devices, sequences=sequences)
        options = [
            segments.of_bits(pipeline.place(at), begins[at], [bits] * count, sequences)
            for at, count in enumerate(counts)
        ]
        if all(one.memory_bytes <= of.usable_bytes for one, of in zip(options, setting.devices, strict=True)):
            found.append(pipeline.plan(options))
    return min(found, key=lambda plan: plan.total_s, default=None)


def microbatch_sizes(batch: int) -> list[int]:
    """List the sizes of microbatches that are tried: powers of two, and the whole batch."""
    return sorted({2**power for power in range(batch.bit_length()) if 2**power <= batch} | {batch})


def _orders(setting: ServingSetting) -> Iterator[tuple[Hardware, ...]]:
    """Give the orders of all devices, then of fewer, each once: a device may be left out."""
    layers = setting.shape.decoder.layers

    def orders(left: Counter[Hardware], length: int) -> Iterator[tuple[Hardware, ...]]:
        if not length:
            yield ()
            return
        for hardware in [hardware for hardware, count in left.items() if count]:
            rest = left.copy()
            rest[hardware] -= 1
            yield from ((hardware, *others) for others in orders(rest, length - 1))

    for length in range(min(len(setting.devices), layers), 0, -1):
        yield from orders(Counter(setting.devices), length)


def order_count(setting: ServingSetting) -> int:
    """Count the orders of the devices and of fewer."""
    ways = [1] + [0] * len(setting.devices)
    for count in Counter(setting.devices).values():
        ways = [
            sum(ways[length - used] * math.comb(length, used) for used in range(min(count, length) + 1))
            for length in range(len(ways))
        ]
    return sum(ways[1 : setting.shape.decoder.layers + 1])


def _check_memory(segments: Segments, orders: Sequence[tuple[Hardware, ...]]) -> None:
    """Refuse a model that does not fit with the fewest bits, and say by how much the memory is short."""
    pipelines = [Pipeline(segments=segments, devices=devices, sequences=(1, 1)) for devices in orders]
    short = min(_short_bytes(pipeline) for pipeline in pipelines)
    if short:
        raise InvalidConfigError(
            f"{_asked(segments.setting)}: with the fewest bits their memory is {size_words(short)} short",
            field="--devices, --batch or the tokens",
        )


def _too_little_budget(segments: Segments, orders: Sequence[tuple[Hardware, ...]]) -> InvalidConfigError:
    """Say which budget the bits that fit the memory would need."""
    setting = segments.setting
    pipelines = [Pipeline(segments=segments, devices=devices, sequences=(1, 1)) for devices in orders]
    least = min(pipeline.least_error()[0] for pipeline in pipelines)
    needed = math.ceil(1000 * least / setting.worst_error) / 1000
    return InvalidConfigError(
        f"{_asked(setting)} within a quality budget of {setting.budget:g}: bits that fit the memory need {needed:g}",
        field="--quality-budget or --devices",
    )


def _asked(setting: ServingSetting) -> str:
    names = ", ".join(hardware.name for hardware in setting.devices)
    phases = setting.phases
    return f"{setting.shape.name} with {phases.batch} x {phases.total_tokens:,} tokens does not fit {names}"


def _short_bytes(pipeline: Pipeline) -> float:
    """Return the memory that is missing on all devices together, with the fewest bits and the best split."""
    before = {0: 0.0}
    for at, hardware in enumerate(pipeline.devices):
        bits = BITS[-1] if hardware.in_memory else BITS[0]
        now: dict[int, float] = {}
        for begin, short in before.items():
            for end in pipeline.spans(at, begin):
                option = pipeline.segments.of_bits(
                    pipeline.place(at), begin, [bits] * (end - begin), pipeline.sequences
                )
                more = short + max(0.0, option.memory_bytes - hardware.usable_bytes)
                now[end] = min(now.get(end, math.inf), more)
        before = now
    return before[len(pipeline.segments.parts)]
