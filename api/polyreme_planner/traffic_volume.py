"""Bytes that each parallel group moves in a step, which the operator's placement weighs by distance in the network.

They sum up the one traffic model (``traffic.py``) over the layers and microbatches of a step.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping

from polyreme_planner.adapters import Adapters, adapter_counts
from polyreme_planner.hardware import FLOAT32, Numerics
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import all_parts, expert_parameters, parameter_count
from polyreme_planner.shapes import ModelShape
from polyreme_planner.traffic import by_axis, exchanges, parameter_bytes

NOMINAL_BYTES: Mapping[str, int] = {"tp": 16 * 2**30, "ep": 8 * 2**30, "cp": 4 * 2**30, "dp": 2 * 2**30, "pp": 2**30}
"""Bytes that a rank sends in a step if the model is not known. Only their order matters: tensor, expert and context
groups exchange activations in every layer, data groups gradients once a step, stages one activation each."""


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


def group_volumes(
    layout: Layout,
    *,
    shape: ModelShape,
    tokens_per_rank: int,
    numerics: Numerics = FLOAT32,
    microbatches: int = 1,
    adapters: Adapters | None = None,
) -> tuple[GroupVolume, ...]:
    """Compute the traffic of each group with more than one rank, of the mean stage.

    Gradients of dense parameters are summed over dp, cp and tp, those that tensor ranks share over dp and cp; for the
    placement each axis has a ring of its own.

    Args:
        layout: Degrees.
        shape: Sizes of the model.
        tokens_per_rank: Tokens of one data-parallel rank in a step, before cp and tp cut them.
        numerics: Bytes of a number, and sharding of the state.
        microbatches: Of a step.
        adapters: That are trained in the place of the model.
    """
    routed: float = expert_parameters(shape)
    shared: float = shared_parameters(shape)
    whole: float = parameter_count(shape) - routed - shared
    if adapters is not None:
        whole, shared, routed = adapter_counts(shape, adapters)
    dense = whole + shared // layout.tp
    counts = collections.Counter(all_parts(shape))
    sums = {axis: [0.0, 0] for axis in ("dp", "edp", "ep", "cp", "tp")}
    found = by_axis(exchanges(shape, layout, numerics, tokens=tokens_per_rank))
    for part, of_part in found.items():
        for axis, (sent_bytes, messages) in of_part.items():
            sums[axis][0] += counts[part] * sent_bytes
            sums[axis][1] += counts[part] * messages * microbatches
    summed = parameter_bytes(numerics, microbatches=microbatches)
    buffers = (("dp", dense), ("edp", routed // layout.ep), ("cp", dense), ("tp", whole))
    for axis, parameters in buffers:
        ranks = getattr(layout, axis)
        sums[axis][0] += sum(of for of, _, _ in summed) * parameters * (ranks - 1) / ranks
        sums[axis][1] += sum(messages for _, messages, _ in summed)
    return tuple(
        GroupVolume(
            axis=axis,
            ranks=getattr(layout, axis),
            bytes_per_rank=math.floor(sent_bytes / layout.pp),
            messages=math.ceil(messages / layout.pp),
        )
        for axis, (sent_bytes, messages) in sums.items()
        if getattr(layout, axis) > 1
    )


def nominal_volumes(layout: Layout) -> tuple[GroupVolume, ...]:
    """Rank the traffic of groups whose model is not known, so that those that exchange most can be nearest."""
    ranks = {axis: getattr(layout, axis) for axis in NOMINAL_BYTES}
    return tuple(
        GroupVolume(axis=axis, ranks=ranks[axis], bytes_per_rank=NOMINAL_BYTES[axis], messages=1)
        for axis in NOMINAL_BYTES
        if ranks[axis] > 1
    )
