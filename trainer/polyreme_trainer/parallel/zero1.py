"""Exchanges of a sharded update (ZeRO-1, arXiv:1910.02054): gradients to their owners, parameters back.

A bucket's gradient is reduce-scattered while the backward passes of earlier layers still run. When it leaves is fixed
by layer: where the last backward pass of the step leaves a layer, all buckets go whose parameters lie in this layer and
later ones. So every rank makes these exchanges in one order among those of the layers, whichever gradients it makes
itself. NCCL does not promise progress if ranks begin the exchanges of two communicators in different orders.

Buckets with parameters before the first layer (embedding, projector, tower) go when the backward has ended, and so do
all buckets under schedules that compute gradients of weights apart from those of inputs (zero-bubble).

Parameters are gathered bucket by bucket after the optimizer, in the order in which the forward pass reads them. When a
module is next called, it waits for the buckets that it has parameters in, and for no others: those of later layers are
received meanwhile. These exchanges have groups apart from the layers', so that they overlap.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch.distributed as dist
from torch import Tensor, nn

from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.communicators import Wanted
from polyreme_trainer.parallel.flat_buffers import FlatModel, FlatParameters
from polyreme_trainer.parallel.flat_layout import Piece, Slot
from polyreme_trainer.parallel.mesh import Meshes, share_groups

_WHOLE, _TENSOR, _EXPERTS = "dense_update", "tensor_update", "expert_update"
_AXES = {_WHOLE: ("dp", "cp", "tp"), _TENSOR: ("dp", "cp"), _EXPERTS: ("edp",)}
"""Axes of the ranks that hold the same whole parameters, slices or experts."""
_OF_LAYER = re.compile(r"language_model\.model\.layers\.(\d+)\.")
_AFTER_LAYERS = ("language_model.lm_head.", "language_model.model.norm.")
"""Prefixes of the names of parameters whose gradients are made before those of the last layer."""
_READS_FOR_OTHERS = re.compile(r"(.+\.(?:layers|blocks)\.\d+|vision_tower\.patch_embed|multi_modal_projector)\.")
"""Names of modules that read their children's parameters, some without a call of the child."""

_Key = tuple[int, int]
"""A buffer and where a bucket of it starts."""


@dataclasses.dataclass(slots=True)
class _Turn:
    """One bucket of one part, in the order of its group."""

    part: FlatParameters
    piece: Piece
    layers: frozenset[int] | None
    """Decoder layers whose gradients it waits for; None: it goes when the backward has ended."""


class Replicas:
    """Buffers that all ranks of a group hold copies of, and whose update they shard."""

    def __init__(self, parts: Iterable[FlatParameters], group: dist.ProcessGroup) -> None:
        """Order the buckets: the last layers' first, those that wait for the end last.

        Args:
            parts: Buffers, each cut into one share per rank of the group.
            group: A group for these exchanges alone.
        """
        self.group = group
        self._turns = sorted((turn for part in parts for turn in _turns(part)), key=_due)
        self._next = len(self._turns)
        self._reducing: list[dist.Work] = []
        self._gathering: dict[_Key, dist.Work] = {}
        for index, turn in enumerate(self._turns):
            for slot, parameter in turn.part.parameters():
                if _overlaps(slot, turn.piece):
                    parameter.register_post_accumulate_grad_hook(self._check(index))

    def begin(self) -> None:
        """Start a step."""
        self._next = 0

    def advance(self, ended: AbstractSet[int]) -> None:
        """Begin to reduce the next buckets, as far as these layers' gradients are all that they wait for."""
        while self._next < len(self._turns) and (layers := self._turns[self._next].layers) is not None:
            if not layers <= ended:
                return
            self._reduce_next()

    def finish(self) -> None:
        """Reduce the remaining buckets, and wait for all: the owners' shares are then summed."""
        while self._next < len(self._turns):
            self._reduce_next()
        collectives.finish(self._reducing, self.group)
        self.settle()

    def gather(self, part: FlatParameters, piece: Piece) -> None:
        """Begin to send an updated piece to the other ranks, and to receive theirs."""
        whole = piece.bucket.of(part.values)
        self._gathering[_key(part, piece)] = collectives.begin_gather(whole, piece.of(part.values), self.group)

    def settle(self, keys: Iterable[_Key] | None = None) -> None:
        """Wait until the parameters of some buckets are here; None: of all."""
        if self._gathering:
            wanted = list(self._gathering) if keys is None else keys
            works = [work for key in wanted if (work := self._gathering.pop(key, None)) is not None]
            collectives.finish(works, self.group)

    def readers(self) -> Iterator[tuple[str, _Key]]:
        """Yield the name of each module that reads parameters of a bucket, with the bucket: the last to leave first."""
        for turn in reversed(self._turns):
            for name in {_reader(slot.name) for slot in turn.part.slots if _overlaps(slot, turn.piece)}:
                yield name, _key(turn.part, turn.piece)

    def _check(self, index: int) -> Callable[[Tensor], None]:
        def made(_: Tensor) -> None:
            if index < self._next:
                raise RuntimeError(f"a gradient was made after its bucket was reduced: bucket {index}")

        return made

    def _reduce_next(self) -> None:
        turn = self._turns[self._next]
        own = turn.piece.of_own(turn.part.own_gradients)
        whole = turn.piece.bucket.of(turn.part.gradients)
        self._reducing.append(collectives.begin_reduce_scatter(own, whole, self.group))
        self._next += 1


class Zero1Update:
    """All exchanges of a rank's sharded update."""

    def __init__(self, replicas: Sequence[Replicas], owner_of: dict[int, Replicas]) -> None:
        self._replicas = replicas
        self._replicas_of = owner_of
        self._passes = 0
        self._left: dict[int, int] = {}
        """Backward passes that have not left a layer yet, by its number."""
        self._ended: set[int] = set()

    def begin(self, passes: int) -> None:
        """Start a step of so many backward passes."""
        self._passes = passes
        self._left.clear()
        self._ended.clear()
        for replicas in self._replicas:
            replicas.begin()

    def watch(self, layer: int, x_SD: Tensor) -> Tensor:
        """Return the input of a layer so that its gradient, the last that the layer's backward makes, is noticed."""
        if not x_SD.requires_grad:
            return x_SD
        # Autograd makes the gradient of a view after all others of the layer; for a leaf it promises no order.
        watched_SD = x_SD.view_as(x_SD)
        watched_SD.register_hook(lambda _: self._leave(layer))
        return watched_SD

    def _leave(self, layer: int) -> None:
        self._left[layer] = self._left.get(layer, self._passes) - 1
        if not self._left[layer]:
            self._ended.add(layer)
            for replicas in self._replicas:
                replicas.advance(self._ended)

    def finish(self) -> None:
        """Wait until the gradients of what this rank updates are summed."""
        for replicas in self._replicas:
            replicas.finish()

    def gather(self, part: FlatParameters, piece: Piece) -> None:
        """Begin to send an updated piece to the other ranks, and to receive theirs; skip parts without copies."""
        if (replicas := self.replicas_of(part)) is not None:
            replicas.gather(part, piece)

    def replicas_of(self, part: FlatParameters) -> Replicas | None:
        """Return the exchanges of a part with the ranks that hold copies of it; None if there are none."""
        return self._replicas_of.get(id(part))

    def settle(self) -> None:
        """Wait until all parameters are here."""
        for replicas in self._replicas:
            replicas.settle()

    def wait_in(self, model: KimiVL) -> None:
        """Let each module wait, before it runs, for the parameters that it reads."""
        needed: dict[str, dict[int, list[_Key]]] = {}
        for number, replicas in enumerate(self._replicas):
            for name, key in replicas.readers():
                needed.setdefault(name, {}).setdefault(number, []).append(key)
        for name, module in model.named_modules():
            if name in needed:
                module.register_forward_pre_hook(self._waiting(needed[name]))

    def _waiting(self, needed: Mapping[int, Sequence[_Key]]) -> Callable[[nn.Module, object], None]:
        def wait(_: nn.Module, __: object) -> None:
            for number, keys in needed.items():
                self._replicas[number].settle(keys)

        return wait


def update_groups(meshes: Meshes) -> list[Wanted]:
    """Return the groups of a sharded update."""
    axes = {name: along for name, along in _AXES.items() if name != _TENSOR or meshes.layout.tp > 1}
    return share_groups(meshes.layout, meshes.rank, axes)


def open_zero1(
    flat: FlatModel, groups: Mapping[str, dist.ProcessGroup], models: Iterable[KimiVL], *, by_layer: bool
) -> Zero1Update:
    """Return the exchanges of a sharded update.

    Args:
        flat: Buffers that were laid out for it.
        groups: Those of ``update_groups``.
        models: This rank's stages, whose modules wait for their parameters.
        by_layer: Whether their layers fix when buckets of gradients go; else they go when the backward has ended.
    """
    replicas: list[Replicas] = []
    replicas_of: dict[int, Replicas] = {}
    for name, parts in (
        (_WHOLE, (flat.dense, flat.exact)),
        (_TENSOR, (flat.tensor.flat,)),
        (_EXPERTS, (flat.experts.flat,)),
    ):
        shared = [part for part in parts if part.shares.count > 1]
        if not any(part.length for part in shared):
            continue
        replicas.append(Replicas(shared, groups[name]))
        replicas_of |= {id(part): replicas[-1] for part in shared}
    update = Zero1Update(replicas, replicas_of)
    for model in models:
        update.wait_in(model)
        if by_layer:
            model.language_model.model.before_layer = update.watch
    return update


def in_order_of_reads(parts: Sequence[FlatParameters]) -> list[tuple[int, Piece]]:
    """Order the pieces of some parts as the forward pass first reads their buckets; each with its part's number."""
    pieces = [(number, piece) for number, part in enumerate(parts) for piece in part.pieces]
    return sorted(pieces, key=lambda of: _first_read(parts[of[0]], of[1]))


def _turns(part: FlatParameters) -> list[_Turn]:
    """Order a part's buckets as the backward pass makes them: the last matrices first, vectors (of all layers) last."""
    matrices = [piece for piece in part.pieces if piece.bucket.start < part.matrices_end]
    vectors = [piece for piece in part.pieces if piece.bucket.start >= part.matrices_end]
    return [
        _Turn(part=part, piece=piece, layers=_layers(part, piece))
        for piece in (*reversed(matrices), *reversed(vectors))
    ]


def _layers(part: FlatParameters, piece: Piece) -> frozenset[int] | None:
    """Return the decoder layers that a bucket has parameters of; None if it has some from before the first layer."""
    found: set[int] = set()
    for slot in part.slots:
        if not _overlaps(slot, piece) or slot.name.startswith(_AFTER_LAYERS):
            continue
        if (layer := _OF_LAYER.match(slot.name)) is None:
            return None
        found.add(int(layer[1]))
    return frozenset(found)


def _first_read(part: FlatParameters, piece: Piece) -> tuple[float, bool]:
    """Sort key of a bucket in the forward pass: by its first layer; of equals, vectors of all layers come first."""
    layers = _layers(part, piece)
    return -1 if layers is None else min(layers, default=math.inf), piece.bucket.start < part.matrices_end


def _due(turn: _Turn) -> tuple[bool, float]:
    """Sort key of a bucket: the backward pass reaches its first layer later than all others."""
    return turn.layers is None, -min(turn.layers or (), default=math.inf)


def _overlaps(slot: Slot, piece: Piece) -> bool:
    return slot.start < piece.bucket.end and piece.bucket.start < slot.start + slot.length


def _reader(name: str) -> str:
    """Return the name of the module whose call reads a parameter first."""
    found = _READS_FOR_OTHERS.match(name)
    return found[1] if found else name.rpartition(".")[0]


def _key(part: FlatParameters, piece: Piece) -> _Key:
    return id(part), piece.bucket.start
