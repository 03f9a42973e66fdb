"""Balance the images of a step's packs over neighbouring data-parallel ranks, and read those assigned to this rank.

Ranks are numbered so that neighbours share a node. Only a few take each other's images, so an exchange stays near, and
what a rank looks up does not grow with the job. The order of packs is a function of plan and step, and their grids lie
in the mapped index, so each rank looks up its neighbours' grids: no rank asks another, and no host waits for an
accelerator. The encoder of a remote image reads it itself.

Legend: P patches that a rank encodes, C values of a patch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from polyreme_api.batch import BatchSource
from polyreme_planner.flops import Mix, forward_flops, image_flops
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import Part, all_parts
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.model.patch_grid import Grid
from polyreme_trainer.parallel.communicators import Operation, Wanted
from polyreme_trainer.parallel.image_balancing import Image, ImageAssignment, ReturnRoute, balance_images, return_route
from polyreme_trainer.parallel.mesh import Meshes, group_ranks

NEIGHBOURS_MAX = 8
"""Most ranks that take each other's images: those of a node. With 256 ranks in one assignment, each microbatch had an
all-to-all over all of them, and the assignment alone took 0.07 s of every rank."""
_GROUP = "images"

Patches = npt.NDArray[np.uint8 | np.float32]
"""As the source has them."""

SAVES_MIN = 200_000_000
"""Least operations of a forward that are worth an exchange there and one back: gloo takes 2 to 6 ms for both, in which
a core does that many. Where devices are faster, networks are too, and models larger: ``GAIN_MIN`` decides."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BalancedImages:
    """A microbatch whose images are balanced, from the view of one rank."""

    assignment: ImageAssignment
    grids: Sequence[Sequence[Grid]]
    """Of all images that the index has, by data-parallel rank."""
    remote_PC: Patches
    """Patches of the remote images, in the order of the assignment."""
    encoder: int
    place: int
    """Of this rank among the encoder's tensor ranks."""
    tp: int
    merge: int
    group: dist.ProcessGroup
    """The encoders' ranks of this tensor place, dp x cp."""

    @property
    def data_rank(self) -> int:
        """Data-parallel rank of the encoder."""
        return self.encoder // self.assignment.parts

    @property
    def encoded(self) -> list[Grid]:
        """Grids of the images that this rank encodes."""
        return [self.grids[dp][number] for dp, number in self.assignment.by_encoder[self.encoder]]

    def patches(self, here_PC: Patches, lost: frozenset[int]) -> Patches:
        """Join the patches that this rank encodes; those of lost images are zero.

        Args:
            here_PC: Of this data-parallel rank's images that are not lost, in order.
            lost: Numbers of those that are.
        """
        own = self.grids[self.data_rank]
        sizes = [0 if image in lost else rows * columns for image, (rows, columns) in enumerate(own)]
        edges = list(itertools.accumulate(sizes, initial=0))
        parts = [here_PC[:0]]
        for dp, number in self.assignment.by_encoder[self.encoder]:
            if dp == self.data_rank:
                rows, columns = own[number]
                zeros = np.zeros((rows * columns, here_PC.shape[1]), here_PC.dtype) if number in lost else None
                parts.append(here_PC[edges[number] : edges[number + 1]] if zeros is None else zeros)
        return np.concatenate([*parts, self.remote_PC])

    def return_route(self, part: int, place: int, lost: frozenset[int]) -> ReturnRoute:
        """Work out the return route of a rank of this stream: which rows it then has."""
        cells = [[rows * columns // self.merge**2 for rows, columns in grids] for grids in self.grids]
        encoder = self.data_rank * self.assignment.parts + part
        return return_route(self.assignment, cells, encoder, tp=self.tp, place=place, lost=lost)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageBalancer:
    """This rank's place among those that take each other's images."""

    shape: ModelShape
    parts: int
    """Context parts of a data-parallel rank."""
    data_ranks: range
    """The data-parallel ranks that take part; an assignment numbers them from 0."""
    tp: int
    stages: int
    """Ranks of a pipeline, which share the work other than images."""
    encoder: int
    place: int
    group: dist.ProcessGroup

    def assign(
        self, source: BatchSource, step: int, microbatches: Sequence[Sequence[range]]
    ) -> list[BalancedImages | None]:
        """Assign a step's images to encoders.

        Args:
            source: Its packs.
            step: Number of the step.
            microbatches: Packs of each microbatch, by data-parallel rank, of all of them.

        Returns:
            By microbatch; None where all images stay with their owners.
        """
        near = [[by_rank[dp] for dp in self.data_ranks] for by_rank in microbatches]
        first = min(packs.start for by_rank in near for packs in by_rank)
        count = max(packs.stop for by_rank in near for packs in by_rank) - first
        grids = dict(enumerate(map(_grids, source.grids(step, first=first, count=count)), start=first))
        return [self._assign(source, step, packs, grids) for packs in near]

    def _assign(
        self, source: BatchSource, step: int, packs: Sequence[range], by_pack: Mapping[int, Sequence[Grid]]
    ) -> BalancedImages | None:
        grids = [[grid for pack in mine for grid in by_pack[pack]] for mine in packs]
        sizes = [[rows * columns for rows, columns in mine] for mine in grids]
        cost_of = {size: image_flops(self.shape, size) for size in set(itertools.chain(*sizes))}
        costs = [[cost_of[size] for size in mine] for mine in sizes]
        tokens = len(packs[0]) * source.pack_tokens_in(step)
        other_flops = self._other_flops(tokens, source.pack_tokens_in(step))
        assignment = balance_images(costs, parts=self.parts, other_flops=other_flops, saves_min=SAVES_MIN)
        if assignment is None:
            return None
        remote_images = [
            image for image in assignment.by_encoder[self.encoder] if image[0] != self.encoder // self.parts
        ]
        return BalancedImages(
            assignment=assignment,
            grids=grids,
            remote_PC=self._read(source, step, remote_images, packs, by_pack),
            encoder=self.encoder,
            place=self.place,
            tp=self.tp,
            merge=self.shape.vision.merge,
            group=self.group,
        )

    def _other_flops(self, tokens: int, pack_tokens: int) -> int:
        """Count the operations of an encoder's ranks other than images, for so many tokens of a data-parallel rank."""
        flops = forward_flops(self.shape, Mix(sequence_tokens=pack_tokens))
        each = sum(flops[part] for part in all_parts(self.shape) if part is not Part.TOWER)
        return int(each * tokens) // (self.parts * self.stages)

    def _read(
        self,
        source: BatchSource,
        step: int,
        remote_images: Sequence[Image],
        packs: Sequence[range],
        by_pack: Mapping[int, Sequence[Grid]],
    ) -> Patches:
        """Read remote images, in order: those of one data-parallel rank lie pack by pack."""
        vision = self.shape.vision
        found = [np.zeros((0, vision.channels * vision.patch_px**2), np.uint8)]
        for dp, mine in enumerate(packs):
            first = 0
            for pack in mine:
                count = len(by_pack[pack])
                images = [
                    number - first for owner, number in remote_images if owner == dp and 0 <= number - first < count
                ]
                if images:
                    found.append(np.asarray(source.patches(step, pack=pack, images=images)))
                first += count
        return np.concatenate(found)


def neighbours(layout: Layout, dp: int) -> range:
    """Return the data-parallel ranks that take each other's images: ``NEIGHBOURS_MAX`` ranks, or as few as one."""
    size = max(1, NEIGHBOURS_MAX // (layout.cp * layout.tp))
    first = dp // size * size
    return range(first, min(first + size, layout.dp))


def image_group(meshes: Meshes) -> list[Wanted]:
    """Return the group over which this rank shares images, if it has neighbours and they are not all its replicas."""
    layout, near = meshes.layout, neighbours(meshes.layout, meshes.place("dp"))
    if len(near) in {1, layout.dp}:
        return []
    replicas = group_ranks(layout, meshes.rank, ("dp", "cp"))
    ranks = replicas[near.start * layout.cp : near.stop * layout.cp]
    return [Wanted(name=_GROUP, ranks=ranks, operations=frozenset({Operation.ROWS}))]


def image_balancer_of(
    meshes: Meshes, shape: ModelShape, groups: Mapping[str, dist.ProcessGroup]
) -> ImageBalancer | None:
    """Return how this rank, which holds a tower, shares images with its neighbours; None if it has no neighbours.

    Args:
        meshes: This rank's groups.
        shape: Of the model.
        groups: That of ``image_group``, if there is one.
    """
    layout = meshes.layout
    near = neighbours(layout, meshes.place("dp"))
    if len(near) == 1 or not shape.sees:
        return None
    return ImageBalancer(
        shape=shape,
        parts=layout.cp,
        data_ranks=near,
        tp=layout.tp,
        stages=layout.pp,
        encoder=(meshes.place("dp") - near.start) * layout.cp + meshes.place("cp"),
        place=meshes.place("tp"),
        group=groups.get(_GROUP, meshes.replica_group),
    )


def _grids(grids_I2: object) -> list[Grid]:
    return [(rows, columns) for rows, columns in np.asarray(grids_I2).tolist()]
