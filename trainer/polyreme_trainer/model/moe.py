"""Mixture of experts as DeepSeek-V3 has it (arXiv:2412.19437, 2.1.2): shared and routed experts, sigmoid router.

No collective is called here. A layer sorts its rows by expert; a ``Dispatcher`` brings them to the ranks that hold
the experts and back.

Legend: T tokens, D model width, F expert width, E experts of the model, L experts of this rank, K experts a token,
R = T * K routed rows of this rank in order of their expert, S rows that arrived for the experts of this rank.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyreme_api.errors import InvalidConfigError
from polyreme_api.plan.shapes import DecoderShape
from polyreme_trainer.model.tensor import ALONE, TensorRanks, row_product, share


@dataclasses.dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows that arrived for the experts of this rank."""

    rows_SD: Tensor
    """Sorted by local expert."""
    counts_L: Tensor
    """Rows of each local expert, int64, on the device of the rows; sums to S."""
    state: Any = None
    """What the same dispatcher needs to send the rows back."""


@dataclasses.dataclass(frozen=True, slots=True)
class Routed:
    """What a layer tells about its routing."""

    load_E: Tensor
    """Tokens of this rank routed to each expert of the model, int64; without gradient."""
    balance: Tensor | None
    """Balance loss of this rank's documents, or None when not asked for."""


class Dispatcher(Protocol):
    """Moves routed rows between the ranks of an expert-parallel group; both calls are differentiable.

    An uneven all-to-all implements it: exchange ``counts_E`` first, send rows by the sums over each rank's slice of
    experts, and permute what arrives from (source rank, expert) to (expert, source rank). ``combine`` undoes both.
    Every rank of the group calls both, once a layer, also with no rows.
    """

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor) -> Dispatched:
        """Send rows, sorted by global expert, to where their experts are."""
        ...

    def combine(self, rows_SD: Tensor, state: Any) -> Tensor:
        """Send the experts' answers back: R rows in the order that ``dispatch`` got."""
        ...


class LocalDispatcher:
    """All experts are here: rows stay."""

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor) -> Dispatched:
        """Hand the rows on."""
        return Dispatched(rows_RD, counts_E)

    def combine(self, rows_SD: Tensor, state: Any) -> Tensor:  # noqa: ARG002
        """Hand the rows back."""
        return rows_SD


class FeedForward(nn.Module):
    """Gated feed-forward, ``down(silu(gate(x)) * up(x))`` (arXiv:2002.05202), its inside shared by the tensor ranks."""

    def __init__(self, width: int, inner: int, ranks: TensorRanks = ALONE) -> None:
        """Hold this rank's inner columns.

        Raises:
            InvalidConfigError: If the ranks do not divide ``inner``.
        """
        super().__init__()
        self.ranks = ranks
        inner = share(inner, ranks, what="a feed-forward's inner width")
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x_SD: Tensor) -> Tensor:
        """Apply to each row that this rank holds between layers."""
        x_TD = self.ranks.gather(x_SD)
        return row_product(F.silu(self.gate_proj(x_TD)) * self.up_proj(x_TD), self.down_proj, self.ranks)


class Router(nn.Module):
    """Chooses K experts a token: by biased sigmoid scores; weighs them by the unbiased ones. float32 throughout."""

    e_score_correction_bias: Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.chosen = shape.experts_per_token
        self.scaling = shape.routed_scaling
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.width))
        self.register_buffer("e_score_correction_bias", torch.zeros(shape.experts, dtype=torch.float32))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route every token.

        Returns:
            weights_TK float32 (sum to ``routed_scaling``), experts_TK int64, scores_TE float32.
        """
        scores_TE = F.linear(x_TD.float(), self.weight.float()).sigmoid()
        biased_TE = scores_TE.detach() + self.e_score_correction_bias.float()
        experts_TK = biased_TE.topk(self.chosen, dim=-1, sorted=False).indices
        weights_TK = scores_TE.gather(1, experts_TK)
        weights_TK = weights_TK * (self.scaling / (weights_TK.sum(-1, keepdim=True) + 1e-20))
        return weights_TK, experts_TK, scores_TE


class Experts(nn.Module):
    """The experts of this rank, stacked; gate and up projections are fused in that order."""

    def __init__(self, shape: DecoderShape, count: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * shape.expert_ffn_width, shape.width))
        self.down_proj = nn.Parameter(torch.empty(count, shape.width, shape.expert_ffn_width))

    def forward(self, rows_SD: Tensor, counts_L: Tensor) -> Tensor:
        """Apply expert e to its ``counts_L[e]`` rows; rows are sorted by expert."""
        ends_L = counts_L.cumsum(0, dtype=torch.int32)
        gate_SF, up_SF = F.grouped_mm(rows_SD, self.gate_up_proj.transpose(1, 2), offs=ends_L).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate_SF) * up_SF, self.down_proj.transpose(1, 2), offs=ends_L)


class MixtureOfExperts(nn.Module):
    """One feed-forward layer of shared and routed experts."""

    def __init__(
        self,
        shape: DecoderShape,
        *,
        experts_local: range | None = None,
        dispatcher: Dispatcher | None = None,
        ranks: TensorRanks = ALONE,
    ) -> None:
        """Hold the experts ``experts_local`` (all by default) and reach the others through ``dispatcher``.

        Routed experts are not shared among tensor-parallel ranks: each rank routes the rows that it holds.

        Raises:
            InvalidConfigError: If the slice leaves the model's experts, or is partial without a dispatcher.
        """
        super().__init__()
        held = range(shape.experts) if experts_local is None else experts_local
        if held.step != 1 or not 0 <= held.start < held.stop <= shape.experts:
            raise InvalidConfigError(
                f"expert slice does not fit: {held}, it must lie in 0..{shape.experts} with step 1"
            )
        if len(held) < shape.experts and dispatcher is None:
            raise InvalidConfigError(f"expert slice lacks a dispatcher: {held} of {shape.experts} experts are held")
        self.dispatcher: Dispatcher = dispatcher or LocalDispatcher()
        self.gate = Router(shape)
        self.experts = Experts(shape, len(held))
        self.shared_experts = FeedForward(shape.width, shape.shared_experts * shape.expert_ffn_width, ranks)

    def forward(self, x_TD: Tensor, document_T: Tensor | None = None) -> tuple[Tensor, Routed]:
        """Add the shared and the weighted routed experts.

        Args:
            x_TD: Normalised hidden states.
            document_T: Document of each token (0, 1, ...) when the balance loss is wanted, else None.
        """
        weights_TK, experts_TK, scores_TE = self.gate(x_TD)
        sorted_R, order_R = experts_TK.flatten().sort(stable=True)
        place_R = order_R.argsort()
        # bincount would make the host wait for an accelerator.
        load_E = sorted_R.new_zeros(scores_TE.shape[1]).scatter_add_(0, sorted_R, torch.ones_like(sorted_R))
        sent = self.dispatcher.dispatch(spread(x_TD, order_R, place_R, experts_TK.shape[1]), load_E)
        answered_SD = self.experts(sent.rows_SD, sent.counts_L)
        answered_RD = collect(self.dispatcher.combine(answered_SD, sent.state), order_R, place_R)
        routed_TD = (answered_RD.unflatten(0, experts_TK.shape) * weights_TK.unsqueeze(-1)).sum(1)
        balance = None if document_T is None else balance_loss(scores_TE, experts_TK, document_T)
        return routed_TD.to(x_TD.dtype) + self.shared_experts(x_TD), Routed(load_E, balance)


def balance_loss(scores_TE: Tensor, experts_TK: Tensor, document_T: Tensor) -> Tensor:
    """Sequence-wise balance loss of DeepSeek-V3 (equations 17 to 20), before its weight, averaged over documents.

    Args:
        scores_TE: Sigmoid scores, with gradient.
        experts_TK: Chosen experts.
        document_T: Document of each token, 0, 1, ... without gaps.
    """
    experts, chosen = scores_TE.shape[1], experts_TK.shape[1]
    length_S = torch.bincount(document_T).clamp_(min=1).unsqueeze(1)
    share_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, experts_TK, 1.0)
    empty_SE = scores_TE.new_zeros(length_S.shape[0], experts)
    mean_SE = empty_SE.index_add(0, document_T, share_TE) / length_S
    fraction_SE = empty_SE.index_add(0, document_T, chosen_TE) * (experts / chosen) / length_S
    return (mean_SE * fraction_SE).sum(-1).mean()


def spread(x_TD: Tensor, order_R: Tensor, place_R: Tensor, chosen: int) -> Tensor:
    """Copy each token to its K places in the order of experts.

    Args:
        x_TD: Tokens.
        order_R: Routed row (token * K + choice) at each place.
        place_R: Its inverse.
        chosen: K.
    """
    rows_RD: Tensor = _Spread.apply(x_TD, order_R, place_R, chosen)
    return rows_RD


def collect(rows_RD: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
    """Undo ``spread``'s order: K rows a token, side by side."""
    ordered_RD: Tensor = _Collect.apply(rows_RD, order_R, place_R)
    return ordered_RD


class _Spread(torch.autograd.Function):
    """``rows_RD[i] = x_TD[order_R[i] // K]``; its gradient sums over K in a fixed order, without atomics."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, place_R: Tensor, chosen: int) -> Tensor:
        ctx.save_for_backward(place_R)
        ctx.chosen = chosen
        return x_TD.index_select(0, order_R // chosen)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None]:
        (place_R,) = ctx.saved_tensors
        rows_TKD = grad_RD.index_select(0, place_R).unflatten(0, (grad_RD.shape[0] // ctx.chosen, ctx.chosen))
        return rows_TKD.sum(1), None, None, None


class _Collect(torch.autograd.Function):
    """Rows back in the order of their tokens: a permutation, whose gradient is the inverse one."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return rows_RD.index_select(0, place_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        (order_R,) = ctx.saved_tensors
        return grad_RD.index_select(0, order_R), None, None
