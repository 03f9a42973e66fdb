"""Traffic between the workers of a gang, derived from the communication groups of a plan.

Shape suffixes: W workers, M members of groups, C columns (one receiver for each worker), K neighbours of a worker,
L levels.

Ranks are ``index x devices + device``. Two meshes stand over them, dense ``(pp, dp, cp, tp)`` and sparse ``(pp, edp,
ep)``, the last axis fastest, so that the groups of every axis are arithmetic: rank ``k`` of a group lies ``k x stride``
after its first. What a group's ranks send in a step, ``bytes_per_rank`` each:

- ``dp``, ``edp``, ``cp``, ``tp``: a ring in the order of ranks; each sends all of it to the next, the last to the
  first.
- ``pp``: a chain; each sends all of it to the next stage, the last nothing.
- ``ep``: an all-to-all; each sends an equal part to each of the others.

The *cost* of an order is the sum over all that is sent of bytes x distance between the nodes of sender and receiver. It
is worked out in Python's integers from counts in int64 of pairs that part at each level: bytes of a step times 100,000
ranks times distances do not fit into 64 bits. The local search compares differences in float64 and is judged by the
exact cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyreme_operator.placement.tree import Tree
from polyreme_operator.types.inventory import GangRequest, IntArray, RowArray
from polyreme_planner.layout import Layout

DENSE_MAX = 64
"""Up to this many workers the neighbours are a full matrix, whatever the groups are."""
PEERS_MAX = 32
"""Largest all-to-all that the local search considers; larger ones count in the exact cost only."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Senders with one receiver each: rings and chains of one axis."""

    sent_bytes: int
    to_CW: RowArray
    """Receiver of each worker in each column; the worker itself if it sends nothing."""
    from_CW: RowArray
    times_C: tuple[int, ...]
    """Ranks of a worker that a column stands for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """All-to-alls of one axis, between members: whole workers, or single ranks where groups cut through workers."""

    sent_bytes: int
    """By one rank, to all others of its group together."""
    others: int
    """Ranks of a group less one."""
    members: int
    size: int
    """Members of a group."""
    stride: int
    """Between the members of a group."""
    each: int
    """Members of one worker."""
    times: int
    """Pairs of ranks that a pair of members stands for."""

    @property
    def group_M(self) -> IntArray:
        """Group of each member."""
        member_M = np.arange(self.members, dtype=np.int64)
        group_M: IntArray = member_M // (self.size * self.stride) * self.stride + member_M % self.stride
        return group_M

    @property
    def worker_M(self) -> IntArray:
        """Worker of each member."""
        return np.arange(self.members, dtype=np.int64) // self.each

    @property
    def columns(self) -> int:
        """Neighbours that the all-to-all gives a worker."""
        return self.each * (self.size - 1)

    def peers(self) -> Iterator[RowArray]:
        """Yield another worker of the group for each worker, until all have been."""
        member_M = np.arange(self.members, dtype=np.int64)
        place_M = member_M // self.stride % self.size
        for on in range(1, self.size):
            other_M = member_M + ((place_M + on) % self.size - place_M) * self.stride
            yield from (other_M // self.each).reshape(-1, self.each).T.astype(np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a step sends between workers."""

    workers: int
    devices: int
    layout: Layout
    sent_by_axis: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of one rank."""
    links: tuple[Links, ...] = ()
    exchanges: tuple[Exchange, ...] = ()

    @property
    def lookups(self) -> int:
        """Distances that the cost of one order takes."""
        linked = sum(link.to_CW.size for link in self.links)
        return linked + sum(exchange.members for exchange in self.exchanges)


@dataclasses.dataclass(frozen=True, slots=True)
class Graph:
    """Neighbours of each worker, as senders or receivers, for the local search."""

    neighbour_KW: RowArray
    weight_KW: NDArray[np.float64]
    """Bytes per step in both directions; one column if it is the same for all workers."""
    loops: bool
    """Whether some neighbours are the worker itself."""

    def weights(self, worker_B: Any) -> NDArray[np.float64]:
        """Return the weights of some workers' neighbours."""
        uniform = self.weight_KW.shape[1] == 1
        return self.weight_KW if uniform else self.weight_KW[:, worker_B]

    def weighed(self, worker_BT: NDArray[np.intp], distance_KBT: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum distances over the neighbours of some workers, each by its weight."""
        if self.weight_KW.shape[1] == 1:
            sum_BT: NDArray[np.float64] = np.einsum("k,kbt->bt", self.weight_KW[:, 0], distance_KBT)
        else:
            sum_BT = (self.weight_KW[:, worker_BT] * distance_KBT).sum(axis=0)
        return sum_BT


def traffic_of(request: GangRequest) -> Traffic:
    """Bring a plan's volumes down to workers; a layout that is not of the gang's size says nothing about its ranks."""
    layout, devices = request.layout, max(1, request.devices)
    nothing = Traffic(workers=request.workers, devices=devices, layout=layout)
    fits = layout.world == request.workers * devices and layout.edp * layout.ep * layout.pp == layout.world
    if not fits or request.workers < 2:
        return nothing
    links: list[Links] = []
    exchanges: list[Exchange] = []
    for volume in request.volumes:
        if volume.axis not in _STRIDES or volume.bytes_per_rank <= 0:
            continue
        ranks, stride = getattr(layout, volume.axis), _stride(layout, volume.axis)
        if ranks == 1 or devices % (ranks * stride) == 0:
            continue  # a group of one, or one that never leaves its worker
        if volume.axis == "ep":
            exchanges.append(_exchange(volume.bytes_per_rank, ranks, stride, layout.world, devices))
        else:
            chain = volume.axis == "pp"
            links.append(_links(volume.bytes_per_rank, ranks, stride, layout.world, devices, chain=chain))
    return dataclasses.replace(
        nothing,
        sent_by_axis={volume.axis: volume.bytes_per_rank for volume in request.volumes},
        links=tuple(links),
        exchanges=tuple(exchanges),
    )


_STRIDES = {"tp": (), "cp": ("tp",), "dp": ("cp", "tp"), "pp": ("dp", "cp", "tp"), "ep": (), "edp": ("ep",)}
"""Axes that vary faster, whose degrees multiply to the stride."""


def _stride(layout: Layout, axis: str) -> int:
    stride = 1
    for faster in _STRIDES[axis]:
        stride *= getattr(layout, faster)
    return stride


def _links(sent_bytes: int, ranks: int, stride: int, world: int, devices: int, *, chain: bool) -> Links:
    copies = 1
    if stride % devices == 0:  # all ranks of a worker have theirs on the same other worker
        stride, world, copies, devices = stride // devices, world // devices, devices, 1
    rank = np.arange(world, dtype=np.int64)
    place = rank // stride % ranks
    wrap = (ranks - 1) * stride
    after = np.where(place < ranks - 1, rank + stride, rank if chain else rank - wrap)
    before = np.where(place > 0, rank - stride, rank if chain else rank + wrap)
    to, back = ((other // devices).reshape(-1, devices).T.astype(np.int32) for other in (after, before))
    keep, times = [0], [copies]
    for column in range(1, devices):
        if np.array_equal(to[column], to[column - 1]) and np.array_equal(back[column], back[column - 1]):
            times[-1] += copies
        else:
            keep.append(column)
            times.append(copies)
    return Links(sent_bytes=sent_bytes, to_CW=to[keep], from_CW=back[keep], times_C=tuple(times))


def _exchange(sent_bytes: int, ranks: int, stride: int, world: int, devices: int) -> Exchange:
    exchange = Exchange(
        sent_bytes=sent_bytes, others=ranks - 1, members=world, size=ranks, stride=stride, each=devices, times=1
    )
    whole = {"members": world // devices, "each": 1}
    if stride % devices == 0:
        return dataclasses.replace(exchange, **whole, stride=stride // devices, times=devices)
    if devices % stride == 0 and (ranks * stride) % devices == 0:
        size, times = ranks * stride // devices, devices * devices // stride
        return dataclasses.replace(exchange, **whole, size=size, stride=1, times=times)
    return exchange


def cost_of(tree: Tree, traffic: Traffic, rows_W: RowArray) -> int:
    """Return the sum of bytes x distance of an order, exactly."""
    total = 0
    domain_LW = tree.domain_LN[:, rows_W]
    rises = [int(rise) for rise in tree.rise_L]
    for link in traffic.links:
        for to_W, times in zip(link.to_CW, link.times_C, strict=True):
            parted = (np.count_nonzero(domain_W != domain_W[to_W]) for domain_W in domain_LW)
            total += link.sent_bytes * times * sum(rise * int(count) for rise, count in zip(rises, parted, strict=True))
    for exchange in traffic.exchanges:
        pairs = _parted_pairs(exchange, domain_LW, rows_W)
        crossed = sum(rise * count for rise, count in zip(rises, pairs, strict=True))
        total += exchange.sent_bytes * exchange.times * crossed // exchange.others
    return total


def _parted_pairs(exchange: Exchange, domain_LW: RowArray, rows_W: RowArray) -> list[int]:
    """Count ordered pairs of members that lie in different domains, by level."""
    group_M, worker_M = exchange.group_M, exchange.worker_M
    row_M = rows_W[worker_M].astype(np.int64)
    by_group = np.argsort(group_M * (int(row_M.max()) + 1) + row_M, kind="stable")
    group_M, worker_M = group_M[by_group], worker_M[by_group]
    new_group_M = np.diff(group_M, prepend=-1) != 0
    # Rows of one domain are neighbours, so within a group sorted by row each domain is one run, at every level.
    pairs = []
    for domain_W in domain_LW:
        starts = np.flatnonzero(new_group_M | (np.diff(domain_W[worker_M], prepend=-1) != 0))
        run = np.diff(np.append(starts, len(group_M)))
        pairs.append(_pairs(np.flatnonzero(new_group_M), len(group_M)) - int(np.dot(run, run)))
    return pairs


def _pairs(starts: NDArray[np.intp], members: int) -> int:
    size = np.diff(np.append(starts, members))
    return int(np.dot(size, size))


def graph_of(traffic: Traffic) -> Graph:
    """List each worker's neighbours: a full matrix for small gangs, columns for large ones."""
    if traffic.workers <= DENSE_MAX:
        return _full(traffic)
    neighbours: list[RowArray] = []
    weights: list[float] = []
    for link in traffic.links:
        for to_W, from_W, times in zip(link.to_CW, link.from_CW, link.times_C, strict=True):
            neighbours += [to_W, from_W]
            weights += [float(link.sent_bytes * times)] * 2
    for exchange in traffic.exchanges:
        if exchange.columns <= PEERS_MAX:
            neighbours += exchange.peers()
            weights += [2.0 * exchange.sent_bytes * exchange.times / exchange.others] * exchange.columns
    shape = (len(weights), traffic.workers)
    neighbour_KW = np.array(neighbours, dtype=np.int32).reshape(shape)
    loops = bool((neighbour_KW == np.arange(traffic.workers, dtype=np.int32)).any())
    return Graph(neighbour_KW, np.array(weights, dtype=np.float64)[:, None], loops)


def _full(traffic: Traffic) -> Graph:
    workers = traffic.workers
    sent_WW = np.zeros((workers, workers))
    everyone = np.arange(workers)
    for link in traffic.links:
        for to_W, times in zip(link.to_CW, link.times_C, strict=True):
            np.add.at(sent_WW, (everyone, to_W), float(link.sent_bytes * times))
    for exchange in traffic.exchanges:
        group_M = exchange.group_M
        members_GW = np.zeros((int(group_M.max()) + 1, workers))
        np.add.at(members_GW, (group_M, exchange.worker_M), 1.0)
        sent_WW += members_GW.T @ members_GW * (exchange.sent_bytes * exchange.times / exchange.others)
    both_WW = sent_WW + sent_WW.T
    neighbour_KW = ((everyone[None, :] + np.arange(1, workers)[:, None]) % workers).astype(np.int32)
    return Graph(neighbour_KW, both_WW[everyone[None, :], neighbour_KW], loops=False)
