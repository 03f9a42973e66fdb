"""Segments of a model on a device that serves it: for each number of layers by bits, the seconds, bytes and error.

Layers of one kind cost the same at the same bits, and differ in the error that rounding them adds. So a segment is
described by how many of its layers have which bits, and of all choices with the same numbers the one with the least
error is kept.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from polyreme_planner import serving_prices as prices
from polyreme_planner.hardware import Hardware
from polyreme_planner.memory import LOGITS_MAX
from polyreme_planner.model_parts import Part, layer_parts
from polyreme_planner.serving_prices import BITS, FULL_BITS, ServingSetting

KINDS = (Part.DENSE, Part.MOE)
LOGIT_BYTES = 4
_Linked = tuple[Any, Any] | None
"""A list linked from its end: its last item and those before; None is empty."""
_Counts = tuple[int, ...]
"""Layers by kind and bits."""
_Cost = tuple[float, float, float]
"""Seconds of prefill and of decode, bytes."""


def _linked(items: Sequence[Any]) -> _Linked:
    linked: _Linked = None
    for item in items:
        linked = (item, linked)
    return linked


def unlinked(linked: _Linked) -> tuple[Any, ...]:
    """Return the items in order."""
    found = []
    while linked is not None:
        item, linked = linked
        found.append(item)
    return tuple(reversed(found))


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A device and its place in the pipeline, on which prices depend."""

    hardware: Hardware
    first: bool
    last: bool


Sequences = tuple[int, int]
"""Sequences of a microbatch in prefill and in decode; 0 leaves the seconds of a phase out."""
Seconds = tuple[float, float]
"""Of one microbatch in prefill, and of one step of one in decode."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """Bits for the layers of a segment, and what they cost on a device."""

    error: float
    seconds: Seconds
    memory_bytes: float
    bits: _Linked

    def within(self, limits: Seconds) -> bool:
        """Return whether a stage with these layers takes no longer than the limits."""
        return self.seconds[0] <= limits[0] and self.seconds[1] <= limits[1]


class Segments:
    """Options of the segments of a model, each computed once."""

    def __init__(self, setting: ServingSetting) -> None:
        self.setting = setting
        self.parts = layer_parts(setting.shape)
        rows = [(part, *row.values()) for part, row in zip(self.parts, setting.indicator, strict=True)]
        self._class_of = [rows.index(row) for row in rows]
        kinds: dict[_Counts, int] = {}
        ends = range(len(rows) + 1)
        self.kinds = [
            [kinds.setdefault(tuple(self._class_of[begin:end]), len(kinds)) for end in ends] for begin in ends
        ]
        """By first layer and the one after the last: segments with one number consist of the same layers."""
        self._least: dict[int, dict[_Counts, tuple[float, _Linked]]] = {
            self.kinds[0][0]: {(0,) * (len(KINDS) * len(BITS)): (0.0, None)}
        }
        self._layers: dict[tuple[Hardware, Part, int, Sequences], _Cost] = {}
        self._options: dict[tuple[Place, Sequences, int], tuple[Option, ...]] = {}

    def options(self, place: Place, begin: int, end: int, sequences: Sequences) -> tuple[Option, ...]:
        """List what layers ``begin`` to ``end`` may be on a device: the least error first, each faster than all before.

        Faster means less time in prefill or in decode. What the device can't hold is left out.
        """
        key = (place, sequences, self.kinds[begin][end])
        if key not in self._options:
            fixed = self.fixed(place, begin, end, sequences)
            units = [self.layer(place.hardware, part, bits, sequences) for part in KINDS for bits in BITS]
            found = []
            for counts, (error, linked) in self._by_counts(begin, end).items():
                if place.hardware.in_memory and not _full(counts):
                    continue
                option = _option(fixed, zip(counts, units, strict=True), error=error, bits=linked)
                if option.memory_bytes <= place.hardware.usable_bytes:
                    found.append(option)
            self._options[key] = _undominated(found)
        return self._options[key]

    def of_bits(self, place: Place, begin: int, bits: Sequence[int], sequences: Sequences) -> Option:
        """Price layers from ``begin`` with given bits, whether they fit the device or not."""
        end = begin + len(bits)
        layers = zip(self.parts[begin:end], bits, strict=True)
        units = Counter(self.layer(place.hardware, part, each, sequences) for part, each in layers)
        error = sum(row[each] for row, each in zip(self.setting.indicator[begin:end], bits, strict=True))
        fixed = self.fixed(place, begin, end, sequences)
        return _option(fixed, ((count, unit) for unit, count in units.items()), error=error, bits=_linked(bits))

    def _by_counts(self, begin: int, end: int) -> dict[_Counts, tuple[float, _Linked]]:
        """Find the least error of a segment for each number of layers by kind and bits."""
        key = self.kinds[begin][end]
        if key not in self._least:
            row, kind = self.setting.indicator[end - 1], KINDS.index(self.parts[end - 1])
            longer: dict[_Counts, tuple[float, _Linked]] = {}
            for counts, (error, linked) in self._by_counts(begin, end - 1).items():
                for at, bits in enumerate(BITS, start=kind * len(BITS)):
                    more = (*counts[:at], counts[at] + 1, *counts[at + 1 :])
                    if more not in longer or error + row[bits] < longer[more][0]:
                        longer[more] = (error + row[bits], (bits, linked))
            self._least[key] = longer
        return self._least[key]

    def layer(self, hardware: Hardware, part: Part, bits: int, sequences: Sequences) -> _Cost:
        """Price one part, as a decoder layer with its cache: seconds of prefill and of decode, bytes."""
        key = (hardware, part, bits, sequences)
        if key not in self._layers:
            shape, phases, (prefill, decode) = self.setting.shape, self.setting.phases, sequences
            self._layers[key] = (
                prices.prefill_s(shape, part, hardware, phases, bits=bits, sequences=prefill) if prefill else 0.0,
                prices.decode_s(shape, part, hardware, phases, bits=bits, sequences=decode) if decode else 0.0,
                prices.weight_bytes(shape, part, bits) + (prices.cache_bytes(shape, phases) if part in KINDS else 0),
            )
        return self._layers[key]

    def fixed(self, place: Place, begin: int, end: int, sequences: Sequences) -> _Cost:
        """Price what a device has other than layers: ends of the model, the hand-over, tensors of a microbatch."""
        shape, phases, (prefill, decode) = self.setting.shape, self.setting.phases, sequences
        ends = [Part.TOWER, Part.EMBEDDING] * place.first + [Part.HEAD] * place.last
        costs = [self.layer(place.hardware, part, FULL_BITS, sequences) for part in ends]
        if not place.last:
            first_s, later_s = (
                prices.handover_s(shape, place.hardware, tokens=sent) if sent else 0.0
                for sent in (prefill * phases.mix.sequence_tokens, decode)
            )
            costs.append((first_s, later_s, 0.0))
        alive = max(
            prices.activation_bytes(shape, part, phases, sequences=prefill)
            for part in {*self.parts[begin:end], *ends} - {Part.HEAD}
        )
        logits = min(LOGITS_MAX, max(sequences) * shape.decoder.vocabulary) * LOGIT_BYTES * place.last
        prefill_s, decode_s, weights = (sum(cost[index] for cost in costs) for index in range(3))
        return prefill_s, decode_s, weights + max(alive, logits)


def _option(fixed: _Cost, units: Iterable[tuple[int, _Cost]], *, error: float, bits: _Linked) -> Option:
    prefill_s, decode_s, memory_bytes = fixed
    for count, unit in units:
        prefill_s += count * unit[0]
        decode_s += count * unit[1]
        memory_bytes += count * unit[2]
    return Option(error, (prefill_s, decode_s), memory_bytes, bits)


def _full(counts: _Counts) -> bool:
    """Return whether all layers have all their bits: memory that computes knows no others."""
    return sum(counts) == sum(counts[len(BITS) - 1 :: len(BITS)])


def _undominated(options: list[Option]) -> tuple[Option, ...]:
    """Keep the options that no other with as little error beats in both phases."""
    kept: list[Option] = []
    corners: list[Seconds] = []
    """Fastest ones so far, by prefill; decode falls along them."""
    for option in sorted(options, key=lambda of: (of.error, of.seconds)):
        prefill_s, decode_s = option.seconds
        at = bisect.bisect_right(corners, (prefill_s, math.inf))
        if at and corners[at - 1][1] <= decode_s:
            continue
        kept.append(option)
        after = at
        while after < len(corners) and corners[after][1] >= decode_s:
            after += 1
        corners[at:after] = [option.seconds]
    return tuple(kept)
