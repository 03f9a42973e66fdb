"""Attention on the device equals a CPU's: kernels with offsets, their form with sums, float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from polyreme_trainer.model.attention_tiles import (
    Answers,
    Partial,
    Rows,
    attend_tile,
    attend_tile_backward,
    tiles,
    with_edges,
)
from polyreme_trainer.model.segment_attention import Attend, segments
from polyreme_trainer.parallel.context import StreamCut
from tests.device.conftest import HALF_BOUND, SINGLE_BOUND, relative

pytestmark = pytest.mark.device

WIDTHS = {"latent": (192, 128), "tower": (72, 72), "nano": (24, 16), "wide": (256, 256)}
LENGTHS = {"one": [300], "many": [20] * 30, "mixed": [1, 260, 7, 40], "even": [128] * 4, "short": [30, 50]}


def drawn(tokens: int, widths: tuple[int, int], *, heads: int = 4) -> list[Tensor]:
    """Queries, keys, values and a gradient, all of them numbers that bfloat16 has."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = (widths[0], widths[0], widths[1], widths[1])
    return [torch.randn(tokens, heads, size, generator=generator).bfloat16().float() for size in sizes]


def passed(attend: Attend, given: list[Tensor], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Output, and the gradients of queries, keys and values."""
    q, k, v = (tensor.to(device, dtype).requires_grad_() for tensor in given[:3])
    out = attend(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), given[3].to(device, dtype))]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, HALF_BOUND), (torch.float32, SINGLE_BOUND)])
def test_segments_attend_as_on_a_processor(
    device: torch.device,
    dtype: torch.dtype,
    bound: float,
    widths: tuple[int, int],
    lengths: list[int],
    causal: bool,
) -> None:
    given = drawn(sum(lengths), widths)
    there, here = (segments(lengths, causal=causal, device=d, dtype=t).attend for d, t in (
        (device, dtype), (torch.device("cpu"), torch.float32)))  # fmt: skip
    found = passed(there, given, device, dtype)
    expected = passed(here, given, torch.device("cpu"), torch.float32)
    for name, one, other in zip(("out", "q", "k", "v"), found, expected, strict=True):
        assert one.dtype == dtype
        assert relative(one, other) < bound, name


def test_a_stream_of_no_tokens_is_attended(device: torch.device) -> None:
    q = torch.zeros(0, 4, 72, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = segments([], causal=False, device=device, dtype=torch.bfloat16).attend(q, q, q)
    out.sum().backward()
    assert out.shape == q.shape
    assert q.grad is not None


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, HALF_BOUND), (torch.float32, SINGLE_BOUND)])
@pytest.mark.parametrize("offsets", [[0, 512], [0, 100, 130, 400, 512]], ids=["one", "many"])
def test_a_stream_in_tiles_is_the_stream_whole(
    device: torch.device, dtype: torch.dtype, bound: float, offsets: list[int]
) -> None:
    """What the ranks of a ring do, one after the other."""
    q, k, v, grad = drawn(offsets[-1], (192, 192))
    lengths = [end - begin for begin, end in itertools.pairwise(offsets)]
    whole = segments(lengths, causal=True, device=torch.device("cpu"), dtype=torch.float32).attend
    expected = passed(whole, [q, k, v, grad], torch.device("cpu"), torch.float32)
    cut = StreamCut(tokens=offsets[-1], ring=2, ulysses=1)
    found = [torch.zeros(tensor.shape) for tensor in (q, q, k, v)]
    parts = [torch.tensor([token for piece in cut.pieces(place) for token in piece]) for place in range(2)]

    def part(tensor: Tensor, place: int) -> Tensor:
        return tensor[parts[place]].to(device, dtype)

    for own in range(2):
        seen = Partial.nothing(part(q, own))
        of_both = [tiles(cut.pieces(own), cut.pieces(other), offsets) for other in range(2)]
        met = list(enumerate(with_edges(of_both, device=device, dtype=dtype)))
        for other, some in met:
            for tile in some:
                seen.add(tile, *attend_tile(tile, Rows(part(q, own), part(k, other), part(v, other))))
        found[0][parts[own]] = seen.out_THQ.float().cpu()
        answers = Answers(seen.out_THQ.to(dtype), seen.lse_TH, part(grad, own))
        for other, some in met:
            for tile in some:
                rows = Rows(part(q, own), part(k, other), part(v, other))
                made = [tensor.float().cpu() for tensor in attend_tile_backward(tile, rows, answers)]
                found[1].index_add_(0, parts[own][tile.queries], made[0])
                found[2].index_add_(0, parts[other][tile.keys], made[1])
                found[3].index_add_(0, parts[other][tile.keys], made[2])
    for name, one, other_one in zip(("out", "q", "k", "v"), found, expected, strict=True):
        assert relative(one, other_one) < bound, name


def test_deterministic_algorithms_repeat_attention_bit_by_bit(
    device: torch.device, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(_as_they_were(torch.are_deterministic_algorithms_enabled()))
    torch.use_deterministic_algorithms(True)
    lengths = [700, 324]
    given = drawn(sum(lengths), (192, 128), heads=16)
    attend = segments(lengths, causal=True, device=device, dtype=torch.bfloat16).attend
    first, again = (passed(attend, given, device, torch.bfloat16) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def _as_they_were(enabled: bool) -> Callable[[], None]:
    return lambda: torch.use_deterministic_algorithms(enabled)
