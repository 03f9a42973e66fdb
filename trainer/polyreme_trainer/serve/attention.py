"""Attention of a step of the engine: pieces of prompts, and single tokens, to all that their sequences have cached.

A prompt that runs whole is attended as in training. A later piece of a prompt expands what its sequence has in the
cache. A single token never expands it (DeepSeek-V2, arXiv:2405.04434, section 2.1.2): its query is multiplied by what
would make the keys, so it is compared with the latents themselves, and the values are made of their weighted sum. That
takes more products, and a ninth of the bytes.

Legend: T tokens of the step, P those of prompts that run whole, B single tokens, S tokens of a later piece, L places
that a sequence may look at, N pages of the longest sequence, H heads, Q width of a query, V of a value, C of a latent,
R of a rotated key, X = C + R.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from polyreme_trainer.model.attention import LatentAttend, LatentAttention
from polyreme_trainer.model.segment_attention import Segments, segments
from polyreme_trainer.serve.cache import LatentCache
from polyreme_trainer.serve.pages import Pages
from polyreme_trainer.serve.scheduler import Piece

BUCKET_RATIO = 2.0
"""Sequences of a product are at most so many times as long as the shortest of them."""
BUCKET_TOKENS = 64
"""Shorter sequences than this one count as this long: a product of their own would cost more than it saves."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Single tokens whose sequences are about equally long."""

    rows: slice
    page_BN: Tensor
    unseen_B1L: Tensor
    """0 at places that a token may look at, -inf elsewhere."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """A piece of a prompt that has begun in an earlier step."""

    rows: slice
    page_1N: Tensor
    end: int
    """Tokens of the sequence up to the end of the piece."""
    unseen_SL: Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Which rows of a step look where; built once, used by every layer."""

    place_T: Tensor
    """Place of each token in the cache."""
    position_T: Tensor
    whole: Segments | None
    """Prompts that run whole: the first rows of the step."""
    whole_rows: int
    later: list[Later]
    buckets: list[Bucket]


def order(pieces: list[Piece]) -> list[Piece]:
    """Put the pieces of a step in the order of its rows: whole prompts, later pieces, single tokens by length."""
    whole = [piece for piece in pieces if piece.begin == 0]
    later = [piece for piece in pieces if piece.begin and piece.end - piece.begin > 1]
    single = [piece for piece in pieces if piece.begin and piece.end - piece.begin == 1]
    return [*whole, *later, *sorted(single, key=lambda piece: piece.end)]


def lay_out(pieces: list[Piece], pages: Pages, *, like: Tensor) -> StepLayout:
    """Lay out pieces, which are in order."""
    lengths = [piece.end for piece in pieces if piece.begin == 0]
    first = sum(lengths)
    later, single = [], []
    for piece in pieces[len(lengths) :]:
        rows = slice(first, first + piece.end - piece.begin)
        first = rows.stop
        if piece.end - piece.begin > 1:
            later.append(_later(piece, rows, pages, like=like))
        else:
            single.append((rows.start, piece))
    places = [place for piece in pieces for place in pages.places(piece.sequence.number, piece.begin, piece.end)]
    positions = [position for piece in pieces for position in range(piece.begin, piece.end)]
    return StepLayout(
        place_T=torch.tensor(places, dtype=torch.int64, device=like.device),
        position_T=torch.tensor(positions, dtype=torch.int64, device=like.device),
        whole=segments(lengths, causal=True, device=like.device, dtype=like.dtype) if lengths else None,
        whole_rows=sum(lengths),
        later=later,
        buckets=[_bucket(part, pages, like=like) for part in bucketed(single)],
    )


def bucketed(single: list[tuple[int, Piece]]) -> list[list[tuple[int, Piece]]]:
    """Cut single tokens, shortest sequence first, where one is much longer than the first of its bucket."""
    parts: list[list[tuple[int, Piece]]] = []
    for row, piece in single:
        if not parts or piece.end > BUCKET_RATIO * max(parts[-1][0][1].end, BUCKET_TOKENS):
            parts.append([])
        parts[-1].append((row, piece))
    return parts


def _later(piece: Piece, rows: slice, pages: Pages, *, like: Tensor) -> Later:
    table = pages.tables[piece.sequence.number][: pages.count(piece.end)]
    unseen_SL = torch.full((piece.end - piece.begin, piece.end), -math.inf).triu_(piece.begin + 1)
    return Later(
        rows=rows,
        page_1N=torch.tensor([table]).to(like.device),
        end=piece.end,
        unseen_SL=unseen_SL.to(like.device, like.dtype),
    )


def _bucket(single: list[tuple[int, Piece]], pages: Pages, *, like: Tensor) -> Bucket:
    counts = [pages.count(piece.end) for _, piece in single]
    longest = max(counts)
    tables = [pages.tables[piece.sequence.number][:count] for (_, piece), count in zip(single, counts, strict=True)]
    page_BN = torch.tensor([[*table, *(longest - len(table)) * [0]] for table in tables])
    end_B1 = torch.tensor([piece.end for _, piece in single]).unsqueeze(1)
    beyond_BL = torch.arange(longest * pages.page_tokens) >= end_B1
    unseen_BL = torch.zeros(beyond_BL.shape).masked_fill_(beyond_BL, -math.inf)
    return Bucket(
        rows=slice(single[0][0], single[-1][0] + 1),
        page_BN=page_BN.to(like.device),
        unseen_B1L=unseen_BL.unsqueeze(1).to(like.device, like.dtype),
    )


class CachedAttention(LatentAttend):
    """Writes a step's latents to the cache of a layer, and attends to what is there."""

    def __init__(self, layout: StepLayout, cache: LatentCache, layer: int) -> None:
        self._layout, self._cache, self._layer = layout, cache, layer

    def attend(self, attention: LatentAttention, q_THQ: Tensor, latent_TX: Tensor) -> Tensor:
        """Attend from all rows of the step."""
        layout = self._layout
        self._cache.write(self._layer, layout.place_T, latent_TX)
        whole = layout.whole_rows
        parts_THV = []
        if layout.whole is not None:
            parts_THV.append(layout.whole.attend(q_THQ[:whole], *attention.expand(latent_TX[:whole])))
        parts_THV += [self._later(attention, q_THQ[later.rows], later) for later in layout.later]
        if layout.buckets:
            keys_HNC, values_HVC = attention.absorbed()
            parts_THV += [self._single(q_THQ[bucket.rows], bucket, keys_HNC, values_HVC) for bucket in layout.buckets]
        if not parts_THV:
            return q_THQ.new_zeros(0, attention.heads, attention.shape.value_dim)
        return torch.cat(parts_THV)

    def _later(self, attention: LatentAttention, q_SHQ: Tensor, later: Later) -> Tensor:
        latent_LX = self._cache.read(self._layer, later.page_1N)[0, : later.end]
        k_LHQ, v_LHV = attention.expand(latent_LX)
        q_HSQ, k_HLQ, v_HLV = (x.transpose(0, 1) for x in (q_SHQ, k_LHQ, v_LHV))
        return F.scaled_dot_product_attention(q_HSQ, k_HLQ, v_HLV, attn_mask=later.unseen_SL).transpose(0, 1)

    def _single(self, q_BHQ: Tensor, bucket: Bucket, keys_HNC: Tensor, values_HVC: Tensor) -> Tensor:
        latent_BLX = self._cache.read(self._layer, bucket.page_BN)
        width, rank = keys_HNC.shape[1:]
        q_HBC = torch.bmm(q_BHQ[..., :width].transpose(0, 1), keys_HNC)
        q_BHX = torch.cat((q_HBC.transpose(0, 1), q_BHQ[..., width:]), dim=-1)
        scale = q_BHQ.shape[-1] ** -0.5
        scores_BHL = torch.baddbmm(bucket.unseen_B1L, q_BHX, latent_BLX.transpose(1, 2), alpha=scale)
        o_BHC = torch.bmm(scores_BHL.softmax(-1, dtype=torch.float32).to(q_BHQ.dtype), latent_BLX[..., :rank])
        o_HBV = torch.bmm(o_BHC.transpose(0, 1), values_HVC.transpose(1, 2))
        return o_HBV.transpose(0, 1)
