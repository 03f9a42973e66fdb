"""Parts of the model, in the order of a pipeline (tower, embedding, decoder layers, head), and their parameters.

The tower (with its projector) and the embedding can only be on the first stage, the head only on the last: between them
are the layers, and a stage split says how many of them each stage gets.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping

from polyreme_planner.shapes import ModelShape

SHAPES_KEPT = 64
"""Models whose counts are cached: a search asks for the same ones tens of thousands of times."""


class Part(enum.StrEnum):
    """Kinds of parts that cost alike."""

    TOWER = "tower"
    """MoonViT and the projector."""
    EMBEDDING = "embedding"
    DENSE = "dense layer"
    """A decoder layer with a dense feed-forward."""
    MOE = "moe layer"
    """A decoder layer with shared and routed experts."""
    HEAD = "head"
    """Last norm, output head and loss."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of one part [scalars]."""

    common: int
    """Held by every rank of the stage."""
    routed: int = 0
    """Of the routed experts, which the expert-parallel ranks divide."""
    matrices: int = 0
    """Those of ``common`` in matrices of layers, which Muon updates; all routed ones are."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.common + self.routed


@functools.lru_cache(maxsize=SHAPES_KEPT)
def layer_parts(shape: ModelShape) -> tuple[Part, ...]:
    """Name the decoder layers in order: the leading dense ones, then the mixtures of experts."""
    d = shape.decoder
    return (Part.DENSE,) * d.dense_layers + (Part.MOE,) * (d.layers - d.dense_layers)


@functools.lru_cache(maxsize=SHAPES_KEPT)
def all_parts(shape: ModelShape) -> tuple[Part, ...]:
    """Name every part of the model in order."""
    return (Part.TOWER, Part.EMBEDDING, *layer_parts(shape), Part.HEAD)


def parameter_count(shape: ModelShape) -> int:
    """Count the parameters of a model [scalars]; ``kimi-vl-a3b`` has 16,407,654,384."""
    parameters = part_parameters(shape)
    return sum(parameters[part].total for part in all_parts(shape))


def expert_parameters(shape: ModelShape) -> int:
    """Count the routed experts' parameters [scalars], all layers."""
    parameters = part_parameters(shape)
    return sum(parameters[part].routed for part in layer_parts(shape))


@functools.lru_cache(maxsize=SHAPES_KEPT)
def part_parameters(shape: ModelShape) -> Mapping[Part, Parameters]:
    """Count the parameters of one part of each kind.

    The router's correction bias is a buffer and is not counted.
    """
    d, v = shape.decoder, shape.vision
    norms = 2 * d.width
    dense = attention_parameters(shape) + norms + 3 * d.width * d.dense_ffn_width
    shared = 3 * d.width * d.expert_ffn_width * d.shared_experts
    moe = attention_parameters(shape) + norms + shared + d.width * d.experts
    joined = v.width * v.merge**2
    projector = 2 * v.width + joined * joined + joined + joined * d.width + d.width if shape.sees else 0
    vectors = norms + d.kv_rank + (d.q_rank or 0)
    tower = v.layers * (4 * v.width * v.width + 2 * v.width * v.ffn_width) + joined * (joined + d.width) * shape.sees
    return {
        Part.TOWER: Parameters(common=_tower_parameters(shape) + projector, matrices=tower),
        Part.EMBEDDING: Parameters(common=d.vocabulary * d.width),
        Part.DENSE: Parameters(common=dense, matrices=dense - vectors),
        Part.MOE: Parameters(
            common=moe,
            routed=3 * d.width * d.expert_ffn_width * d.experts,
            matrices=moe - vectors - d.width * d.experts,
        ),
        Part.HEAD: Parameters(common=d.vocabulary * d.width + d.width),
    }


def attention_parameters(shape: ModelShape) -> int:
    """Count one layer's latent attention (arXiv:2405.04434, section 2.1), the norms of its latents included."""
    d = shape.decoder
    queries = d.heads * d.query_dim
    query = d.width * queries if d.q_rank is None else d.q_rank * (d.width + queries + 1)
    key_value = d.width * (d.kv_rank + d.rope_dim) + d.kv_rank + d.kv_rank * d.heads * (d.nope_dim + d.value_dim)
    return query + key_value + d.heads * d.value_dim * d.width


def _tower_parameters(shape: ModelShape) -> int:
    v = shape.vision
    embedding = v.channels * v.patch_px**2 * v.width + v.width + v.position_rows**2 * v.width
    block = 4 * v.width * v.width + 4 * v.width + 2 * v.width * v.ffn_width + v.ffn_width + v.width + 4 * v.width
    return embedding + v.layers * block + 2 * v.width
