"""Every token, image and feature of a stream is on exactly one rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_api.errors import InvalidConfigError
from polyreme_trainer.parallel.context import StreamCut
from polyreme_trainer.parallel.images import FeatureRoutes, share_images

cuts = st.builds(
    lambda unit, ring, ulysses: StreamCut(tokens=unit * 2 * ring * ulysses, ring=ring, ulysses=ulysses),
    unit=st.integers(1, 9),
    ring=st.integers(1, 5),
    ulysses=st.integers(1, 4),
)


@given(cuts)
def test_every_token_is_held_by_one_rank(cut: StreamCut) -> None:
    held = np.concatenate([cut.tokens_of(place) for place in range(cut.ranks)])
    assert sorted(held.tolist()) == list(range(cut.tokens))
    assert len({cut.tokens_of(place).size for place in range(cut.ranks)}) == 1


@given(cuts)
def test_every_place_of_a_ring_looks_at_equally_much_of_one_long_document(cut: StreamCut) -> None:
    work = {sum(token + 1 for piece in cut.pieces(place) for token in piece) for place in range(cut.ring)}
    assert len(work) == 1


@pytest.mark.parametrize(("tokens", "ring", "ulysses"), [(6, 2, 1), (8, 1, 3), (12, 3, 3)])
def test_a_stream_that_does_not_divide_is_refused(tokens: int, ring: int, ulysses: int) -> None:
    with pytest.raises(InvalidConfigError, match=f"{tokens} tokens of a rank's packs over cp={ring}x{ulysses}"):
        StreamCut(tokens=tokens, ring=ring, ulysses=ulysses)


@given(st.lists(st.integers(1, 64), max_size=12), st.integers(1, 6))
def test_images_are_shared_out_whole_and_no_rank_has_more_than_another_and_one_image(
    patches: list[int], ranks: int
) -> None:
    shares = share_images(patches, ranks)
    assert sorted(image for share in shares for image in share) == list(range(len(patches)))
    loads = [sum(patches[image] for image in share) for share in shares]
    assert max(loads) - min(loads) <= max(patches, default=0)


def test_features_that_are_not_all_wanted_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="2 tokens, 3 features"):
        FeatureRoutes(made=[np.arange(3), np.arange(0)], wanted=[np.array([0]), np.array([2])])
