"""Price of serving a decoder: time of a layer in prefill and in decode, its memory, and the error of fewer bits.

Weights of a layer's matrices have 4, 8 or 16 bits; products are in bfloat16 at any width (weight-only quantisation,
LLM-PQ, arXiv:2403.01136), so fewer bits save reading and memory, not operations. Tower, embedding, head, routers and
norms stay in bfloat16. Decode multiplies latents as they are cached (arXiv:2405.04434, section 2.1.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.costs import Recompute
from polyreme_planner.flops import Mix, core_flops, forward_flops, forward_moves, launches
from polyreme_planner.hardware import Hardware
from polyreme_planner.latent_cache import CacheKind, token_bytes
from polyreme_planner.memory import kept_numbers
from polyreme_planner.model_parts import Part, layer_parts, part_parameters
from polyreme_planner.shapes import ModelShape

BITS = (4, 8, 16)
"""Bits that a layer's weights may have."""
FULL_BITS = 16
DEVICES_MAX = 8
ROUNDING = 1e-9
"""Share by which a sum of prices may exceed its limit, since it is rounded."""
NUMBER_BYTES = 2
"""Of activations, the cache, a group's scale, and weights that are not quantised."""
GROUP = 64
"""Weights that share a scale."""
RTN_ERROR = 0.090
"""Error of weights rounded to the nearest of 16 steps between a group's least and most, over their norm: measured on
normal numbers."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """What is asked of a model at a time."""

    mix: Mix
    """A prompt: its tokens, and how much of it is images."""
    answer_tokens: int
    batch: int
    """Prompts that are answered together."""

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            InvalidConfigError: Naming the value.
        """
        for value, name in ((self.answer_tokens, "answer-tokens"), (self.batch, "batch")):
            if value < 1:
                raise InvalidConfigError(f"{name} is {value}, expected at least 1", field=f"--{name}")

    @property
    def total_tokens(self) -> int:
        """Of one sequence at its end."""
        return self.mix.sequence_tokens + self.answer_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one part does in one pass."""

    flops: float
    read_bytes: float
    moved_bytes: float
    launches: int

    def seconds(self, hardware: Hardware) -> float:
        """Price it as training does: products or their reading, then everything else (roofline, see ``costs``)."""
        products_s = max(self.flops / hardware.flops_per_s, self.read_bytes / hardware.bytes_per_s)
        return products_s + self.moved_bytes / hardware.bytes_per_s + self.launches * hardware.launch_s


def number_bytes(bits: int, *, group: int = GROUP) -> float:
    """Count the bytes of one weight; below 16 bits each group has a scale and a zero point."""
    return NUMBER_BYTES if bits >= FULL_BITS else bits / 8 + (NUMBER_BYTES + bits / 8) / group


def weight_bytes(shape: ModelShape, part: Part, bits: int) -> float:
    """Count the bytes of one part's weights."""
    of = part_parameters(shape)[part]
    matrices = of.matrices + of.routed
    return matrices * number_bytes(bits) + (of.total - matrices) * NUMBER_BYTES


def cache_bytes(shape: ModelShape, phases: Phases) -> int:
    """Count the bytes of one layer's cache: a latent and a rotated key for each token (arXiv:2405.04434)."""
    token = token_bytes(shape.decoder, CacheKind.AUTO, number_bytes=NUMBER_BYTES)
    return token * phases.total_tokens * phases.batch


def activation_bytes(shape: ModelShape, part: Part, phases: Phases, *, sequences: int) -> float:
    """Count the bytes that one part makes of a microbatch in prefill, all of a layer's tensors alive at once."""
    kept = kept_numbers(shape, recompute=Recompute.NONE)[part]
    tokens = float(sequences * phases.mix.sequence_tokens)
    if part is Part.TOWER:
        kept, tokens = kept / max(1, shape.vision.layers), tokens * phases.mix.patches_per_token(shape)
    return kept * tokens * NUMBER_BYTES


def prefill_s(
    shape: ModelShape,
    part: Part,
    hardware: Hardware,
    phases: Phases,
    *,
    bits: int = FULL_BITS,
    sequences: int,
    ep: int = 1,
) -> float:
    """Price the prefill of one part for a microbatch of so many prompts [seconds]; only last tokens need the head."""
    mix = phases.mix
    tokens = sequences * (1 if part is Part.HEAD else mix.sequence_tokens)
    flops = forward_flops(shape, mix)[part] * tokens
    return _work(shape, part, hardware, mix, bits=bits, tokens=tokens, flops=flops, ep=ep).seconds(hardware)


def decode_s(
    shape: ModelShape,
    part: Part,
    hardware: Hardware,
    phases: Phases,
    *,
    bits: int = FULL_BITS,
    sequences: int,
    ep: int = 1,
) -> float:
    """Price a step of one part for so many sequences [seconds], at the mean length that answers have on their way."""
    if part is Part.TOWER:
        return 0.0
    d, mix = shape.decoder, phases.mix
    flops, cached = forward_flops(shape, mix)[part], 0.0
    if part in {Part.DENSE, Part.MOE}:
        context = mix.sequence_tokens + phases.answer_tokens / 2
        flops += 2 * d.heads * (2 * d.kv_rank + d.rope_dim) * context - core_flops(shape, mix)
        cached = sequences * context * token_bytes(d, CacheKind.AUTO, number_bytes=NUMBER_BYTES)
    work = _work(shape, part, hardware, mix, bits=bits, tokens=sequences, flops=flops * sequences, ep=ep)
    return dataclasses.replace(work, read_bytes=work.read_bytes + cached).seconds(hardware)


def _work(
    shape: ModelShape, part: Part, hardware: Hardware, mix: Mix, *, bits: int, tokens: int, flops: float, ep: int
) -> Work:
    moved = 0.0 if hardware.in_memory else forward_moves(shape, mix)[part] * tokens * NUMBER_BYTES
    return Work(
        flops=flops,
        read_bytes=_read_bytes(shape, part, hardware, bits=bits, tokens=tokens, ep=ep) if flops else 0.0,
        moved_bytes=moved,
        launches=launches(shape)[part],
    )


def _read_bytes(shape: ModelShape, part: Part, hardware: Hardware, *, bits: int, tokens: int, ep: int) -> float:
    """Count the weights that a pass reads: of the experts those that any of its tokens chose, choices being even.

    Of ``ep`` devices each reads its share of them, for the tokens of all.
    """
    d, of = shape.decoder, part_parameters(shape)[part]
    size = weight_bytes(shape, part, bits)
    chosen = d.experts_per_token / d.experts
    if hardware.in_memory:
        return tokens * size * (1 - of.routed / of.total * (1 - chosen))
    read = (1 - (1 - chosen) ** (tokens * ep)) / ep
    return size - (1 - read) * of.routed * number_bytes(bits)


def handover_s(shape: ModelShape, hardware: Hardware, *, tokens: int) -> float:
    """Price what a stage sends to the next one: unlike devices are in different nodes [seconds]."""
    return tokens * shape.decoder.width * NUMBER_BYTES / hardware.far_bytes_per_s + hardware.far_latency_s


def relative_error(bits: int) -> float:
    """Return the error of rounded weights over their norm: of 4 bits as measured, of others by the width of a step."""
    return 0.0 if bits >= FULL_BITS else RTN_ERROR * (2**4 - 1) / (2**bits - 1)


Indicator = tuple[Mapping[int, float], ...]
"""Error that each layer adds, by bits: any unit, 0 at 16 bits, and less with more bits."""


def indicator_without_data(shape: ModelShape) -> Indicator:
    """Return the variance of each layer's rounding error over that of its weights: the same for all layers."""
    row = {bits: relative_error(bits) ** 2 for bits in BITS}
    return tuple(row for _ in layer_parts(shape))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingSetting:
    """The inputs of a plan."""

    shape: ModelShape
    devices: tuple[Hardware, ...]
    phases: Phases
    indicator: Indicator
    budget: float
    """Of the layers' errors: share of their sum with the fewest bits everywhere, 0 to 1."""

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            InvalidConfigError: Naming the value.
        """
        if not 0 <= self.budget <= 1:
            raise InvalidConfigError(f"quality budget is {self.budget}, expected 0 to 1", field="--quality-budget")
        if not 1 <= len(self.devices) <= DEVICES_MAX:
            raise InvalidConfigError(
                f"{len(self.devices)} devices are given, expected 1 to {DEVICES_MAX}", field="--devices"
            )

    @property
    def worst_error(self) -> float:
        """Sum of the layers' errors with the fewest bits everywhere."""
        return sum(row[BITS[0]] for row in self.indicator)
