"""Every layout starts with the same weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyreme_planner.shapes import KIMI_VL_NANO, model_shape
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.moe import Dispatched


class Elsewhere:
    """Never called: these tests only build."""

    def dispatch(self, rows_BD: Tensor, counts_E: Tensor, *, each: int | None = None) -> Dispatched:
        raise AssertionError

    def combine(self, rows_SD: Tensor, state: Any) -> Tensor:
        raise AssertionError


def test_a_rank_with_some_experts_draws_exactly_its_slice_of_the_whole() -> None:
    whole = build_model(KIMI_VL_NANO, seed=7, media_token=1).state_dict()
    held = range(4, 8)
    part = build_model(KIMI_VL_NANO, seed=7, media_token=1, experts_local=held, dispatcher=Elsewhere())
    for name, tensor in part.state_dict().items():
        expected = whole[name][held.start : held.stop] if ".experts." in name else whole[name]
        assert torch.equal(tensor, expected), name


def test_the_same_seed_draws_the_same_weights_and_another_seed_draws_others() -> None:
    first, again, other = (build_model(KIMI_VL_NANO, seed=seed, media_token=1).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name, tensor in first.items() if tensor.unique().numel() > 1]
    assert len(drawn) > 30
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_a_deeper_model_begins_with_the_weights_of_the_shallower_one() -> None:
    shallow = build_model(KIMI_VL_NANO, seed=1, media_token=1).state_dict()
    deep = build_model(model_shape("kimi-vl-nano", {"decoder": {"layers": 4}}), seed=1, media_token=1).state_dict()
    assert all(torch.equal(tensor, deep[name]) for name, tensor in shallow.items())


def test_no_two_tensors_are_drawn_alike() -> None:
    state = build_model(KIMI_VL_NANO, seed=1, media_token=1).state_dict()
    heads = [tuple(tensor.flatten()[:4].tolist()) for tensor in state.values() if tensor.unique().numel() > 1]
    assert len(set(heads)) == len(heads)
    experts = state["language_model.model.layers.1.mlp.experts.down_proj"]
    assert len({float(expert[0, 0]) for expert in experts}) == KIMI_VL_NANO.decoder.experts


def test_norms_begin_at_one_and_biases_at_zero_and_weights_at_their_spread() -> None:
    model = build_model(KIMI_VL_NANO, seed=1, media_token=1)
    state = model.state_dict()
    assert (state["language_model.model.norm.weight"] == 1).all()
    assert (state["vision_tower.encoder.blocks.0.norm0.weight"] == 1).all()
    assert (state["multi_modal_projector.pre_norm.weight"] == 1).all()
    assert (state["language_model.model.layers.0.self_attn.kv_a_layernorm.weight"] == 1).all()
    assert (state["multi_modal_projector.linear_1.bias"] == 0).all()
    assert (state["language_model.model.layers.1.mlp.gate.e_score_correction_bias"] == 0).all()
    spread = KIMI_VL_NANO.decoder.initializer_range
    embedding = state["language_model.model.embed_tokens.weight"]
    assert abs(float(embedding.std()) / spread - 1) < 0.05
    assert abs(float(embedding.mean())) < 0.05 * spread


def test_parameters_take_the_wanted_type_and_the_correction_bias_stays_float32() -> None:
    state = build_model(KIMI_VL_NANO, seed=1, media_token=1, dtype=torch.bfloat16).state_dict()
    for name, tensor in state.items():
        wanted = torch.float32 if name.endswith("correction_bias") else torch.bfloat16
        assert tensor.dtype == wanted, name
