"""Attention over a stream that is cut over a context-parallel group: implements the model's ``Attend``.

Legend: S tokens of this rank, T tokens of this ring place (S of each of its Ulysses ranks), H heads of this rank,
L heads after the exchange, Q width of queries and keys, V width of values, W = 2 Q + V.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_trainer.model.attention_tiles import (
    Answers,
    Documents,
    Partial,
    Rows,
    Tile,
    attend_tile,
    attend_tile_backward,
    tiles,
    with_edges,
)
from polyreme_trainer.model.segment_attention import Attend, pad_values, segments
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.context import StreamCut

_KEYS_TAG, _GRADIENTS_TAG = 0, 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The ranks that pass keys and values around, and what this one's queries see of each."""

    group: dist.ProcessGroup | None
    """None for a ring of one rank, which passes nothing on."""
    place: int
    tiles: tuple[tuple[Tile, ...], ...]
    """Of this place's queries with the keys of each place."""

    @property
    def ranks(self) -> int:
        """Places of the ring."""
        return len(self.tiles)

    def sources(self) -> list[int]:
        """Owner of the keys that are here at each step of a round."""
        return [(self.place - step) % self.ranks for step in range(self.ranks)]

    def attend(self, q_THQ: Tensor, k_THQ: Tensor, v_THV: Tensor) -> Tensor:
        """Attend to the keys of all places."""
        # Flash kernels want values as wide as keys; zero columns change nothing (MLA: 192 against 128).
        v_THQ = pad_values(v_THV, q_THQ.shape[-1])
        out_THQ: Tensor = _RingAttention.apply(q_THQ, k_THQ, v_THQ, self)
        return out_THQ[..., : v_THV.shape[-1]]


def _pass_on(sent: Tensor, received: Tensor, ring: Ring, *, tag: int) -> Callable[[], None]:
    if ring.group is None:  # no other rank: what arrives is what is sent
        received.copy_(sent)
        return lambda: None
    return collectives.pass_on(sent, received, ring.group, tag=tag)


class _RingAttention(torch.autograd.Function):
    """One round of keys and values forward; one more backward, on which their gradients travel along."""

    @staticmethod
    def forward(ctx: Any, q_THQ: Tensor, k_THQ: Tensor, v_THQ: Tensor, ring: Ring) -> Tensor:
        seen, held = Partial.nothing(q_THQ), torch.stack((k_THQ, v_THQ))
        for step, source in enumerate(ring.sources()):
            coming = torch.empty_like(held)
            last = step + 1 == ring.ranks
            wait = None if last else _pass_on(held, coming, ring, tag=_KEYS_TAG)
            for tile in ring.tiles[source]:
                seen.add(tile, *attend_tile(tile, Rows(q_THQ, held[0], held[1])))
            if wait is not None:
                wait()
                held = coming
        ctx.save_for_backward(q_THQ, k_THQ, v_THQ, seen.out_THQ, seen.lse_TH)
        ctx.ring = ring
        return seen.out_THQ.to(q_THQ.dtype)

    @staticmethod
    def backward(ctx: Any, grad_THQ: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_THQ, k_THQ, v_THQ, out_THQ, lse_TH = ctx.saved_tensors
        ring: Ring = ctx.ring
        held, answers = torch.stack((k_THQ, v_THQ)), Answers(out_THQ.to(q_THQ.dtype), lse_TH, grad_THQ)
        grad_q = torch.zeros_like(out_THQ)
        # Gradients of keys and values follow them, one step later: each rank adds its part and passes them on.
        home = torch.zeros(held.shape, dtype=out_THQ.dtype, device=held.device)
        grads_wait = None
        for step, source in enumerate(ring.sources()):
            coming = torch.empty_like(held)
            last = step + 1 == ring.ranks
            wait = None if last else _pass_on(held, coming, ring, tag=_KEYS_TAG)
            mine = torch.zeros_like(home)
            for tile in ring.tiles[source]:
                part_q, part_k, part_v = attend_tile_backward(tile, Rows(q_THQ, held[0], held[1]), answers)
                grad_q[tile.queries] += part_q
                mine[0, tile.keys] += part_k
                mine[1, tile.keys] += part_v
            if grads_wait is not None:
                grads_wait()
                mine += home
            sent, home = mine, torch.empty_like(mine)
            grads_wait = _pass_on(sent, home, ring, tag=_GRADIENTS_TAG)
            if wait is not None:
                wait()
                held = coming
        if grads_wait is not None:
            grads_wait()
        dtype = q_THQ.dtype
        return grad_q.to(dtype), home[0].to(dtype), home[1].to(dtype), None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContextRanks:
    """This rank's place in its context-parallel group, and the ranks that it exchanges with."""

    place: int
    ring: int
    ulysses: int
    ring_group: dist.ProcessGroup
    """Ranks at the other places of the ring, each at this one's place among its Ulysses ranks."""
    ulysses_group: dist.ProcessGroup
    """Ranks of the same place in the ring."""

    def attend(self, documents: Documents, *, device: torch.device, dtype: torch.dtype) -> Attend:
        """Lay out attention for one stream."""
        inner = self._inner(documents, device, dtype)
        if self.ulysses == 1:
            return inner

        def attend(q_SHQ: Tensor, k_SHQ: Tensor, v_SHV: Tensor) -> Tensor:
            widths = [q_SHQ.shape[-1], k_SHQ.shape[-1], v_SHV.shape[-1]]
            qkv_SHW = torch.cat((q_SHQ, k_SHQ, v_SHV), dim=-1)
            qkv_TLW = _heads_for_tokens(qkv_SHW, self.ulysses, self.ulysses_group)
            out_TLV = inner(*qkv_TLW.split(widths, dim=-1))
            return _tokens_for_heads(out_TLV, self.ulysses, self.ulysses_group)

        return attend

    def cut(self, tokens: int) -> StreamCut:
        """Return how a stream of some length is cut.

        Raises:
            InvalidConfigError: If the length does not divide.
        """
        return StreamCut(tokens=tokens, ring=self.ring, ulysses=self.ulysses)

    def _inner(self, documents: Documents, device: torch.device, dtype: torch.dtype) -> Attend:
        if self.ring == 1:
            return attend_alone(documents, device=device, dtype=dtype)
        own, (offsets, prompts) = self.place // self.ulysses, (documents.offsets, documents.prompts)
        cut = self.cut(offsets[-1])
        pieces = [cut.pieces(place) for place in range(self.ring)]
        seen = [tiles(pieces[own], keys, offsets, prompts) for keys in pieces]
        return Ring(group=self.ring_group, place=own, tiles=with_edges(seen, device=device, dtype=dtype)).attend


def attend_alone(documents: Documents, *, device: torch.device, dtype: torch.dtype) -> Attend:
    """Lay out attention for a stream that no ring shares; one with branches is a ring of one."""
    offsets = documents.offsets
    if not documents.prompts:
        lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
        return segments(lengths, causal=True, device=device, dtype=dtype).attend
    whole = [range(offsets[-1])]
    seen = [tiles(whole, whole, offsets, documents.prompts)]
    return Ring(group=None, place=0, tiles=with_edges(seen, device=device, dtype=dtype)).attend


def _heads_for_tokens(x_SHW: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    """Give each rank its share of the heads, and get the tokens of all ranks for the own share (T, L, W)."""
    tokens, heads, width = x_SHW.shape
    by_rank = x_SHW.view(tokens, ranks, heads // ranks, width).transpose(0, 1).reshape(ranks * tokens, -1)
    shares = [tokens] * ranks
    arrived = collectives.exchange_rows(by_rank, sent=shares, received=shares, group=group)
    return arrived.view(ranks * tokens, heads // ranks, width)


def _tokens_for_heads(x_TLV: Tensor, ranks: int, group: dist.ProcessGroup) -> Tensor:
    """Undo ``_heads_for_tokens``: (S, H, V)."""
    rows, heads, width = x_TLV.shape
    tokens = rows // ranks
    shares = [tokens] * ranks
    arrived = collectives.exchange_rows(x_TLV.reshape(rows, -1), sent=shares, received=shares, group=group)
    by_rank = arrived.view(ranks, tokens, heads, width)
    return by_rank.transpose(0, 1).reshape(tokens, ranks * heads, width)
