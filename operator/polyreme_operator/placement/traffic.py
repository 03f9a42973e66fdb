"""Traffic between the workers of a gang, derived from the communication groups of a plan.

Shape suffixes: W workers, M members of groups, G groups, Z members of one group, C columns (one receiver for each
worker), K neighbours of a worker, A runs, R ranks of a group, S ranks between them.

Ranks are ``index x devices + device``. Two meshes stand over them, dense ``(pp, dp, cp, tp)`` and sparse ``(pp, edp,
ep)``, the last axis fastest, so that the groups of every axis are arithmetic: rank ``k`` of a group lies ``k x stride``
after its first. What a group's ranks send in a step, ``bytes_per_rank`` each:

- ``dp``, ``edp``, ``cp``, ``tp``: a ring in the order of ranks; each sends all of it to the next, the last to the
  first.
- ``pp``: a chain; each sends all of it to the next stage, the last nothing.
- ``ep``: an all-to-all; each sends an equal part to each of the others.

The *cost* of an order is the sum over all that is sent of bytes x distance between the nodes of sender and receiver. It
is worked out in Python's integers from counts of pairs that part at each level: bytes of a step times 100,000 ranks
times distances do not fit into 64 bits. The local search compares differences in float64 and is judged by the exact
cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polyreme_operator.placement.metric import Metric, lengths
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
    """Members of a group; they are consecutive."""
    each: int
    """Members of one worker."""
    times: int
    """Pairs of ranks that a pair of members stands for."""

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
        worker_GZ = self.worker_M.astype(np.int32).reshape(-1, self.size)
        for on in range(1, self.size):
            yield from np.roll(worker_GZ, -on, axis=1).reshape(-1, self.each).T


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

    @property
    def neighbours(self) -> int:
        """Neighbours of each worker in ``graph_of``."""
        if self.workers <= DENSE_MAX:
            return self.workers - 1
        linked = 2 * sum(len(link.to_CW) for link in self.links)
        return linked + sum(exchange.columns for exchange in self.searched)

    @property
    def searched(self) -> tuple[Exchange, ...]:
        """All-to-alls that the local search considers."""
        return tuple(exchange for exchange in self.exchanges if exchange.columns <= PEERS_MAX)


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
            exchanges.append(_exchange(volume.bytes_per_rank, ranks, layout.world, devices))
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
    # Consecutive ranks of a worker that have theirs on the same other worker count as one.
    copies = math.gcd(stride, devices)
    stride, world, devices = stride // copies, world // copies, devices // copies
    rank_GRS = np.arange(world, dtype=np.int32).reshape(-1, ranks, stride)
    after, before = np.roll(rank_GRS, -1, axis=1), np.roll(rank_GRS, 1, axis=1)
    if chain:
        after[:, -1], before[:, 0] = rank_GRS[:, -1], rank_GRS[:, 0]
    to, back = ((other // devices).reshape(-1, devices).T for other in (after, before))
    keep, times = [0], [copies]
    for column in range(1, devices):
        if np.array_equal(to[column], to[column - 1]) and np.array_equal(back[column], back[column - 1]):
            times[-1] += copies
        else:
            keep.append(column)
            times.append(copies)
    return Links(sent_bytes=sent_bytes, to_CW=to[keep], from_CW=back[keep], times_C=tuple(times))


def _exchange(sent_bytes: int, ranks: int, world: int, devices: int) -> Exchange:
    if ranks % devices == 0:  # groups of whole workers
        return Exchange(
            sent_bytes=sent_bytes,
            others=ranks - 1,
            members=world // devices,
            size=ranks // devices,
            each=1,
            times=devices * devices,
        )
    return Exchange(sent_bytes=sent_bytes, others=ranks - 1, members=world, size=ranks, each=devices, times=1)


def cost_of(traffic: Traffic, metric: Metric, place_W: NDArray[np.intp]) -> int:
    """Return the sum of bytes x distance of an order, exactly."""
    code_W, total = metric.code_S[place_W], 0
    for link in traffic.links:
        crossed = sum(
            times * metric.total(code_W ^ code_W.take(to_W))
            for to_W, times in zip(link.to_CW, link.times_C, strict=True)
        )
        total += link.sent_bytes * crossed
    for exchange in traffic.exchanges:
        crossed = _crossed(exchange, metric, code_W)
        total += exchange.sent_bytes * exchange.times * crossed // exchange.others
    return total


def _crossed(exchange: Exchange, metric: Metric, code_W: NDArray[Any]) -> int:
    """Return the sum of distances of all ordered pairs of members of a group."""
    code_M = code_W if exchange.each == 1 else np.repeat(code_W, exchange.each)
    # Places of one domain are neighbours, so in a sorted group each domain is one run, at every level.
    code_GZ = np.sort(code_M.reshape(-1, exchange.size), axis=1)
    apart_GZ = np.empty_like(code_GZ)
    np.bitwise_xor(code_GZ[:, 1:], code_GZ[:, :-1], out=apart_GZ[:, 1:])
    apart_GZ[:, 0] = np.iinfo(apart_GZ.dtype).max
    crossed, pairs = 0, exchange.members * exchange.size
    for bit, rise in metric.steps:
        run_A = lengths(np.flatnonzero(apart_GZ >= bit), exchange.members)
        crossed += rise * (pairs - int(np.dot(run_A, run_A)))
    return crossed


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
    for exchange in traffic.searched:
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
        group_M = np.arange(exchange.members) // exchange.size
        members_GW = np.zeros((exchange.members // exchange.size, workers))
        np.add.at(members_GW, (group_M, exchange.worker_M), 1.0)
        sent_WW += members_GW.T @ members_GW * (exchange.sent_bytes * exchange.times / exchange.others)
    both_WW = sent_WW + sent_WW.T
    neighbour_KW = ((everyone[None, :] + np.arange(1, workers)[:, None]) % workers).astype(np.int32)
    return Graph(neighbour_KW, both_WW[everyone[None, :], neighbour_KW], loops=False)
