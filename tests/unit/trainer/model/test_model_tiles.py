"""A stream that is cut and attended piece by piece is the stream attended whole, in value and in gradient."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyreme_trainer.model import attention_tiles as tiles_module
from polyreme_trainer.model.attention_tiles import Answers, Partial, Rows, attend_tile, attend_tile_backward, tiles
from polyreme_trainer.model.segment_attention import segments
from polyreme_trainer.parallel.context import StreamCut

TOKENS, HEADS, WIDTH = 48, 2, 8


def whole(qkv: Sequence[Tensor], offsets: Sequence[int], grad: Tensor) -> tuple[Tensor, ...]:
    q, k, v = (tensor.clone().requires_grad_() for tensor in qkv)
    lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
    out = segments(lengths, causal=True, device=q.device, dtype=q.dtype).attend(q, k, v)
    out.backward(grad)
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


def by_pieces(cut: StreamCut, qkv: Sequence[Tensor], offsets: Sequence[int], grad: Tensor) -> tuple[Tensor, ...]:
    """What the ranks of a ring do, one after the other."""
    results = [torch.zeros_like(tensor) for tensor in (qkv[0], *qkv)]
    for place in range(cut.ring):
        own = [cut.tokens_of(place * cut.ulysses + u) for u in range(cut.ulysses)]
        rows_q = torch.cat([torch.tensor(tokens) for tokens in own])
        seen, q = Partial.nothing(qkv[0][rows_q]), qkv[0][rows_q]
        held = []
        for other in range(cut.ring):
            rows_k = torch.tensor([token for piece in cut.pieces(other) for token in piece])
            found = tiles(cut.pieces(place), cut.pieces(other), offsets)
            rows = Rows(q, qkv[1][rows_k], qkv[2][rows_k])
            held.append((rows_k, found, rows))
            for tile in found:
                seen.add(tile, *attend_tile(tile, rows))
        results[0][rows_q] = seen.out_THQ
        answers = Answers(seen.out_THQ, seen.lse_TH, grad[rows_q])
        for rows_k, found, rows in held:
            for tile in found:
                grad_q, grad_k, grad_v = attend_tile_backward(tile, rows, answers)
                results[1].index_add_(0, rows_q[tile.queries], grad_q)
                results[2].index_add_(0, rows_k[tile.keys], grad_k)
                results[3].index_add_(0, rows_k[tile.keys], grad_v)
    return tuple(results)


@pytest.mark.parametrize("dense_tokens_max", [0, 192], ids=["flash", "dense"])
@given(
    borders=st.lists(st.integers(1, TOKENS - 1), unique=True, max_size=8),
    shape=st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)]),
    seed=st.integers(0, 99),
)
def test_a_ring_attends_as_one_process_does(
    dense_tokens_max: int, borders: list[int], shape: tuple[int, int], seed: int
) -> None:
    cut = StreamCut(tokens=TOKENS, ring=shape[0], ulysses=shape[1])
    offsets = [0, *sorted(borders), TOKENS]
    generator = torch.Generator().manual_seed(seed)
    *qkv, grad = (torch.randn(TOKENS, HEADS, WIDTH, generator=generator) for _ in range(4))
    before = vars(tiles_module)["DENSE_TOKENS_MAX"]
    vars(tiles_module)["DENSE_TOKENS_MAX"] = dense_tokens_max
    try:
        seen = by_pieces(cut, qkv, offsets, grad)
    finally:
        vars(tiles_module)["DENSE_TOKENS_MAX"] = before
    for ours, theirs in zip(seen, whole(qkv, offsets, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_only_the_document_that_crosses_a_border_is_seen_across_it() -> None:
    found = tiles([range(8, 12)], [range(4)], [0, 2, 9, 12])
    assert [(tile.queries, tile.keys, tile.causal) for tile in found] == [(slice(0, 1), slice(2, 4), ())]
    assert tiles([range(8, 12)], [range(4)], [0, 4, 12]) == ()
    assert tiles([range(4)], [range(8, 12)], [0, 12]) == (), "nobody sees what is to come"
