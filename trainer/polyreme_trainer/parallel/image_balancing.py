"""Balance the image encoding of a microbatch over data-parallel ranks, and route the features back to their owners.

A step takes as long as its slowest rank, and packs differ in their images. So images of a rank that has many are
encoded by ranks that have few. An image stays with its owner, the context part of its own stream that ``share_images``
gives it to, unless it has to move. An assignment is a function of the cost of the images in all data-parallel ranks'
packs, and every rank computes the same one without communication. The encoder of an image reads its patches itself, so
only features are exchanged, and their gradients on the same route back.

An **encoder** is one context part of one data-parallel rank, with all its tensor ranks: number ``dp x context parts +
part``, which is also its place in the group of dp x cp. Features return to their owner at the tensor place where the
encoder's tower left them; from there ``FeatureRoutes`` takes them to their tokens. An image is identified by its
data-parallel rank and its number among the images that the index has in that rank's microbatch.

Legend: M rows of features made here, N rows of features that are owned here, D their width.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_trainer.model.transfer import on_device
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.images import Deliver, share_images

GAIN_MIN = 0.02
"""Least share of the slowest rank's operations that balancing must save: below it, every image stays with its owner and
there is no exchange."""
MOVES_MAX = 1024
"""Most images that leave their owner in one microbatch: the largest that fit go first."""

Image = tuple[int, int]
"""Data-parallel rank of its owner, and number there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageAssignment:
    """Encoder of each image."""

    owners: tuple[tuple[int, ...], ...]
    """Encoder that owns each image, by data-parallel rank."""
    by_encoder: tuple[tuple[Image, ...], ...]
    """Images of each encoder in the order in which it encodes them: its own, then remote ones."""

    @property
    def parts(self) -> int:
        """Context parts of a data-parallel rank."""
        return len(self.by_encoder) // len(self.owners)

    def owner_of(self, image: Image) -> int:
        """Return the encoder that needs the features of an image."""
        return self.owners[image[0]][image[1]]

    def loads(self, costs: Sequence[Sequence[int]]) -> list[int]:
        """Return the operations of each encoder."""
        return [sum(costs[dp][number] for dp, number in images) for images in self.by_encoder]


def balance_images(
    costs: Sequence[Sequence[int]], *, parts: int, other_flops: int, saves_min: int = 1
) -> ImageAssignment | None:
    """Move whole images from the fullest encoder to the emptiest, as long as that lowers the fullest.

    No move makes the larger of the two as large as the fullest was, so the largest load never rises.

    Args:
        costs: Operations of each image, by data-parallel rank.
        parts: Context parts of a data-parallel rank.
        other_flops: Operations of an encoder's rank other than images.
        saves_min: Least operations that are worth an exchange, however small the step.

    Returns:
        None if it would save less than that or ``GAIN_MIN``: images then stay with their owners.
    """
    shares = [share_images(costs_I, parts) for costs_I in costs]
    owner_loads = [
        sum(costs_I[image] for image in share) for costs_I, of in zip(costs, shares, strict=True) for share in of
    ]
    before = max(owner_loads, default=0)
    least = max(
        -(-sum(owner_loads) // max(1, len(owner_loads))), max((max(own, default=0) for own in costs), default=0)
    )
    worth = max(float(saves_min), GAIN_MIN * (other_flops + before))
    if before - least < worth:
        return None
    loads = np.array(owner_loads, np.int64)
    holds = [
        sorted((costs_I[image], (dp, image)) for image in share)
        for dp, (costs_I, of) in enumerate(zip(costs, shares, strict=True))
        for share in of
    ]
    for _ in range(MOVES_MAX):
        fullest, emptiest = int(loads.argmax()), int(loads.argmin())
        # Images stay with their owners unless they have to move: the rest is not worth a move.
        even = loads[fullest] - least < GAIN_MIN / 2 * (other_flops + int(loads[fullest]))
        if even or not _move(holds, loads, fullest, emptiest):
            break
    if before - int(loads.max()) < worth:
        return None
    owners = tuple(_owners(of, first=dp * parts) for dp, of in enumerate(shares))
    return ImageAssignment(
        owners=owners, by_encoder=tuple(_ordered(held, encoder // parts) for encoder, held in enumerate(holds))
    )


def _owners(shares: Sequence[Sequence[int]], *, first: int) -> tuple[int, ...]:
    owners = [first] * sum(map(len, shares))
    for part, images in enumerate(shares):
        for image in images:
            owners[image] = first + part
    return tuple(owners)


def _move(holds: list[list[tuple[int, Image]]], loads: npt.NDArray[np.int64], fullest: int, emptiest: int) -> bool:
    """Move the image that evens out two encoders best; False if none makes the fuller one less full than it was."""
    gap = int(loads[fullest] - loads[emptiest])
    held = holds[fullest]
    at = bisect.bisect_right(held, gap // 2, key=lambda image: image[0])
    near = [place for place in (at - 1, at) if 0 <= place < len(held) and 0 < held[place][0] < gap]
    if not near:
        return False
    image = held.pop(min(near, key=lambda place: (max(held[place][0], gap - held[place][0]), held[place])))
    bisect.insort(holds[emptiest], image)
    loads[fullest] -= image[0]
    loads[emptiest] += image[0]
    return True


def _ordered(held: Sequence[tuple[int, Image]], owner: int) -> tuple[Image, ...]:
    return tuple(sorted((image for _, image in held), key=lambda image: (image[0] != owner, image)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReturnRoute:
    """Rows that one rank sends and receives, so that it has the features of the images that it owns."""

    kept: npt.NDArray[np.int64]
    """Rows made here, of M, that are owned here."""
    leaving: npt.NDArray[np.int64]
    """Rows made here that others own, in the order of the ranks."""
    sent: list[int]
    """How many of them go to each rank of dp x cp."""
    received: list[int]
    order: npt.NDArray[np.int64]
    """Indices into the kept rows followed by the received ones: in the order of the stream, without lost images."""
    rows: npt.NDArray[np.int64]
    """The media tokens, by their number in the stream, that these N rows are for; rising."""

    def bring(self, group: dist.ProcessGroup) -> Deliver:
        """Make the exchange; every rank of dp x cp calls it, even one without an image."""
        held = [torch.tensor(places) for places in (self.kept, self.leaving, self.order)]

        def bring(features_MD: Tensor) -> Tensor:
            kept_M, leaving_M, order_N = on_device(held, features_MD.device)
            came_MD = collectives.exchange_rows(
                features_MD.index_select(0, leaving_M), sent=self.sent, received=self.received, group=group
            )
            return torch.cat([features_MD.index_select(0, kept_M), came_MD]).index_select(0, order_N)

        return bring


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Some cells of an image that lie on one rank after the tower."""

    image: Image
    cells: range
    begin: int
    """Row of the first of them there."""


def held_after_tower(
    assignment: ImageAssignment, cells: Sequence[Sequence[int]], encoder: int, *, tp: int, place: int
) -> Iterator[Held]:
    """Yield the cells that a tensor rank of an encoder holds: an equal part of all rows, fewer on the last ranks.

    Args:
        assignment: Encoder of each image.
        cells: Features of each image, by data-parallel rank.
        encoder: Encoder whose images are asked for.
        tp: Tensor ranks of an encoder.
        place: Of the rank among them.
    """
    images = assignment.by_encoder[encoder]
    share = -(-sum(cells[dp][number] for dp, number in images) // tp)
    begin, at = place * share, 0
    for dp, number in images:
        count = cells[dp][number]
        mine = range(min(max(begin - at, 0), count), min(max(begin + share - at, 0), count))
        if mine:
            yield Held(image=(dp, number), cells=mine, begin=at + mine.start - begin)
        at += count


def return_route(
    assignment: ImageAssignment,
    cells: Sequence[Sequence[int]],
    encoder: int,
    *,
    tp: int,
    place: int,
    lost: frozenset[int] = frozenset(),
) -> ReturnRoute:
    """Work out the return route of one rank.

    Args:
        assignment: Encoder of each image.
        cells: Features of each image, by data-parallel rank.
        encoder: This rank's.
        tp: Tensor ranks of an encoder.
        place: Of this rank among them.
        lost: Images of this data-parallel rank that have no tokens, since their sample is damaged.
    """
    kept: list[range] = []
    leaving: list[list[range]] = [[] for _ in assignment.by_encoder]
    numbers: list[range | Sequence[int]] = []
    first = _first_rows(cells[encoder // assignment.parts], lost)
    received = [0] * len(assignment.by_encoder)
    for held in held_after_tower(assignment, cells, encoder, tp=tp, place=place):
        here = range(held.begin, held.begin + len(held.cells))
        if assignment.owner_of(held.image) == encoder:
            kept.append(here)
            numbers.append(_numbers(held, first, lost))
        else:
            leaving[assignment.owner_of(held.image)].append(here)
    for other in _encoders_of(assignment, encoder):
        for held in held_after_tower(assignment, cells, other, tp=tp, place=place):
            if assignment.owner_of(held.image) == encoder:
                received[other] += len(held.cells)
                numbers.append(_numbers(held, first, lost))
    number_N = _joined(numbers)
    order = np.argsort(number_N, kind="stable")[np.count_nonzero(number_N < 0) :]
    return ReturnRoute(
        kept=_joined(kept),
        leaving=_joined(itertools.chain(*leaving)),
        sent=[sum(map(len, parts)) for parts in leaving],
        received=received,
        order=order,
        rows=number_N[order],
    )


def _encoders_of(assignment: ImageAssignment, owner: int) -> list[int]:
    """Return the other encoders that take images of this owner."""
    return [
        other
        for other, images in enumerate(assignment.by_encoder)
        if other != owner and any(assignment.owner_of(image) == owner for image in images)
    ]


def _first_rows(cells_I: Sequence[int], lost: frozenset[int]) -> list[int]:
    """Return the number of the first media token of each image."""
    there = (0 if image in lost else count for image, count in enumerate(cells_I))
    return list(itertools.accumulate(there, initial=0))


def _numbers(held: Held, first: Sequence[int], lost: frozenset[int]) -> Sequence[int]:
    """Return the media tokens of the rows; below 0: none."""
    image = held.image[1]
    if image in lost:
        return [-1] * len(held.cells)
    return range(first[image] + held.cells.start, first[image] + held.cells.stop)


def _joined(parts: Iterator[Sequence[int]] | Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(part, np.int64) for part in parts)])
