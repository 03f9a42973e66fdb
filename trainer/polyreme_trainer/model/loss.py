"""Token cross-entropy as a sum and a count, so that normalising by the global count happens outside.

Head and loss are one operation, over some tokens at a time (as in Liger, arXiv:2410.10989): their logits are computed,
turned into their own gradient in place, and used up for the gradients of hidden states and head before the next ones
are computed. So the logits of all tokens are never held, and are computed once. Between forward and backward a gradient
as large as the head is held, for every microbatch whose backward has not run; the schedules that we have run it next.

An objective other than the plain sum needs the log-probabilities of all targets before any gradient: it gives the loss
and its derivative by each of them, which weighs the gradient of that token's cross-entropy. Where the logits of all
tokens are held at a time they are still computed once, else twice.

Tensor-parallel ranks share the vocabulary: each scores its words for all tokens, and they only exchange three numbers
per token.

Legend: T tokens, S those of this rank between layers, N unmasked tokens, C those of a chunk, D width, V words of this
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from polyreme_api.batch import IGNORED_TARGET
from polyreme_trainer.model.tensor import ALONE, TensorRanks

LOGITS_MAX = 1 << 28
"""Logits held at a time [scalars]; at least those of one token."""

Weigh = Callable[[Tensor], tuple[Tensor, Tensor]]
"""``logp_N -> (loss, weights_N)``: of the log-probabilities of unmasked targets (float32), the loss (scalar) and its
negative derivative by each of them."""

_How = tuple[TensorRanks, Weigh | None]


def token_loss(
    hidden_SD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    ranks: TensorRanks = ALONE,
    *,
    learned_N: Tensor | None = None,
    weigh: Weigh | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropy of unmasked targets, in float32; logits are computed at unmasked positions only.

    Args:
        hidden_SD: Hidden states after the final norm.
        head_VD: This rank's words of the output head's weight.
        targets_T: int64 next tokens, ``IGNORED_TARGET`` where masked.
        ranks: The ranks that share the vocabulary.
        learned_N: Places of unmasked targets, rising; None: they are looked up, and the host waits for it.
        weigh: Gives another loss of the log-probabilities instead; None: the sum of their negatives.

    Returns:
        The sum (float32 scalar, with gradient) and the count (int64 scalar) of unmasked targets, of all words: the same
        on all ranks that share them, so only one of them may report it.
    """
    hidden_ND, targets_N = _learned(ranks.gather(hidden_SD), targets_T, learned_N)
    count = torch.full((), targets_N.shape[0], dtype=torch.int64, device=hidden_ND.device)
    head_VD = head_VD if torch.is_grad_enabled() else head_VD.detach()
    return cast("Tensor", _HeadLoss.apply(hidden_ND, head_VD, targets_N, (ranks, weigh))), count


@torch.no_grad()
def token_scores(
    hidden_SD: Tensor,
    head_VD: Tensor,
    targets_T: Tensor,
    ranks: TensorRanks = ALONE,
    *,
    learned_N: Tensor | None = None,
) -> Tensor:
    """Return the log-probability of each unmasked target (N, float32): the same bits that ``token_loss`` weighs."""
    hidden_ND, targets_N = _learned(ranks.gather(hidden_SD), targets_T, learned_N)
    return _scored(_chunks(hidden_ND, head_VD, targets_N), head_VD, ranks)


def _learned(hidden_TD: Tensor, targets_T: Tensor, learned_N: Tensor | None) -> tuple[Tensor, Tensor]:
    if learned_N is None:
        learned_N = (targets_T != IGNORED_TARGET).nonzero().squeeze(1)
    return hidden_TD.index_select(0, learned_N), targets_T.index_select(0, learned_N)


def _chunks(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> list[tuple[Tensor, Tensor]]:
    rows = max(1, LOGITS_MAX // head_VD.shape[0])
    return list(zip(hidden_ND.split(rows), targets_N.split(rows), strict=True))


def _scored(chunks: list[tuple[Tensor, Tensor]], head_VD: Tensor, ranks: TensorRanks) -> Tensor:
    scores = [_score(*chunk, head_VD, ranks).target_C for chunk in chunks]
    return scores[0] if len(scores) == 1 else torch.cat(scores)


class _HeadLoss(torch.autograd.Function):
    """Loss of ``hidden_ND @ head_VD.T``; both gradients are computed with it."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, how: _How) -> Tensor:
        ranks, weigh = how
        chunks = _chunks(hidden_ND, head_VD, targets_N)
        hidden_wanted, head_wanted = ctx.needs_input_grad[:2]
        grads_CD: list[Tensor] = []
        # Sums over several chunks are kept in float32, whatever the type of the head.
        grad_VD = torch.zeros_like(head_VD, dtype=torch.float32 if len(chunks) > 1 else None) if head_wanted else None
        losses: list[Tensor] = []
        weights: list[Tensor] = []
        # With one chunk its logits serve for the scores and for the gradient.
        only = _score(*chunks[0], head_VD, ranks) if weigh is not None and len(chunks) == 1 else None
        if weigh is not None:
            loss, weights_N = weigh(_scored(chunks, head_VD, ranks) if only is None else only.target_C)
            losses, weights = [loss], list(weights_N.split(chunks[0][1].shape[0]))
        for number, (hidden_CD, targets_C) in enumerate(chunks):
            scored = only or _score(hidden_CD, targets_C, head_VD, ranks)
            if weigh is None:
                losses.append(-scored.target_C.sum())
            grad_CV = _gradient(scored, weights[number] if weights else None, head_VD.dtype)
            if hidden_wanted:
                grads_CD.append(grad_CV @ head_VD)
            if grad_VD is not None:
                _add_product(grad_VD, grad_CV, hidden_CD)
            del scored, grad_CV  # before the next chunk takes as much
        grads_ND = (grads_CD[0] if len(grads_CD) == 1 else torch.cat(grads_CD)) if hidden_wanted else None
        ctx.save_for_backward(grads_ND, None if grad_VD is None else grad_VD.to(head_VD.dtype))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_ND, grad_VD = (made if made is None else made * grad.to(made.dtype) for made in ctx.saved_tensors)
        return grad_ND, grad_VD, None, None


def _add_product(grad_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    if grad_VD.dtype == grad_CV.dtype:
        grad_VD.addmm_(grad_CV.T, hidden_CD)
    elif grad_VD.is_cuda:  # adds in the product's own kernel, without rounding the product first
        torch.addmm(grad_VD, grad_CV.T, hidden_CD, out_dtype=grad_VD.dtype, out=grad_VD)
    else:
        grad_VD += grad_CV.T @ hidden_CD


class _Scored(NamedTuple):
    """Log-probabilities of some tokens, in float32."""

    logp_CV: Tensor
    """Of this rank's words."""
    target_C: Tensor
    """Of each token's target, whichever rank holds it."""
    own_C1: Tensor
    """The target's place among this rank's words; any place if another rank holds it."""
    held_C1: Tensor
    """Whether this rank holds the target."""


def _score(hidden_CD: Tensor, targets_C: Tensor, head_VD: Tensor, ranks: TensorRanks) -> _Scored:
    """Score words. Each rank holds the logits of some (arXiv:1909.08053, section 3).

    Logits are read as the product leaves them and written once, as log-probabilities: on an accelerator passes over
    memory take as long as the products.
    """
    logits_CV = F.linear(hidden_CD, head_VD)
    words = logits_CV.shape[1]
    own_C = targets_C - ranks.place * words
    held_C1 = ((own_C >= 0) & (own_C < words)).unsqueeze(1)
    own_C1 = own_C.clamp(0, words - 1).unsqueeze(1)
    largest = logits_CV.max(1, keepdim=True) if ranks.parts > 1 else None
    if logits_CV.dtype == torch.float32:  # in place: new memory would take longer than the rest on a processor
        logp_CV = torch.log_softmax(logits_CV, 1, out=logits_CV)
    else:
        logp_CV = torch.log_softmax(logits_CV, 1, dtype=torch.float32)
    target_C = (logp_CV.gather(1, own_C1) * held_C1).squeeze(1)
    if largest is not None:
        # A logit less its log-probability: the logarithm of the sum of this rank's exponentials. Of the largest logit,
        # since the log-probability of a small one has no digits left for it.
        sum_C = (largest.values.float() - logp_CV.gather(1, largest.indices)).squeeze(1)
        above_C = sum_C - ranks.largest(sum_C)
        target_C = target_C + above_C * held_C1.squeeze(1)
        total_C, target_C = ranks.total(torch.stack((above_C.exp(), target_C)))
        target_C = target_C - total_C.log()
        logp_CV += (above_C - total_C.log()).unsqueeze(1)
    return _Scored(logp_CV, target_C, own_C1, held_C1)


def _gradient(scored: _Scored, weights_C: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Turn the log-probabilities of words into the gradient of their logits, in place where the type is theirs."""
    logp_CV, _, own_C1, held_C1 = scored
    target_C1 = logp_CV.gather(1, own_C1)
    # Not a probability less one: that would lose all digits of a target that is nearly certain.
    target_C1 = torch.where(held_C1, target_C1.expm1(), target_C1.exp())
    if weights_C is not None:
        target_C1 = target_C1 * weights_C.unsqueeze(1)
        grad_CV = logp_CV.exp_().mul_(weights_C.unsqueeze(1)).to(dtype)
    else:
        grad_CV = torch.exp(logp_CV, out=logp_CV if logp_CV.dtype == dtype else torch.empty_like(logp_CV, dtype=dtype))
    return grad_CV.scatter_(1, own_C1, target_C1.to(dtype))
