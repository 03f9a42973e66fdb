"""A batch on the device of the model: all of it, or one rank's part if several ranks share its stream.

Legend: T tokens of a rank's context part, P patches that it encodes, C values of a patch, I images, A tokens of the
whole stream, M media tokens, S rows that a rank holds between layers, N those of them that are not padding, B branches
(answers to one prompt) of the stream, K those that are learned, L layers with experts, X experts of a token.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_api.batch import IGNORED_TARGET, PackedBatch
from polyreme_api.errors import InvalidConfigError
from polyreme_planner.flops import image_flops
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.model.attention_tiles import Documents
from polyreme_trainer.model.branches import Branches, Drawn, StoredScores
from polyreme_trainer.model.patch_grid import Grid
from polyreme_trainer.model.segment_attention import Attend
from polyreme_trainer.model.transfer import on_device
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.images import Deliver, FeatureRoutes, Places, share_images
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.parallel.ring import ContextRanks, attend_alone
from polyreme_trainer.train.image_assignment import BalancedImages, Patches


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
    """Attention of T tokens to the whole stream; None if T is the whole stream."""
    deliver: Deliver | None = None
    """Sends features to the ranks of their tokens; None if they are here."""
    real_N: Tensor | None = None
    """Which of the rows that this rank holds between layers are not padding, rising; None: all."""
    media_M: Tensor | None = None
    """Which of these rows are media tokens, rising; None: the model looks, and the host waits for it."""
    chosen_LSX: Tensor | None = None
    """Experts that these rows went to when answers were drawn; None: routers choose."""
    learned_N: Tensor | None = None
    """Which of T have unmasked targets, rising; None: the loss looks."""
    branches: Branches | None = None
    """The answers of documents with several; None: there are none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrawnAnswers:
    """What is known of the branches of a stream that the model has drawn itself (``Drawn``)."""

    log_prob_T: npt.NDArray[np.float64]
    """By the place of the target."""
    advantage_B: npt.NDArray[np.float64]
    share_B: npt.NDArray[np.float64]
    chosen_TLX: npt.NDArray[np.integer] | None = None
    """Experts that each place of the stream went to; None: routers choose."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The ranks that share a stream: first by context (cp), then the rows of each context part (tp)."""

    context: ContextRanks
    tp: int
    rank: int
    """This rank among cp x tp, tp fastest."""
    group: dist.ProcessGroup
    media_token: int
    shape: ModelShape

    @property
    def ranks(self) -> int:
        """Ranks that share a stream."""
        return self.context.ring * self.context.ulysses * self.tp


def sharing_of(meshes: Meshes, *, media_token: int, shape: ModelShape) -> Sharing | None:
    """Return how this rank shares its streams, or None if no other rank has them."""
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
        shape=shape,
    )


def to_inputs(
    batch: PackedBatch,
    *,
    device: torch.device | str,
    media_token: int | None = None,
    sharing: Sharing | None = None,
    balanced: BalancedImages | None = None,
    dtype: torch.dtype = torch.float32,
    reference: StoredScores | None = None,
    drawn: DrawnAnswers | None = None,
) -> Inputs:
    """Copy a batch's arrays, or this rank's part of them, to tensors.

    On CPU too: torch aligns what it allocates to 64 bytes, NumPy does not, and a kernel may round differently by
    alignment. The last bits of a loss must not depend on the state of the heap: a resumed run repeats them (ADR 6).

    Args:
        batch: Packs of this data-parallel rank.
        device: Where the model is.
        media_token: Token that an image feature replaces; None: the model finds its places; the host waits for it.
        sharing: The ranks that share the stream; None if it is this rank's alone.
        balanced: Encoders of the images, if other data-parallel ranks take part.
        dtype: Type of the computation.
        reference: Stored scores of branches; None: zero.
        drawn: What is known of branches that the model has drawn; None: they are of the data.

    Raises:
        InvalidConfigError: If the stream cannot be split evenly, or images do not fit their media tokens.
    """
    device = torch.device(device)
    branches_B4 = np.asarray(batch.branches_B4)
    offsets: list[int] = np.asarray(batch.document_offsets).tolist()
    tokens_A, targets_A = np.asarray(batch.tokens_T), np.asarray(batch.targets_T)
    images = _encoded(batch, sharing, balanced)
    place_T = place_S = np.arange(tokens_A.shape[0])
    if sharing is not None:
        place_T = sharing.context.cut(tokens_A.shape[0]).tokens_of(sharing.context.place)
        place_S = np.split(place_T, sharing.tp)[sharing.rank % sharing.tp]
    learned_N = np.flatnonzero(targets_A[place_T] != IGNORED_TARGET)
    arrays = {
        "tokens_T": tokens_A[place_T],
        "targets_T": targets_A[place_T],
        "positions_T": np.asarray(batch.positions_T)[place_T],
        "patches_PC": images.patches_PC,
        "learned_N": learned_N,
    }
    if media_token is not None:
        arrays["media_M"] = np.flatnonzero(tokens_A[place_S] == media_token)
    if batch.padding_documents:
        arrays["real_N"] = _real(batch, place_S)
    if branches_B4.size:
        arrays |= _branch_arrays(branches_B4, targets_A, offsets, place_T[learned_N], reference)
        arrays |= {} if drawn is None else _drawn_arrays(drawn, place_T[learned_N], place_S)
    tensors = _tensors(arrays, device)
    branches = _branches(tensors, sharing) if branches_B4.size else None
    return Inputs(
        **tensors,
        document_offsets=offsets,
        grids=images.grids,
        unmasked=learned_N.size,
        attend=_attend(Documents.of(offsets, branches_B4[:, :2].tolist()), device, sharing, dtype),
        deliver=images.deliver,
        branches=branches,
    )


def _attend(documents: Documents, device: torch.device, sharing: Sharing | None, dtype: torch.dtype) -> Attend | None:
    """Lay out attention, unless the model does: for a stream that is this rank's alone, without branches."""
    if sharing is not None:
        return sharing.context.attend(documents, device=device, dtype=dtype)
    return attend_alone(documents, device=device, dtype=dtype) if documents.prompts else None


def _branch_arrays(
    branches_B4: Places, targets_A: Places, offsets: Sequence[int], learned_N: Places, reference: StoredScores | None
) -> dict[str, npt.NDArray[Any]]:
    """Find the branch of each unmasked target of a rank, and how many targets each branch has in the stream."""
    begins_B, places = branches_B4[:, 1], np.flatnonzero(targets_A != IGNORED_TARGET)
    everywhere = np.searchsorted(begins_B, places, side="right") - 1
    documents = np.searchsorted(offsets, places, side="right") - 1
    if (everywhere < 0).any() or (branches_B4[everywhere, 0] != documents).any():
        raise InvalidConfigError(
            "a pack holds pairs of answers beside documents that have none and are learned; a stage of preferences "
            "draws from pairs alone",
            field="spec.data.schedule or spec.training.stages[].weights",
        )
    reference_B = np.zeros(begins_B.size) if reference is None else reference(branches_B4[:, 2:])
    known_K = np.flatnonzero(np.isfinite(reference_B))
    return {
        "branch_N": np.searchsorted(begins_B, learned_N, side="right") - 1,
        "tokens_B": np.bincount(everywhere, minlength=begins_B.size).astype(np.float64),
        "reference_B": reference_B,
        **({} if known_K.size == begins_B.size else {"known_K": known_K}),
    }


def _drawn_arrays(drawn: DrawnAnswers, learned_N: Places, place_S: Places) -> dict[str, npt.NDArray[Any]]:
    """Take what is known of answers at the places of a rank's unmasked targets, and of its rows."""
    chosen_TLX = drawn.chosen_TLX
    return {
        "log_prob_N": drawn.log_prob_T[learned_N],
        "advantage_B": drawn.advantage_B,
        "share_B": drawn.share_B,
        **({} if chosen_TLX is None else {"chosen_LSX": chosen_TLX[place_S].swapaxes(0, 1).astype(np.int64)}),
    }


def _branches(tensors: dict[str, Tensor], sharing: Sharing | None) -> Branches:
    """Take the branches' tensors out of all, and say how the ranks of the stream add up."""
    alone = Branches(
        branch_N=tensors.pop("branch_N"),
        tokens_B=tensors.pop("tokens_B"),
        reference_B=tensors.pop("reference_B"),
        known_K=tensors.pop("known_K", None),
        drawn=_drawn(tensors),
    )
    if sharing is None or sharing.ranks == sharing.tp:
        return alone

    def add_up(values: Tensor) -> None:
        if sharing.rank % sharing.tp:  # the tensor ranks of one context part know the same
            values.zero_()
        collectives.sum_over(values, sharing.group)

    return dataclasses.replace(alone, speaks=sharing.context.place == 0, add_up=add_up)


def _drawn(tensors: dict[str, Tensor]) -> Drawn | None:
    if "log_prob_N" not in tensors:
        return None
    return Drawn(
        log_prob_N=tensors.pop("log_prob_N"), advantage_B=tensors.pop("advantage_B"), share_B=tensors.pop("share_B")
    )


def _real(batch: PackedBatch, place_S: Places) -> Places:
    """Return which rows of a rank are not padding; their count is known to the host, so no rank waits for it."""
    offsets = np.asarray(batch.document_offsets)
    real_A = np.ones(np.asarray(batch.tokens_T).shape[0], dtype=bool)
    for document in batch.padding_documents:
        real_A[offsets[document] : offsets[document + 1]] = False
    return np.flatnonzero(real_A[place_S])


@dataclasses.dataclass(frozen=True, slots=True)
class _Encoded:
    """Images that this rank encodes, and the route of features to their tokens."""

    patches_PC: Patches
    grids: list[Grid]
    deliver: Deliver | None


def _encoded(batch: PackedBatch, sharing: Sharing | None, balanced: BalancedImages | None) -> _Encoded:
    grids: list[Grid] = [(rows, columns) for rows, columns in np.asarray(batch.grids_I2).tolist()]
    patches_PC = np.asarray(batch.patches_PC)
    if balanced is not None:
        lost = frozenset(batch.lost_images)
        deliver = _from_all(balanced, lost, None if sharing is None else (sharing, np.asarray(batch.tokens_T)))
        return _Encoded(balanced.patches(patches_PC, lost), balanced.encoded, deliver)
    if sharing is None:
        return _Encoded(patches_PC, grids, None)
    images = _images(grids, sharing)
    mine = images[sharing.rank // sharing.tp]
    routes = FeatureRoutes(made=_made(grids, images, sharing), wanted=_wanted(np.asarray(batch.tokens_T), sharing))
    return _Encoded(
        _patches(patches_PC, grids, mine),
        [grids[image] for image in mine],
        routes.deliver(sharing.rank, sharing.group),
    )


def _from_all(balanced: BalancedImages, lost: frozenset[int], shared: tuple[Sharing, Places] | None) -> Deliver:
    """Bring features back from all data-parallel ranks, and then to the ranks of the stream that hold their tokens."""
    part = balanced.encoder % balanced.assignment.parts
    home = balanced.return_route(part, balanced.place, lost).bring(balanced.group)
    if shared is None:
        return home
    sharing, tokens_A = shared
    made = [
        balanced.return_route(part, place, lost).rows
        for part in range(balanced.assignment.parts)
        for place in range(balanced.tp)
    ]
    onwards = FeatureRoutes(made=made, wanted=_wanted(tokens_A, sharing)).deliver(sharing.rank, sharing.group)
    return lambda features_MD: onwards(home(features_MD))


def _tensors(arrays: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Copy arrays, all at once to an accelerator."""
    held = [torch.tensor(np.asarray(array)) for array in arrays.values()]
    return dict(zip(arrays, on_device(held, device), strict=True))


def _images(grids: Sequence[Grid], sharing: Sharing) -> tuple[tuple[int, ...], ...]:
    """Images of each context part; the tensor ranks of one encode them together."""
    costs = [image_flops(sharing.shape, rows * columns) for rows, columns in grids]
    return share_images(costs, sharing.ranks // sharing.tp)


def _patches(patches_PC: Patches, grids: Sequence[Grid], images: Sequence[int]) -> Patches:
    edges = list(itertools.accumulate((rows * columns for rows, columns in grids), initial=0))
    return np.concatenate([patches_PC[:0], *(patches_PC[edges[image] : edges[image + 1]] for image in images)])


def _made(grids: Sequence[Grid], images: Sequence[Sequence[int]], sharing: Sharing) -> list[Places]:
    """Rows of features that each rank makes, numbered by the media tokens of the stream."""
    cells = [rows * columns // sharing.shape.vision.merge**2 for rows, columns in grids]
    edges = list(itertools.accumulate(cells, initial=0))
    made: list[Places] = []
    for encoded in images:
        rows = np.concatenate([np.arange(0), *(np.arange(edges[image], edges[image + 1]) for image in encoded)])
        share = -(-rows.size // sharing.tp)
        made += [rows[place * share : (place + 1) * share] for place in range(sharing.tp)]
    return made


def _wanted(tokens_A: Places, sharing: Sharing) -> list[Places]:
    """Rows that each rank wants, in the order of its tokens."""
    number_A = np.cumsum(tokens_A == sharing.media_token) - 1
    cut = sharing.context.cut(tokens_A.shape[0])
    return [
        number_A[held[tokens_A[held] == sharing.media_token]]
        for part in range(sharing.ranks // sharing.tp)
        for held in np.split(cut.tokens_of(part), sharing.tp)
    ]
