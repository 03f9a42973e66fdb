"""Resampling has the same bits by the library and by NumPy, and follows Pillow's bicubic filter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from polyreme_datahub.loader.sample.pixels import Area, resample_by_library, resample_by_numpy


@st.composite
def cases(draw: st.DrawFn) -> tuple[Image.Image, tuple[int, int], Area]:
    """A gray or RGB image of noise, a size, and a part of the image."""
    width, height = draw(st.integers(1, 160)), draw(st.integers(1, 160))
    shape = draw(st.sampled_from([(height, width), (height, width, 3)]))
    noise = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, shape, np.uint8)
    size = draw(st.integers(1, 12)) * 14, draw(st.integers(1, 12)) * 14
    share = st.floats(0.0, 0.45)
    left, top = draw(share) * width, draw(share) * height
    right, bottom = (1 - draw(share)) * width, (1 - draw(share)) * height
    return Image.fromarray(noise), size, (left, top, right - left, bottom - top)


@settings(max_examples=60)
@given(cases())
def test_the_library_and_numpy_make_the_same_bits(case: tuple[Image.Image, tuple[int, int], Area]) -> None:
    assert np.array_equal(resample_by_library(*case), resample_by_numpy(*case))


@pytest.mark.parametrize("size", [(112, 84), (56, 140), (420, 308), (14, 14)])
def test_a_picture_is_that_of_pillow_within_a_few_levels(size: tuple[int, int]) -> None:
    smooth = Image.effect_noise((20, 15), 60).resize((300, 220), Image.Resampling.BICUBIC).convert("RGB")
    ours = resample_by_library(smooth, size, (0.0, 0.0, 300.0, 220.0)).astype(int)
    theirs = np.asarray(smooth.resize(size, Image.Resampling.BICUBIC)).astype(int)
    assert np.abs(ours - theirs).max() <= 3
