"""Attention within the segments (documents, images) of one packed stream.

Every kernel computes the same sum; the choice is a pure function of device, type and lengths, so on CPU a step repeats
bit by bit. (On CUDA the backward of the flash kernel adds in whatever order its blocks end, unless
``torch.use_deterministic_algorithms`` is set.) On CPU, measured on one thread, forward and backward, 4 heads:

    stream                            dense     padded    loop
    160 tokens, 8 documents of 20     0.41 ms   0.42 ms   0.73 ms
    304 patches, 19 images of 16      1.22 ms   0.41 ms   1.25 ms
    960 tokens, 48 documents of 20    12.3 ms   3.4 ms    4.8 ms

Dense is one masked product of all with all; padded makes rows of equal length; the loop wastes nothing if lengths
differ much. Causal rows of up to 128 tokens are separate masked products, one per row and head: 2.8 ms against 3.7 ms
of the flash kernel for 48 documents of 20. Long rows go in blocks of 64 tokens, each with the keys that it may see: for
8 documents of 128 tokens a forward and backward takes 4.0 ms of a core, 6.9 ms without blocks, 4.2 ms in the flash
kernel. An accelerator's flash kernel takes offsets and needs none of this; it only takes 16-bit types, so float32 takes
the same path there as on CPU.

Legend: T tokens or patches of the stream, S segments, L longest segment, H heads, N = S * H, Q width of a query or key
head, V width of a value head, X any width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from polyreme_trainer.model.recompute import recomputable_copy
from polyreme_trainer.model.transfer import on_device

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(q_THQ, k_THQ, v_THV) -> o_THV``: the attention that a layer calls; it may be a cache or a ring of ranks."""

DENSE_TOKENS_MAX = 192
"""Longest stream [tokens] for which the dense masked product is used on CPU."""
ROW_TOKENS_MAX = 128
"""Longest causal row [tokens] for which a masked product is used on CPU; for 256 tokens both kernels take equally
long."""
BLOCK_TOKENS = 64
"""Tokens of a block of causal rows: a quarter of the scores of rows of 128 tokens is never computed."""
WHOLE_SCORES_MAX = 1 << 18
"""Most scores of rows that are not cut into blocks: beyond, they no longer fit a core's cache [scalars]."""
HALF_TYPES = (torch.bfloat16, torch.float16)
"""Types that an accelerator's flash kernels take."""
PADDING_RATIO_MAX = 2.0
"""Most padded rows for each token; beyond it segments run one by one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Positions of the segments in a packed stream, in the form of the chosen kernel; built once per forward."""

    lengths: tuple[int, ...]
    causal: bool
    mask_TT: Tensor | None = None
    """Dense: 0 where a token may look, -inf elsewhere."""
    padding: Padding | None = None
    """Padded: the place of each token."""
    offsets_S: Tensor | None = None
    """Accelerator: int32 cumulative lengths."""

    def attend(self, q_THQ: Tensor, k_THQ: Tensor, v_THV: Tensor) -> Tensor:
        """Attend within each segment, scaled by ``1 / sqrt(Q)``."""
        if self.mask_TT is not None:
            return _attend_dense(q_THQ, k_THQ, v_THV, self.mask_TT)
        if self.padding is not None and self.padding.mask_LL is not None:
            return _attend_rows(q_THQ, k_THQ, v_THV, self.padding, self.padding.mask_LL)
        value_dim = v_THV.shape[-1]
        # Flash kernels need values as wide as keys; zero columns change nothing (MLA: 192 against 128).
        v_THQ = pad_values(v_THV, q_THQ.shape[-1])
        if self.offsets_S is not None:
            return self._attend_offsets(q_THQ, k_THQ, v_THQ, self.offsets_S)[..., :value_dim]
        if self.padding is not None:
            return self._attend_padded(q_THQ, k_THQ, v_THQ, self.padding)[..., :value_dim]
        return self._attend_loop(q_THQ, k_THQ, v_THQ)[..., :value_dim]

    def _attend_loop(self, q_THQ: Tensor, k_THQ: Tensor, v_THQ: Tensor) -> Tensor:
        parts = [
            F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            for q, k, v in zip(*(_heads_first(x, self.lengths) for x in (q_THQ, k_THQ, v_THQ)), strict=True)
        ]
        return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)

    def _attend_padded(self, q_THQ: Tensor, k_THQ: Tensor, v_THQ: Tensor, padding: Padding) -> Tensor:
        q, k, v = (recomputable_copy(padding.pad, x).transpose(1, 2) for x in (q_THQ, k_THQ, v_THQ))
        # A causal row never sees what follows it, so only full attention must hide the padding.
        mask = None if self.causal else padding.mask_S11L
        out_SHLQ = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return padding.unpad(out_SHLQ.transpose(1, 2))

    def _attend_offsets(self, q_THQ: Tensor, k_THQ: Tensor, v_THQ: Tensor, offsets_S: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn  # accelerator only: its import is not cheap

        longest = max(self.lengths, default=0)
        window = (-1, 0) if self.causal else (-1, -1)
        attended = varlen_attn(q_THQ, k_THQ, v_THQ, offsets_S, offsets_S, longest, longest, window_size=window)
        return cast("Tensor", attended)


def pad_values(v_THV: Tensor, width: int) -> Tensor:
    """Pad values to the width of keys."""
    missing = width - v_THV.shape[-1]
    return recomputable_copy(lambda values: F.pad(values, (0, missing)), v_THV) if missing else v_THV


def segments(lengths: Sequence[int], *, causal: bool, device: torch.device, dtype: torch.dtype) -> Segments:
    """Lay out segments that fill a stream in order.

    Args:
        lengths: Length of each segment [tokens]; empty ones are dropped.
        causal: Whether a token sees only itself and what comes before it.
        device: Where attention will run.
        dtype: Type of queries; the dense product serves float32 only.
    """
    kept = tuple(length for length in lengths if length)
    total = sum(kept)
    small = dtype == torch.float32 and total <= DENSE_TOKENS_MAX
    if small or not total:  # no kernel but a product takes an empty stream
        (mask_TT,) = on_device([segment_mask(kept, causal=causal).to(dtype)], device)
        return Segments(lengths=kept, causal=causal, mask_TT=mask_TT)
    if takes_offsets(device, dtype):
        ends_S = torch.tensor(kept, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        (offsets_S,) = on_device([F.pad(ends_S, (1, 0))], device)
        return Segments(lengths=kept, causal=causal, offsets_S=offsets_S)
    if len(kept) * max(kept) <= PADDING_RATIO_MAX * total:
        return Segments(lengths=kept, causal=causal, padding=_padding(kept, dtype, causal=causal).to(device))
    return Segments(lengths=kept, causal=causal)


def takes_offsets(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a flash kernel that takes cumulative lengths: on accelerators, for 16-bit types."""
    return device.type != "cpu" and dtype in HALF_TYPES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Rows of equal length, one per segment, and the mapping there and back."""

    segments: int
    token_R: Tensor
    """Token at each of the S * L places; token 0 at places without one."""
    place_T: Tensor
    """Place of each token."""
    mask_S11L: Tensor
    """0 at places with a token, -inf elsewhere."""
    mask_LL: Tensor | None = None
    """0 where a token may look at another of its row, -inf elsewhere; only for short causal rows."""

    @property
    def empty(self) -> bool:
        """Whether every place has a token: rows are then the stream itself."""
        return self.token_R.shape == self.place_T.shape

    def to(self, device: torch.device) -> Padding:
        """Move it to the device of the stream."""
        held = [self.token_R, self.place_T, self.mask_S11L, *(() if self.mask_LL is None else (self.mask_LL,))]
        token_R, place_T, mask_S11L, *mask_LL = on_device(held, device)
        return Padding(
            segments=self.segments,
            token_R=token_R,
            place_T=place_T,
            mask_S11L=mask_S11L,
            mask_LL=mask_LL[0] if mask_LL else None,
        )

    def pad(self, x_THQ: Tensor) -> Tensor:
        """Return (S, L, H, Q); values in the padding are finite and have no meaning."""
        x_RHQ: Tensor = _Pad.apply(x_THQ, self.token_R, self.place_T)
        x_SLHQ: Tensor = x_RHQ.unflatten(0, (self.segments, -1))
        return x_SLHQ

    def unpad(self, x_SLHQ: Tensor) -> Tensor:
        """Return (T, H, Q)."""
        x_THQ: Tensor = _Unpad.apply(x_SLHQ.flatten(0, 1), self.place_T)
        return x_THQ


def _padding(lengths: tuple[int, ...], dtype: torch.dtype, *, causal: bool) -> Padding:
    longest = max(lengths)
    length_S = torch.tensor(lengths)
    segment_T = torch.repeat_interleave(torch.arange(len(lengths)), length_S, output_size=sum(lengths))
    # Token t of segment s moves by the total padding of all segments before s.
    place_T = torch.arange(segment_T.shape[0]) + (segment_T * longest - (length_S.cumsum(0) - length_S)[segment_T])
    token_R = torch.zeros(len(lengths) * longest, dtype=torch.int64)
    token_R[place_T] = torch.arange(segment_T.shape[0])
    absent_SL = torch.arange(longest) >= length_S.unsqueeze(1)
    mask_SL = torch.zeros(absent_SL.shape, dtype=dtype).masked_fill_(absent_SL, -math.inf)
    short = causal and dtype == torch.float32 and longest <= ROW_TOKENS_MAX
    return Padding(
        segments=len(lengths),
        token_R=token_R,
        place_T=place_T,
        mask_S11L=mask_SL[:, None, None],
        mask_LL=segment_mask((longest,), causal=True) if short else None,
    )


class _Pad(torch.autograd.Function):
    """Rows to their places; the gradient of a place without a token is dropped, not added to token 0."""

    @staticmethod
    def forward(ctx: Any, x_THQ: Tensor, token_R: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        return x_THQ.index_select(0, token_R)

    @staticmethod
    def backward(ctx: Any, grad_RHQ: Tensor) -> tuple[Tensor, None, None]:
        (place_T,) = ctx.saved_tensors
        return grad_RHQ.index_select(0, place_T), None, None


class _Unpad(torch.autograd.Function):
    """Rows back from their places; places without a token get no gradient."""

    @staticmethod
    def forward(ctx: Any, x_RHQ: Tensor, place_T: Tensor) -> Tensor:
        ctx.save_for_backward(place_T)
        ctx.rows = x_RHQ.shape[0]
        return x_RHQ.index_select(0, place_T)

    @staticmethod
    def backward(ctx: Any, grad_THQ: Tensor) -> tuple[Tensor, None]:
        (place_T,) = ctx.saved_tensors
        return grad_THQ.new_zeros(ctx.rows, *grad_THQ.shape[1:]).index_copy_(0, place_T, grad_THQ), None


def _heads_first(x_THQ: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    return [part.transpose(0, 1).unsqueeze(0) for part in x_THQ.split(lengths)]


def segment_mask(lengths: tuple[int, ...], *, causal: bool) -> Tensor:
    """Return (T, T): 0 where a token may look at another of its segment, -inf elsewhere."""
    length_S = torch.tensor(lengths, dtype=torch.int64)
    segment_T = torch.repeat_interleave(torch.arange(len(lengths)), length_S, output_size=sum(lengths))
    seen_TT = segment_T.unsqueeze(1) == segment_T
    if causal:
        seen_TT = seen_TT.tril()
    return torch.zeros(seen_TT.shape).masked_fill_(~seen_TT, -math.inf)


def _attend_rows(q_THQ: Tensor, k_THQ: Tensor, v_THV: Tensor, padding: Padding, mask_LL: Tensor) -> Tensor:
    """One masked product per row and head. A causal row never sees what follows it, so padding needs no mask."""

    def by_head(x_THX: Tensor) -> Tensor:
        x_SLHX = x_THX.unflatten(0, (padding.segments, -1)) if padding.empty else padding.pad(x_THX)
        return x_SLHX.transpose(1, 2).flatten(0, 1)

    q_NLQ, k_NLQ, v_NLV = (recomputable_copy(by_head, x) for x in (q_THQ, k_THQ, v_THV))
    rows, longest, _ = q_NLQ.shape
    block = longest if rows * longest**2 <= WHOLE_SCORES_MAX else BLOCK_TOKENS
    blocks = [
        _attend_block(q_NLQ, k_NLQ, v_NLV, mask_LL, slice(begin, begin + block)) for begin in range(0, longest, block)
    ]
    out_NLV = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
    out_SLHV = out_NLV.unflatten(0, (padding.segments, -1)).transpose(1, 2)
    return out_SLHV.flatten(0, 1) if padding.empty else padding.unpad(out_SLHV)


def _attend_block(q_NLQ: Tensor, k_NLQ: Tensor, v_NLV: Tensor, mask_LL: Tensor, block: slice) -> Tensor:
    """Let some tokens of each causal row look at those up to them."""
    seen = slice(0, block.stop)
    keys_NQL, scale = k_NLQ[:, seen].transpose(1, 2), q_NLQ.shape[-1] ** -0.5
    scores_NBL = torch.baddbmm(mask_LL[block, seen], q_NLQ[:, block], keys_NQL, alpha=scale)
    return torch.bmm(scores_NBL.softmax(-1), v_NLV[:, seen])


def _attend_dense(q_THQ: Tensor, k_THQ: Tensor, v_THV: Tensor, mask_TT: Tensor) -> Tensor:
    scale = q_THQ.shape[-1] ** -0.5
    scores_HTT = torch.baddbmm(mask_TT, q_THQ.transpose(0, 1), k_THQ.permute(1, 2, 0), alpha=scale)
    return torch.bmm(scores_HTT.softmax(-1), v_THV.transpose(0, 1)).transpose(0, 1)
