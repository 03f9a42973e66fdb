"""Time of each part of a model on one rank, by layout, for one microbatch: products, memory, exchanges.

A product takes its operations over the rate, or the reading of its weights where that is longer (roofline, Williams et
al., CACM 52(4), 2009). Nothing is assumed to overlap: exchanges are added. Bytes that a rank sends:

- tensor parallel with sequence parallel (arXiv:2205.05198): a gather and a scatter around attention and feed-forward;
- context parallel (Ulysses, arXiv:2309.14509): queries, keys, values and outputs change places once;
- expert parallel: dispatch and combine of each token's experts.

Each is paid in the forward and again in the backward. What the trainer measured of a part replaces its products.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping

from polyreme_api.errors import InvalidConfigError
from polyreme_api.plan.flops import Mix, forward_flops
from polyreme_api.plan.hardware import Hardware, Numerics
from polyreme_api.plan.layout import Layout
from polyreme_api.plan.parts import Part, all_parts, layer_parts, part_parameters
from polyreme_api.plan.shapes import ModelShape
from polyreme_api.plan.simulate import StageTimes
from polyreme_api.plan.stages import ModelTimes, plus


class Recompute(enum.StrEnum):
    """What a layer makes anew in the backward, so as not to hold it."""

    NONE = "none"
    SELECTIVE = "selective"
    """Norms, activations, and the products that are wide and cheap (arXiv:2205.05198, section 5)."""
    FULL = "full"
    """Everything but the layer's input."""


RECOMPUTED: Mapping[Recompute, float] = {Recompute.NONE: 0.0, Recompute.SELECTIVE: 0.15, Recompute.FULL: 1.0}
"""Share of a layer's forward that is done again."""


COSTS_FORMAT = "polyreme.dev/costs/v1"
"""Format of measured times in a file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Times of parts as the trainer measured them, on one device that does all the work of a part."""

    hardware: str
    mix: Mix
    seconds_per_token: Mapping[Part, StageTimes]
    """For one token of the language model."""

    def to_json(self) -> str:
        """Write it down."""
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
        """Read it back.

        Raises:
            InvalidConfigError: If it is something else, or not every time is a number that is not negative.
        """
        try:
            data = json.loads(text)
            if data["format"] != COSTS_FORMAT:
                raise ValueError(f"format {data['format']!r}, rule {COSTS_FORMAT!r}")
            times = {Part(part): StageTimes(**of) for part, of in data["secondsPerToken"].items()}
            if not all(0 <= taken_s < math.inf for of in times.values() for taken_s in dataclasses.astuple(of)):
                raise ValueError("a time is negative or no number")
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
                f"measured times lack a part of the model: {', '.join(missing)}", field="measured.secondsPerToken"
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What stays the same while layouts are compared."""

    shape: ModelShape
    mix: Mix
    hardware: Hardware
    numerics: Numerics
    measured: Measured | None = None

    def __post_init__(self) -> None:
        """Refuse measured times of something else.

        Raises:
            InvalidConfigError: If they are of other hardware or another mix.
        """
        if self.measured is not None:
            self.measured.check(self.hardware, self.mix, self.shape)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What one rank sends to the others of a group."""

    sent_bytes: float
    """All messages together."""
    messages: int
    span: int
    """Ranks from the group's first to its last."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartTimes:
    """Time of one part of each kind for one microbatch, and what of its forward is exchanged, by axis [seconds]."""

    times: Mapping[Part, StageTimes]
    exchanged_s: Mapping[Part, Mapping[str, float]]
    """Forward and backward together."""

    def model_times(self, shape: ModelShape) -> ModelTimes:
        """Line the parts up."""
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
    exchanged = {
        part: {
            axis: 2 * setting.hardware.exchange_s(of.sent_bytes, span=of.span, messages=of.messages)
            for axis, of in by_axis.items()
        }
        for part, by_axis in exchanges(setting, layout, packs=packs).items()
    }
    products = products_s(setting, layout, packs=packs)
    again = RECOMPUTED[recompute]
    times = {}
    for part, of in products.items():
        moved_s = sum(exchanged[part].values()) / 2
        done_again = 0.0 if part in {Part.EMBEDDING, Part.HEAD} else again
        times[part] = StageTimes(
            forward_s=of.forward_s + moved_s,
            # What is recomputed in full is exchanged again, too.
            input_s=of.input_s + moved_s + done_again * of.forward_s + (moved_s if done_again == 1 else 0.0),
            weight_s=of.weight_s,
        )
    return PartTimes(times=times, exchanged_s=exchanged)


def transfer_s(setting: Setting, layout: Layout, *, packs: int) -> float:
    """Price the hand-over of a microbatch from one pipeline rank to the next [seconds]."""
    tokens = packs * setting.mix.sequence_tokens / (layout.cp * layout.tp)
    sent = tokens * setting.shape.decoder.width * setting.numerics.activation_bytes
    return setting.hardware.exchange_s(sent, span=layout.world // layout.pp + 1)


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
    found = {}
    for part, of in parameters.items():
        read = 0.0 if part is Part.EMBEDDING or not flops[part] else of.common / layout.tp + of.routed / layout.ep
        once_s = max(
            flops[part] * tokens / setting.hardware.flops_per_s,
            read * setting.numerics.weight_bytes / setting.hardware.bytes_per_s,
        )
        found[part] = StageTimes(forward_s=once_s, input_s=once_s, weight_s=once_s)
    return found


def exchanges(setting: Setting, layout: Layout, *, packs: int) -> dict[Part, dict[str, Exchange]]:
    """Work out what one part of each kind exchanges in its forward, by axis; its backward exchanges as much again."""
    d, number = setting.shape.decoder, setting.numerics.activation_bytes
    tp, cp, ep = layout.tp, layout.cp, layout.ep
    tokens = packs * setting.mix.sequence_tokens / (cp * tp)
    layer: dict[str, Exchange] = {}
    head: dict[str, Exchange] = {}
    if tp > 1:  # a rank sends its own tokens to each of the others
        sent = tokens * (tp - 1) * d.width * number
        layer["tp"] = Exchange(sent_bytes=4 * sent, messages=4, span=tp)
        head["tp"] = Exchange(sent_bytes=sent, messages=1, span=tp)
    if cp > 1:
        sent = 2 * tokens * d.heads * (d.query_dim + d.value_dim) * number * (cp - 1) / cp
        layer["cp"] = Exchange(sent_bytes=sent, messages=4, span=cp * tp)
    moe = dict(layer)
    if ep > 1:
        sent = 2 * tokens * d.experts_per_token * d.width * number * (ep - 1) / ep
        moe["ep"] = Exchange(sent_bytes=sent, messages=2, span=ep)
    return {Part.TOWER: {}, Part.EMBEDDING: {}, Part.DENSE: layer, Part.MOE: moe, Part.HEAD: head}
