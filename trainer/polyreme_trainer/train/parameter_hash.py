"""Hashes of the parameters that several ranks hold copies of, compared over all ranks: copies that differ are damaged.

Every rank updates its copies by the same gradients, so they have the same bits, on any device. A bit that memory or a
device changed in one of them stays different, and so is found by eight bytes a buffer. Rows that FSDP2 shards have no
copies. Under ZeRO-1 all but a share of each copy is received again in each step, so a change there is found only in the
step in which it happens, and one in a share reaches all copies.

Legend: R ranks, K kinds of buffers, W words of eight bytes of a buffer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from polyreme_api.errors import CopiesDifferError, EnvironmentFailedError
from polyreme_planner.layout import Layout
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.flat_buffers import FlatModel
from polyreme_trainer.parallel.mesh import Meshes, group_ranks
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState, settle

_OCTETS = 8
_WORDS_AT_ONCE = 1 << 18
"""Words that are weighed at a time: 2 MiB, which a processor's cache holds."""
_COPIES = (("dp", "cp", "tp"), ("dp", "cp", "tp"), ("dp", "cp"), ("edp",))
"""Axes of the ranks that hold copies of the dense, exact, sliced and expert parameters."""


def compare_copies(state: TrainState, settings: TrainSettings, meshes: Meshes, *, saves: bool) -> None:
    """Compare copies of parameters where it is due; errors as ``check_copies``.

    Args:
        state: After a step.
        settings: The run.
        meshes: This rank's place.
        saves: Whether a checkpoint of the step follows: none is saved of copies that differ.
    """
    every = settings.parameter_hash_steps
    if every and (saves or state.step % every == 0):
        settle(state)
        check_copies(state.flat, meshes, step=state.step)


def check_copies(flat: FlatModel, meshes: Meshes, *, step: int) -> None:
    """Compare the copies after a step; every rank calls it, with parameters that are up to date.

    Raises:
        CopiesDifferError: On the ranks whose copies differ from most others, or from the only other one.
        EnvironmentFailedError: On all other ranks then.
    """
    buffers = (flat.dense, flat.exact, flat.tensor.flat, flat.experts.flat)
    hashes_K = torch.stack([hash_of(part.values) for part in buffers])
    found_RK: list[list[int]] = collectives.gather_slices(hashes_K, meshes.world_group).view(-1, len(buffers)).tolist()
    odd = odd_ranks(found_RK, meshes.layout)
    if not odd:
        return
    named = f"rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))}"
    words = f"copies of parameters differ after step {step}: those of {named} from the copies of other ranks"
    if meshes.rank in odd:
        raise CopiesDifferError(words, field="the memory and the devices of the rank's node")
    raise EnvironmentFailedError(words)


def odd_ranks(found_RK: Sequence[Sequence[int]], layout: Layout) -> list[int]:
    """Return the ranks whose hash is not the most common one among their copies; all ranks of a tie.

    Args:
        found_RK: Hashes of each rank.
        layout: Degrees of the axes.
    """
    odd: set[int] = set()
    for kind, axes in enumerate(_COPIES):
        left = set(range(len(found_RK)))
        while left:
            peers = group_ranks(layout, min(left), axes)
            left -= set(peers)
            (first, count), *others = Counter(found_RK[peer][kind] for peer in peers).most_common(2)
            if others:
                split = others[0][1] == count
                odd |= {peer for peer in peers if split or found_RK[peer][kind] != first}
    return sorted(odd)


@torch.no_grad()
def hash_of(values: Tensor) -> Tensor:
    """Hash a buffer on its device: a sum of its words with odd weights, modulo 2**64, which any one bit changes."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    octets = values.view(torch.uint8)
    whole = octets.numel() // _OCTETS * _OCTETS
    words_W, rest_W = octets[:whole].view(torch.int64), octets[whole:].long()
    weights_W = torch.arange(1, 2 * min(_WORDS_AT_ONCE, words_W.numel() + _OCTETS) + 1, 2, device=values.device)
    for part_W in (*words_W.split(_WORDS_AT_ONCE), rest_W):
        total = total * 3 + (part_W * weights_W[: part_W.numel()]).sum()
    return total
