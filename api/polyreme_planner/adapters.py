"""Adapters (LoRA, arXiv:2106.09685): the matrices of a model that they are added to, and their sizes. Arithmetic.

A frozen matrix W gets a product of two small ones beside it: y = W x + (alpha / rank) B A x. A maps the inputs to
``rank`` numbers, B these to the outputs. Only A and B are trained.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Iterator

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.model import Training
from polyreme_planner.model_parts import SHAPES_KEPT, Part, layer_parts
from polyreme_planner.shapes import DecoderShape, ModelShape

FIELD = "spec.training.adapters"
EXPERTS_RANK_STEP = 8
"""Experts' ranks are multiples of this: grouped products on accelerators need rows of 16 bytes, in bfloat16 too."""


class Target(enum.StrEnum):
    """Kinds of matrices of the decoder that adapters are added to."""

    ATTENTION = "Attention"
    """Projections of the attention."""
    DENSE = "Dense"
    """Projections of dense feed-forwards and of shared experts."""
    EXPERTS = "Experts"
    """Grouped products of the routed experts; gate and up are one matrix, so they share an A."""


class Cut(enum.Enum):
    """Side of a matrix that tensor-parallel ranks share."""

    NONE = enum.auto()
    INPUTS = enum.auto()
    OUTPUTS = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The adapters of a run."""

    rank: int
    alpha: float
    targets: frozenset[Target]

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix that can have an adapter."""

    part: Part
    target: Target
    name: str
    inputs: int
    outputs: int
    cut: Cut = Cut.NONE
    count: int = 1
    """Matrices of this kind in the part."""

    def adapter_scalars(self, rank: int, *, tp: float = 1) -> float:
        """Count the parameters of their adapters on one tensor-parallel rank."""
        inputs = self.inputs / tp if self.cut is Cut.INPUTS else self.inputs
        outputs = self.outputs / tp if self.cut is Cut.OUTPUTS else self.outputs
        return self.count * rank * (inputs + outputs)


def adapters_of(training: Training, shape: ModelShape) -> Adapters | None:
    """Return the adapters that a job trains, if it does.

    Raises:
        InvalidConfigError: Naming the matrix or target of the model that they do not fit.
    """
    given = training.adapters
    if given is None:
        return None
    targets = frozenset(Target(target) for target in given.targets)
    adapters = Adapters(rank=given.rank, alpha=float(given.alpha), targets=targets)
    _check(adapters, shape)
    return adapters


@functools.lru_cache(maxsize=SHAPES_KEPT)
def matrices_of(shape: ModelShape, targets: frozenset[Target]) -> tuple[Matrix, ...]:
    """Name the matrices with adapters in one layer of each kind that the model has."""
    kinds = set(layer_parts(shape))
    every = (*_attention(shape.decoder), *_feed_forwards(shape.decoder), *_experts(shape.decoder))
    return tuple(matrix for matrix in every if matrix.part in kinds and matrix.target in targets and matrix.count)


def _attention(d: DecoderShape) -> Iterator[Matrix]:
    queries, values = d.heads * d.query_dim, d.heads * d.value_dim
    for part in (Part.DENSE, Part.MOE):
        if d.q_rank is None:
            yield Matrix(part, Target.ATTENTION, "q_proj", d.width, queries, Cut.OUTPUTS)
        else:
            yield Matrix(part, Target.ATTENTION, "q_a_proj", d.width, d.q_rank)
            yield Matrix(part, Target.ATTENTION, "q_b_proj", d.q_rank, queries, Cut.OUTPUTS)
        yield Matrix(part, Target.ATTENTION, "kv_a_proj_with_mqa", d.width, d.kv_rank + d.rope_dim)
        heads = d.heads * (d.nope_dim + d.value_dim)
        yield Matrix(part, Target.ATTENTION, "kv_b_proj", d.kv_rank, heads, Cut.OUTPUTS)
        yield Matrix(part, Target.ATTENTION, "o_proj", values, d.width, Cut.INPUTS)


def _feed_forwards(d: DecoderShape) -> Iterator[Matrix]:
    shared = d.shared_experts * d.expert_ffn_width
    for part, inner in ((Part.DENSE, d.dense_ffn_width), (Part.MOE, shared)):
        count = 1 if inner else 0
        yield Matrix(part, Target.DENSE, "gate_proj", d.width, inner, Cut.OUTPUTS, count)
        yield Matrix(part, Target.DENSE, "up_proj", d.width, inner, Cut.OUTPUTS, count)
        yield Matrix(part, Target.DENSE, "down_proj", inner, d.width, Cut.INPUTS, count)


def _experts(d: DecoderShape) -> Iterator[Matrix]:
    yield Matrix(Part.MOE, Target.EXPERTS, "gate_up_proj", d.width, 2 * d.expert_ffn_width, count=d.experts)
    yield Matrix(Part.MOE, Target.EXPERTS, "down_proj", d.expert_ffn_width, d.width, count=d.experts)


def adapter_parameters(shape: ModelShape, adapters: Adapters, part: Part, *, tp: float = 1) -> tuple[float, float]:
    """Count the adapters' parameters of one part: of common matrices, on a tensor-parallel rank, and of all experts."""
    common = routed = 0.0
    for matrix in matrices_of(shape, adapters.targets):
        if matrix.part is not part:
            continue
        if matrix.target is Target.EXPERTS:
            routed += matrix.adapter_scalars(adapters.rank)
        else:
            common += matrix.adapter_scalars(adapters.rank, tp=tp)
    return common, routed


def adapter_counts(shape: ModelShape, adapters: Adapters) -> tuple[float, float, float]:
    """Count the adapters' parameters: those that tensor ranks hold whole, those that they share, the experts'."""
    parts = layer_parts(shape)
    every = [adapter_parameters(shape, adapters, part) for part in parts]
    whole = sum(adapter_parameters(shape, adapters, part, tp=math.inf)[0] for part in parts)
    return whole, sum(common for common, _ in every) - whole, sum(routed for _, routed in every)


def inner_numbers(shape: ModelShape, adapters: Adapters) -> dict[Part, int]:
    """Count the numbers between A and B, for one token and one part of each kind."""
    found = dict.fromkeys(Part, 0)
    for matrix in matrices_of(shape, adapters.targets):
        rows = shape.decoder.experts_per_token if matrix.target is Target.EXPERTS else 1
        found[matrix.part] += rows * adapters.rank
    return found


def _check(adapters: Adapters, shape: ModelShape) -> None:
    for target in sorted(adapters.targets):
        if not matrices_of(shape, frozenset({target})):
            raise InvalidConfigError(
                f"adapters have nothing to adapt: model {shape.name} has no matrices of target {target}",
                field=f"{FIELD}.targets",
            )
    for matrix in matrices_of(shape, adapters.targets):
        if adapters.rank > min(matrix.inputs, matrix.outputs):
            raise InvalidConfigError(
                f"adapters' rank is too large: {adapters.rank}, {matrix.name} of model {shape.name} is "
                f"{matrix.outputs} x {matrix.inputs}; expected at most {min(matrix.inputs, matrix.outputs)}",
                field=f"{FIELD}.rank",
            )
    if Target.EXPERTS in adapters.targets and adapters.rank % EXPERTS_RANK_STEP:
        raise InvalidConfigError(
            f"adapters' rank does not fit experts: {adapters.rank}, expected a multiple of {EXPERTS_RANK_STEP}, which "
            "grouped products need; or leave Experts out of targets",
            field=f"{FIELD}.rank",
        )
