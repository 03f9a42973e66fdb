"""Digest of the weights that adapters are trained beside: the same for every layout and precision.

Every number, rounded to bfloat16, is looked up in a table of random integers; their sum over a tensor is multiplied by
a hash of its name, and those of all tensors are added, modulo 2 ** 64. So slices of a tensor add up to the digest of
the whole, on whichever ranks they are. It does not see the order of numbers within a matrix: it shall notice other
weights, not an attack.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from polyreme_trainer.model.adapters import is_adapter
from polyreme_trainer.model.initialise import STACKED
from polyreme_trainer.model.sharding import cut_of
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes, sparse_place
from polyreme_trainer.train.state import TrainState

_AT_ONCE_SCALARS = 1 << 22
_WORD = 1 << 64


@torch.no_grad()
def digest_of_frozen(state: TrainState, meshes: Meshes) -> str:
    """Compute it; every rank calls it, and gets the same."""
    table = _table(state.flat.dense.values.device)
    total = 0
    for model in state.models.values():
        for name, tensor in model.state_dict().items():
            if is_adapter(name) or not _counts(name, meshes):
                continue
            for named, part in _experts(name, tensor, model.experts_local):
                total += _hash(named) * _sum(part, table)
    return f"{sum(collectives.gather_to_all(total % _WORD, meshes.control_group)) % _WORD:016x}"


def _counts(name: str, meshes: Meshes) -> bool:
    """Whether this rank counts a tensor: of several copies, one does."""
    if name.endswith(STACKED):
        return sparse_place(meshes.layout, meshes.rank)["edp"] == 0
    shared = ("dp", "cp") if cut_of(name) is not None else ("dp", "cp", "tp")
    return all(meshes.place(axis) == 0 for axis in shared)


def _experts(name: str, tensor: Tensor, experts: range) -> Iterator[tuple[str, Tensor]]:
    if name.endswith(STACKED):
        yield from ((f"{name}.{expert}", part) for expert, part in zip(experts, tensor, strict=True))
    else:
        yield name, tensor


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1


def _table(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(1 << 62), 1 << 62, (1 << 16,), generator=generator).to(device)


def _sum(tensor: Tensor, table: Tensor) -> int:
    """Add what the table has for each number; sums of int64 are modulo 2 ** 64."""
    total = 0
    for part in tensor.reshape(-1).split(_AT_ONCE_SCALARS):
        bits = part.to(torch.bfloat16).view(torch.int16).int() + (1 << 15)
        total += int(table[bits].sum())
    return total
