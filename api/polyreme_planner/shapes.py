"""Model shapes as data: the widths, depths and counts from which layouts, volumes and parameters follow.

Sources: the released configurations of Kimi-VL (arXiv:2504.07491), Moonlight (arXiv:2502.16982), DeepSeek-V3
(arXiv:2412.19437) and Kimi-K2 (arXiv:2507.20534). Parameter counts are 16,407,654,384 of ``kimi-vl-a3b``,
15,960,108,544 of ``moonlight-16b-a3b``, 671,026,404,352 of ``deepseek-v3`` without the layer that predicts a second
token, and 1,026,408,209,408 of ``kimi-k2``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
    """Patches per side that the pixel shuffle joins into one language-model token."""
    position_rows: int = 64
    """Rows and columns of the learned position table, interpolated (bicubic) to each image's grid."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Width of one attention head; a multiple of 4, since 2-D rotary pairs alternate between x and y."""
        return self.width // self.heads


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
    expert_groups: int = 1
    """Groups of experts; a token uses a few of them (``n_group``; arXiv:2412.19437, section 2.1.2)."""
    groups_per_token: int = 1
    """Groups that a token's experts come from (``topk_group``)."""
    yarn_factor: float = 1.0
    """Factor by which YaRN (arXiv:2309.00071) extends the positions; 1: plain rotary positions."""
    yarn_positions: int = 4096
    """Positions before YaRN extends them (``original_max_position_embeddings``) [tokens]."""
    yarn_beta_fast: float = 32.0
    """Rotary pairs that rotate more often than this over ``yarn_positions`` stay as they are."""
    yarn_beta_slow: float = 1.0
    """Rotary pairs that rotate less often than this are slowed down by the whole ``yarn_factor``."""
    yarn_mscale: float = 1.0
    """Growth of the rotated parts of queries and keys with the logarithm of ``yarn_factor``."""
    yarn_mscale_all_dim: float = 0.0
    """Growth of the attention scores with the logarithm of ``yarn_factor``."""

    @property
    def query_dim(self) -> int:
        """Width of one query or key head: the part without rotation, then the rotated part."""
        return self.nope_dim + self.rope_dim


NO_VISION = VisionShape(layers=0, width=0, heads=0, ffn_width=0)
"""Neither tower nor projector: the model only reads text."""


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

DEEPSEEK_V3 = ModelShape(
    name="deepseek-v3",
    vision=NO_VISION,
    decoder=DecoderShape(
        vocabulary=129_280,
        width=7168,
        layers=61,
        dense_layers=3,
        dense_ffn_width=18_432,
        expert_ffn_width=2048,
        experts=256,
        experts_per_token=8,
        shared_experts=1,
        heads=128,
        q_rank=1536,
        kv_rank=512,
        nope_dim=128,
        rope_dim=64,
        value_dim=128,
        rope_theta=10_000.0,
        norm_eps=1e-6,
        routed_scaling=2.5,
        expert_groups=8,
        groups_per_token=4,
        yarn_factor=40.0,
        yarn_mscale_all_dim=1.0,
    ),
)

KIMI_K2 = ModelShape(
    name="kimi-k2",
    vision=NO_VISION,
    decoder=dataclasses.replace(
        DEEPSEEK_V3.decoder,
        vocabulary=163_840,
        dense_layers=1,
        experts=384,
        heads=64,
        rope_theta=50_000.0,
        routed_scaling=2.827,
        expert_groups=1,
        groups_per_token=1,
        yarn_factor=32.0,
        yarn_beta_fast=1.0,
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
"""Placeholder in the plan of a job that brings its own training: nothing is known of its model."""

_MAY_BE_ZERO = frozenset({"dense_layers", "shared_experts", "yarn_mscale_all_dim"})
_LATER = (
    "expert_groups", "groups_per_token",
    "yarn_factor", "yarn_positions", "yarn_beta_fast", "yarn_beta_slow", "yarn_mscale", "yarn_mscale_all_dim",
)  # fmt: skip
"""Sizes that came after the first checkpoints: with their defaults they are not part of a shape's digest."""
GEMM_BYTES = 16
"""Rows that experts multiply begin at multiples of so many bytes (torch's ``grouped_mm``)."""
HEAD_STEP, HEAD_MAX = 8, 256
"""Widths of a head that flash kernels take: multiples of the first, up to the second (torch's ``_flash_attention``)."""

PRESETS: Mapping[str, ModelShape] = {
    shape.name: shape for shape in (KIMI_VL_NANO, KIMI_VL_A3B, MOONLIGHT_16B_A3B, DEEPSEEK_V3, KIMI_K2)
}


def shape_content(shape: ModelShape) -> dict[str, Any]:
    """Return a shape as plain data for digests: a shape that earlier versions knew has the content that it had."""
    content = dataclasses.asdict(shape)
    defaults = {field.name: field.default for field in dataclasses.fields(DecoderShape)}
    for name in _LATER:
        if content["decoder"][name] == defaults[name]:
            del content["decoder"][name]
    return content


def model_shape(preset: str, overrides: Mapping[str, Mapping[str, int | str]] | None = None) -> ModelShape:
    """Look a preset up and replace some of its sizes.

    Args:
        preset: A name of ``PRESETS``.
        overrides: Field names and values by part, ``{"decoder": {"layers": 4, "norm_eps": "1e-6"}}``.

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
        types = {f.name: str(f.type) for f in dataclasses.fields(getattr(shape, part))}
        if unknown := sorted(set(values) - types.keys()):
            raise InvalidConfigError(
                f"unknown model size: {unknown[0]!r}, sizes of {part} are {', '.join(sorted(types))}",
                field=f"spec.model.overrides.{part}",
            )
        sizes = {name: _size(value, f"{part}.{name}", types[name]) for name, value in values.items()}
        changed = dataclasses.replace(getattr(shape, part), **sizes)
        shape = (
            dataclasses.replace(shape, vision=changed)
            if part == "vision"
            else dataclasses.replace(shape, decoder=changed)
        )
    check_shape(shape)
    return shape


def _size(value: int | str, name: str, kind: str) -> int | float:
    """Read a size; a decimal is text.

    Raises:
        InvalidConfigError: If it is no number, or a count is no whole number.
    """
    if isinstance(value, int):
        return value
    try:
        return float(value) if kind == "float" else int(value)
    except ValueError as error:
        rule = "a decimal as text" if kind == "float" else "a whole number"
        raise InvalidConfigError(
            f"model sizes do not fit: {name} is {value!r}, expected {rule}", field=f"spec.model.overrides.{name}"
        ) from error


def check_shape(shape: ModelShape, *, scalar_bytes: int = 4, flash: bool = False) -> None:
    """Refuse sizes that no model can have, or that a step could not compute.

    Args:
        shape: All sizes.
        scalar_bytes: Size of a number in the type that the model computes in.
        flash: Whether attention runs in an accelerator's flash kernels.

    Raises:
        InvalidConfigError: Naming the first rule that is broken.
    """
    vision, decoder = shape.vision, shape.decoder
    for part in ("vision", "decoder") if shape.sees else ("decoder",):
        for name, size in dataclasses.asdict(getattr(shape, part)).items():
            if size is not None and size <= 0 and name not in _MAY_BE_ZERO:
                least = "above 0" if isinstance(size, float) else "at least 1"
                raise InvalidConfigError(
                    f"model sizes do not fit: {part}.{name} is {size}, expected {least}",
                    field=f"spec.model.overrides.{part}.{name}",
                )
    rules = [
        *_rotary_rules(decoder),
        *_group_rules(decoder),
        *_product_rules(decoder, scalar_bytes),
        *(_head_rules(shape) if flash else []),
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
            (width % vision.heads == 0, "vision.width", f"{width} is not a multiple of heads {vision.heads}"),
            (wide % 4 == 0, "vision.heads", f"head width {wide} is not a multiple of 4 (2-D rotary)"),
        ]
    for holds, name, why in rules:
        if not holds:
            raise InvalidConfigError(f"model sizes do not fit: {name}: {why}", field=f"spec.model.overrides.{name}")


_Rule = tuple[bool, str, str]
"""Whether it holds, the size to change, and the sentence that says why it does not."""


def _rotary_rules(decoder: DecoderShape) -> list[_Rule]:
    """Rotated parts are read as complex numbers where they lie, after what is not rotated."""
    pairs = [
        (size % 2 == 0, f"decoder.{name}", f"{size} is odd; rotary pairs need an even width")
        for name, size in (("rope_dim", decoder.rope_dim), ("nope_dim", decoder.nope_dim), ("kv_rank", decoder.kv_rank))
    ]
    query = decoder.query_dim
    wide = f"{decoder.value_dim} is above the width of a query, nope_dim + rope_dim ({query})"
    pairs.append((decoder.value_dim <= query, "decoder.value_dim", wide))
    if decoder.yarn_factor == 1:
        return pairs
    fast, slow = decoder.yarn_beta_fast, decoder.yarn_beta_slow
    return [
        *pairs,
        (decoder.yarn_factor > 1, "decoder.yarn_factor", f"{decoder.yarn_factor} is below 1; YaRN extends positions"),
        (decoder.rope_theta > 1, "decoder.rope_theta", f"{decoder.rope_theta} is not above 1, which YaRN needs"),
        (fast >= slow, "decoder.yarn_beta_fast", f"{fast} is below yarn_beta_slow ({slow})"),
    ]


def _group_rules(decoder: DecoderShape) -> list[_Rule]:
    """A group is scored by its two best experts (arXiv:2412.19437, section 2.1.2)."""
    groups, kept = decoder.expert_groups, decoder.groups_per_token
    size = decoder.experts // groups
    few = f"{decoder.experts_per_token} are more than groups_per_token ({kept}) groups of {size} experts have"
    return [
        (
            decoder.experts % groups == 0,
            "decoder.expert_groups",
            f"{groups} does not divide experts ({decoder.experts})",
        ),
        (groups == 1 or size >= 2, "decoder.expert_groups", f"{groups} leaves groups of {size} expert; 2 are scored"),
        (kept <= groups, "decoder.groups_per_token", f"{kept} lies outside 1..expert_groups ({groups})"),
        (groups == 1 or decoder.experts_per_token <= kept * size, "decoder.experts_per_token", few),
    ]


def _head_rules(shape: ModelShape) -> list[_Rule]:
    """Flash kernels refuse other widths of a head."""
    heads = [("decoder.nope_dim", "nope_dim + rope_dim", shape.decoder.query_dim)]
    heads += [("vision.heads", "width / heads", shape.vision.head_dim)] if shape.sees else []
    return [
        (
            width % HEAD_STEP == 0 and width <= HEAD_MAX,
            name,
            f"head width {width} ({words}) is no multiple of {HEAD_STEP} up to {HEAD_MAX}; flash kernels need that",
        )
        for name, words, width in heads
    ]


def _product_rules(decoder: DecoderShape, scalar_bytes: int) -> list[_Rule]:
    """Grouped products of the experts take rows that begin at multiples of ``GEMM_BYTES``."""
    if decoder.dense_layers == decoder.layers:
        return []
    step = GEMM_BYTES // scalar_bytes
    return [
        (
            size % step == 0,
            f"decoder.{name}",
            f"{size} is not a multiple of {step} ({GEMM_BYTES} bytes of a row)",
        )
        for name, size in (("width", decoder.width), ("expert_ffn_width", decoder.expert_ffn_width))
    ]
