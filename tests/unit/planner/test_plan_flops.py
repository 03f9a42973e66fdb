"""Parameters and operations by part, against the published counts and sums made by hand."""

from __future__ import annotations

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.flops import Mix, core_flops, forward_flops, image_flops, training_flops, uneven_flops
from polyreme_planner.model_parts import Part, all_parts, part_parameters
from polyreme_planner.shapes import KIMI_VL_A3B

KI = 1024


def test_the_parts_of_kimi_vl_sum_to_the_published_count() -> None:
    of = part_parameters(KIMI_VL_A3B)
    assert sum(of[part].total for part in all_parts(KIMI_VL_A3B)) == 16_407_654_384


@pytest.mark.parametrize(("tokens", "gflop"), [(4 * KI, 17.2), (8 * KI, 18.9), (32 * KI, 29.1), (128 * KI, 69.8)])
def test_a_text_token_costs_what_its_length_says(tokens: int, gflop: float) -> None:
    mix = Mix(sequence_tokens=tokens, visual_share=0)
    assert training_flops(KIMI_VL_A3B, mix) / 1e9 == pytest.approx(gflop, rel=0.02)


@pytest.mark.parametrize(
    ("tokens", "patches", "tower", "head"),
    [
        (4 * KI, 1024, 10.3, 3.6),
        (4 * KI, 4096, 14.4, 3.6),
        (32 * KI, 1024, 5.8, 2.0),
        (128 * KI, 1024, 2.3, 0.8),
    ],
)
def test_tower_and_head_weigh_as_many_layers_as_by_hand(tokens: int, patches: int, tower: float, head: float) -> None:
    of = forward_flops(KIMI_VL_A3B, Mix(sequence_tokens=tokens, image_patches=patches))
    assert of[Part.TOWER] / of[Part.MOE] == pytest.approx(tower, rel=0.02)
    assert of[Part.HEAD] / of[Part.MOE] == pytest.approx(head, rel=0.02)


def test_the_dense_layer_of_kimi_vl_costs_as_much_as_a_mixture() -> None:
    """Its feed-forward is as wide as eight experts: 11,264 = 8 x 1,408."""
    of = forward_flops(KIMI_VL_A3B, Mix(sequence_tokens=4 * KI))
    assert of[Part.DENSE] == pytest.approx(of[Part.MOE], rel=0.002)


def test_text_alone_costs_no_tower() -> None:
    assert forward_flops(KIMI_VL_A3B, Mix(sequence_tokens=64, visual_share=0))[Part.TOWER] == 0


def test_what_differs_between_packs_is_attention_within_documents_and_images() -> None:
    whole, parts = (uneven_flops(KIMI_VL_A3B, documents, []) for documents in ([8 * KI], [4 * KI, 4 * KI]))
    assert whole == 2 * parts
    layers = sum(part in {Part.DENSE, Part.MOE} for part in all_parts(KIMI_VL_A3B))
    assert whole == layers * core_flops(KIMI_VL_A3B, Mix(sequence_tokens=8 * KI)) * 8 * KI
    images = uneven_flops(KIMI_VL_A3B, [8 * KI], [256, 1024, 256]) - whole
    assert images == 2 * image_flops(KIMI_VL_A3B, 256) + image_flops(KIMI_VL_A3B, 1024)


def test_a_pair_costs_what_its_branches_see_and_its_prefix_once() -> None:
    """A query sees its prefix and its own branch: 6 KI + 2 x (2 KI after 6 KI), not the square of all 10 KI."""
    prefix, branch = 6 * KI, 2 * KI
    pair = uneven_flops(KIMI_VL_A3B, [prefix + branch] * 2, [], shared=[prefix])
    seen = prefix**2 + 2 * ((prefix + branch) ** 2 - prefix**2)
    assert pair * 64 * KI**2 == uneven_flops(KIMI_VL_A3B, [8 * KI], []) * seen


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sequence_tokens": 0}, "spec.data.sequenceTokens"),
        ({"image_patches": 0}, "--image-patches"),
        ({"visual_share": 1.1}, "--visual-share"),
    ],
)
def test_a_mix_that_no_pack_holds_is_refused(values: dict[str, float], words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        Mix(**{"sequence_tokens": 64, **values})  # type: ignore[arg-type]
