"""Attention of one part of a stream to another, with the sums to merge such parts: the inner step of a ring.

A stream of packed documents is cut into pieces. Of two pieces, the later sees of the earlier only the one document that
may cross the borders between them, and all of that; within a piece each document is causal. So the causal mask is the
only one needed: a pair of pieces is one tile.

Branches of a document (the answers to one prompt) are causal like documents of their own, and all of them see all of
the prompt: that is one more tile without a mask.

Partial results are merged by their log-sum-exp, and the gradient of each tile follows from the merged one
(FlashAttention, arXiv:2205.14135; ring attention, arXiv:2310.01889).

Legend: T tokens of the queries' part, U of the keys' part, H heads, Q width of queries and keys (values are padded).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyreme_trainer.model.segment_attention import DENSE_TOKENS_MAX, segment_mask, takes_offsets
from polyreme_trainer.model.transfer import on_device


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Some queries that see some keys."""

    queries: slice
    """Among the tokens of the queries' part."""
    keys: slice
    causal: tuple[int, ...] = ()
    """Lengths of documents that fill queries and keys alike, each causal; empty: every query sees every key."""
    edges: tuple[Tensor, Tensor] | None = dataclasses.field(default=None, compare=False)
    """Cumulative lengths of queries and keys, int32 on the device, if its kernel takes them (``with_edges``)."""


@dataclasses.dataclass(slots=True)
class Partial:
    """Attention of queries to the keys so far, in float32; without any key the log-sum-exp is minus infinity."""

    out_THQ: Tensor
    lse_TH: Tensor

    @classmethod
    def nothing(cls, q_THQ: Tensor) -> Partial:
        """Begin with no key seen."""
        return cls(
            torch.zeros_like(q_THQ, dtype=torch.float32),
            torch.full(q_THQ.shape[:2], -math.inf, dtype=torch.float32, device=q_THQ.device),
        )

    def add(self, tile: Tile, out_THQ: Tensor, lse_TH: Tensor) -> None:
        """Merge the partial result of a tile."""
        before_TH = self.lse_TH[tile.queries]
        both_TH = torch.logaddexp(before_TH, lse_TH)
        kept_TH1, new_TH1 = (before_TH - both_TH).exp_().unsqueeze(-1), (lse_TH - both_TH).exp_().unsqueeze(-1)
        self.out_THQ[tile.queries] = self.out_THQ[tile.queries] * kept_TH1 + out_THQ * new_TH1
        self.lse_TH[tile.queries] = both_TH


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Where a stream's tokens may look."""

    offsets: tuple[int, ...]
    """Where documents begin in the stream, from 0 to its end; each branch of a document counts as one."""
    prompts: tuple[tuple[range, range], ...] = ()
    """Of each document with branches: the prompt's tokens that all of them see, and all tokens of the branches."""

    @classmethod
    def of(cls, offsets: Sequence[int], branches: Sequence[tuple[int, int]] = ()) -> Documents:
        """Lay out documents.

        Args:
            offsets: Where documents begin, from 0 to the end of the stream.
            branches: Document and first token of each branch, rising.
        """
        first = dict(reversed(branches))
        prompts = tuple(
            (range(offsets[document], begin), range(begin, offsets[document + 1]))
            for document, begin in sorted(first.items())
            if offsets[document] < begin
        )
        return cls(offsets=tuple(sorted({*offsets, *(begin for _, begin in branches)})), prompts=prompts)


def tiles(
    queries: Sequence[range],
    keys: Sequence[range],
    offsets: Sequence[int],
    prompts: Sequence[tuple[range, range]] = (),
) -> tuple[Tile, ...]:
    """Work out which tokens of one part see which of another.

    Args:
        queries: Pieces of the stream that make up the queries' part, in the order of its tokens.
        keys: The same of the keys' part; any two pieces of the stream are the same or disjoint.
        offsets: Where documents begin in the stream, from 0 to its end (``Documents``).
        prompts: What branches see of their documents.
    """
    found: list[Tile] = []
    for q_start, q_piece in zip(_starts(queries), queries, strict=True):
        for k_start, k_piece in zip(_starts(keys), keys, strict=True):
            if k_piece == q_piece:
                edges = [q_piece.start, *(o for o in offsets if q_piece.start < o < q_piece.stop), q_piece.stop]
                lengths = tuple(end - begin for begin, end in itertools.pairwise(sorted(set(edges))))
                rows = slice(q_start, q_start + len(q_piece))
                found.append(Tile(queries=rows, keys=slice(k_start, k_start + len(k_piece)), causal=lengths))
            elif k_piece.stop <= q_piece.start:
                found += _crossing(q_start, q_piece, k_start, k_piece, offsets)
            found += _prompts(q_start, q_piece, k_start, k_piece, prompts)
    return tuple(found)


def with_edges(
    rounds: Sequence[Sequence[Tile]], *, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Tile, ...], ...]:
    """Give tiles their edges on the device, if its kernel takes them: one copy for all tiles, layers and passes."""
    if not takes_offsets(device, dtype):
        return tuple(map(tuple, rounds))
    held = [edges for part in rounds for tile in part for edges in _edges(tile)]
    moved = iter(on_device(held, device))
    return tuple(tuple(dataclasses.replace(tile, edges=(next(moved), next(moved))) for tile in part) for part in rounds)


def _edges(tile: Tile) -> tuple[Tensor, Tensor]:
    lengths = [tile.causal] * 2 if tile.causal else [(part.stop - part.start,) for part in (tile.queries, tile.keys)]
    queries, keys = (torch.tensor([0, *itertools.accumulate(of)], dtype=torch.int32) for of in lengths)
    return queries, keys


def _crossing(q_start: int, q_piece: range, k_start: int, k_piece: range, offsets: Sequence[int]) -> list[Tile]:
    """The document that holds the last token of the earlier piece, if it reaches into the later one."""
    place = bisect.bisect_right(offsets, k_piece.stop - 1)
    begin, end = offsets[place - 1], offsets[place]
    if end <= q_piece.start:
        return []
    seen = max(k_piece.start, begin) - k_piece.start
    looking = min(q_piece.stop, end) - q_piece.start
    return [Tile(queries=slice(q_start, q_start + looking), keys=slice(k_start + seen, k_start + len(k_piece)))]


def _prompts(
    q_start: int, q_piece: range, k_start: int, k_piece: range, prompts: Sequence[tuple[range, range]]
) -> Iterator[Tile]:
    """Yield what branches in one piece see of their prompts in another, or in the same one."""
    for prompt, branches in prompts:
        queries, keys = _common(q_start, q_piece, branches), _common(k_start, k_piece, prompt)
        if queries is not None and keys is not None:
            yield Tile(queries=queries, keys=keys)


def _common(start: int, piece: range, tokens: range) -> slice | None:
    """Return the places of some tokens of the stream in a piece whose first place is ``start``."""
    begin, end = max(piece.start, tokens.start), min(piece.stop, tokens.stop)
    return slice(start + begin - piece.start, start + end - piece.start) if begin < end else None


def _starts(pieces: Sequence[range]) -> list[int]:
    return [0, *itertools.accumulate(len(piece) for piece in pieces[:-1])]


class Rows(NamedTuple):
    """Queries, keys and values of two parts, values padded to the width of keys."""

    q_THQ: Tensor
    k_UHQ: Tensor
    v_UHQ: Tensor

    def of(self, tile: Tile) -> Rows:
        """Those of a tile."""
        return Rows(self.q_THQ[tile.queries], self.k_UHQ[tile.keys], self.v_UHQ[tile.keys])


class Answers(NamedTuple):
    """The merged output of queries over all keys, its log-sum-exp, and its gradient."""

    out_THQ: Tensor
    lse_TH: Tensor
    grad_THQ: Tensor

    def of(self, tile: Tile) -> Answers:
        """Those of a tile's queries."""
        return Answers(*(tensor[tile.queries] for tensor in self))


def attend_tile(tile: Tile, rows: Rows) -> tuple[Tensor, Tensor]:
    """Attend within a tile, scaled by ``1 / sqrt(Q)``.

    Args:
        tile: Which queries see which keys.
        rows: Of the whole parts.

    Returns:
        out (queries of the tile, H, Q) and float32 log-sum-exp (queries of the tile, H).
    """
    own = rows.of(tile)
    if takes_offsets(own.q_THQ.device, own.q_THQ.dtype):
        return _forward_offsets(tile, own)
    if _is_dense(own):
        scores_HTU = _scores(tile, own)
        lse_HT = scores_HTU.logsumexp(-1)
        out_HTQ = (scores_HTU - lse_HT.unsqueeze(-1)).exp_() @ own.v_UHQ.transpose(0, 1)
        return out_HTQ.transpose(0, 1), lse_HT.transpose(0, 1)
    parts = [_forward_flash(Rows(*part), causal=bool(tile.causal)) for part in _split(tile, *own)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def attend_tile_backward(tile: Tile, rows: Rows, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tile's part of the gradients of its queries, keys and values.

    Args:
        tile: Which queries see which keys.
        rows: Of the whole parts.
        answers: Of the whole part of the queries, over all keys that they see anywhere, in the type of the queries.
    """
    own, seen = rows.of(tile), answers.of(tile)
    if takes_offsets(own.q_THQ.device, own.q_THQ.dtype):
        return _backward_offsets(tile, own, seen)
    if _is_dense(own):
        return _backward_dense(tile, own, seen)
    parts = [
        _backward_flash(Rows(*part[:3]), Answers(*part[3:]), causal=bool(tile.causal))
        for part in _split(tile, *own, *seen)
    ]
    grad_q, grad_k, grad_v = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return grad_q, grad_k, grad_v


def _is_dense(rows: Rows) -> bool:
    """Whether a tile is small; on an accelerator every float32 tile is dense: no kernel returns the sums there."""
    longest = max(rows.q_THQ.shape[0], rows.k_UHQ.shape[0])
    return rows.q_THQ.dtype == torch.float32 and (longest <= DENSE_TOKENS_MAX or rows.q_THQ.device.type != "cpu")


def _split(tile: Tile, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Documents of a causal tile one by one; a tile without documents is one part."""
    if not tile.causal:
        return [tensors]
    return list(zip(*(tensor.split(tile.causal) for tensor in tensors), strict=True))


def _scores(tile: Tile, rows: Rows) -> Tensor:
    scale = rows.q_THQ.shape[-1] ** -0.5
    q_HTQ, k_HQU = rows.q_THQ.transpose(0, 1), rows.k_UHQ.permute(1, 2, 0)
    if not tile.causal:
        plain_HTU: Tensor = torch.bmm(q_HTQ, k_HQU) * scale
        return plain_HTU
    (mask_TU,) = on_device([segment_mask(tile.causal, causal=True)], rows.q_THQ.device)
    scores_HTU: Tensor = torch.baddbmm(mask_TU, q_HTQ, k_HQU, alpha=scale)
    return scores_HTU


def _backward_dense(tile: Tile, rows: Rows, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
    scale = rows.q_THQ.shape[-1] ** -0.5
    share_HTU = (_scores(tile, rows) - answers.lse_TH.transpose(0, 1).unsqueeze(-1)).exp_()
    grad_HTQ = answers.grad_THQ.transpose(0, 1)
    inner_HT1 = (grad_HTQ * answers.out_THQ.transpose(0, 1)).sum(-1, keepdim=True)
    grad_v_HUQ = share_HTU.transpose(1, 2) @ grad_HTQ
    grad_s_HTU = share_HTU * (grad_HTQ @ rows.v_UHQ.permute(1, 2, 0) - inner_HT1) * scale
    grad_q_HTQ = grad_s_HTU @ rows.k_UHQ.transpose(0, 1)
    grad_k_HUQ = grad_s_HTU.transpose(1, 2) @ rows.q_THQ.transpose(0, 1)
    return grad_q_HTQ.transpose(0, 1), grad_k_HUQ.transpose(0, 1), grad_v_HUQ.transpose(0, 1)


def _batched(*tensors_THQ: Tensor) -> list[Tensor]:
    return [tensor.transpose(0, 1).unsqueeze(0) for tensor in tensors_THQ]


def _forward_flash(rows: Rows, *, causal: bool) -> tuple[Tensor, Tensor]:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - the public one hides the sums
    out, lse = attend(*_batched(*rows), is_causal=causal)
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)


def _backward_flash(rows: Rows, answers: Answers, *, causal: bool) -> tuple[Tensor, ...]:
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001
    lse_1HT = answers.lse_TH.transpose(0, 1).unsqueeze(0).contiguous()
    grad, out = _batched(answers.grad_THQ, answers.out_THQ)
    parts = back(grad, *_batched(*rows), out, lse_1HT, 0.0, causal)
    return tuple(part.squeeze(0).transpose(0, 1) for part in parts)


def _offsets(tile: Tile, rows: Rows) -> tuple[Tensor, Tensor, int, int]:
    """Cumulative lengths of queries and keys on the device, and the longest of each."""
    if tile.edges is None:
        raise ValueError("a tile has no edges: with_edges copies them to the device, once for all layers")
    longest = (max(tile.causal),) * 2 if tile.causal else (rows.q_THQ.shape[0], rows.k_UHQ.shape[0])
    return *tile.edges, *longest


def _forward_offsets(tile: Tile, rows: Rows) -> tuple[Tensor, Tensor]:
    attend = torch.ops.aten._flash_attention_forward  # noqa: SLF001
    out, lse_HT, *_ = attend(*rows, *_offsets(tile, rows), 0.0, bool(tile.causal), return_debug_mask=False)
    return out, lse_HT.transpose(0, 1)


def _backward_offsets(tile: Tile, rows: Rows, answers: Answers) -> tuple[Tensor, Tensor, Tensor]:
    back, device = torch.ops.aten._flash_attention_backward, rows.q_THQ.device  # noqa: SLF001
    # The random state for dropout, which is 0.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)
    given = (answers.grad_THQ, *rows, answers.out_THQ, answers.lse_TH.transpose(0, 1).contiguous())
    grad_q, grad_k, grad_v = back(*given, *_offsets(tile, rows), 0.0, bool(tile.causal), state, unused)
    return grad_q, grad_k, grad_v
