"""Hashes of parameters: any one bit changes them, and the ranks that are named by them."""

from __future__ import annotations

import pytest
import torch

from polyreme_planner.layout import Layout
from polyreme_trainer.train import parameter_hash
from polyreme_trainer.train.parameter_hash import hash_of, odd_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_one_bit_and_the_place_of_a_word_change_the_hash(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_hash, "_WORDS_AT_ONCE", 8)
    values = torch.randn(37, generator=torch.Generator().manual_seed(1)).to(dtype)
    right = int(hash_of(values))
    assert int(hash_of(values.clone())) == right
    words = values.view(torch.int16 if dtype is torch.bfloat16 else torch.int32)
    for word in range(37):
        for bit in range(8 * dtype.itemsize - 1):
            words[word] ^= 1 << bit
            assert int(hash_of(values)) != right, (word, bit)
            words[word] ^= 1 << bit
    assert int(hash_of(values)) == right
    assert int(hash_of(values.roll(5))) != right
    assert int(hash_of(values[:0])) == 0


def test_the_ranks_that_differ_from_most_copies_are_odd() -> None:
    def found(layout: Layout, **wrong: int) -> list[int]:
        kinds = ("dense", "exact", "tensor", "experts")
        hashes = [[place[kind] for kind in range(4)] for place in _places(layout)]
        for kind, rank in wrong.items():
            hashes[rank][kinds.index(kind)] = -1
        return odd_ranks(hashes, layout)

    layout = Layout(pp=2, dp=4, ep=2)
    assert found(layout) == []
    assert found(layout, dense=6) == [6]
    assert found(layout, experts=6) == [4, 6], "of two copies neither is right"
    assert found(layout, dense=1, exact=7) == [1, 7]
    assert found(Layout(dp=2, tp=2), tensor=3) == [1, 3]
    assert found(Layout(tp=4), dense=3) == [3]


def _places(layout: Layout) -> list[list[int]]:
    """Hashes as they are where nothing is wrong: those of a stage, of a slice, and of a rank's experts."""
    inner = layout.world // layout.pp
    return [
        [rank // inner, rank // inner, rank // inner * 100 + rank % layout.tp, rank // inner * 100 + rank % layout.ep]
        for rank in range(layout.world)
    ]
