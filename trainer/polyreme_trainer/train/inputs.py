"""A batch on the device of the model: the whole of it, or what falls to one rank of those that share its stream.

Legend: T tokens of a rank's context part, P patches that it encodes, C values of a patch, I images, A tokens of the
whole stream, M media tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_api.batch import IGNORED_TARGET, PackedBatch
from polyreme_trainer.model.attend import Attend
from polyreme_trainer.model.grid import Grid
from polyreme_trainer.parallel.images import Deliver, FeatureRoutes, Places, share_images
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.parallel.ring import ContextRanks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """A batch on the device of the model."""

    tokens_T: Tensor
    targets_T: Tensor
    positions_T: Tensor
    document_offsets: list[int]
    """Of the whole stream."""
    patches_PC: Tensor
    grids: list[Grid]
    unmasked: int
    """Unmasked tokens among T."""
    attend: Attend | None = None
    """Attention of T tokens to the whole stream; None where T is the whole."""
    deliver: Deliver | None = None
    """Brings features to where their tokens are; None where they are here."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The ranks that share a stream: first by context (cp), then the rows of each context part (tp)."""

    context: ContextRanks
    tp: int
    rank: int
    """This rank among cp x tp, tp fastest."""
    group: dist.ProcessGroup
    media_token: int
    merge: int
    """Patches a side that become one token."""
    dtype: torch.dtype = torch.float32

    @property
    def ranks(self) -> int:
        """Ranks that share a stream."""
        return self.context.ring * self.context.ulysses * self.tp


def sharing_of(meshes: Meshes, *, media_token: int, merge: int, dtype: torch.dtype = torch.float32) -> Sharing | None:
    """Return how this rank shares its streams, or None if it has them for itself."""
    layout = meshes.layout
    if layout.cp * layout.tp == 1:
        return None
    context = ContextRanks(
        place=meshes.place("cp"),
        ring=layout.ring,
        ulysses=layout.ulysses,
        ring_group=meshes.ring_group,
        ulysses_group=meshes.ulysses_group,
    )
    rank = meshes.place("cp") * layout.tp + meshes.place("tp")
    return Sharing(
        context=context,
        tp=layout.tp,
        rank=rank,
        group=meshes.shard_group,
        media_token=media_token,
        merge=merge,
        dtype=dtype,
    )


def to_inputs(batch: PackedBatch, *, device: torch.device | str, sharing: Sharing | None = None) -> Inputs:
    """Copy a batch's arrays to tensors, or this rank's part of them.

    On CPU too: torch aligns what it allocates to 64 bytes, NumPy does not, and a kernel may round differently by
    alignment. The last bits of a loss must not hang on the state of the heap: a resumed run repeats them (ADR 6).

    Raises:
        InvalidConfigError: If the stream cannot be shared out evenly, or images do not fit their media tokens.
    """
    grids: list[Grid] = [(rows, columns) for rows, columns in np.asarray(batch.grids_I2).tolist()]
    offsets: list[int] = np.asarray(batch.document_offsets).tolist()
    if sharing is None:
        return Inputs(
            tokens_T=_tensor(batch.tokens_T, device),
            targets_T=_tensor(batch.targets_T, device),
            positions_T=_tensor(batch.positions_T, device),
            document_offsets=offsets,
            patches_PC=_tensor(batch.patches_PC, device),
            grids=grids,
            unmasked=batch.unmasked_tokens,
        )
    tokens_A = np.asarray(batch.tokens_T)
    place_T = sharing.context.cut(tokens_A.shape[0]).tokens_of(sharing.context.place)
    targets_T = np.asarray(batch.targets_T)[place_T]
    images = _images(grids, sharing)
    mine = images[sharing.rank // sharing.tp]
    device = torch.device(device)
    return Inputs(
        tokens_T=_tensor(tokens_A[place_T], device),
        targets_T=_tensor(targets_T, device),
        positions_T=_tensor(np.asarray(batch.positions_T)[place_T], device),
        document_offsets=offsets,
        patches_PC=_tensor(_patches(np.asarray(batch.patches_PC), grids, mine), device),
        grids=[grids[image] for image in mine],
        unmasked=int((targets_T != IGNORED_TARGET).sum()),
        attend=sharing.context.attend(offsets, device=device, dtype=sharing.dtype),
        deliver=_routes(tokens_A, grids, images, sharing).deliver(sharing.rank, sharing.group),
    )


def _tensor(array: object, device: torch.device | str) -> Tensor:
    """Copy; to an accelerator by pinned memory, which torch's allocator keeps until the copy is done: nobody waits."""
    host = torch.tensor(np.asarray(array))
    return host if torch.device(device).type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def _images(grids: Sequence[Grid], sharing: Sharing) -> tuple[tuple[int, ...], ...]:
    """Images of each context part; the tensor ranks of one encode them together."""
    return share_images([rows * columns for rows, columns in grids], sharing.ranks // sharing.tp)


def _patches(
    patches_PC: npt.NDArray[np.float32], grids: Sequence[Grid], images: Sequence[int]
) -> npt.NDArray[np.float32]:
    edges = list(itertools.accumulate((rows * columns for rows, columns in grids), initial=0))
    return np.concatenate([patches_PC[:0], *(patches_PC[edges[image] : edges[image + 1]] for image in images)])


def _routes(
    tokens_A: Places, grids: Sequence[Grid], images: Sequence[Sequence[int]], sharing: Sharing
) -> FeatureRoutes:
    """Rows of features are numbered by the media tokens of the stream."""
    cells = [rows * columns // sharing.merge**2 for rows, columns in grids]
    edges = list(itertools.accumulate(cells, initial=0))
    number_A = np.cumsum(tokens_A == sharing.media_token) - 1
    cut = sharing.context.cut(tokens_A.shape[0])
    made: list[Places] = []
    wanted: list[Places] = []
    for part, encoded in enumerate(images):
        rows = np.concatenate([np.arange(0), *(np.arange(edges[image], edges[image + 1]) for image in encoded)])
        share = -(-rows.size // sharing.tp)
        made += [rows[place * share : (place + 1) * share] for place in range(sharing.tp)]
        wanted += [
            number_A[held[tokens_A[held] == sharing.media_token]] for held in np.split(cut.tokens_of(part), sharing.tp)
        ]
    return FeatureRoutes(made=made, wanted=wanted)
