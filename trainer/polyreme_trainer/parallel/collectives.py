"""All collectives of the trainer in one place, for gloo and NCCL alike.

Measured on gloo with four ranks on two cores: an all-reduce costs 5-10 ms, nearly independent of its size up to some
MiB, an all-to-all 1-3 ms. So callers fuse exchanges into few calls, and nothing here loops.

What waits for other ranks is recorded on this rank's page (``rank_page.exchanges``), for the detection of hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_trainer.rank_page import exchanges

Value = TypeVar("Value")


@exchanges
def sum_over(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Sum a buffer over the group, in place; every rank gets the same bits."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(buffer, op=dist.ReduceOp.SUM, group=group)


@exchanges
def largest_over(buffer: Tensor, group: dist.ProcessGroup) -> None:
    """Take the largest over the group, element by element, in place."""
    if dist.get_world_size(group) > 1:
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group)


@exchanges
def exchange_counts(counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give each rank of the group its slice of this rank's counts.

    Args:
        counts_E: int64, rows for each expert of the model; the slices of the group's ranks are equal and in order.
        group: The expert-parallel group, of N ranks.

    Returns:
        counts_NL int64: rows that each rank of the group sends to each of this rank's L experts.
    """
    received = torch.empty_like(counts_E)
    dist.all_to_all_single(received, counts_E, group=group)
    return received.view(dist.get_world_size(group), -1)


def exchange_rows(rows_RD: Tensor, *, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Exchange rows unevenly; differentiable: the gradient takes the same route back.

    Args:
        rows_RD: Rows in the order of the ranks they go to.
        sent: Rows for each rank of the group; sums to R.
        received: Rows that come from each rank of the group.
        group: The ranks that exchange.

    Returns:
        The rows that arrived, in the order of the ranks they come from.
    """
    return cast(Tensor, _Exchange.apply(rows_RD, sent, received, group))


def gather_rows(rows_SX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join equal parts of all ranks along the first dimension; the gradient is summed over ranks and scattered."""
    return cast(Tensor, _Gather.apply(rows_SX, group))


def scatter_rows(rows_TX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks and keep this rank's part of the first dimension; the gradient is gathered."""
    return cast(Tensor, _Scatter.apply(rows_TX, group))


@exchanges
def finish(works: list[dist.Work], group: dist.ProcessGroup) -> None:  # noqa: ARG001 - read by ``exchanges``
    """Wait for exchanges of a group that were begun, and forget them."""
    for work in works:
        work.wait()
    works.clear()


def pass_on(sent: Tensor, received: Tensor, group: dist.ProcessGroup, *, tag: int, step: int = 1) -> Callable[[], None]:
    """Begin to send a buffer to the next rank of the group's ring, and to receive one from the rank before.

    Neither buffer may be touched until the returned function has been called, which waits for both. Exchanges that are
    in flight at the same time need different tags. A ``step`` of -1 goes the other way round.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, tag=tag, group_peer=(rank + step) % ranks),
            dist.P2POp(dist.irecv, received, group=group, tag=tag, group_peer=(rank - step) % ranks),
        ]
    )

    return lambda: finish(works, group)


@exchanges
def largest_number(mine: int, group: dist.ProcessGroup) -> int:
    """Return the largest number of the group's ranks, to each of them once all have given theirs."""
    numbers = torch.tensor([mine], dtype=torch.int64, device=_device(group))
    if dist.get_world_size(group) > 1:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    return int(numbers.item())


@exchanges
def send(rows_SX: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Send rows to a rank of the group, which must ``receive`` as many; with no rows nothing is sent."""
    if rows_SX.numel():
        dist.send(rows_SX.contiguous(), group=group, group_dst=rank)


@exchanges
def receive(rows_SX: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Fill rows with what a rank of the group sends."""
    if rows_SX.numel():
        dist.recv(rows_SX, group=group, group_src=rank)


@exchanges
def from_rank(values: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Broadcast what one rank of the group has to all of them, in place."""
    if values.numel():
        dist.broadcast(values, group=group, group_src=rank)


@exchanges
def gather_to_first(value: Value, group: dist.ProcessGroup) -> list[Value] | None:
    """Collect small picklable values on the group's first rank; None on the others."""
    first = dist.get_rank(group) == 0
    values: list[Any] | None = [None] * dist.get_world_size(group) if first else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values


@exchanges
def gather_to_all(value: Value, group: dist.ProcessGroup) -> list[Value]:
    """Collect small picklable values on every rank of the group."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@exchanges
def from_first(value: Value | None, group: dist.ProcessGroup) -> Value:
    """Broadcast the first rank's small picklable value."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return cast(Value, values[0])


@exchanges
def gather_slices(slice_LX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join equal slices of the group's ranks along the first dimension, on every rank."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return slice_LX
    joined = slice_LX.new_empty((ranks * slice_LX.shape[0], *slice_LX.shape[1:]))
    _join(joined, slice_LX.contiguous(), group=group)
    return joined


@exchanges
def gather_into(whole: Tensor, own: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work | None:
    """Join the equal shares of all ranks, in order, as torch's FSDP2 asks for it."""
    return _join(whole, own, group=group, async_op=async_op)


@exchanges
def reduce_into(
    own: Tensor, whole: Tensor, group: dist.ProcessGroup, *, op: dist.ReduceOp.RedOpType, async_op: bool
) -> dist.Work | None:
    """Reduce a buffer over the group into equal shares, one per rank, in order, as torch's FSDP2 asks for it."""
    return _reduce(own, whole, group=group, op=op, async_op=async_op)


def begin_reduce_scatter(own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to sum a buffer over the group into equal shares, one per rank, in order; both are in use meanwhile."""
    return cast("dist.Work", _reduce(own, whole, group=group, async_op=True))


def begin_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Begin to join the equal shares of all ranks, in order; ``own`` may be this rank's part of ``whole``."""
    return cast("dist.Work", _join(whole, own, group=group, async_op=True))


def _join(whole: Tensor, own: Tensor, **options: Any) -> dist.Work | None:
    # torch 2.13 calls it all_gather_single and warns about the old name; older releases only have the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast("dist.Work | None", gather(whole, own, **options))


def _reduce(own: Tensor, whole: Tensor, **options: Any) -> dist.Work | None:
    # The same of reduce_scatter_single.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast("dist.Work | None", scatter(own, whole, **options))


class _Gather(torch.autograd.Function):
    """All-gather of rows; its gradient is a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, rows_SX: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return gather_slices(rows_SX, group)

    @staticmethod
    def backward(ctx: Any, grad_TX: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad_TX, ctx.group), None


class _Scatter(torch.autograd.Function):
    """Reduce-scatter of rows; its gradient is an all-gather."""

    @staticmethod
    def forward(ctx: Any, rows_TX: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(rows_TX, group)

    @staticmethod
    def backward(ctx: Any, grad_SX: Tensor) -> tuple[Tensor, None]:
        return gather_slices(grad_SX, ctx.group), None


class _Exchange(torch.autograd.Function):
    """An uneven all-to-all of rows."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way_back = (received, sent, group)
        return _all_to_all(rows_RD, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad_SD, *ctx.way_back), None, None, None


def _device(group: dist.ProcessGroup) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")
    )


@exchanges
def _all_to_all(rows_RD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived_SD = rows_RD.new_empty((sum(received), *rows_RD.shape[1:]))
    dist.all_to_all_single(arrived_SD, rows_RD.contiguous(), received, sent, group=group)
    return arrived_SD


@exchanges
def _reduce_scatter(rows_TX: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return rows_TX
    kept = rows_TX.new_empty((rows_TX.shape[0] // ranks, *rows_TX.shape[1:]))
    _reduce(kept, rows_TX.contiguous(), group=group)
    return kept
