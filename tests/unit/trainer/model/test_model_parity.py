"""The same weights give the same numbers in classes of another library that we did not write."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.model_parts import parameter_count
from polyreme_planner.shapes import (
    DEEPSEEK_V3,
    KIMI_K2,
    KIMI_VL_NANO,
    MOONLIGHT_16B_A3B,
    NO_VISION,
    PRESETS,
    ModelShape,
    model_shape,
)
from polyreme_trainer.export.config import text_config
from polyreme_trainer.export.names import text_part
from polyreme_trainer.model.initialise import build_model, outline
from polyreme_trainer.model.loss import token_loss
from polyreme_trainer.model.moe import MixtureOfExperts
from polyreme_trainer.model.vlm import KimiVL

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.trainer.model.conftest import Batch, References

TOLERANCE = 1e-5


@pytest.mark.parametrize("shape", PRESETS.values(), ids=PRESETS)
def test_the_model_has_exactly_the_parameters_that_the_plan_counts(shape: ModelShape) -> None:
    with torch.device("meta"):
        model = KimiVL(shape, media_token=1)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(shape)


RELEASED = {
    "kimi-vl-a3b": 16_407_654_384,
    "moonlight-16b-a3b": 15_960_108_544,
    "deepseek-v3": 671_026_404_352,
    "kimi-k2": 1_026_408_209_408,
}


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_models_have_exactly_their_parameters(name: str) -> None:
    with torch.device("meta"):
        model = KimiVL(PRESETS[name], media_token=1)
    assert sum(parameter.numel() for parameter in model.parameters()) == RELEASED[name]
    assert hasattr(model, "vision_tower") == (name == "kimi-vl-a3b")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [MOONLIGHT_16B_A3B, DEEPSEEK_V3, KIMI_K2], ids=lambda shape: str(shape.name))
def test_a_released_decoder_is_a_references_model_name_by_name_and_shape_by_shape(shape: ModelShape) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    with torch.device("meta"):
        reference = DeepseekV3ForCausalLM(DeepseekV3Config(**text_config(shape.decoder))).state_dict()
    ours = text_part(outline(shape))
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in reference.items()}


def test_a_model_that_takes_no_images_refuses_them_in_words() -> None:
    model = build_model(dataclasses.replace(KIMI_VL_NANO, vision=NO_VISION), seed=0, media_token=1)
    tokens_T = torch.tensor([3, 4, 5])
    with pytest.raises(InvalidConfigError, match=r"model kimi-vl-nano takes no images: 1 in this batch, expected none"):
        model(tokens_T, torch.arange(3), [0, 3], torch.zeros(4, 588), [(2, 2)])
    hidden_TD = model(tokens_T, torch.arange(3), [0, 3], torch.zeros(0, 588), []).hidden_TD
    assert hidden_TD.shape == (3, KIMI_VL_NANO.decoder.width)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("dense", [0, 1])
@pytest.mark.parametrize("shared", [0, 3])
@pytest.mark.parametrize("rank", [None, 24])
@pytest.mark.parametrize("tower", [1, 5])
def test_a_model_of_any_sizes_has_exactly_the_parameters_that_the_plan_counts(
    layers: int, dense: int, shared: int, rank: int | None, tower: int
) -> None:
    decoder = {"layers": layers, "dense_layers": dense, "shared_experts": shared} | ({"q_rank": rank} if rank else {})
    shape = model_shape("kimi-vl-nano", {"decoder": decoder, "vision": {"layers": tower}})
    with torch.device("meta"):
        model = KimiVL(shape, media_token=1)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(shape)


@pytest.mark.slow
def test_the_tower_equals_a_reference_and_a_wrong_rotation_does_not(
    model: KimiVL, batch: Batch, references: References
) -> None:
    pixels = batch.patches_PC.view(-1, 3, 14, 14)
    grid_thw = torch.tensor([[1, rows, columns] for rows, columns in batch.grids])
    with torch.no_grad():
        ours = model.vision_tower(batch.patches_PC, batch.grids)
        theirs = references.vision(model)(pixels, grid_thw=grid_thw).pooler_output
        planted = references.vision(model, deinterleave=False)(pixels, grid_thw=grid_thw).pooler_output
    assert (ours - theirs).abs().max() < TOLERANCE
    assert (ours - planted).abs().max() > 1e-2


YARN: dict[str, int | str] = {"yarn_factor": "40", "yarn_positions": 512, "yarn_beta_fast": "4"}
"""Positions so few that the pairs of a nano model lie on either side of the ramp, and on it."""
DECODERS: dict[str, dict[str, int | str]] = {
    "plain": {},
    "compressed queries": {"q_rank": 24},
    "groups": {"experts": 16, "experts_per_token": 3, "expert_groups": 4, "groups_per_token": 2},
    "YaRN": {**YARN, "rope_dim": 16},
    "YaRN with scaled scores": {**YARN, "rope_dim": 16, "yarn_mscale_all_dim": "1"},
    "YaRN with two scales": {**YARN, "yarn_mscale": "0.7", "yarn_mscale_all_dim": "1.4", "rope_theta": 50_000},
    "as DeepSeek-V3": {
        "q_rank": 24,
        "experts": 16,
        "experts_per_token": 4,
        "expert_groups": 8,
        "groups_per_token": 4,
        "routed_scaling": "2.5",
        "norm_eps": "1e-6",
        "yarn_factor": "40",
        "yarn_mscale_all_dim": "1",
    },
    "as Kimi-K2": {
        "q_rank": 24,
        "experts": 24,
        "experts_per_token": 8,
        "routed_scaling": "2.827",
        "norm_eps": "1e-6",
        "rope_theta": "50000.0",
        "yarn_factor": "32",
        "yarn_beta_fast": "1",
        "yarn_mscale_all_dim": "1",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_the_decoder_equals_a_reference_document_by_document(
    model_of: Callable[..., KimiVL], batch: Batch, references: References, decoder: dict[str, int | str]
) -> None:
    """Scores and all gradients."""
    model = model_of(model_shape("kimi-vl-nano", {"decoder": decoder}))
    reference = references.text(model)
    tokens_T = batch.tokens_T.clamp(min=2)
    ours = model.logits(model(tokens_T, batch.positions_T, batch.offsets, batch.patches_PC[:0], []).hidden_TD)
    ours.square().mean().backward()
    documents = tokens_T.split([end - start for start, end in itertools.pairwise(batch.offsets)])
    theirs = torch.cat([reference(input_ids=document.unsqueeze(0)).logits[0] for document in documents])
    theirs.square().mean().backward()
    assert (ours - theirs).abs().max() < TOLERANCE
    named = model.named_parameters()
    gradients = text_part({name: made for name, parameter in named if (made := parameter.grad) is not None})
    for name, parameter in reference.named_parameters():
        assert (gradients[name] - parameter.grad).abs().max() < TOLERANCE * parameter.grad.abs().max().clamp(min=1), (
            name
        )


def test_a_wrong_ramp_a_missing_scale_and_ungrouped_experts_are_seen(
    model_of: Callable[..., KimiVL], batch: Batch
) -> None:
    """Each number of the configuration moves the scores by more than parity lets pass."""
    tokens_T = batch.tokens_T.clamp(min=2)

    def scores(decoder: dict[str, int | str]) -> torch.Tensor:
        model = model_of(model_shape("kimi-vl-nano", {"decoder": decoder}))
        with torch.no_grad():
            return model.logits(model(tokens_T, batch.positions_T, batch.offsets, batch.patches_PC[:0], []).hidden_TD)

    for name in ("YaRN with two scales", "groups"):
        right = scores(DECODERS[name])
        for field, other in OTHERS[name].items():
            assert (right - scores({**DECODERS[name], field: other})).abs().max() > 100 * TOLERANCE, field


OTHERS: dict[str, dict[str, int | str]] = {
    "YaRN with two scales": {
        "yarn_factor": "39",
        "yarn_positions": 16,
        "yarn_beta_fast": "64",
        "yarn_beta_slow": "0.1",
        "yarn_mscale": "0.8",
        "yarn_mscale_all_dim": "1.3",
    },
    "groups": {"expert_groups": 2, "groups_per_token": 3},
}
"""Another value of each number."""


@pytest.mark.slow
def test_each_layer_equals_a_references_and_so_does_its_routing(
    model: KimiVL, batch: Batch, references: References
) -> None:
    """Routing is compared first: two runs that choose other experts differ, though both are right."""
    reference = references.text(model)
    ours: dict[str, torch.Tensor] = {}
    theirs: dict[str, torch.Tensor] = {}
    for index, layer in model.language_model.model.layers.items():
        _watch(layer, f"layer {index}", ours)
        _watch(reference.model.layers[int(index)], f"layer {index}", theirs)
        if isinstance(layer.mlp, MixtureOfExperts):
            layer.mlp.gate.register_forward_hook(_routing(index, ours))
            reference.model.layers[int(index)].mlp.experts.register_forward_pre_hook(_routed(index, theirs))
    end = batch.offsets[1]
    tokens_T = batch.tokens_T[:end].clamp(min=2)
    with torch.no_grad():
        model(tokens_T, batch.positions_T[:end], [0, end], batch.patches_PC[:0], [])
        reference(input_ids=tokens_T.unsqueeze(0))
    assert ours.keys() == theirs.keys()
    assert sum(name.startswith("routing") for name in ours) == 2
    for name in sorted(ours, reverse=True):
        assert (ours[name] - theirs[name]).abs().max() < TOLERANCE, name


def _watch(layer: torch.nn.Module, name: str, seen: dict[str, torch.Tensor]) -> None:
    """Keep what a layer puts out: a tensor, or a tuple that begins with it."""

    def keep(_layer: object, _arguments: object, output: Any) -> None:
        seen[name] = (output[0] if isinstance(output, tuple) else output).reshape(-1, KIMI_VL_NANO.decoder.width)

    layer.register_forward_hook(keep)


def _routing(index: str, seen: dict[str, torch.Tensor]) -> Callable[..., None]:
    """Keep each token's weight of each expert, 0 for those not chosen, as our router says it."""

    def keep(_router: object, _arguments: object, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        weights_TK, experts_TK, scores_TE = output
        seen[f"routing {index}"] = torch.zeros_like(scores_TE).scatter_(1, experts_TK, weights_TK)

    return keep


def _routed(index: str, seen: dict[str, torch.Tensor]) -> Callable[..., None]:
    """Keep the same of what the reference gives to its experts."""

    def keep(_experts: object, arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        x_TD, experts_TK, weights_TK = arguments
        weight_TE = x_TD.new_zeros((x_TD.shape[0], KIMI_VL_NANO.decoder.experts))
        seen[f"routing {index}"] = weight_TE.scatter_(1, experts_TK, weights_TK)

    return keep


@pytest.mark.slow
def test_a_wrong_rotation_of_the_decoder_shows(model: KimiVL, batch: Batch, references: References) -> None:
    reference = references.text(model)
    reference.config.rope_interleave = False
    tokens_T = batch.tokens_T[: batch.offsets[1]].clamp(min=2)
    positions_T, no_patches = batch.positions_T[: batch.offsets[1]], batch.patches_PC[:0]
    with torch.no_grad():
        ours = model.logits(model(tokens_T, positions_T, [0, len(tokens_T)], no_patches, []).hidden_TD)
        planted = reference(input_ids=tokens_T.unsqueeze(0)).logits[0]
    assert (ours - planted).abs().max() > 1e-2


@pytest.mark.slow
def test_loss_and_gradients_of_the_decoder_equal_a_reference(
    model: KimiVL, batch: Batch, references: References
) -> None:
    reference = references.text(model)
    end = batch.offsets[1]
    tokens_T, targets_T = batch.tokens_T[:end].clamp(min=2), batch.targets_T[:end]
    output = model(tokens_T, batch.positions_T[:end], [0, end], batch.patches_PC[:0], [])
    total, count = token_loss(output.hidden_TD, model.language_model.lm_head.weight, targets_T)
    (total / count).backward()
    theirs = reference(input_ids=tokens_T.unsqueeze(0)).logits[0]
    expected = torch.nn.functional.cross_entropy(theirs, targets_T)
    expected.backward()
    torch.testing.assert_close(total / count, expected, rtol=0, atol=TOLERANCE)
    gradients = dict(model.language_model.named_parameters())
    for name, parameter in reference.named_parameters():
        ours = gradients[name].grad
        assert ours is not None, name
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=TOLERANCE, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.slow
def test_the_whole_model_equals_a_reference_image_and_text(model: KimiVL, batch: Batch, references: References) -> None:
    reference = references.vlm(model)
    output = model(batch.tokens_T, batch.positions_T, batch.offsets, batch.patches_PC, batch.grids)
    ours = model.logits(output.hidden_TD)
    for index, images in enumerate([slice(0, 1), slice(1, 1), slice(1, 3), slice(3, 4)]):
        alone = batch.document(index, images)
        arguments = {}
        if alone.grids:
            arguments["pixel_values"] = alone.patches_PC.view(-1, 3, 14, 14)
            arguments["image_grid_thw"] = torch.tensor([[1, rows, columns] for rows, columns in alone.grids])
        with torch.no_grad():
            theirs = reference(input_ids=alone.tokens_T.unsqueeze(0), **arguments).logits[0]
        start, end = batch.offsets[index : index + 2]
        assert _error(ours[start:end], theirs) < TOLERANCE


def _error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference against the largest value: in float32 the difference alone grows with the values."""
    return float((ours - theirs).detach().abs().max() / theirs.abs().max())
