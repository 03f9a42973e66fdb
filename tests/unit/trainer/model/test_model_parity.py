"""The same weights give the same numbers in classes of another library that we did not write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from polyreme_api.plan.parts import parameter_count
from polyreme_api.plan.shapes import PRESETS, ModelShape, model_shape
from polyreme_trainer.model.loss import token_loss
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
    assert _error(ours, theirs) < TOLERANCE
    assert (ours - planted).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("q_rank", [None, 24])
def test_the_decoder_equals_a_reference_document_by_document(
    model_of: Callable[..., KimiVL], batch: Batch, references: References, q_rank: int | None
) -> None:
    decoder = {} if q_rank is None else {"q_rank": q_rank}
    model = model_of(model_shape("kimi-vl-nano", {"decoder": decoder}))
    reference = references.text(model)
    tokens_T = batch.tokens_T.clamp(min=2)
    no_patches = batch.patches_PC[:0]
    with torch.no_grad():
        ours = model.logits(model(tokens_T, batch.positions_T, batch.offsets, no_patches, []).hidden_TD)
        for start, end in zip(batch.offsets, batch.offsets[1:], strict=False):
            theirs = reference(input_ids=tokens_T[start:end].unsqueeze(0)).logits[0]
            assert _error(ours[start:end], theirs) < TOLERANCE


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
