"""Memory of a rank, consumer by consumer, in a step and at its start. Arithmetic, no torch.

Activations are what autograd keeps of the trainer's own layers for one token, tensor by tensor; a test of the trainer
holds the sum to what a run on a fake process group keeps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from polyreme_planner.adapters import Target, adapter_parameters, inner_numbers
from polyreme_planner.costs import Recompute, Setting
from polyreme_planner.hardware import GIB
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import (
    SHAPES_KEPT,
    Parameters,
    Part,
    all_parts,
    expert_parameters,
    layer_parts,
    parameter_count,
    part_parameters,
)
from polyreme_planner.pipeline_simulation import held_at_most
from polyreme_planner.schedules import Schedule, chunks_of, ranks_of_stages
from polyreme_planner.shapes import ModelShape
from polyreme_planner.stage_split import Split

LOGITS_MAX = 1 << 28
"""Logits that the head holds at a time [scalars]; for more it runs in chunks (``polyreme_trainer/model/loss.py``)."""
FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank at its fullest."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    """Of sharded parameters while their layers run."""
    activations_bytes: int
    logits_bytes: int
    generation_bytes: int
    """Of a second copy of the weights, which draws answers in a layout of its own."""
    start_bytes: int
    """Weights, gradients, the optimizer's state and the second copy, of the rank that has most of them, which need not
    be this one: no rank holds more while it starts."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self._consumers().values())

    def _consumers(self) -> dict[str, int]:
        named = {field.name.removesuffix("_bytes"): getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: size for name, size in named.items() if name != "start"}

    def largest(self) -> str:
        """Name the consumers, the largest first."""
        ordered = sorted(self._consumers().items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {size_words(size)}" for name, size in ordered if size)


def size_words(size_bytes: float) -> str:
    """Format a size: in GiB, or in MiB if that would round to nothing."""
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB / 10 else f"{size_bytes / 2**20:.1f} MiB"


@functools.lru_cache(maxsize=SHAPES_KEPT)
def kept_numbers(shape: ModelShape, *, recompute: Recompute) -> Mapping[Part, float]:
    """Count the numbers that autograd keeps of one part of each kind, for one token of the part's own stream.

    The tower's stream is its patches, every other part's the tokens of the language model.
    """
    d, v = shape.decoder, shape.vision
    if recompute is Recompute.FULL:
        return {
            Part.TOWER: v.layers * v.width,
            Part.EMBEDDING: 0,
            Part.DENSE: d.width,
            Part.MOE: d.width,
            Part.HEAD: 2 * d.width,
        }
    queries, values = d.heads * d.query_dim, d.heads * d.value_dim
    norm = 2 * d.width + 1  # its input, its output, the scale of a row
    # Latent and its norm; queries, keys, values as wide as keys, output likewise; the input of the last product.
    attention = norm + 2 * d.kv_rank + 1 + d.rope_dim + 4 * queries + d.heads + values
    dense = norm + 4 * d.dense_ffn_width
    # Rows that go to the experts, gate, up, their product twice, rows that come back; their positions, in int64.
    routed = d.experts_per_token * (2 * d.width + 4 * d.expert_ffn_width + 8)
    moe = norm + d.experts + routed + 4 * d.shared_experts * d.expert_ffn_width
    # Two norms; queries, keys, values, output; the input of the last product; both sides of the activation.
    tower = v.layers * (9 * v.width + v.heads + 4 + 2 * v.ffn_width)
    if recompute is Recompute.SELECTIVE:
        # Kept: outputs of products and attention. Recomputed: norms, activations, keys and values from the latent.
        attention -= d.width + d.kv_rank + 2 * queries
        dense -= d.width + 2 * d.dense_ffn_width
        moe -= d.width + 2 * d.expert_ffn_width * (d.experts_per_token + d.shared_experts)
        tower -= v.layers * (2 * v.width + v.ffn_width)
    return {
        Part.TOWER: tower,
        Part.EMBEDDING: 0,
        Part.DENSE: attention + dense,
        Part.MOE: attention + moe,
        Part.HEAD: 2 * d.width,
    }


def _kept_numbers(setting: Setting, *, recompute: Recompute) -> Mapping[Part, float]:
    """Count the same for a job: adapters keep what A made of each token.

    Of a frozen tower nothing is kept, and of frozen matrices without adapters not what they multiply.
    """
    kept, adapters = kept_numbers(setting.shape, recompute=recompute), setting.adapters
    if adapters is None:
        return kept
    added = dict.fromkeys(kept, 0)
    if recompute is not Recompute.FULL:
        added = inner_numbers(setting.shape, adapters)
        for target, inputs in _inputs(setting.shape, recompute=recompute).items():
            for part, numbers in inputs.items() if target not in adapters.targets else ():
                added[part] -= numbers
    return {part: numbers + added[part] for part, numbers in kept.items()} | {Part.TOWER: 0}


def _inputs(shape: ModelShape, *, recompute: Recompute) -> dict[Target, dict[Part, int]]:
    """Count those numbers that are kept only because matrices multiply them: for one token, by the matrices' target."""
    d, recomputed = shape.decoder, recompute is Recompute.SELECTIVE
    shared, chosen = d.shared_experts * d.expert_ffn_width, d.experts_per_token
    attention = d.heads * d.value_dim + (0 if recomputed else d.width + d.kv_rank)
    return {
        Target.ATTENTION: dict.fromkeys((Part.DENSE, Part.MOE), attention),
        Target.DENSE: {} if recomputed else {Part.DENSE: d.width + d.dense_ffn_width, Part.MOE: d.width + shared},
        Target.EXPERTS: {Part.MOE: chosen * (d.width + (0 if recomputed else d.expert_ffn_width))},
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Weights that a rank trains [scalars]."""

    common: float
    """Of all ranks of the dense mesh's slice."""
    matrices: float
    """Those of them in matrices of layers."""
    routed: float
    frozen: float = 0.0
    """Weights that it only computes with."""
    unit: tuple[float, float] = (0.0, 0.0)
    """The largest part that is gathered at once with sharded parameters: of the former, and routed ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class _StageBytes:
    held: Held
    kept: float


def memory_of(
    setting: Setting,
    layout: Layout,
    *,
    packs: int,
    microbatches: int,
    recompute: Recompute,
    schedule: Schedule | None,
    split: Split,
) -> Memory:
    """Compute the memory of the fullest rank.

    Args:
        setting: Model, mix, hardware and numerics.
        layout: Degrees.
        packs: Of one microbatch.
        microbatches: Of one step.
        recompute: What layers recompute.
        schedule: Order of the pipeline; None without one.
        split: Decoder layers of each stage; one number without a pipeline.
    """
    stages = _stage_bytes(setting, layout, packs=packs, recompute=recompute, split=split)
    logits = _logits_bytes(setting, layout, packs=packs)
    recomputed = _layer_bytes(setting, layout, packs=packs) if recompute is Recompute.FULL else 0.0
    if schedule is None:
        return _rank_memory(setting, layout, stages, held=stages[0].kept + recomputed, logits=logits)
    chunks = chunks_of(schedule, layout.pp, len(split))
    rank_of = ranks_of_stages(schedule, layout.pp, chunks)
    found = []
    most = held_at_most(schedule, ranks=layout.pp, microbatches=microbatches, chunks=chunks)
    for rank, moments in enumerate(most):
        own = [stage for stage, at in zip(stages, rank_of, strict=True) if at == rank]
        held = max(sum(count * stage.kept for count, stage in zip(counts, own, strict=True)) for counts in moments)
        found.append(
            _rank_memory(setting, layout, own, held=held + recomputed, logits=logits if rank_of[-1] == rank else 0)
        )
    fullest = max(found, key=lambda memory: memory.total_bytes)
    return dataclasses.replace(fullest, start_bytes=max(memory.start_bytes for memory in found))


def least_states(setting: Setting) -> Callable[[Layout], float]:
    """Return a lower bound for the state of a layout's fullest rank, whatever the split [bytes].

    It is the mean over the pipeline's ranks.
    """

    def least(layout: Layout) -> float:
        return sum(_state_bytes(setting, layout, mean_held(setting, layout)))

    return least


def update_bytes(setting: Setting, layout: Layout) -> float:
    """Compute what the mean rank reads and writes in the update: all that it updates, each number twice."""
    held, numerics = mean_held(setting, layout), setting.numerics
    copies = (1, 1)
    if numerics.sharded_optimizer or numerics.sharded_parameters:
        copies = _copies(layout)
    updated = held.common / copies[0] + held.routed / copies[1]
    return 2 * updated * (numerics.weight_bytes + numerics.gradient_bytes + numerics.optimizer_bytes)


def _state_bytes(setting: Setting, layout: Layout, held: Held) -> tuple[float, float, float]:
    """Compute the bytes of weights, gradients and the optimizer's state."""
    if setting.numerics.sharded_parameters:
        return _row_bytes(setting, layout, held)
    numerics = setting.numerics
    copies = _copies(layout) if numerics.sharded_optimizer else (1, 1)
    # A rank keeps gradients of everything that it holds, and the reduced sums of its own shares.
    shares = sum(part / ranks for part, ranks in zip((held.common, held.routed), copies, strict=True) if ranks > 1)
    return (
        numerics.weight_bytes * (numerics.weight_copies * (held.common + held.routed) + held.frozen),
        numerics.gradient_bytes * (held.common + held.routed) + FLOAT32_BYTES * shares,
        _moment_bytes(setting, held, copies),
    )


def _moment_bytes(setting: Setting, held: Held, copies: tuple[int, int]) -> float:
    numerics = setting.numerics
    of_matrices = numerics.optimizer_bytes
    if numerics.matrix_optimizer_bytes is not None:
        of_matrices = numerics.matrix_optimizer_bytes
    rest = numerics.optimizer_bytes * (held.common - held.matrices)
    return (rest + of_matrices * held.matrices) / copies[0] + of_matrices * held.routed / copies[1]


def _row_bytes(setting: Setting, layout: Layout, held: Held) -> tuple[float, float, float]:
    """The same with sharded parameters: rows of weights, sums and moments in float32.

    Parts that no other rank shares are held as usual.
    """
    numerics = setting.numerics
    weights = gradients = moments = 0.0
    for scalars, ranks in zip((held.common, held.routed), _copies(layout), strict=True):
        if ranks == 1:
            weights += numerics.weight_bytes * scalars
            gradients += numerics.gradient_bytes * scalars
            moments += numerics.optimizer_bytes * scalars
            continue
        original = FLOAT32_BYTES if numerics.optimizer_bytes and numerics.weight_bytes < FLOAT32_BYTES else 0
        weights += FLOAT32_BYTES * scalars / ranks
        gradients += FLOAT32_BYTES * scalars / ranks
        moments += (numerics.optimizer_bytes - original) * scalars / ranks
    return numerics.weight_copies * weights, gradients, moments


def _gathered_bytes(setting: Setting, layout: Layout, held: Held) -> float:
    """Compute what is gathered at once of sharded parameters.

    torch holds the unit that runs, the next one, and the receive buffer of that one; a unit's gradients, and the buffer
    they are summed from.
    """
    if not setting.numerics.sharded_parameters:
        return 0.0
    unit = sum(part for part, ranks in zip(held.unit, _copies(layout), strict=True) if ranks > 1)
    return (4 * setting.numerics.weight_bytes + FLOAT32_BYTES) * unit


def _copies(layout: Layout) -> tuple[int, int]:
    """Ranks that hold the same common parameters, and the same experts."""
    return layout.dp * layout.cp, layout.edp


def _rank_memory(setting: Setting, layout: Layout, stages: list[_StageBytes], *, held: float, logits: float) -> Memory:
    together = _sum([stage.held for stage in stages])
    weights, gradients, moments = _state_bytes(setting, layout, together)
    generation = generation_bytes(setting)
    return Memory(
        weights_bytes=round(weights),
        gradients_bytes=round(gradients),
        optimizer_bytes=round(moments),
        gathered_bytes=round(_gathered_bytes(setting, layout, together)),
        activations_bytes=round(held),
        logits_bytes=round(logits),
        generation_bytes=round(generation),
        start_bytes=round(weights + gradients + moments + generation),
    )


def generation_bytes(setting: Setting) -> float:
    """Compute the weights of a second copy: all layers, and a share of the experts."""
    if setting.generation_ep is None:
        return 0.0
    experts = expert_parameters(setting.shape)
    common = parameter_count(setting.shape) - experts
    return setting.numerics.weight_bytes * (common + experts / setting.generation_ep)


def _stage_bytes(
    setting: Setting, layout: Layout, *, packs: int, recompute: Recompute, split: Split
) -> list[_StageBytes]:
    parameters, kept = part_parameters(setting.shape), _kept_numbers(setting, recompute=recompute)
    tokens = packs * setting.mix.sequence_tokens / (layout.cp * layout.tp)
    number = setting.numerics.activation_bytes
    streams = dict.fromkeys(Part, tokens) | {Part.TOWER: tokens * setting.mix.patches_per_token(setting.shape)}
    of_part = {part: _held(setting, layout, part) for part in parameters}
    held_numbers = {part: kept[part] * streams[part] for part in parameters}
    layers = layer_parts(setting.shape)
    stages, begin = [], 0
    for at, count in enumerate(split):
        parts = list(layers[begin : begin + count])
        begin += count
        parts += [Part.TOWER, Part.EMBEDDING] if at == 0 else []
        parts += [Part.HEAD] if at == len(split) - 1 else []
        held = _sum([of_part[part] for part in parts])
        stages.append(_StageBytes(held, kept=sum(held_numbers[part] for part in parts) * number))
    return stages


def _held(setting: Setting, layout: Layout, part: Part) -> Held:
    """Count what a rank holds of one part: with adapters, all of the model is frozen."""
    parameters = part_parameters(setting.shape)[part]
    common, routed = parameters.common / layout.tp, parameters.routed / layout.ep
    if setting.adapters is None:
        unit = _unit(setting, layout, part, parameters)
        return Held(common=common, matrices=parameters.matrices / layout.tp, routed=routed, unit=unit)
    added, of_experts = adapter_parameters(setting.shape, setting.adapters, part, tp=layout.tp)
    return Held(common=added, matrices=added, routed=of_experts / layout.ep, frozen=common + routed)


def _sum(parts: Sequence[Held]) -> Held:
    """Add parts up; of the units, take the largest."""
    return Held(
        common=sum(part.common for part in parts),
        matrices=sum(part.matrices for part in parts),
        routed=sum(part.routed for part in parts),
        frozen=sum(part.frozen for part in parts),
        unit=max((part.unit for part in parts), key=sum),
    )


def mean_held(setting: Setting, layout: Layout) -> Held:
    """Count what the mean rank of a pipeline holds."""
    kinds = Counter(all_parts(setting.shape))
    held = [(count / layout.pp, _held(setting, layout, part)) for part, count in kinds.items()]
    return Held(
        common=sum(times * part.common for times, part in held),
        matrices=sum(times * part.matrices for times, part in held),
        routed=sum(times * part.routed for times, part in held),
        frozen=sum(times * part.frozen for times, part in held),
    )


def _unit(setting: Setting, layout: Layout, part: Part, parameters: Parameters) -> tuple[float, float]:
    """Part that is gathered at once [scalars]: all of it, and of the tower a layer."""
    layers = max(1, setting.shape.vision.layers) if part is Part.TOWER else 1
    return parameters.common / layout.tp / layers, parameters.routed / layout.ep


def _layer_bytes(setting: Setting, layout: Layout, *, packs: int) -> float:
    """Compute what the fullest layer holds only while it is recomputed."""
    shape = setting.shape
    kept = _kept_numbers(setting, recompute=Recompute.NONE)
    tokens = packs * setting.mix.sequence_tokens / (layout.cp * layout.tp)
    layers = [kept[part] for part in layer_parts(shape)]
    block = kept[Part.TOWER] / max(1, shape.vision.layers) * setting.mix.patches_per_token(shape)
    return max(*layers, block) * tokens * setting.numerics.activation_bytes


def _logits_bytes(setting: Setting, layout: Layout, *, packs: int) -> float:
    tokens = packs * setting.mix.sequence_tokens / layout.cp
    words, number = setting.shape.decoder.vocabulary / layout.tp, setting.numerics.activation_bytes
    # Float32 numbers become their own gradient; in another type they are made before, and handed on afterwards.
    logit = FLOAT32_BYTES if number == FLOAT32_BYTES else FLOAT32_BYTES + 2 * number
    # Held until the backward of its microbatch.
    head_gradient = FLOAT32_BYTES * words * setting.shape.decoder.width if setting.adapters is None else 0
    return logit * min(tokens * words, LOGITS_MAX) + head_gradient
