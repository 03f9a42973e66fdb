"""Ranks that shard an update compute together what one rank computes alone; also with narrower values and originals."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from polyreme_planner.curriculum import Learner
from polyreme_planner.hardware import Precision
from polyreme_planner.optimizer_state import state_bytes
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import STACKED, build_model
from polyreme_trainer.parallel.flat_buffers import FlatModel, Slices, Storage, Update, flatten
from polyreme_trainer.parallel.flat_layout import Shares
from polyreme_trainer.train import muon
from polyreme_trainer.train.optimizer import Optimizer, learner_of
from polyreme_trainer.train.settings import OptimizerSettings

SHAPES = {
    "embed_tokens.weight": (40, 24),
    "layers.0.q_proj.weight": (30, 24),
    "layers.0.o_proj.weight": (24, 30),
    "layers.0.experts.gate_up_proj": (4, 20, 24),
    "layers.0.experts.down_proj": (4, 24, 10),
    "vision_tower.blocks.0.wqkv.weight": (72, 24),
    "vision_tower.blocks.0.wqkv.bias": (72,),
    "layers.0.norm.weight": (24,),
    "layers.1.q_proj.weight": (30, 24),
    "layers.1.mlp.gate.weight": (4, 24),
    "layers.1.norm.weight": (23,),
}
EXPERTS = frozenset(name for name in SHAPES if "experts" in name)
RANKS = 3


def drawn(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def held(update: Update, *, ranks: int = 1, place: int = 0) -> FlatModel:
    parameters = {name: nn.Parameter(value) for name, value in drawn(0).items()}
    return flatten(
        parameters,
        piggybacked=4,
        stage=Shares(count=ranks, place=place),
        experts=Slices(names=EXPERTS, copies=ranks, copy=place),
        update=update,
    )


Learned = Sequence[Mapping[Learner, int] | None]
ALL: Learned = (None, None, None)


def stepped(flat: FlatModel, settings: OptimizerSettings, learned: Learned = ALL) -> Optimizer:
    """Take three steps from summed gradients, as a reduction leaves them; frozen parameters have none."""
    optimizer = Optimizer(flat, settings)
    for step, parts in enumerate(learned, start=1):
        gradients = {
            name: gradient * (parts is None or learner_of(name) in parts) for name, gradient in drawn(step).items()
        }
        for part in flat.parts:
            for name, view in part.views(part.gradients):
                view.copy_(gradients[name])
            if part.shares.count > 1:
                for piece in part.pieces:
                    piece.of_own(part.own_gradients).copy_(piece.of(part.gradients))
        optimizer.step(learning_rate=0.01 * step, gradient_scale=0.3, learned=parts)
    return optimizer


def values(ranks: list[FlatModel]) -> dict[str, Tensor]:
    """Bring together what each rank has updated."""
    whole: dict[str, Tensor] = {}
    for parts in zip(*(flat.parts for flat in ranks), strict=True):
        joined = torch.full((parts[0].length,), torch.nan)
        for part in parts:
            for piece in part.pieces:
                piece.of(joined).copy_(part.own_values(piece))
        whole |= {name: view.clone() for name, view in parts[0].views(joined)}
    return whole


def together(update: Update, settings: OptimizerSettings, learned: Learned = ALL) -> dict[str, Tensor]:
    flats = [held(update, ranks=RANKS, place=place) for place in range(RANKS)]
    for flat in flats:
        stepped(flat, settings, learned)
    return values(flats)


def alone(update: Update, settings: OptimizerSettings, learned: Learned = ALL) -> dict[str, Tensor]:
    flat = held(update)
    stepped(flat, settings, learned)
    return values([flat])


@pytest.mark.parametrize("bucket_scalars", [200, 1000, 1 << 20])
def test_a_divided_adamw_makes_the_bits_of_a_whole_one(bucket_scalars: int) -> None:
    settings = OptimizerSettings(weight_decay=0.3)
    expected = alone(Update(), settings)
    seen = together(Update(zero1=True, bucket_scalars=bucket_scalars), settings)
    assert all(torch.equal(seen[name], value) for name, value in expected.items())
    assert not torch.equal(expected["layers.0.norm.weight"], drawn(0)["layers.0.norm.weight"])


@pytest.mark.parametrize("bucket_scalars", [200, 1 << 20])
def test_a_divided_muon_makes_the_directions_of_a_whole_one(bucket_scalars: int) -> None:
    settings = OptimizerSettings(weight_decay=0.3)
    whole = muon.whole_names(SHAPES.items())
    expected = alone(Update(whole=whole), settings)
    seen = together(Update(whole=whole, zero1=True, bucket_scalars=bucket_scalars), settings)
    for name, value in expected.items():
        torch.testing.assert_close(seen[name], value, rtol=1e-5, atol=1e-6)


def test_muon_steps_by_its_written_rule_and_leaves_the_rest_to_adamw() -> None:
    settings = OptimizerSettings(weight_decay=0.3, momentum=0.9)
    whole = muon.whole_names(SHAPES.items())
    assert {*SHAPES} - whole == {name for name in SHAPES if "norm" in name or "bias" in name} | {
        "embed_tokens.weight",
        "layers.1.mlp.gate.weight",
    }
    seen = alone(Update(whole=whole), settings)
    by_adamw = alone(Update(), settings)
    name = "layers.0.experts.gate_up_proj"
    weight, momentum = drawn(0)[name][1, 10:].double(), torch.zeros(10, 24, dtype=torch.float64)
    for step in (1, 2, 3):
        gradient = drawn(step)[name][1, 10:].double() * 0.3  # the second expert's ups
        momentum = 0.9 * momentum + gradient
        x = gradient + 0.9 * momentum
        x = x / x.norm()
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        rate = 0.01 * step
        weight = weight * (1 - rate * 0.3) - rate * 0.2 * 24**0.5 * x
    torch.testing.assert_close(seen[name][1, 10:].double(), weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(seen["embed_tokens.weight"], by_adamw["embed_tokens.weight"])
    assert torch.equal(seen["layers.0.norm.weight"], by_adamw["layers.0.norm.weight"])


def test_a_direction_has_singular_values_near_one_and_nothing_stays_nothing() -> None:
    torch.manual_seed(0)
    given = torch.stack([torch.randn(12, 20), torch.randn(12, 20) * 1e-3, torch.zeros(12, 20)])
    turned = muon.orthogonal(given)
    singular = torch.linalg.svdvals(turned)
    assert 0.6 < float(singular[:2].min()) < float(singular[:2].max()) < 1.3
    assert float(turned[2].abs().max()) == 0.0
    torch.testing.assert_close(muon.orthogonal(given.mT.contiguous()), turned.mT)


def test_narrow_values_are_their_originals_rounded_and_small_steps_are_not_lost() -> None:
    settings = OptimizerSettings(weight_decay=0.0)
    update = Update(storage=Storage(dtype=torch.bfloat16), exact=frozenset({"layers.1.mlp.gate.weight"}))
    expected = alone(Update(), settings)
    flat = held(update)
    stepped(flat, settings)
    assert all(torch.equal(value, expected[name]) for name, value in values([flat]).items())
    for part in flat.parts:
        for name, value in part.views(part.values):
            rounded = expected[name].to(torch.float32 if "gate.weight" in name else torch.bfloat16)
            assert value.dtype == rounded.dtype, name
            assert torch.equal(value, rounded), name
    seen = together(dataclasses.replace(update, zero1=True, bucket_scalars=500), settings)
    assert all(torch.equal(seen[name], value) for name, value in expected.items())


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_frozen_parameters_keep_their_bits_and_trained_ones_count_their_own_steps(name: str) -> None:
    """Decay, momentum and moments of the decoder begin when it does: as in a run that has those steps alone."""
    settings = OptimizerSettings(weight_decay=0.3)
    whole = muon.whole_names(SHAPES.items()) if name == "Muon" else frozenset[str]()
    tower, decoder = Learner.TOWER, Learner.DECODER
    still = [{tower: 1}, {tower: 2}, {tower: 3}]
    flat = held(Update(whole=whole))
    optimizer = stepped(flat, settings, still)
    seen, first = values([flat]), drawn(0)
    expected = alone(Update(whole=whole), settings)
    for parameter, value in seen.items():
        learns = learner_of(parameter) is tower
        assert torch.equal(value, (expected if learns else first)[parameter]), parameter
    for state in optimizer.states:
        for _, buffer, begin in state.buffers():
            for slot in state.part.slots:
                if learner_of(slot.name) is decoder and 0 <= slot.start - begin < buffer.shape[0]:
                    assert not buffer[slot.start - begin :][: slot.length].any(), slot.name

    # The decoder learns in the third step alone, and has its own first step then.
    late = [{tower: 1}, {tower: 2}, {decoder: 1}]
    seen = alone(Update(whole=whole), settings, late)
    flat = held(Update(whole=whole))
    own = Optimizer(flat, settings)
    for part in flat.parts:
        for parameter, view in part.views(part.gradients):
            view.copy_(drawn(3)[parameter])
    own.step(learning_rate=0.03, gradient_scale=0.3)
    for parameter, value in values([flat]).items():
        if learner_of(parameter) is decoder:
            assert torch.equal(seen[parameter], value), parameter

    # Shares are cut anywhere, also through frozen parameters.
    update = Update(whole=whole, zero1=True, bucket_scalars=300)
    for parameter, value in together(update, settings, late).items():
        torch.testing.assert_close(seen[parameter], value, rtol=1e-5, atol=1e-6)
        if learner_of(parameter) is tower and name == "AdamW":
            assert torch.equal(seen[parameter], value), parameter


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_rank_holds_the_state_that_is_planned(precision: Precision) -> None:
    ranks = 4
    model = build_model(KIMI_VL_NANO, seed=0, media_token=5)
    parameters = dict(model.named_parameters())
    update = Update(storage=Storage(dtype=getattr(torch, precision)), zero1=True)
    stacks = frozenset(name for name in parameters if name.endswith(STACKED))
    flat = flatten(
        parameters,
        piggybacked=0,
        stage=Shares(count=ranks, place=1),
        experts=Slices(names=stacks, copies=ranks, copy=1),
        update=update,
    )
    optimizer = Optimizer(flat, OptimizerSettings())
    held = [buffer for state in optimizer.states for _, buffer, _ in state.buffers()]
    held += [part.masters for part in flat.parts if part.masters is not None]
    count = sum(parameter.numel() for parameter in parameters.values())
    planned = state_bytes(precision) * count / ranks
    assert sum(buffer.nbytes for buffer in held) == pytest.approx(planned, rel=0.01)


def test_gradients_of_narrow_values_add_up_in_float32() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    flat = flatten({"weight": weight}, piggybacked=0, update=Update(storage=Storage(dtype=torch.bfloat16)))
    for scale in (256.0, 0.5, 0.5):
        (weight * scale).sum().backward()
    assert weight.dtype == torch.bfloat16
    assert flat.dense.gradients.tolist() == [257.0] * 16


def test_originals_follow_values_that_are_set_from_elsewhere() -> None:
    flat = held(Update(storage=Storage(dtype=torch.bfloat16)))
    flat.dense.values.fill_(0.5)
    flat.dense.adopt()
    assert flat.dense.masters is not None
    assert set(flat.dense.masters.tolist()) == {0.5}
