"""Floating-point operations of each part of the model, in closed form.

A product of an (m, k) by a (k, n) matrix is ``2 m k n`` operations; a training step costs three forwards, since the
backward makes two products of each one (PaLM, arXiv:2204.02311, appendix B). Counted are products only: norms,
activations and the softmax of attention are under 1 % at these widths. Causal attention sees half of its square.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.model_parts import Part, all_parts, attention_parameters
from polyreme_planner.shapes import ModelShape

TRAINING_FORWARDS = 3
"""Forward, gradient of the inputs, gradient of the weights."""
BACKWARD_MOVES = 1.5
"""Reads and writes of the backward of kernels other than products, over those of the forward: a norm's three to two, a
gated activation's five to three."""
DENSE_LAUNCHES, MOE_LAUNCHES = 40, 80
"""Kernels of a decoder layer's forward."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Content of a pack: its length, and how much of it is images."""

    sequence_tokens: int
    """Tokens of a pack; attention is priced over all of it, which is the most that a pack of one document costs."""
    image_patches: int = 1024
    """Patches of one image, before the tower joins them to tokens."""
    visual_share: float = 0.5
    """Share of the tokens that are image features, 0 to 1."""

    def __post_init__(self) -> None:
        """Refuse impossible values.

        Raises:
            InvalidConfigError: Naming the value.
        """
        if self.sequence_tokens < 1:
            raise InvalidConfigError(
                f"pack is too short: {self.sequence_tokens} tokens, expected at least 1",
                field="spec.data.sequenceTokens",
            )
        if self.image_patches < 1:
            raise InvalidConfigError(
                f"image is too small: {self.image_patches} patches, expected at least 1", field="--image-patches"
            )
        if not 0 <= self.visual_share <= 1:
            raise InvalidConfigError(
                f"share of image tokens is {self.visual_share}, expected 0 to 1", field="--visual-share"
            )

    def patches_per_token(self, shape: ModelShape) -> float:
        """Patches that the tower encodes for each token of the language model, on average."""
        return self.visual_share * shape.vision.merge**2


def forward_flops(shape: ModelShape, mix: Mix) -> dict[Part, float]:
    """Count the forward of one part of each kind, for one token of the language model [operations]."""
    d = shape.decoder
    attention = 2 * _attention_products(shape) + core_flops(shape, mix)
    active = d.experts_per_token + d.shared_experts
    return {
        Part.TOWER: _tower_flops(shape, mix),
        Part.EMBEDDING: 0.0,
        Part.DENSE: attention + 2 * 3 * d.width * d.dense_ffn_width,
        Part.MOE: attention + 2 * (3 * d.width * d.expert_ffn_width * active + d.width * d.experts),
        Part.HEAD: 2.0 * d.vocabulary * d.width,
    }


def core_flops(shape: ModelShape, mix: Mix) -> float:
    """Count attention's scores and their values in one layer's forward, for one token [operations]."""
    d = shape.decoder
    return float(d.heads * (d.query_dim + d.value_dim) * mix.sequence_tokens)


def forward_moves(shape: ModelShape, mix: Mix) -> dict[Part, float]:
    """Count what kernels other than products read and write in one part's forward, for one token [numbers].

    A norm reads and writes a row, a residual sum reads two and writes one; rotation reads and writes queries and keys;
    a gated activation reads two and writes one. Rows of experts are put in their order before and after each of the
    two exchanges (seven readings or writings: the last sums them up).
    """
    d, v = shape.decoder, shape.vision
    layer = 10 * d.width + 4 * d.heads * d.query_dim
    active = d.experts_per_token + d.shared_experts
    block = 10 * v.width + 4 * v.width + 2 * v.ffn_width
    return {
        Part.TOWER: mix.patches_per_token(shape) * v.layers * block,
        Part.EMBEDDING: 2.0 * d.width,
        Part.DENSE: layer + 3.0 * d.dense_ffn_width,
        Part.MOE: layer + 7.0 * d.experts_per_token * d.width + 3.0 * d.expert_ffn_width * active,
        Part.HEAD: 2.0 * d.width + 2.0 * d.vocabulary,
    }


def launches(shape: ModelShape) -> dict[Part, int]:
    """Count the kernels of one part's forward, whatever its tokens: a fixed cost of each layer.

    As the trainer runs them on a device; a test of the trainer holds the numbers to what it runs.
    """
    return {
        Part.TOWER: 30 * shape.vision.layers,
        Part.EMBEDDING: 4,
        Part.DENSE: DENSE_LAUNCHES,
        Part.MOE: MOE_LAUNCHES,
        Part.HEAD: 8,
    }


def training_flops(shape: ModelShape, mix: Mix) -> float:
    """Count a training step's operations for one token, the whole model."""
    flops = forward_flops(shape, mix)
    return TRAINING_FORWARDS * sum(flops[part] for part in all_parts(shape))


def model_flops_utilisation(
    shape: ModelShape, mix: Mix, *, tokens: int, step_s: float, devices: int, peak_flops_per_s: float
) -> float:
    """Compute MFU (PaLM, arXiv:2204.02311, appendix B): the model's operations over what the devices could do.

    Args:
        shape: Sizes of the model.
        mix: Content of the tokens.
        tokens: Of one step, all ranks together.
        step_s: Time of the step.
        devices: Devices that took part.
        peak_flops_per_s: Of one device, by its data sheet.
    """
    return training_flops(shape, mix) * tokens / (step_s * devices * peak_flops_per_s)


def _attention_products(shape: ModelShape) -> int:
    """Count the weights of attention that are multiplied: all except its norms'."""
    d = shape.decoder
    norms = d.kv_rank + (d.q_rank or 0)
    return attention_parameters(shape) - norms


def image_flops(shape: ModelShape, patches: int) -> int:
    """Count the forward of tower and projector for one image [operations]; attention is full within an image.

    An integer, so that balancing images by it gives the same sums in any order, on any machine.
    """
    v = shape.vision
    products = 4 * v.width * v.width + 2 * v.width * v.ffn_width
    # The projector sees merge**2 patches side by side as one row: divided by them, its products are of whole numbers.
    projector = 2 * (v.width * v.width * v.merge**2 + v.width * shape.decoder.width)
    patch = 2 * v.layers * products + 2 * v.channels * v.patch_px**2 * v.width + projector
    return patches * (patch + 4 * v.layers * v.width * patches)


def uneven_flops(
    shape: ModelShape, documents: Sequence[int], images: Sequence[int], *, shared: Sequence[int] = ()
) -> int:
    """Count the operations of a pack's forward that are not the same in every pack of its length.

    They are the core of attention, which is causal within each document, and the images. An integer, as for images.

    Args:
        shape: Sizes of the model.
        documents: Tokens of each document; the padding is one. Of one with branches those of each branch, with the
            prefix that they share.
        images: Patches of each image.
        shared: Tokens of a shared prefix, once for each branch after the first.
    """
    d = shape.decoder
    layers = sum(part in {Part.DENSE, Part.MOE} for part in all_parts(shape))
    squares = sum(tokens * tokens for tokens in documents) - sum(tokens * tokens for tokens in shared)
    core = layers * d.heads * (d.query_dim + d.value_dim) * squares
    return core + sum(image_flops(shape, patches) * count for patches, count in Counter(images).items())


def _tower_flops(shape: ModelShape, mix: Mix) -> float:
    """Count the tower and the projector for one token of the language model."""
    return mix.patches_per_token(shape) * image_flops(shape, mix.image_patches) / mix.image_patches
