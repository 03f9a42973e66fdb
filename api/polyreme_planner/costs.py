"""Time of each part of a model on one rank, by layout, for one microbatch: products, memory, launches, exchanges.

A product takes its operations over the rate, or the reading of its weights if that is longer (roofline, Williams et
al., CACM 52(4), 2009). Norms, activations and permutations take their bytes read and written over the memory's rate,
and each kernel takes a launch. Exchanges (``traffic.py``) are added, except for those that the trainer overlaps with
computation: a ring's keys and values travel during the products of attention, and only the rest is waited for.

Measured times of a part replace everything but its exchanges.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.adapters import Adapters
from polyreme_planner.flops import BACKWARD_MOVES, Mix, core_flops, forward_flops, forward_moves, launches
from polyreme_planner.hardware import Group, Hardware, Numerics, Pattern
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import Part, all_parts, layer_parts, part_parameters
from polyreme_planner.pipeline_simulation import StageTimes
from polyreme_planner.shapes import ModelShape
from polyreme_planner.stage_split import ModelTimes, plus
from polyreme_planner.traffic import TRAINER, Exchange, Framework, Sent, exchanges


class Recompute(enum.StrEnum):
    """What a layer recomputes in the backward, in order not to keep it."""

    NONE = "none"
    SELECTIVE = "selective"
    """Norms, activations, and the products that are wide and cheap (arXiv:2205.05198, section 5)."""
    FULL = "full"
    """Everything but the layer's input."""


RECOMPUTED: Mapping[Recompute, float] = {Recompute.NONE: 0.0, Recompute.SELECTIVE: 0.15, Recompute.FULL: 1.0}
"""Share of a layer's forward that is repeated."""
BACKWARD_PRODUCTS = 2.5
"""Products of attention's backward over those of its forward: scores are recomputed (FlashAttention-2,
arXiv:2307.08691, section 4.1)."""
COSTS_FORMAT = "polyreme.dev/costs/v1"
"""Format of measured times in a file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times of parts as the trainer measured them, on one device that does all the work of a part."""

    hardware: str
    mix: Mix
    seconds_per_token: Mapping[Part, StageTimes] = dataclasses.field(hash=False)
    """For one token of the language model."""

    def to_json(self) -> str:
        """Convert to JSON data."""
        return json.dumps(
            {
                "format": COSTS_FORMAT,
                "hardware": self.hardware,
                "mix": dataclasses.asdict(self.mix),
                "secondsPerToken": {part: dataclasses.asdict(of) for part, of in self.seconds_per_token.items()},
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Measured:
        """Read it from JSON data.

        Raises:
            InvalidConfigError: If it is something else, or not every time is a number that is not negative.
        """
        try:
            data = json.loads(text)
            if data["format"] != COSTS_FORMAT:
                raise ValueError(f"format {data['format']!r}, expected {COSTS_FORMAT!r}")
            times = {Part(part): StageTimes(**of) for part, of in data["secondsPerToken"].items()}
            if not all(0 <= taken_s < math.inf for of in times.values() for taken_s in dataclasses.astuple(of)):
                raise ValueError("a time is negative or not a number")
            return cls(hardware=str(data["hardware"]), mix=Mix(**data["mix"]), seconds_per_token=times)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidConfigError(
                f"measured times can't be read: {type(error).__name__}, {error}", field="--costs"
            ) from error

    def check(self, hardware: Hardware, mix: Mix, shape: ModelShape) -> None:
        """Refuse times of another device, another mix, or of a model that lacks parts of this one.

        Raises:
            InvalidConfigError: Naming both.
        """
        if self.hardware != hardware.name:
            raise InvalidConfigError(
                f"measured times are of other hardware: {self.hardware}, the plan is for {hardware.name}",
                field="measured.hardware",
            )
        if self.mix != mix:
            raise InvalidConfigError(
                f"measured times are of another mix: {self.mix}, the plan is for {mix}", field="measured.mix"
            )
        if missing := [part for part in dict.fromkeys(all_parts(shape)) if part not in self.seconds_per_token]:
            raise InvalidConfigError(
                f"measured times are missing for parts of the model: {', '.join(missing)}",
                field="measured.secondsPerToken",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The inputs that stay the same while layouts are compared."""

    shape: ModelShape
    mix: Mix
    hardware: Hardware
    numerics: Numerics
    adapters: Adapters | None = None
    """Adapters that are trained in the place of the model."""
    generation_ep: int | None = None
    """Ranks that share the experts of a second copy of the weights, which draws answers; None: there is none."""
    measured: Measured | None = None
    framework: Framework = TRAINER
    """The training framework: what it sends and what it overlaps."""

    def __post_init__(self) -> None:
        """Refuse measured times of something else.

        Raises:
            InvalidConfigError: If they are of other hardware or another mix.
        """
        if self.measured is not None:
            self.measured.check(self.hardware, self.mix, self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartTimes:
    """Time of one part of each kind for one microbatch, and the exchanges of its forward, by axis [seconds]."""

    times: Mapping[Part, StageTimes]
    exchanged_s: Mapping[Part, Mapping[str, float]]
    """Forward and backward together."""

    def model_times(self, shape: ModelShape) -> ModelTimes:
        """Put the parts in the model's order."""
        return ModelTimes(
            first=plus(self.times[Part.TOWER], self.times[Part.EMBEDDING]),
            layers=tuple(self.times[part] for part in layer_parts(shape)),
            last=self.times[Part.HEAD],
        )


def part_times(setting: Setting, layout: Layout, *, packs: int, recompute: Recompute) -> PartTimes:
    """Price the parts.

    Args:
        setting: Model, mix and hardware.
        layout: Degrees.
        packs: Of one microbatch.
        recompute: Of every decoder layer; the tower and the head are as the layers are.
    """
    products = products_s(setting, layout, packs=packs)
    core_s = attention_core_s(setting, layout, packs=packs)
    again = RECOMPUTED[recompute]
    times, exchanged = {}, {}
    for part, found in part_exchanges(setting, layout, packs=packs).items():
        of = products[part] if setting.adapters is None else _frozen(products[part], part)
        forward_s = {one.axis: 0.0 for one in found}
        backward_s = dict(forward_s)
        for one in found:
            forward_s[one.axis] += _waited_s(setting, one, one.forward, overlap_s=core_s)
            backward_s[one.axis] += _waited_s(setting, one, one.backward, overlap_s=BACKWARD_PRODUCTS * core_s)
        done_again = 0.0 if part in {Part.EMBEDDING, Part.HEAD} else again
        # What is recomputed in full is exchanged again, too.
        sent_again = done_again == 1
        exchanged[part] = {axis: forward_s[axis] * (1 + sent_again) + backward_s[axis] for axis in forward_s}
        moved_s = sum(forward_s.values())
        times[part] = StageTimes(
            forward_s=of.forward_s + moved_s,
            input_s=of.input_s + sum(backward_s.values()) + done_again * of.forward_s + sent_again * moved_s,
            weight_s=of.weight_s,
        )
    return PartTimes(times=times, exchanged_s=exchanged)


def _frozen(of: StageTimes, part: Part) -> StageTimes:
    """Drop the gradients of frozen weights, and all of the tower's; the adapters' few products are not counted."""
    return StageTimes(forward_s=of.forward_s, input_s=0.0 if part is Part.TOWER else of.input_s, weight_s=0.0)


def part_exchanges(setting: Setting, layout: Layout, *, packs: int) -> dict[Part, tuple[Exchange, ...]]:
    """List what one part of each kind exchanges for one microbatch."""
    return exchanges(
        setting.shape,
        layout,
        setting.numerics,
        tokens=packs * setting.mix.sequence_tokens,
        near_devices=setting.hardware.near_devices,
        framework=setting.framework,
    )


def attention_core_s(setting: Setting, layout: Layout, *, packs: int) -> float:
    """Price the forward of attention's own products, scores and their values, in one layer [seconds]."""
    tokens = packs * setting.mix.sequence_tokens / (layout.cp * layout.tp)
    return core_flops(setting.shape, setting.mix) * tokens / setting.hardware.flops_per_s


def _waited_s(setting: Setting, exchange: Exchange, sent: Sent, *, overlap_s: float) -> float:
    """Price what a rank waits for: all that it sends, except what travels while it computes ``overlap_s``."""
    if exchange.axis in setting.framework.overlapped:
        return 0.0

    def took_s(sent_bytes: float, messages: int, far_bytes: float | None) -> float:
        if not messages:
            return 0.0
        return setting.hardware.exchange_s(
            sent_bytes, group=exchange.group, pattern=exchange.pattern, messages=messages, far_bytes=far_bytes
        )

    overlapped = took_s(sent.overlapped_bytes, sent.overlapped_messages, None)
    return took_s(sent.sent_bytes, sent.messages, exchange.far_bytes) + max(0.0, overlapped - overlap_s)


def transfer_s(setting: Setting, layout: Layout, *, packs: int) -> float:
    """Price the hand-over of a microbatch from one pipeline rank to the next [seconds]."""
    if "pp" in setting.framework.overlapped:
        return 0.0
    tokens = packs * setting.mix.sequence_tokens / (layout.cp * layout.tp)
    sent = tokens * setting.shape.decoder.width * setting.numerics.activation_bytes
    group = Group(ranks=layout.pp, stride=layout.world // layout.pp)
    return setting.hardware.exchange_s(sent, group=group, pattern=Pattern.RING)


def products_s(setting: Setting, layout: Layout, *, packs: int) -> dict[Part, StageTimes]:
    """Price the products of one part of each kind, for one microbatch: no exchanges, nothing recomputed."""
    tokens = packs * setting.mix.sequence_tokens / (layout.cp * layout.tp)
    if setting.measured is not None:
        return {
            part: StageTimes(
                forward_s=of.forward_s * tokens, input_s=of.input_s * tokens, weight_s=of.weight_s * tokens
            )
            for part, of in setting.measured.seconds_per_token.items()
        }
    flops, parameters = forward_flops(setting.shape, setting.mix), part_parameters(setting.shape)
    moved, launched = forward_moves(setting.shape, setting.mix), launches(setting.shape)
    hardware, number_bytes = setting.hardware, setting.numerics.activation_bytes
    found = {}
    for part, of in parameters.items():
        read = 0.0 if part is Part.EMBEDDING or not flops[part] else of.common / layout.tp + of.routed / layout.ep
        once_s = max(
            flops[part] * tokens / hardware.flops_per_s,
            read * setting.numerics.weight_bytes / hardware.bytes_per_s,
        )
        beside_s = moved[part] * tokens * number_bytes / hardware.bytes_per_s + launched[part] * hardware.launch_s
        found[part] = StageTimes(
            forward_s=once_s + beside_s, input_s=once_s + BACKWARD_MOVES * beside_s, weight_s=once_s
        )
    return found
