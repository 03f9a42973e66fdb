"""The flat optimizer is AdamW; the router's bias follows its rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.curriculum import Learner
from polyreme_trainer.parallel.flat_buffers import FlatParameters, flatten
from polyreme_trainer.parallel.flat_layout import Piece
from polyreme_trainer.train import optimizer
from polyreme_trainer.train.optimizer import Optimizer, update_router_biases
from polyreme_trainer.train.settings import OptimizerSettings


@pytest.mark.slow
def test_ten_steps_are_those_of_torch_with_decay_on_matrices_only() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(7, 5), nn.Linear(7, 5)
    theirs.load_state_dict(ours.state_dict())
    settings = OptimizerSettings(weight_decay=0.3, beta2=0.95)
    flat = flatten(dict(ours.named_parameters()), piggybacked=0)
    mine = Optimizer(flat, settings)
    peer = torch.optim.AdamW(
        [{"params": [theirs.weight], "weight_decay": 0.3}, {"params": [theirs.bias], "weight_decay": 0.0}],
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )
    for step in range(10):
        x = torch.randn(3, 7)
        flat.dense.clear_gradients()
        ours(x).square().sum().backward()
        peer.zero_grad()
        (theirs(x).square().sum() * 0.25).backward()
        mine.step(learning_rate=0.01 * (step + 1), gradient_scale=0.25)
        for group in peer.param_groups:
            group["lr"] = 0.01 * (step + 1)
        peer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.bias, theirs.bias, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("learned", [None, {Learner.DECODER: 3}], ids=["all", "a part"])
def test_the_update_is_known_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, learned: dict[Learner, int] | None
) -> None:
    monkeypatch.setattr(optimizer, "MEASURED_AT_ONCE_SCALARS", {"cpu": 16})
    torch.manual_seed(0)
    named = {"lm_head.weight": nn.Parameter(torch.randn(7, 5)), "vision_tower.bias": nn.Parameter(torch.randn(5))}
    flat = flatten(named, piggybacked=0)
    mine = Optimizer(flat, OptimizerSettings(weight_decay=0.0))
    for _ in range(3):
        flat.dense.gradients.normal_()
        gradients, before = flat.dense.gradients.clone(), flat.dense.values.clone()
        state = [buffer.clone() for _, buffer, _ in mine.states[0].buffers()]
        said = torch.cat([each for _, each in mine.directions(gradient_scale=0.25, learned=learned)])
        assert torch.equal(flat.dense.values, before)
        assert torch.equal(flat.dense.gradients, gradients)
        assert all(torch.equal(old, new) for old, (_, new, _) in zip(state, mine.states[0].buffers(), strict=True))
        mine.step(learning_rate=1.0, gradient_scale=0.25, learned=learned)
        made = (before - flat.dense.values)[: len(said)]
        assert (len(said) == flat.dense.length) == (learned is None)
        torch.testing.assert_close(said, made, rtol=1e-5, atol=1e-6)


def test_a_busy_expert_is_made_less_likely_and_an_idle_one_more() -> None:
    biases = [torch.zeros(4), torch.ones(4)]
    loads = torch.tensor([[10.0, 0.0, 5.0, 5.0], [1.0, 1.0, 1.0, 1.0]])
    update_router_biases(biases, loads, rate=0.5)
    assert biases[0].tolist() == [-0.5, 0.5, 0.0, 0.0]
    assert biases[1].tolist() == [1.0] * 4


def test_an_even_load_moves_no_bias_however_large_it_is() -> None:
    biases = [torch.zeros(3)]
    # In float32 the mean of these three is rounded.
    update_router_biases(biases, torch.full((1, 3), 16_777_213.0), rate=0.5)
    assert biases[0].tolist() == [0.0, 0.0, 0.0]


def test_loads_of_other_layers_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="loads do not fit the model: 5 layers, it has 2 routers"):
        update_router_biases([torch.zeros(4), torch.zeros(4)], torch.zeros(5, 4), rate=0.5)


def test_a_buffer_beyond_what_a_kernel_takes_at_once_is_updated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    kernel: Any = torch._fused_adamw_

    def counted(values: list[torch.Tensor], *rest: Any, **options: Any) -> None:
        calls.append(values[0].numel())
        kernel(values, *rest, **options)

    monkeypatch.setattr(torch, "_fused_adamw_", counted)
    whole, at_once = one_step(), max(calls)
    monkeypatch.setattr(optimizer, "AT_ONCE_SCALARS", 16)
    calls.clear()
    assert torch.equal(one_step(), whole)
    assert at_once > 16 == max(calls)


def test_a_part_that_knows_its_rows_by_where_they_begin_is_updated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As rows of sharded parameters are: a part of a piece begins elsewhere."""

    def own_values(self: FlatParameters, piece: Piece) -> torch.Tensor:
        return {whole.start: whole.of(self.values) for whole in self.pieces}[piece.start]

    monkeypatch.setattr(optimizer, "AT_ONCE_SCALARS", 16)
    expected = one_step()
    monkeypatch.setattr(FlatParameters, "own_values", own_values)
    assert torch.equal(one_step(), expected)


def one_step() -> torch.Tensor:
    torch.manual_seed(0)
    layer = nn.Linear(7, 5)
    flat = flatten(dict(layer.named_parameters()), piggybacked=0)
    layer(torch.ones(3, 7)).square().sum().backward()
    Optimizer(flat, OptimizerSettings()).step(learning_rate=0.01, gradient_scale=0.5)
    return flat.dense.values
