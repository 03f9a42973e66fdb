"""Bytes that one rank sends in each exchange of a step: the one traffic model of planner, placement and report.

It describes what ``polyreme_trainer/parallel`` sends. In the forward of a layer, for S tokens of a rank:

- tensor parallel (arXiv:2205.05198): rows gathered and scattered around attention and feed-forward;
- Ulysses (arXiv:2309.14509): queries, keys and values change from heads to tokens, outputs back;
- ring: keys and values, padded to the width of keys, go to the next rank ``ring - 1`` times. In the backward they do
  so again, and their gradients follow them, in float32, ``ring`` times. All but the last of these overlap with the
  products of attention;
- expert parallel: each token's rows to its experts, and back.

Except for the ring, the backward sends as much as the forward. The tower's exchanges depend on the images, which are
not known: they are left out.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from polyreme_planner.hardware import Group, Numerics, Pattern
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import Part
from polyreme_planner.shapes import ModelShape

FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one rank sends in one pass."""

    sent_bytes: float = 0.0
    messages: int = 0
    overlapped_bytes: float = 0.0
    """Part of the bytes that travels while attention computes."""
    overlapped_messages: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One kind of exchange of one part of the model, for one microbatch."""

    axis: str
    """Axis of the mesh: ``tp``, ``cp`` or ``ep``."""
    group: Group
    pattern: Pattern
    forward: Sent
    backward: Sent
    far_bytes: float | None = None
    """Bytes of a pass that leave the node, if that is less than an even spread over the group."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Differences of a training framework from ours in what it sends and what it overlaps with products."""

    overlapped: frozenset[str] = frozenset()
    """Axes whose exchanges overlap with products: ``tp``, ``cp``, ``ep``, ``pp``."""
    token_nodes: int | None = None
    """Nodes that hold a token's experts, if the dispatcher sends a token once to each of them and spreads it there
    (arXiv:2412.19437, section 3.2.2). None: a row for each expert, wherever it is."""


TRAINER = Framework()
"""Framework of ``polyreme_trainer``."""


def exchanges(
    shape: ModelShape,
    layout: Layout,
    numerics: Numerics,
    *,
    tokens: float,
    near_devices: int = 1,
    framework: Framework = TRAINER,
) -> dict[Part, tuple[Exchange, ...]]:
    """List the exchanges of one part of each kind.

    Args:
        shape: Sizes of the model.
        layout: Degrees.
        numerics: Bytes of a number.
        tokens: Of a data-parallel rank, before cp and tp cut them.
        near_devices: Devices of a node.
        framework: The training framework with its dispatcher.
    """
    context = _context(shape, layout, numerics, tokens / layout.cp)
    attention, feed_forward, row = _tensor(shape, layout, numerics, tokens / layout.cp)
    shared = feed_forward if shape.decoder.shared_experts else ()
    row_bytes = tokens / layout.cp / layout.tp * shape.decoder.width * numerics.activation_bytes
    nodes = -(-layout.ep // near_devices)
    experts = _experts(shape, layout, row_bytes=row_bytes, nodes=nodes, framework=framework)
    return {
        Part.TOWER: (),
        Part.EMBEDDING: row,
        Part.DENSE: (*attention, *context, *feed_forward),
        Part.MOE: (*attention, *context, *shared, *experts),
        Part.HEAD: row,
    }


def _both(axis: str, group: Group, pattern: Pattern, sent: Sent) -> Exchange:
    return Exchange(axis=axis, group=group, pattern=pattern, forward=sent, backward=sent)


def _tensor(
    shape: ModelShape, layout: Layout, numerics: Numerics, tokens: float
) -> tuple[tuple[Exchange, ...], tuple[Exchange, ...], tuple[Exchange, ...]]:
    """Return what attention, a feed-forward, and the embedding or the head gather and scatter."""
    if layout.tp == 1:
        return (), (), ()
    d, group = shape.decoder, Group(ranks=layout.tp, stride=1)
    others = tokens * (layout.tp - 1) / layout.tp * numerics.activation_bytes

    def rows(*widths: int) -> tuple[Exchange, ...]:
        sent = Sent(sent_bytes=sum(widths) * others, messages=len(widths))
        return (_both("tp", group, Pattern.REDUCE, sent),)

    asked = d.width if d.q_rank is None else d.q_rank
    return rows(asked + d.kv_rank + d.rope_dim, d.width), rows(d.width, d.width), rows(d.width)


def _context(shape: ModelShape, layout: Layout, numerics: Numerics, tokens: float) -> tuple[Exchange, ...]:
    d, ring, ulysses = shape.decoder, layout.ring, layout.ulysses
    heads = tokens * max(1.0, d.heads / layout.tp)
    found: list[Exchange] = []
    if ulysses > 1:
        numbers = heads * 2 * (d.query_dim + d.value_dim) * (ulysses - 1) / ulysses
        sent = Sent(sent_bytes=numbers * numerics.activation_bytes, messages=2)
        found.append(_both("cp", Group(ranks=ulysses, stride=layout.tp), Pattern.ALL_TO_ALL, sent))
    if ring > 1:
        keys = heads * 2 * d.query_dim
        turn, gradients = (ring - 1) * keys * numerics.activation_bytes, keys * FLOAT32_BYTES
        found.append(
            Exchange(
                axis="cp",
                group=Group(ranks=ring, stride=layout.tp * ulysses),
                pattern=Pattern.RING,
                forward=Sent(overlapped_bytes=turn, overlapped_messages=ring - 1),
                backward=Sent(
                    sent_bytes=gradients,
                    messages=1,
                    overlapped_bytes=turn + (ring - 1) * gradients,
                    overlapped_messages=2 * (ring - 1),
                ),
            )
        )
    return tuple(found)


def _experts(
    shape: ModelShape, layout: Layout, *, row_bytes: float, nodes: int, framework: Framework
) -> tuple[Exchange, ...]:
    """Return what expert ranks on so many nodes exchange; ``row_bytes`` are those of one row of each token."""
    if layout.ep == 1:
        return ()
    chosen, group = shape.decoder.experts_per_token, Group(ranks=layout.ep, stride=1)
    sent = 2 * chosen * row_bytes * (layout.ep - 1) / layout.ep
    far_bytes = None
    if framework.token_nodes is not None and nodes > 1:
        far_bytes = 2 * min(framework.token_nodes, chosen, nodes) * row_bytes * (nodes - 1) / nodes
    # In the forward, an exchange of counts goes first; the gradient takes the same route without it.
    return (
        Exchange(
            axis="ep",
            group=group,
            pattern=Pattern.ALL_TO_ALL,
            forward=Sent(sent_bytes=sent, messages=3),
            backward=Sent(sent_bytes=sent, messages=2),
            far_bytes=far_bytes,
        ),
    )


class Moment(enum.StrEnum):
    """Moment in a step at which gradients and parameters are exchanged."""

    DURING_BACKWARD = "during the last backward pass"
    DURING_PASSES = "during the passes of every microbatch"
    DURING_UPDATE = "during the update"
    AFTER = "after the last backward pass"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepExchange:
    """One exchange of gradients or parameters, all of one step together."""

    group: Group
    sent_bytes: float
    messages: int
    moment: Moment


def step_exchanges(
    layout: Layout, numerics: Numerics, *, common: float, routed: float, microbatches: int, signalled: bool = True
) -> tuple[StepExchange, ...]:
    """List the exchanges of gradients and parameters in a step, by one rank.

    Gradients are float32 whatever the model computes in. Without sharded states they are all-reduced after the backward
    passes (``parallel/gradients.py``). Under ZeRO-1, they are reduce-scattered while the last backward pass runs, and
    the parameters gathered after the update (``parallel/zero1.py``). With sharded parameters, a layer is gathered in
    each forward and backward, and gradients reduce-scattered after each (``parallel/fsdp.py``).

    Args:
        layout: Degrees.
        numerics: Bytes of a number, and sharding of the state.
        common: Parameters of a rank that all ranks of its stage hold, or a slice of them.
        routed: Routed experts' parameters of a rank.
        microbatches: Of a step.
        signalled: Whether a backward pass signals when a gradient is made; zero-bubble schedules do not.
    """
    groups = (
        (Group(ranks=layout.dp * layout.cp, stride=layout.tp), common),
        (Group(ranks=layout.edp, stride=layout.ep), routed),
    )
    return tuple(
        StepExchange(
            group=group,
            sent_bytes=parameters * (group.ranks - 1) / group.ranks * number_bytes,
            messages=messages,
            moment=moment,
        )
        for group, parameters in groups
        if group.ranks > 1 and parameters
        for number_bytes, messages, moment in parameter_bytes(numerics, microbatches=microbatches, signalled=signalled)
    )


def parameter_bytes(
    numerics: Numerics, *, microbatches: int, signalled: bool = True
) -> tuple[tuple[float, int, Moment], ...]:
    """Return, of each exchange of a step, bytes for one parameter, messages and when it runs."""
    if numerics.sharded_parameters:
        overlapped = Moment.DURING_PASSES
        gathered = (numerics.weight_bytes * 2 * microbatches, 2 * microbatches, overlapped)
        return gathered, (FLOAT32_BYTES * microbatches, microbatches, overlapped)
    if numerics.sharded_optimizer:
        summed = Moment.DURING_BACKWARD if signalled else Moment.AFTER
        return (numerics.gradient_bytes, 1, summed), (numerics.weight_bytes, 1, Moment.DURING_UPDATE)
    return ((2 * numerics.gradient_bytes, 1, Moment.AFTER),)


def by_axis(found: Mapping[Part, tuple[Exchange, ...]]) -> dict[Part, dict[str, tuple[float, int]]]:
    """Sum bytes and messages of forward and backward together, by part and axis."""
    sums: dict[Part, dict[str, tuple[float, int]]] = {}
    for part, all_of in found.items():
        of_part = sums.setdefault(part, {})
        for one in all_of:
            sent_bytes, messages = of_part.get(one.axis, (0.0, 0))
            for way in (one.forward, one.backward):
                sent_bytes += way.sent_bytes + way.overlapped_bytes
                messages += way.messages + way.overlapped_messages
            of_part[one.axis] = sent_bytes, messages
    return sums
