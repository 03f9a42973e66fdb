"""Experts may lie on other ranks: the sum is the same, and so is every gradient."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.compute_options import DEFAULT_OPTIONS, ComputeOptions
from polyreme_trainer.model.moe import Dispatched, MixtureOfExperts, Router, weighed

SHAPE = KIMI_VL_NANO.decoder
RANKS = 2


@dataclasses.dataclass
class Switchboard:
    """What two ranks hand one another in one process; plain tensor operations, so that autograd crosses ranks."""

    barrier: threading.Barrier
    rows: list[Tensor | None]
    counts: list[Tensor | None]


class ThreadDispatcher:
    """One rank's end of an uneven all-to-all between threads."""

    def __init__(self, rank: int, board: Switchboard) -> None:
        self.rank = rank
        self.board = board

    def dispatch(self, rows_RD: Tensor, counts_E: Tensor, *, each: int | None = None) -> Dispatched:
        held = counts_E.shape[0] // RANKS
        rows, counts = self._exchange(rows_RD, counts_E)
        mine = slice(self.rank * held, (self.rank + 1) * held)
        parts = [list(r.split(c.tolist()))[mine] for r, c in zip(rows, counts, strict=True)]
        counts_L = torch.stack([c[mine] for c in counts]).sum(0)
        rows_SD = torch.cat([parts[source][expert] for expert in range(held) for source in range(RANKS)])
        return Dispatched(rows_SD, counts_L, torch.stack(counts))

    def combine(self, rows_SD: Tensor, state: Any) -> Tensor:
        counts_RE = state
        held = counts_RE.shape[1] // RANKS
        answers, _ = self._exchange(rows_SD, counts_RE[self.rank])
        parts = []
        for owner, answer in enumerate(answers):
            sizes_LR = counts_RE[:, owner * held : (owner + 1) * held].T
            pieces = answer.split(sizes_LR.flatten().tolist())
            parts += [pieces[expert * RANKS + self.rank] for expert in range(held)]
        return torch.cat(parts)

    def _exchange(self, rows: Tensor, counts: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        board = self.board
        board.rows[self.rank], board.counts[self.rank] = rows, counts
        board.barrier.wait(timeout=60)
        result = [r for r in board.rows if r is not None], [c for c in board.counts if c is not None]
        board.barrier.wait(timeout=60)
        return result


def fill(layer: MixtureOfExperts, whole: MixtureOfExperts, held: range) -> None:
    state = whole.state_dict()
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        state[name] = state[name][held.start : held.stop]
    layer.load_state_dict(state)


def whole_layer(seed: int = 0, *, options: ComputeOptions = DEFAULT_OPTIONS) -> MixtureOfExperts:
    generator = torch.Generator().manual_seed(seed)
    layer = MixtureOfExperts(SHAPE, options=options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        layer.gate.e_score_correction_bias.copy_(0.1 * torch.randn(SHAPE.experts, generator=generator))
    return layer


def test_two_ranks_with_half_the_experts_each_equal_one_rank_with_all() -> None:
    whole = whole_layer()
    inputs = [torch.randn(n, SHAPE.width, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (11, 5)]
    expected = [whole(x)[0] for x in inputs]
    expected_grads = torch.autograd.grad([out.square().mean() for out in expected], [*inputs, *whole.parameters()])
    board = Switchboard(threading.Barrier(RANKS), [None] * RANKS, [None] * RANKS)
    half = SHAPE.experts // RANKS
    slices = [range(rank * half, (rank + 1) * half) for rank in range(RANKS)]
    layers = [
        MixtureOfExperts(SHAPE, experts_local=held, dispatcher=ThreadDispatcher(rank, board))
        for rank, held in enumerate(slices)
    ]
    for layer, held in zip(layers, slices, strict=True):
        fill(layer, whole, held)
    outputs: list[Tensor] = [torch.empty(0)] * RANKS

    def run(rank: int) -> None:
        outputs[rank] = layers[rank](inputs[rank])[0]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    flat = [*inputs, *layers[0].parameters(), *layers[1].parameters()]
    names = [name for name, _ in whole.named_parameters()]
    grads = torch.autograd.grad([out.square().mean() for out in outputs], flat)
    for ours, theirs in zip(grads[:2], expected_grads[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for place, name in enumerate(names):
        first, second, whole_grad = grads[2 + place], grads[2 + len(names) + place], expected_grads[2 + place]
        joined = torch.cat((first, second)) if name.startswith("experts.") else first + second
        torch.testing.assert_close(joined, whole_grad, rtol=1e-4, atol=1e-5, msg=name)


def test_routed_experts_equal_a_loop_over_tokens() -> None:
    layer = whole_layer()
    x_TD = torch.randn(9, SHAPE.width, generator=torch.Generator().manual_seed(5))
    scores_TE = torch.sigmoid(x_TD @ layer.gate.weight.T)
    out_TD, routed = layer(x_TD)
    load = torch.zeros(SHAPE.experts, dtype=torch.int64)
    for token in range(9):
        biased = scores_TE[token] + layer.gate.e_score_correction_bias
        chosen = biased.topk(SHAPE.experts_per_token).indices
        weights = scores_TE[token, chosen] / scores_TE[token, chosen].sum() * SHAPE.routed_scaling
        expected = layer.shared_experts(x_TD[token])
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            gate, up = (layer.experts.gate_up_proj[expert] @ x_TD[token]).chunk(2)
            expected = expected + weight * (layer.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
            load[expert] += 1
        torch.testing.assert_close(out_TD[token], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(routed.load_E, load)


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_an_expert_takes_the_first_rows_up_to_its_capacity_and_the_others_add_nothing(factor: float) -> None:
    layer = whole_layer(options=ComputeOptions(capacity_factor=factor))
    plain = whole_layer()
    x_TD = torch.randn(13, SHAPE.width, generator=torch.Generator().manual_seed(5), requires_grad=True)
    weights_TK, experts_TK, _ = plain.gate(x_TD)
    room = [max(1, math.ceil(factor * 13 * SHAPE.experts_per_token / SHAPE.experts))] * SHAPE.experts
    kept_TK, dropped = torch.ones_like(weights_TK), [0] * SHAPE.experts
    for token, chosen in enumerate(experts_TK.tolist()):
        for choice, expert in enumerate(chosen):
            room[expert] -= 1
            if room[expert] < 0:
                kept_TK[token, choice], dropped[expert] = 0.0, dropped[expert] + 1
    assert (sum(dropped) > 0) == (factor < 4)
    vars(plain.gate)["forward"] = lambda x, _: (
        Router.forward(plain.gate, x)[0] * kept_TK,
        *Router.forward(plain.gate, x)[1:],
    )
    (ours, routed), (theirs, _) = layer(x_TD), plain(x_TD)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert routed.dropped_E.tolist() == dropped
    gradients = [
        torch.autograd.grad(out.square().mean(), [x_TD, *of.parameters()])
        for out, of in ((ours, layer), (theirs, plain))
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("factor", [None, 0.5])
@pytest.mark.parametrize("padding", [[0], [12], [3, 4, 9, 10, 11, 12], range(13)], ids=str)
def test_padding_takes_no_expert_and_no_count_has_it(padding: Sequence[int], factor: float | None) -> None:
    """Tokens, gradients and drops are those of a layer that never saw the padding, wherever in the stream it lies."""
    real = [token for token in range(13) if token not in padding]
    layer = whole_layer(options=ComputeOptions(capacity_factor=factor))
    of_real = None if factor is None else factor * 13 / max(1, len(real))
    alone = whole_layer(options=ComputeOptions(capacity_factor=of_real))
    x_TD = torch.randn(13, SHAPE.width, generator=torch.Generator().manual_seed(5), requires_grad=True)
    ours, routed = layer(x_TD, torch.tensor(real, dtype=torch.int64))
    theirs, expected = alone(x_TD[real])
    torch.testing.assert_close(ours[real], theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours[list(padding)], layer.shared_experts(x_TD[list(padding)]), rtol=1e-5, atol=1e-5)
    assert routed.load_E.tolist() == expected.load_E.tolist()
    assert routed.dropped_E.tolist() == expected.dropped_E.tolist()
    torch.testing.assert_close(routed.entropy, expected.entropy)
    gradients = [
        torch.autograd.grad(out.square().sum(), [x_TD, *of.parameters()], allow_unused=True, materialize_grads=True)
        for out, of in ((ours[real], layer), (theirs, alone))
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_no_row_is_dropped_while_questions_are_answered() -> None:
    layer, plain = whole_layer(options=ComputeOptions(capacity_factor=0.1)), whole_layer()
    x_TD = torch.randn(13, SHAPE.width, generator=torch.Generator().manual_seed(5))
    assert not torch.equal(layer(x_TD)[0], plain(x_TD)[0])
    assert torch.equal(layer.eval()(x_TD)[0], plain(x_TD)[0])


def test_the_entropy_of_the_router_is_that_of_its_scores() -> None:
    layer = whole_layer()
    x_TD = torch.randn(13, SHAPE.width, generator=torch.Generator().manual_seed(5))
    share_TE = torch.sigmoid(x_TD @ layer.gate.weight.T)
    share_TE /= share_TE.sum(1, keepdim=True)
    torch.testing.assert_close(layer(x_TD)[1].entropy, -(share_TE * share_TE.log()).sum())
    with torch.no_grad():
        layer.gate.weight.zero_()
    torch.testing.assert_close(layer(x_TD)[1].entropy, torch.tensor(13 * math.log(SHAPE.experts)))


def test_a_capacity_of_nothing_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="capacity factor too small"):
        ComputeOptions(capacity_factor=0.0)


def test_the_correction_bias_changes_the_choice_but_not_the_weight_of_an_expert() -> None:
    router = whole_layer().gate
    x_TD = torch.randn(64, SHAPE.width, generator=torch.Generator().manual_seed(1))
    router.e_score_correction_bias.zero_()
    router.e_score_correction_bias[3] = 10.0
    weights_TK, experts_TK, scores_TE = router(x_TD)
    assert (experts_TK == 3).any(1).all()
    torch.testing.assert_close(weights_TK.sum(1), torch.full((64,), SHAPE.routed_scaling))
    chosen_TK = scores_TE.gather(1, experts_TK)
    torch.testing.assert_close(weights_TK, SHAPE.routed_scaling * chosen_TK / chosen_TK.sum(1, keepdim=True))


def test_the_router_stays_in_float32_when_the_model_is_bfloat16() -> None:
    layer = whole_layer().bfloat16()
    layer.gate.e_score_correction_bias = layer.gate.e_score_correction_bias.float()
    weights_TK, _, scores_TE = layer.gate(torch.randn(4, SHAPE.width).bfloat16())
    assert weights_TK.dtype == scores_TE.dtype == torch.float32
    assert layer(torch.randn(4, SHAPE.width).bfloat16())[0].dtype == torch.bfloat16


def test_a_slice_without_a_dispatcher_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="lacks a dispatcher"):
        MixtureOfExperts(SHAPE, experts_local=range(4))


@pytest.mark.parametrize("held", [range(9), range(4, 4), range(0, 8, 2)])
def test_a_slice_outside_the_experts_is_refused(held: range) -> None:
    with pytest.raises(InvalidConfigError, match="expert slice does not fit"):
        MixtureOfExperts(SHAPE, experts_local=held)


class WideCopies(TorchDispatchMode):
    """Counts operations, and those that write a float32 tensor as large as all routed rows."""

    def __init__(self, scalars: int) -> None:
        super().__init__()
        self.scalars, self.count, self.operations = scalars, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.operations += int(not func.is_view)
        wide = isinstance(made, Tensor) and made.dtype == torch.float32 and made.numel() >= self.scalars
        self.count += int(wide and not func.is_view)
        return made


def test_rows_of_16_bits_are_added_up_without_a_copy_in_float32() -> None:
    tokens, chosen, width = 64, 6, 32
    rows_TKD = torch.randn(tokens, chosen, width, requires_grad=True)
    weights_TK = torch.rand(tokens, chosen).requires_grad_()
    wanted_TD = weighed(rows_TKD, weights_TK)
    wanted = torch.autograd.grad(wanted_TD.square().sum(), (rows_TKD, weights_TK))
    short_TKD = rows_TKD.detach().bfloat16().requires_grad_()
    gradient_TD = 2 * wanted_TD.detach().bfloat16()
    with WideCopies(rows_TKD.numel()) as copies:
        seen_TD = weighed(short_TKD, weights_TK)
        seen = torch.autograd.grad(seen_TD, (short_TKD, weights_TK), gradient_TD)
    assert copies.count == 0
    assert copies.operations == 5, "with weights in float32 they were 8"
    for got, exact in zip((seen_TD, *seen), (wanted_TD, *wanted), strict=True):
        assert (got.float() - exact).norm() < 2**-7 * exact.norm()
