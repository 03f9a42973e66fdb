"""Packed documents do not affect each other; inputs that don't fit together are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from polyreme_api.errors import InvalidConfigError
from polyreme_trainer.model import segment_attention
from polyreme_trainer.model.loss import token_loss
from polyreme_trainer.model.patch_grid import packed_tables
from polyreme_trainer.model.segment_attention import segments

if TYPE_CHECKING:
    from collections.abc import Callable

    from polyreme_trainer.model.vlm import KimiVL
    from tests.unit.trainer.model.conftest import Batch

IMAGES = [slice(0, 1), slice(1, 1), slice(1, 3), slice(3, 4)]


def test_packed_documents_equal_separate_documents(model: KimiVL, batch: Batch) -> None:
    packed = model(batch.tokens_T, batch.positions_T, batch.offsets, batch.patches_PC, batch.grids).hidden_TD
    for index, images in enumerate(IMAGES):
        one = batch.document(index, images)
        alone = model(one.tokens_T, one.positions_T, one.offsets, one.patches_PC, one.grids).hidden_TD
        start, end = batch.offsets[index : index + 2]
        torch.testing.assert_close(packed[start:end], alone, rtol=0, atol=1e-5)


def test_packed_images_equal_images_alone(model: KimiVL, batch: Batch) -> None:
    packed = model.image_features(batch.patches_PC, batch.grids)
    patch = feature = 0
    for rows, columns in batch.grids:
        alone = model.image_features(batch.patches_PC[patch : patch + rows * columns], [(rows, columns)])
        torch.testing.assert_close(packed[feature : feature + len(alone)], alone, rtol=0, atol=1e-5)
        patch, feature = patch + rows * columns, feature + len(alone)
    assert feature == len(packed)


def test_bytes_of_pixels_are_normalised_as_kimi_vls_processor_does(model: KimiVL, batch: Batch) -> None:
    pixels_PC = torch.arange(batch.patches_PC.numel()).remainder_(256).to(torch.uint8).view_as(batch.patches_PC)
    floats_PC = (pixels_PC.to(torch.float64) / 255 - 0.5) / 0.5
    expected_MD = model.image_features(floats_PC.to(torch.float32), batch.grids)
    torch.testing.assert_close(model.image_features(pixels_PC, batch.grids), expected_MD, rtol=0, atol=1e-5)


def test_a_later_token_never_changes_an_earlier_one(model: KimiVL, batch: Batch) -> None:
    arguments = (batch.positions_T, batch.offsets, batch.patches_PC, batch.grids)
    before = model(batch.tokens_T, *arguments).hidden_TD
    changed_T = batch.tokens_T.clone()
    last = batch.offsets[1] - 1
    changed_T[last] = 2 + (changed_T[last] - 1) % 500
    after = model(changed_T, *arguments).hidden_TD
    torch.testing.assert_close(before[:last], after[:last], rtol=0, atol=1e-6)
    assert (before[last] - after[last]).abs().max() > 1e-2
    torch.testing.assert_close(before[last + 1 :], after[last + 1 :], rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [[7, 0, 20, 1, 12], [40], [1] * 40, [10, 10, 10, 10]])
def test_padded_rows_and_a_loop_equal_the_dense_product(
    lengths: list[int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(40, 4, width, generator=generator).requires_grad_() for width in (24, 24, 16)]
    weight_THV = torch.randn(40, 4, 16, generator=generator)
    outputs = []
    for dense_max, ratio_max in ((192, 0.0), (0, 100.0), (0, 0.0)):
        monkeypatch.setattr(segment_attention, "DENSE_TOKENS_MAX", dense_max)
        monkeypatch.setattr(segment_attention, "PADDING_RATIO_MAX", ratio_max)
        layout = segments(lengths, causal=causal, device=torch.device("cpu"), dtype=torch.float32)
        assert (layout.mask_TT is not None, layout.padding is not None) == (dense_max > 0, ratio_max > 0)
        out = layout.attend(values[0], values[1], values[2])
        outputs.append((out, *torch.autograd.grad((out * weight_THV).sum(), values)))
    for dense, padded, looped in zip(*outputs, strict=True):
        torch.testing.assert_close(padded, dense, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(looped, dense, rtol=1e-5, atol=1e-5)


def test_one_long_document_among_short_ones_is_not_padded() -> None:
    device, lengths = torch.device("cpu"), [400, *[10] * 20]
    assert segments(lengths, causal=True, device=device, dtype=torch.float32).padding is None
    assert segments([30, 20] * 10, causal=True, device=device, dtype=torch.float32).padding is not None


def test_bfloat16_runs_the_same_path_within_its_precision(model: KimiVL, batch: Batch) -> None:
    arguments = (batch.tokens_T, batch.positions_T, batch.offsets, batch.patches_PC, batch.grids)
    expected_MD = model.image_features(batch.patches_PC, batch.grids)
    model.bfloat16()
    output = model(*arguments)
    total, _ = token_loss(output.hidden_TD, model.language_model.lm_head.weight, batch.targets_T)
    total.backward()
    assert output.hidden_TD.dtype == torch.bfloat16
    assert total.dtype == torch.float32
    assert all(parameter.grad is not None for parameter in model.parameters())
    features_MD = model.image_features(batch.patches_PC, batch.grids).float()
    assert (features_MD - expected_MD).norm() / expected_MD.norm() < 0.05


def test_two_forwards_are_equal_bit_by_bit(model: KimiVL, batch: Batch) -> None:
    arguments = (batch.tokens_T, batch.positions_T, batch.offsets, batch.patches_PC, batch.grids)
    assert torch.equal(model(*arguments).hidden_TD, model(*arguments).hidden_TD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_without_images_gives_every_parameter_a_gradient(
    model: KimiVL, batch_of: Callable[..., Batch], dtype: torch.dtype
) -> None:
    model.to(dtype)
    batch = batch_of([12, 5], [[], []])
    hidden_TD = model(batch.tokens_T, batch.positions_T, batch.offsets, batch.patches_PC, []).hidden_TD
    model.logits(hidden_TD).square().sum().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []
    weight = model.vision_tower.encoder.blocks[0].get_parameter("wqkv.weight")
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0


def test_interpolated_positions_equal_torch_and_the_table_itself_at_its_own_size() -> None:
    table = torch.randn(16, 16, 5, generator=torch.Generator().manual_seed(0))
    for rows, columns in [(16, 16), (2, 4), (30, 6), (6, 22)]:
        tables = packed_tables([(rows, columns)], merge=2, table_side=16)
        ours = (table.flatten(0, 1)[tables.tap_PB] * tables.weight_PB.unsqueeze(-1)).sum(1)
        theirs = torch.nn.functional.interpolate(
            table.permute(2, 0, 1).unsqueeze(0), size=(rows, columns), mode="bicubic"
        )[0].permute(1, 2, 0)
        torch.testing.assert_close(ours, theirs.flatten(0, 1)[tables.order_P], rtol=0, atol=1e-5)
        if (rows, columns) == (16, 16):
            assert torch.equal(ours, table.flatten(0, 1)[tables.order_P])


def test_merged_cells_hold_their_four_patches_row_by_row() -> None:
    tables = packed_tables([(4, 4), (2, 2)], merge=2, table_side=16)
    assert tables.order_P.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 16, 17, 18, 19]


def test_an_odd_grid_is_refused(model: KimiVL) -> None:
    with pytest.raises(InvalidConfigError, match="3 x 4 patches"):
        model.image_features(torch.zeros(12, 588), [(3, 4)])


def test_patches_that_no_grid_explains_are_refused(model: KimiVL) -> None:
    with pytest.raises(InvalidConfigError, match="8 cells, 9 patches"):
        model.image_features(torch.zeros(9, 588), [(2, 4)])


def test_images_without_their_media_tokens_are_refused(model: KimiVL, batch: Batch) -> None:
    with pytest.raises(InvalidConfigError, match="media tokens do not fit"):
        model(batch.tokens_T.clamp(min=2), batch.positions_T, batch.offsets, batch.patches_PC, batch.grids)


@pytest.mark.parametrize("offsets", [[], [1, 50], [0, 49], [0, 30, 20, 50]])
def test_offsets_that_do_not_cover_the_stream_are_refused(model: KimiVL, batch: Batch, offsets: list[int]) -> None:
    with pytest.raises(InvalidConfigError, match="document offsets"):
        model(batch.tokens_T, batch.positions_T, offsets, batch.patches_PC, batch.grids)


def test_long_causal_rows_in_blocks_are_those_of_the_flash_kernel() -> None:
    lengths = (128, 100, 65, 128, 64, 1)
    chosen = segments(lengths, causal=True, device=torch.device("cpu"), dtype=torch.float32)
    assert chosen.padding is not None
    assert chosen.padding.mask_LL is not None
    heads = segment_attention.WHOLE_SCORES_MAX // (len(lengths) * 128**2) + 1
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(sum(lengths), heads, width, generator=generator) for width in (24, 24, 16)]
    results: list[list[torch.Tensor]] = []
    for kernel in (chosen, segment_attention.Segments(lengths=lengths, causal=True)):
        q, k, v = (tensor.clone().requires_grad_() for tensor in made)
        out = kernel.attend(q, k, v)
        out.square().sum().backward()
        results.append([out, *(tensor.grad for tensor in (q, k, v) if tensor.grad is not None)])
    for ours, flash in zip(*results, strict=True):
        torch.testing.assert_close(ours, flash, rtol=1e-4, atol=1e-5)
