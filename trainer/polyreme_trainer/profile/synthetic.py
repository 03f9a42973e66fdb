"""Synthetic packs of a given mix: random words, images of one size, one document per pack.

Legend: T tokens, P patches, C values of a patch, I images.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from polyreme_api.batch import PackedBatch
from polyreme_planner.flops import Mix
from polyreme_planner.shapes import ModelShape

MEDIA_TOKEN = 0
"""Stands for an image feature in synthetic packs; words are drawn from the rest."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of a synthetic pack, all of one size."""

    count: int
    side: int
    """Rows, and columns [patches]."""
    merge: int

    @classmethod
    def of(cls, shape: ModelShape, mix: Mix) -> Images:
        """Match the mix as closely as whole square images allow: at least one image if the mix has any."""
        merge = shape.vision.merge
        if not mix.visual_share:
            return cls(count=0, side=merge, merge=merge)
        side = max(1, round(math.sqrt(mix.image_patches) / merge)) * merge
        wanted = mix.sequence_tokens * mix.visual_share * merge**2 / side**2
        room = mix.sequence_tokens * merge**2 // side**2
        return cls(count=min(room, max(1, round(wanted))), side=side, merge=merge)

    @property
    def patches(self) -> int:
        """Patches of all of them."""
        return self.count * self.side**2

    @property
    def tokens(self) -> int:
        """Features that they become."""
        return self.patches // self.merge**2 if self.count else 0


def synthetic_packs(shape: ModelShape, mix: Mix, *, packs: int, seed: int) -> PackedBatch:
    """Generate packs; the same seed gives the same packs."""
    chance, images = np.random.default_rng(seed), Images.of(shape, mix)
    tokens_T = chance.integers(1, shape.decoder.vocabulary, packs * mix.sequence_tokens)
    for pack in range(packs):
        begin = pack * mix.sequence_tokens
        tokens_T[begin : begin + images.tokens] = MEDIA_TOKEN
    values = shape.vision.channels * shape.vision.patch_px**2
    return PackedBatch(
        tokens_T=tokens_T,
        targets_T=chance.integers(1, shape.decoder.vocabulary, tokens_T.size),
        positions_T=np.tile(np.arange(mix.sequence_tokens), packs),
        document_offsets=np.arange(packs + 1, dtype=np.int32) * mix.sequence_tokens,
        patches_PC=chance.standard_normal((packs * images.patches, values), dtype=np.float32),
        grids_I2=np.full((packs * images.count, 2), images.side, dtype=np.int32),
        sample_ids=[f"synthetic-{seed}-{pack}" for pack in range(packs)],
        unmasked_tokens=tokens_T.size,
    )
