"""Fingerprints of the weights that all ranks together hold: the same in every layout, for the same bits.

Each scalar's bits are multiplied by an odd number that its place in its tensor determines, and added up modulo 2**64;
so the boxes that ranks hold may be added in any order. It tells models apart; it is no protection against forgery.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from polyreme_trainer.checkpoint.shards import boxes_of
from polyreme_trainer.model.adapters import is_adapter
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.checkpoint_content import content, shard_of
from polyreme_trainer.train.state import TrainState

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd: of Fibonacci hashing, as a signed number."""
_AT_ONCE = 1 << 22
"""Scalars that are multiplied at a time; bounds the memory."""
_WORD = 1 << 64

_Sums = dict[tuple[str, tuple[int, ...]], int]
"""Sum of each box, by the name of its tensor and where in it the box begins."""


@torch.no_grad()
def saved_fingerprint(state: TrainState, meshes: Meshes) -> str:
    """Return that of the weights and router biases which a checkpoint holds; every rank calls it, and gets the same."""
    held = content(state, meshes, with_rng=False, with_optimizer=False).state_dict()
    sums: _Sums = {}
    for name, offsets, box, whole in boxes_of(held):
        sums[name, offsets] = box_sum(box, offsets, whole)
    return _agreed(sums, meshes)


@torch.no_grad()
def frozen_fingerprint(state: TrainState, meshes: Meshes) -> str:
    """Return that of the weights beside which adapters are trained; every rank calls it, and gets the same.

    Scalars are rounded to bfloat16, so a run in another precision has the same.
    """
    sums: _Sums = {}
    for model in state.models.values():
        for name, tensor in model.state_dict().items():
            shard = shard_of(name, state.flat)
            if not is_adapter(name):
                for offsets, box in shard.boxes(tensor.shape, 0, tensor.reshape(-1)):
                    sums[name, offsets] = box_sum(box, offsets, shard.whole_shape(tensor.shape), rounded=True)
    return _agreed(sums, meshes)


def _agreed(sums: _Sums, meshes: Meshes) -> str:
    """Add up the boxes of all ranks by tensor; one that several ranks hold counts once: all say the same of it."""
    gathered = collectives.gather_to_first(sums, meshes.control_group)
    digest = None
    if gathered is not None:
        by_tensor: dict[str, int] = {}
        for (name, _), total in {box: total for each in gathered for box, total in each.items()}.items():
            by_tensor[name] = (by_tensor.get(name, 0) + total) % _WORD
        lines = "".join(f"{name} {total:016x}\n" for name, total in sorted(by_tensor.items()))
        digest = hashlib.sha256(lines.encode()).hexdigest()
    return collectives.from_first(digest, meshes.control_group)


def box_sum(box: Tensor, offsets: tuple[int, ...], whole: tuple[int, ...], *, rounded: bool = False) -> int:
    """Sum the marked scalars of a box of a tensor, modulo 2**64; a part of them at a time."""
    scalars = box.reshape(-1)
    total = 0
    for begin in range(0, scalars.shape[0], _AT_ONCE):
        some = scalars[begin : begin + _AT_ONCE]
        some = some.to(torch.bfloat16).float() if rounded else some.contiguous()
        own = torch.arange(begin, begin + some.shape[0], device=box.device)
        marked = (_places(own, tuple(box.shape), offsets, whole) * 2 + 1) * _MULTIPLIER
        marked ^= marked >> 29
        total += int(((some.view(torch.int32).to(torch.int64) + 1) * (marked | 1)).sum())
    return total % _WORD


def _places(own: Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], whole: tuple[int, ...]) -> Tensor:
    """Turn places in a box into places in its tensor."""
    places, stride = torch.zeros_like(own), 1
    for length, first, extent in zip(reversed(shape), reversed(offsets), reversed(whole), strict=True):
        places += (own % length + first) * stride
        own, stride = own // length, stride * extent
    return places
