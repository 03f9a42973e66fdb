"""Fingerprint of the weights that all ranks together hold: the same in every layout, for the same bits.

Each scalar's bits are multiplied by an odd number that its place in its tensor determines, and added up modulo 2**64;
so the boxes that ranks hold may be added in any order. It tells models apart; it is no protection against forgery.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from polyreme_trainer.checkpoint.shards import HeldTensor
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.checkpoint_content import content
from polyreme_trainer.train.state import TrainState

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd: of Fibonacci hashing, as a signed number."""
_AT_ONCE = 1 << 22
"""Scalars that are multiplied at a time; bounds the memory."""


def weights_fingerprint(state: TrainState, meshes: Meshes) -> str:
    """Return a digest of all weights and router biases; every rank calls it, and gets the same."""
    sums: dict[tuple[str, tuple[int, ...]], int] = {}
    held = content(state, meshes, with_rng=False, with_optimizer=False).state_dict()
    for name, tensor in held.items():
        whole = tuple(tensor.whole) if isinstance(tensor, HeldTensor) else tuple(tensor.shape)
        parts = tensor.held if isinstance(tensor, HeldTensor) else [((0,) * tensor.dim(), tensor)]
        for offsets, box in parts:
            sums[name, tuple(offsets)] = _sum(box.detach(), tuple(offsets), whole)
    gathered = collectives.gather_to_first(sums, meshes.control_group)
    digest = None
    if gathered is not None:
        # Ranks that hold the same box say the same of it: it counts once.
        by_tensor: dict[str, int] = {}
        for (name, _), total in {box: total for each in gathered for box, total in each.items()}.items():
            by_tensor[name] = (by_tensor.get(name, 0) + total) % (1 << 64)
        lines = "".join(f"{name} {total:016x}\n" for name, total in sorted(by_tensor.items()))
        digest = hashlib.sha256(lines.encode()).hexdigest()
    return collectives.from_first(digest, meshes.control_group)


def _sum(box: Tensor, offsets: tuple[int, ...], whole: tuple[int, ...]) -> int:
    """Sum the marked scalars of a box of a tensor, modulo 2**64; a part of them at a time."""
    bits = box.contiguous().view(-1).view(torch.int32)
    total = 0
    for begin in range(0, bits.shape[0], _AT_ONCE):
        some = bits[begin : begin + _AT_ONCE].to(torch.int64)
        at = _places(torch.arange(begin, begin + some.shape[0], device=box.device), tuple(box.shape), offsets, whole)
        marked = (at * 2 + 1) * _MULTIPLIER
        marked ^= marked >> 29
        total += int(((some + 1) * (marked | 1)).sum())
    return total % (1 << 64)


def _places(own: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], whole: tuple[int, ...]) -> Tensor:
    """Turn places in a box into places in its tensor."""
    places, stride = torch.zeros_like(own), 1
    for length, first, extent in zip(reversed(shape), reversed(offsets), reversed(whole), strict=True):
        places += (own % length + first) * stride
        own, stride = own // length, stride * extent
    return places
