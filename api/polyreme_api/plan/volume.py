"""How many bytes each parallel group moves in a step, and how much memory a layout needs: arithmetic, no torch.

The placer of the operator weighs these volumes by distance in the network; the planner picks the layout that moves
least. Ring collectives over ``n`` ranks move ``2 (n - 1) / n`` of the buffer for all-reduce; an all-to-all moves
``(n - 1) / n``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyreme_api.plan.layout import Layout
from polyreme_api.plan.shapes import ModelShape, parameter_count

GRADIENT_BYTES = 4
"""Gradients are reduced in float32."""
STATE_BYTES_PER_PARAMETER = 16
"""Weight, gradient, and two AdamW moments, float32."""
MESSAGE_COST_BYTES = 65_536
"""What a message costs besides its bytes, as bytes: at 10 us and 6.5 GB/s of latency and bandwidth."""
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


def expert_parameters(shape: ModelShape) -> int:
    """Count the routed experts' parameters [scalars], all layers."""
    d = shape.decoder
    return 3 * d.width * d.expert_ffn_width * d.experts * (d.layers - d.dense_layers)


def group_volumes(layout: Layout, *, shape: ModelShape, tokens_per_rank: int) -> tuple[GroupVolume, ...]:
    """Work out the traffic of each group with more than one rank."""
    routed = expert_parameters(shape)
    dense = parameter_count(shape) - routed
    moe_layers = shape.decoder.layers - shape.decoder.dense_layers
    exchanged = tokens_per_rank * shape.decoder.experts_per_token * shape.decoder.width * GRADIENT_BYTES
    volumes = (
        GroupVolume(
            axis="dp", ranks=layout.dp, bytes_per_rank=_all_reduce(dense * GRADIENT_BYTES, layout.dp), messages=1
        ),
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
    )
    return tuple(volume for volume in volumes if volume.ranks > 1)


def nominal_volumes(layout: Layout) -> tuple[GroupVolume, ...]:
    """Rank the traffic of groups whose model is not known, so that those who talk most can sit nearest."""
    ranks = {axis: getattr(layout, axis) for axis in NOMINAL_BYTES}
    return tuple(
        GroupVolume(axis=axis, ranks=ranks[axis], bytes_per_rank=NOMINAL_BYTES[axis], messages=1)
        for axis in NOMINAL_BYTES
        if ranks[axis] > 1
    )


def traffic_cost(volumes: tuple[GroupVolume, ...]) -> int:
    """Price a layout's traffic [bytes], messages included."""
    return sum(volume.bytes_per_rank + volume.messages * MESSAGE_COST_BYTES for volume in volumes)


def state_bytes_per_rank(layout: Layout, *, shape: ModelShape) -> int:
    """Work out the memory of weights, gradients and moments on one rank [bytes]; activations not included."""
    routed = expert_parameters(shape)
    return STATE_BYTES_PER_PARAMETER * (parameter_count(shape) - routed + routed // layout.ep)


def _all_reduce(buffer_bytes: int, ranks: int) -> int:
    return 2 * buffer_bytes * (ranks - 1) // ranks
