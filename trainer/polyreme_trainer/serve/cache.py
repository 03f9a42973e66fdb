"""Latents of the tokens that were run, in pages: all that later tokens need of them (DeepSeek-V2, arXiv:2405.04434).

A token has one latent and one rotated key a layer, which all heads share: for Kimi-VL 576 numbers, where keys and
values of all heads would be 5,120. ``Int8`` holds latents in 8 bits, with one scale for each tile of numbers; the
rotated part stays as it is, since it decides which token is near.

Legend: T tokens, G pages in all, K tokens a page, B sequences, N pages of the longest of them, L = N * K places, C
latent width, R rotated width, X = C + R, W tiles of a latent.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from polyreme_planner.latent_cache import CacheKind, tiles_of
from polyreme_planner.shapes import DecoderShape
from polyreme_trainer.serve.pages import Copy

_INT8_MAX = 127.0


class LatentCache(Protocol):
    """Pages of the layers that run here."""

    @property
    def page_tokens(self) -> int:
        """Tokens a page."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages."""
        ...

    def write(self, layer: int, place_T: Tensor, latent_TX: Tensor) -> None:
        """Put latents with their rotated keys to places: page * page_tokens + token within the page."""
        ...

    def read(self, layer: int, page_BN: Tensor) -> Tensor:
        """Return what pages hold (B, L, X), in the type of the computation."""
        ...

    def copy(self, copies: list[Copy]) -> None:
        """Copy pages, in all layers."""
        ...


class FullCache:
    """Holds latents as they are computed."""

    def __init__(self, shape: DecoderShape, layers: range, pages: int, page_tokens: int, *, like: Tensor) -> None:
        self.page_tokens = page_tokens
        width = shape.kv_rank + shape.rope_dim
        # Not zeros: no place is read before it was written, but those beyond a sequence's end, which weigh nothing.
        self._latent_GKX = {layer: like.new_zeros((pages, page_tokens, width)) for layer in layers}

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(held_GKX.nbytes for held_GKX in self._latent_GKX.values())

    def write(self, layer: int, place_T: Tensor, latent_TX: Tensor) -> None:
        """Put latents to places."""
        self._latent_GKX[layer].flatten(0, 1).index_copy_(0, place_T, latent_TX)

    def read(self, layer: int, page_BN: Tensor) -> Tensor:
        """Gather pages."""
        return _gathered(self._latent_GKX[layer], page_BN)

    def copy(self, copies: list[Copy]) -> None:
        """Copy pages."""
        for latent_GKX in self._latent_GKX.values():
            _copy(latent_GKX, copies)


class Int8Cache:
    """Holds latents in 8 bits, each tile relative to its largest number, and rotated keys as they are computed."""

    def __init__(self, shape: DecoderShape, layers: range, pages: int, page_tokens: int, *, like: Tensor) -> None:
        self.page_tokens = page_tokens
        tiles, self._tile = tiles_of(shape)
        self._missing = tiles * self._tile - shape.kv_rank
        self._rank = shape.kv_rank
        room = (pages, page_tokens)
        self._held = {
            layer: (
                like.new_zeros((*room, tiles * self._tile), dtype=torch.int8),
                like.new_zeros((*room, tiles), dtype=torch.float32),
                like.new_zeros((*room, shape.rope_dim)),
            )
            for layer in layers
        }

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(held_GKX.nbytes for held in self._held.values() for held_GKX in held)

    def write(self, layer: int, place_T: Tensor, latent_TX: Tensor) -> None:
        """Round latents to the nearest of 255 steps of their tile."""
        latent_TC, key_TR = latent_TX.split((self._rank, latent_TX.shape[1] - self._rank), dim=1)
        padded_TC = F.pad(latent_TC.float(), (0, self._missing))
        tiles_TWX = padded_TC.unflatten(1, (-1, self._tile))
        scale_TW = tiles_TWX.abs().amax(-1) / _INT8_MAX
        rounded_TWX = (tiles_TWX / scale_TW.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)).round_()
        for held_GKX, value_TX in zip(
            self._held[layer], (rounded_TWX.flatten(1).to(torch.int8), scale_TW, key_TR), strict=True
        ):
            held_GKX.flatten(0, 1).index_copy_(0, place_T, value_TX)

    def read(self, layer: int, page_BN: Tensor) -> Tensor:
        """Gather pages, and multiply by the scales."""
        rounded_BLC, scale_BLW, key_BLR = (_gathered(held_GKX, page_BN) for held_GKX in self._held[layer])
        tiles_BLWX = rounded_BLC.unflatten(-1, (-1, self._tile)) * scale_BLW.unsqueeze(-1)
        latent_BLC = tiles_BLWX.flatten(2)[..., : self._rank]
        return torch.cat((latent_BLC.to(key_BLR.dtype), key_BLR), dim=-1)

    def copy(self, copies: list[Copy]) -> None:
        """Copy pages."""
        for held in self._held.values():
            for held_GKX in held:
                _copy(held_GKX, copies)


def open_cache(
    kind: CacheKind, shape: DecoderShape, layers: range, pages: int, page_tokens: int, *, like: Tensor
) -> LatentCache:
    """Make an empty cache for the layers that run here, of the type and on the device of ``like``."""
    held = Int8Cache if kind is CacheKind.INT8 else FullCache
    return held(shape, layers, pages, page_tokens, like=like)


def _gathered(held_GKX: Tensor, page_BN: Tensor) -> Tensor:
    return held_GKX.index_select(0, page_BN.flatten()).view(page_BN.shape[0], -1, held_GKX.shape[2])


def _copy(held_GKX: Tensor, copies: list[Copy]) -> None:
    if copies:
        source, target = zip(*((copy.source, copy.target) for copy in copies), strict=True)
        held_GKX[list(target)] = held_GKX[list(source)]
