"""Expert dispatch by an all-to-all: implements the model's ``Dispatcher``.

Where no row is dropped, splits are uneven: a layer costs one exchange of counts and one of rows on the way there, one
of rows on the way back; the gradient takes two more. Where every rank sends every expert the same number of rows,
buffers are fixed and splits even: there is no exchange of counts and no wait for the device, and a transposition puts
the rows that arrive in order.

Legend: D model width, E experts of the model, L experts of this rank, N ranks of the expert-parallel group, B rows that
this rank sends, sorted by expert, C of them for each expert where all get the same number, S rows that arrived.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_trainer.model.moe import Dispatched, inverse
from polyreme_trainer.model.recompute import computed_once
from polyreme_trainer.parallel import collectives
from polyreme_trainer.rank_page import add_rows


@dataclasses.dataclass(frozen=True, slots=True)
class _Route:
    """Route of the rows of one dispatch, by which they return."""

    sent: list[int]
    received: list[int]
    order_S: Tensor
    place_S: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class _Even:
    """The same, where every rank sends every expert the same number of rows."""

    experts: int
    """Experts of this rank, L."""
    each: int
    """Rows that a rank sends to an expert, C."""


class AllToAllDispatcher:
    """Moves rows between the ranks of an expert-parallel group, which hold equal slices of the experts in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)

    def dispatch(self, rows_BD: Tensor, counts_E: Tensor, *, each: int | None = None) -> Dispatched:
        """Send rows, sorted by global expert, to where their experts are; what arrives is sorted by local expert."""
        if each is not None:
            return self._dispatch_evenly(rows_BD, counts_E, each)
        counts_NL, sent, received = computed_once(lambda: self._splits(counts_E))
        arrived_SD = collectives.exchange_rows(rows_BD, sent=sent, received=received, group=self._group)
        order_S, place_S = _by_expert(counts_NL, sum(received))
        rows_SD = _Permute.apply(arrived_SD, order_S, place_S)
        return Dispatched(rows_SD, counts_NL.sum(0), _Route(sent, received, order_S, place_S))

    def _splits(self, counts_E: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Exchange counts: what each rank sends to each expert here, and the rows that leave for and come from each."""
        counts_NL = collectives.exchange_counts(counts_E, self._group)
        # The one wait for the device: splits of an uneven exchange are host integers.
        sent, received = torch.stack((counts_E.view(self._ranks, -1).sum(1), counts_NL.sum(1))).tolist()
        add_rows(sum(received))
        return counts_NL, sent, received

    def combine(self, rows_SD: Tensor, state: Any) -> Tensor:
        """Send the experts' outputs back: B rows in the order that ``dispatch`` got."""
        if isinstance(state, _Even):
            return self._exchange_evenly(_swap(rows_SD, state.experts, self._ranks), state)
        route: _Route = state
        back_SD = _Permute.apply(rows_SD, route.place_S, route.order_S)
        return collectives.exchange_rows(back_SD, sent=route.received, received=route.sent, group=self._group)

    def _dispatch_evenly(self, rows_BD: Tensor, counts_E: Tensor, each: int) -> Dispatched:
        even = _Even(experts=counts_E.shape[0] // self._ranks, each=each)
        add_rows(even.experts * even.each * self._ranks)
        arrived_SD = self._exchange_evenly(rows_BD, even)
        rows_SD = _swap(arrived_SD, self._ranks, even.experts)
        return Dispatched(rows_SD, counts_E[: even.experts] * self._ranks, even)

    def _exchange_evenly(self, rows_BD: Tensor, even: _Even) -> Tensor:
        """Return how many rows each rank sends here."""
        shares = [even.experts * even.each] * self._ranks
        return collectives.exchange_rows(rows_BD, sent=shares, received=shares, group=self._group)


def _swap(rows_SD: Tensor, outer: int, inner: int) -> Tensor:
    """Turn blocks of rows from (outer, inner) to (inner, outer)."""
    return rows_SD.view(outer, inner, -1, rows_SD.shape[1]).transpose(0, 1).reshape(rows_SD.shape)


def _by_expert(counts_NL: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the order that turns (rank, expert) into (expert, rank), and its inverse.

    Args:
        counts_NL: Rows from each rank for each expert.
        rows: Number of all rows: known on the host, so an accelerator is not asked for it.
    """
    ranks, experts = counts_NL.shape
    blocks = torch.arange(experts, device=counts_NL.device).repeat(ranks)
    expert_S = blocks.repeat_interleave(counts_NL.flatten(), output_size=rows)
    order_S = expert_S.argsort(stable=True)
    return order_S, inverse(order_S)


class _Permute(torch.autograd.Function):
    """``rows[order]``; its gradient is the inverse permutation, where indexing would add row by row."""

    @staticmethod
    def forward(ctx: Any, rows_SD: Tensor, order_S: Tensor, place_S: Tensor) -> Tensor:
        ctx.save_for_backward(place_S)
        return rows_SD.index_select(0, order_S)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (place_S,) = ctx.saved_tensors
        return grad_SD.index_select(0, place_S), None, None
