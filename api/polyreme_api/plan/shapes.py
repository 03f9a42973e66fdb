"""Model shapes as data: the widths, depths and counts from which layouts, volumes and parameters follow.

Sources: the Kimi-VL (arXiv:2504.07491) and Moonlight (arXiv:2502.16982) configurations; parameter counts are
16,407,654,384 of ``kimi-vl-a3b`` and 15,960,108,544 of ``moonlight-16b-a3b``, its decoder alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyreme_api.errors import InvalidConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VisionShape:
    """MoonViT: a vision transformer over packed patches at native resolution."""

    layers: int
    width: int
    heads: int
    ffn_width: int
    patch_px: int = 14
    """Side of a square patch [pixels]."""
    channels: int = 3
    merge: int = 2
    """Patches a side that the pixel shuffle joins into one language-model token."""
    position_rows: int = 64
    """Rows and columns of the learned position table, interpolated (bicubic) to each image's grid."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head; a multiple of 4, since 2-D rotary pairs alternate between x and y."""
        return self.width // self.heads

    @property
    def token_px(self) -> int:
        """Side of the image square that becomes one language-model token [pixels]."""
        return self.patch_px * self.merge


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """A DeepSeek-V3-style decoder: MLA, leading dense layers, then shared and routed experts."""

    vocabulary: int
    width: int
    layers: int
    dense_layers: int
    """Leading layers with a dense feed-forward (``first_k_dense_replace``)."""
    dense_ffn_width: int
    expert_ffn_width: int
    experts: int
    experts_per_token: int
    shared_experts: int
    """Shared experts, fused into one feed-forward of ``shared_experts * expert_ffn_width``."""
    heads: int
    q_rank: int | None = None
    """Rank of the query compression; None projects queries directly, as Kimi-VL does."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope_theta: float
    norm_eps: float = 1e-5
    routed_scaling: float = 2.446
    initializer_range: float = 0.02
    """Standard deviation of the decoder's initial weights."""

    @property
    def query_dim(self) -> int:
        """Width of one query or key head: the part without rotation, then the rotated part."""
        return self.nope_dim + self.rope_dim


NO_VISION = VisionShape(layers=0, width=0, heads=0, ffn_width=0)
"""Neither tower nor projector: the model reads text alone."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A whole vision-language model: tower, projector (2x2 shuffle, two linear layers), decoder; or a decoder alone."""

    name: str
    vision: VisionShape
    decoder: DecoderShape

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self.vision != NO_VISION


KIMI_VL_A3B = ModelShape(
    name="kimi-vl-a3b",
    vision=VisionShape(layers=27, width=1152, heads=16, ffn_width=4304),
    decoder=DecoderShape(
        vocabulary=163_840,
        width=2048,
        layers=27,
        dense_layers=1,
        dense_ffn_width=11_264,
        expert_ffn_width=1408,
        experts=64,
        experts_per_token=6,
        shared_experts=2,
        heads=16,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        rope_theta=800_000.0,
    ),
)

MOONLIGHT_16B_A3B = ModelShape(
    name="moonlight-16b-a3b",
    vision=NO_VISION,
    decoder=dataclasses.replace(KIMI_VL_A3B.decoder, rope_theta=50_000.0),
)

KIMI_VL_NANO = ModelShape(
    name="kimi-vl-nano",
    vision=VisionShape(layers=2, width=64, heads=4, ffn_width=128, position_rows=16),
    decoder=DecoderShape(
        vocabulary=512,
        width=96,
        layers=3,
        dense_layers=1,
        dense_ffn_width=192,
        expert_ffn_width=64,
        experts=8,
        experts_per_token=2,
        shared_experts=1,
        heads=4,
        kv_rank=32,
        nope_dim=16,
        rope_dim=8,
        value_dim=16,
        rope_theta=10_000.0,
        # One over the root of the width, as 0.02 is at 2,048: at 0.02 the embeddings are so small beside the image
        # features that the gradient has spikes, and the digits of the quickstart take twice the steps.
        initializer_range=0.1,
    ),
)

ANY_MODEL = ModelShape(
    name="any",
    vision=NO_VISION,
    decoder=DecoderShape(
        vocabulary=0,
        width=0,
        layers=0,
        dense_layers=0,
        dense_ffn_width=0,
        expert_ffn_width=0,
        experts=0,
        experts_per_token=0,
        shared_experts=0,
        heads=0,
        kv_rank=0,
        nope_dim=0,
        rope_dim=0,
        value_dim=0,
        rope_theta=0.0,
    ),
)
"""Stands in the plan of a job that brings its own training: nothing is known of its model."""

_MAY_BE_ZERO = frozenset({"dense_layers", "shared_experts"})

PRESETS: Mapping[str, ModelShape] = {shape.name: shape for shape in (KIMI_VL_NANO, KIMI_VL_A3B, MOONLIGHT_16B_A3B)}


def model_shape(preset: str, overrides: Mapping[str, Mapping[str, int]] | None = None) -> ModelShape:
    """Look a preset up and replace some of its sizes.

    Args:
        preset: A name of ``PRESETS``.
        overrides: Field names and values by part, ``{"decoder": {"layers": 4}}``.

    Raises:
        InvalidConfigError: If the preset, the part or the field is not known, or the sizes do not fit together.
    """
    if preset not in PRESETS:
        known = ", ".join(sorted(PRESETS))
        raise InvalidConfigError(
            f"unknown model preset: {preset!r}, known presets are {known}", field="spec.model.preset"
        )
    shape = PRESETS[preset]
    for part, values in (overrides or {}).items():
        if part not in {"vision", "decoder"}:
            raise InvalidConfigError(
                f"unknown model part: {part!r}, parts are vision and decoder", field="spec.model.overrides"
            )
        names = {f.name for f in dataclasses.fields(getattr(shape, part))}
        if unknown := sorted(set(values) - names):
            raise InvalidConfigError(
                f"unknown model size: {unknown[0]!r}, sizes of {part} are {', '.join(sorted(names))}",
                field=f"spec.model.overrides.{part}",
            )
        changed = dataclasses.replace(getattr(shape, part), **values)
        shape = (
            dataclasses.replace(shape, vision=changed)
            if part == "vision"
            else dataclasses.replace(shape, decoder=changed)
        )
    check_shape(shape)
    return shape


def check_shape(shape: ModelShape) -> None:
    """Refuse sizes that no model can have.

    Raises:
        InvalidConfigError: Naming the first rule that is broken.
    """
    vision, decoder = shape.vision, shape.decoder
    for part in ("vision", "decoder") if shape.sees else ("decoder",):
        for name, size in dataclasses.asdict(getattr(shape, part)).items():
            if size is not None and size <= 0 and name not in _MAY_BE_ZERO:
                raise InvalidConfigError(
                    f"model sizes do not fit: {part}.{name} is {size}, rule at least 1",
                    field=f"spec.model.overrides.{part}.{name}",
                )
    rules = [
        (decoder.rope_dim % 2 == 0, "decoder.rope_dim", f"{decoder.rope_dim} is odd; rotary pairs need an even width"),
        (
            1 <= decoder.experts_per_token <= decoder.experts,
            "decoder.experts_per_token",
            f"{decoder.experts_per_token} lies outside 1..experts ({decoder.experts})",
        ),
        (
            0 <= decoder.dense_layers <= decoder.layers,
            "decoder.dense_layers",
            f"{decoder.dense_layers} lies outside 0..layers ({decoder.layers})",
        ),
    ]
    if shape.sees:
        width, wide = vision.width, vision.head_dim
        rules += [
            (width % vision.heads == 0, "vision.width", f"{width} is no multiple of heads {vision.heads}"),
            (wide % 4 == 0, "vision.heads", f"head width {wide} is no multiple of 4 (2-D rotary)"),
        ]
    for holds, name, why in rules:
        if not holds:
            raise InvalidConfigError(f"model sizes do not fit: {name}: {why}", field=f"spec.model.overrides.{name}")
