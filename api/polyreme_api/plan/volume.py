"""How many bytes each parallel group moves in a step, and how much memory a layout needs: arithmetic, no torch.

The placer of the operator weighs these volumes by distance in the network. Ring collectives over ``n`` ranks move
``2 (n - 1) / n`` of the buffer for all-reduce; an all-to-all moves ``(n - 1) / n``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyreme_api.plan.layout import Layout
from polyreme_api.plan.parts import expert_parameters, parameter_count
from polyreme_api.plan.shapes import ModelShape

GRADIENT_BYTES = 4
"""Gradients are reduced in float32."""
STATE_BYTES_PER_PARAMETER = 16
"""Weight, gradient, and two AdamW moments, float32."""
ALL_TO_ALLS_PER_MOE_LAYER = 4
"""Dispatch and combine, forward and backward."""
NOMINAL_BYTES: Mapping[str, int] = {"tp": 16 * 2**30, "ep": 8 * 2**30, "cp": 4 * 2**30, "dp": 2 * 2**30, "pp": 2**30}
"""Bytes that a rank sends in a step, where the model is not known. Only their order means anything: tensor, expert and
context groups exchange activations in every layer, data groups gradients once a step, stages one activation each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupVolume:
    """Traffic of one kind of parallel group in one step."""

    axis: str
    """Axis of the mesh: ``dp``, ``edp``, ``ep``, ``pp``, ``cp`` or ``tp``."""
    ranks: int
    """Ranks of one group."""
    bytes_per_rank: int
    """Bytes that each rank sends in one step."""
    messages: int
    """Collectives in one step."""


def shared_parameters(shape: ModelShape) -> int:
    """Count the parameters that tensor-parallel ranks share [scalars]: all products but routers and routed experts."""
    v, d = shape.vision, shape.decoder
    tower = v.layers * (4 * v.width * v.width + 3 * v.width + 2 * v.width * v.ffn_width + v.ffn_width)
    joined = v.width * v.merge**2
    projector = joined * joined + joined + joined * d.width
    queries = (d.width if d.q_rank is None else d.q_rank) * d.heads * d.query_dim
    heads = queries + d.kv_rank * d.heads * (d.nope_dim + d.value_dim) + d.heads * d.value_dim * d.width
    moe_layers = d.layers - d.dense_layers
    inner = d.dense_layers * d.dense_ffn_width + moe_layers * d.shared_experts * d.expert_ffn_width
    return tower + projector + d.layers * heads + 3 * d.width * inner + 2 * d.vocabulary * d.width


def group_volumes(layout: Layout, *, shape: ModelShape, tokens_per_rank: int) -> tuple[GroupVolume, ...]:
    """Work out the traffic of each group with more than one rank, of one stage.

    Gradients of dense parameters are summed over dp, cp and tp, those that tensor ranks share over dp and cp, and each
    axis bears a ring of its own. What the tower exchanges depends on the images, which are not known: it is left out.

    Args:
        layout: Degrees.
        shape: Sizes of the model.
        tokens_per_rank: Tokens of one data-parallel rank in a step, before cp and tp cut them.
    """
    routed, shared = expert_parameters(shape), shared_parameters(shape)
    whole_bytes = (parameter_count(shape) - routed - shared) * GRADIENT_BYTES
    dense_bytes = whole_bytes + shared // layout.tp * GRADIENT_BYTES
    moe_layers = shape.decoder.layers - shape.decoder.dense_layers
    tokens = tokens_per_rank // (layout.cp * layout.tp)
    exchanged = tokens * shape.decoder.experts_per_token * shape.decoder.width * GRADIENT_BYTES
    volumes = (
        GroupVolume(axis="dp", ranks=layout.dp, bytes_per_rank=_all_reduce(dense_bytes, layout.dp), messages=1),
        GroupVolume(
            axis="edp",
            ranks=layout.edp,
            bytes_per_rank=_all_reduce(routed * GRADIENT_BYTES // layout.ep, layout.edp),
            messages=1,
        ),
        GroupVolume(
            axis="ep",
            ranks=layout.ep,
            bytes_per_rank=moe_layers * ALL_TO_ALLS_PER_MOE_LAYER * exchanged * (layout.ep - 1) // layout.ep,
            messages=moe_layers * ALL_TO_ALLS_PER_MOE_LAYER,
        ),
        _context_volume(layout, shape, tokens_per_rank // layout.cp, gradient_bytes=dense_bytes),
        _tensor_volume(layout, shape, tokens_per_rank // layout.cp, gradient_bytes=whole_bytes),
    )
    return tuple(volume for volume in volumes if volume.ranks > 1)


def _context_volume(layout: Layout, shape: ModelShape, tokens: int, *, gradient_bytes: int) -> GroupVolume:
    """Keys and values twice round the ring, their gradients once; heads for tokens and back, forward and backward.

    Values travel as wide as keys, since the kernel wants them so.
    """
    d, ring, ulysses = shape.decoder, layout.ring, layout.ulysses
    row = max(1, d.heads // layout.tp) * GRADIENT_BYTES
    turns = 3 * ring - 2 if ring > 1 else 0
    passed = turns * tokens * row * 2 * d.query_dim
    swapped = 2 * tokens * row * 2 * (d.query_dim + d.value_dim) * (ulysses - 1) // ulysses
    swaps = 4 if ulysses > 1 else 0
    return GroupVolume(
        axis="cp",
        ranks=layout.cp,
        bytes_per_rank=d.layers * (passed + swapped) + _all_reduce(gradient_bytes, layout.cp),
        messages=d.layers * (turns + swaps) + 1,
    )


def _tensor_volume(layout: Layout, shape: ModelShape, tokens: int, *, gradient_bytes: int) -> GroupVolume:
    """Rows gathered and scattered around attention and feed-forward of each layer, around embedding and head."""
    d, tp = shape.decoder, layout.tp
    asked = d.width if d.q_rank is None else d.q_rank
    widths = d.layers * (asked + d.kv_rank + d.rope_dim + 3 * d.width) + 2 * d.width
    # Forward, and the same back.
    return GroupVolume(
        axis="tp",
        ranks=tp,
        bytes_per_rank=2 * tokens * widths * GRADIENT_BYTES * (tp - 1) // tp + _all_reduce(gradient_bytes, tp),
        messages=2 * (4 * d.layers + 2) + 1,
    )


def nominal_volumes(layout: Layout) -> tuple[GroupVolume, ...]:
    """Rank the traffic of groups whose model is not known, so that those who talk most can sit nearest."""
    ranks = {axis: getattr(layout, axis) for axis in NOMINAL_BYTES}
    return tuple(
        GroupVolume(axis=axis, ranks=ranks[axis], bytes_per_rank=NOMINAL_BYTES[axis], messages=1)
        for axis in NOMINAL_BYTES
        if ranks[axis] > 1
    )


def state_bytes_per_rank(layout: Layout, *, shape: ModelShape) -> int:
    """Work out the memory of weights, gradients and moments on one rank [bytes]; activations not included."""
    routed, shared = expert_parameters(shape), shared_parameters(shape)
    whole = parameter_count(shape) - routed - shared
    return STATE_BYTES_PER_PARAMETER * (whole + shared // layout.tp + routed // layout.ep)


def _all_reduce(buffer_bytes: int, ranks: int) -> int:
    return 2 * buffer_bytes * (ranks - 1) // ranks
