"""Resharding: sends the weights that ranks train to those with which they draw answers, in another layout.

Each rank intersects the boxes that it wants with those that ranks hold, as a load of a checkpoint does, and asks one
holder for each part, itself if it can: so it receives exactly what it lacks (HybridFlow, arXiv:2409.19256). Parts
travel in rounds, in which no rank sends or receives more than a bucket.

After each exchange all ranks compare a checksum of every tensor on both sides. Stale or damaged weights would answer
fluently, and no other check would see them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from polyreme_api.errors import EnvironmentFailedError
from polyreme_trainer.checkpoint.index import StoredBox, wanted_parts
from polyreme_trainer.checkpoint.shards import boxes_of
from polyreme_trainer.parallel import collectives
from polyreme_trainer.rank_page import advance
from polyreme_trainer.train.fingerprint import box_sum

BUCKET_BYTES = 256 << 20
"""Most that a rank sends, and receives, in a round."""
_WORD = 1 << 64


class _Part(NamedTuple):
    """A part of a tensor that one rank wants and another has."""

    dtype: torch.dtype
    """In which it is wanted."""
    item: ReadItem
    source: int
    dest: int

    @property
    def size_bytes(self) -> int:
        return self.item.lengths.numel() * self.dtype.itemsize

    @property
    def order(self) -> tuple[object, ...]:
        wanted = self.item.dest_index
        return str(self.dtype), wanted.fqn, self.source, self.dest, tuple(wanted.offset or ()), self.item.dest_offsets


@dataclasses.dataclass(frozen=True, slots=True)
class _Round:
    """What this rank sends and receives at once: memory by the other rank."""

    dtype: torch.dtype
    sent: Mapping[int, list[Tensor]]
    received: Mapping[int, list[Tensor]]


class Resharding:
    """The exchange between two sets of tensors, whose memory stays where it is; every rank makes one."""

    def __init__(
        self,
        held: Mapping[str, Tensor],
        wanted: dict[str, Tensor],
        *,
        group: dist.ProcessGroup,
        control_group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Find out what every rank sends.

        Args:
            held: What this rank trains, as ``Content.state_dict`` names it.
            wanted: What it draws answers with, under the same names; an exchange fills it.
            group: All ranks.
            control_group: All ranks, on the host.
            bucket_bytes: Most that a rank sends, and receives, in a round.
        """
        self._held, self._wanted, self._group = held, wanted, group
        self._ranks = range(dist.get_world_size(group))
        rank = dist.get_rank(group)
        boxes = [
            StoredBox(tensor=name, dtype=wanted[name].dtype, shape=whole, offsets=offsets, sizes=tuple(box.shape))
            for name, offsets, box, whole in boxes_of(held)
        ]
        everywhere = collectives.gather_to_all(boxes, control_group)
        self._copies = Counter[str]()
        """Scalars of each tensor that all ranks together hold."""
        holders: dict[MetadataIndex, list[int]] = defaultdict(list)
        stored: dict[MetadataIndex, StoredBox] = {}
        for at, each in enumerate(everywhere):
            for box in each:
                self._copies[box.tensor] += torch.Size(box.sizes).numel()
                holders[box.index].append(at)
                stored[box.index] = box
        items, planner = wanted_parts(wanted, list(stored.values()))
        mine = list(_asked(items, holders, wanted, rank=rank, bytes_max=bucket_bytes))
        memory = {MetadataIndex(name, torch.Size(offsets)): box for name, offsets, box, _ in boxes_of(held)}
        self._own = [(planner.resolve_tensor(part.item), _source(part, memory)) for part in mine if part.source == rank]
        every = [part for each in collectives.gather_to_all(mine, control_group) for part in each]
        travelling = [part for part in every if part.source != part.dest]
        self.received_bytes = sum(part.size_bytes for part in travelling if part.dest == rank)
        """That this rank receives in an exchange."""
        self._rounds: list[_Round] = []
        for together in _rounds(travelling, bucket_bytes):
            one = _Round(together[0].dtype, defaultdict(list), defaultdict(list))
            for part in together:
                if part.source == rank:
                    one.sent[part.dest].append(_source(part, memory))
                elif part.dest == rank:
                    one.received[part.source].append(planner.resolve_tensor(part.item))
            self._rounds.append(one)

    @torch.no_grad()
    def exchange(self) -> None:
        """Send and receive; every rank calls it.

        Raises:
            EnvironmentFailedError: On all ranks, if weights differ afterwards.
        """
        for target, source in self._own:
            target.copy_(source)
        for one in self._rounds:
            self._send(one)
            advance()
        self._compare()

    def _send(self, one: _Round) -> None:
        like = next(iter(self._wanted.values())).new_empty(0, dtype=one.dtype)
        parts = [box.to(like).reshape(-1) for at in self._ranks for box in one.sent.get(at, ())]
        targets = [box for at in self._ranks for box in one.received.get(at, ())]
        arrived = collectives.exchange_rows(
            torch.cat([like, *parts]),
            sent=[sum(box.numel() for box in one.sent.get(at, ())) for at in self._ranks],
            received=[sum(box.numel() for box in one.received.get(at, ())) for at in self._ranks],
            group=self._group,
        )
        for target, came in zip(targets, arrived.split([box.numel() for box in targets]), strict=True):
            target.copy_(came.view(target.shape))

    def _compare(self) -> None:
        """Sum each tensor's checksums over all ranks: each copy adds the same, so the sums are as their counts."""
        names = sorted(self._wanted)
        number = {name: at for at, name in enumerate(names)}
        wanted: Counter[str] = Counter()
        size: dict[str, int] = {}
        sums_2N = torch.zeros((2, len(names)), dtype=torch.int64, device=self._wanted[names[0]].device)
        for side, state in enumerate((self._held, self._wanted)):
            for name, offsets, box, whole in boxes_of(state):
                rounded = self._wanted[name].dtype is torch.bfloat16
                total = box_sum(box, offsets, whole, rounded=rounded)
                sums_2N[side, number[name]] += total - _WORD if total >= _WORD // 2 else total
                wanted[name] += box.numel() * side
                size[name] = torch.Size(whole).numel()
        collectives.sum_over(sums_2N, self._group)
        held_N, drawn_N = sums_2N.tolist()
        for name, ours, theirs in zip(names, held_N, drawn_N, strict=True):
            copies, others = self._copies[name] // size[name], len(self._ranks) * wanted[name] // size[name]
            if (ours * others - theirs * copies) % _WORD:
                raise EnvironmentFailedError(
                    f"weights that draw answers differ from those in training after their exchange: {name} has "
                    f"checksum {theirs % _WORD:016x} in {others} copies, and {ours % _WORD:016x} in {copies}; a device "
                    "or a link is damaged"
                )


def _asked(
    items: Iterable[ReadItem],
    holders: Mapping[MetadataIndex, Sequence[int]],
    wanted: Mapping[str, Tensor],
    *,
    rank: int,
    bytes_max: int,
) -> Iterator[_Part]:
    """Choose a holder of each part, this rank if it is one; cut parts by rows so that each fits a bucket."""
    for item in items:
        having = holders[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
        source = rank if rank in having else having[rank % len(having)]
        dtype = wanted[item.dest_index.fqn].dtype
        rows = max(1, bytes_max // (item.lengths[1:].numel() * dtype.itemsize))
        for first in range(0, item.lengths[0], rows):
            part = dataclasses.replace(
                item,
                dest_offsets=_moved(item.dest_offsets, first),
                storage_offsets=_moved(item.storage_offsets, first),
                lengths=torch.Size([min(rows, item.lengths[0] - first), *item.lengths[1:]]),
            )
            yield _Part(dtype, part, source, rank)


def _moved(offsets: torch.Size, rows: int) -> torch.Size:
    return torch.Size([offsets[0] + rows, *offsets[1:]])


def _source(part: _Part, memory: Mapping[MetadataIndex, Tensor]) -> Tensor:
    """Return the memory of a part on the rank that has it."""
    item = part.item
    box = memory[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
    for dim, (first, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        box = box.narrow(dim, first, length)
    return box.detach()


def _rounds(parts: Iterable[_Part], bytes_max: int) -> Iterator[list[_Part]]:
    """Split parts, in an order that all ranks share, so that no rank exceeds a bucket; a round has one type."""
    together: list[_Part] = []
    sent, received = Counter[int](), Counter[int]()
    for part in sorted(parts, key=lambda each: each.order):
        size = part.size_bytes
        full = sent[part.source] + size > bytes_max or received[part.dest] + size > bytes_max
        if together and (full or together[0].dtype != part.dtype):
            yield together
            together = []
            sent.clear()
            received.clear()
        together.append(part)
        sent[part.source] += size
        received[part.dest] += size
    if together:
        yield together
