"""JPEG: metadata and odd bytes of a header decide nothing; damage is found whatever else is odd in a file."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.images import open_upright

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")
EXIF, COMMENT, PHOTOSHOP, PROFILE, ADOBE, JFIF = 0xE1, 0xFE, 0xED, 0xE2, 0xEE, 0xE0
HEADS = {
    EXIF: (b"Exif\0\0", b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0", b"http://ns.adobe.com/xap/1.0/\0<x", b""),
    PROFILE: (b"ICC_PROFILE\0\x01\x02", b"ICC_PROFILE\0\x01\x01", b"ICC_PROFILE\0", b"MPF\0", b"FPXR\0", b""),
    PHOTOSHOP: (b"Photoshop 3.0\0", b"Photoshop 3.0\x008BIM\x04\x04", b""),
    COMMENT: (b"",),
    0xEA: (b"",),
}
"""Beginnings of what a segment of each marker may hold."""


def segment(marker: int, content: bytes) -> bytes:
    return bytes((0xFF, marker)) + (len(content) + 2).to_bytes(2, "big") + content


@st.composite
def odd_parts(draw: st.DrawFn) -> bytes:
    """What may lie between two segments: metadata that is broken, and bytes that are nothing."""
    marker = draw(st.sampled_from([*HEADS, None]))
    noise = draw(st.binary(max_size=40))
    if marker is None:
        return noise.replace(b"\xff", b"\0")
    return segment(marker, draw(st.sampled_from(HEADS[marker])) + noise)


def encoded(mode: str, *, progressive: bool) -> bytes:
    small = np.random.default_rng(1).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((192, 144), Image.Resampling.BICUBIC).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=92, progressive=progressive)
    return buffer.getvalue()


JPEGS = [encoded(mode, progressive=late) for mode in ("RGB", "L", "CMYK") for late in (False, True)]


def borders(data: bytes) -> Iterator[int]:
    """Where each segment of a header begins, but for the first."""
    at = 2
    while data[at + 1] != 0xDA:
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        yield at


def with_parts(data: bytes, places: list[int], parts: list[bytes]) -> bytes:
    for place, part in sorted(zip(places, parts, strict=True), reverse=True):
        data = data[:place] + part + data[place:]
    return data


def seen(data: bytes, *, accepted: bool = False) -> npt.NDArray[np.uint8] | str:
    try:
        return np.asarray(open_upright(data, accepted=accepted))
    except BadRecordError as error:
        return error.rule


def overwritten(data: bytes, first: int) -> bytes:
    """Destroy a third of the data of scans."""
    scan = data.find(b"\xff\xda") + 20
    first = scan + first * (len(data) - scan) // 10
    return data[:first] + bytes((len(data) - scan) // 3) + data[first + (len(data) - scan) // 3 :]


PARTS = st.lists(st.tuples(odd_parts(), st.integers(0, 3)), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(range(len(JPEGS))),
    st.lists(st.tuples(odd_parts(), st.integers(0, 3)), max_size=3),
    st.integers(0, 6),
)
def test_metadata_and_odd_bytes_of_a_header_change_no_pixel_and_hide_no_damage(
    which: int, odd: list[tuple[bytes, int]], at: int
) -> None:
    sound = JPEGS[which]
    parts, places = [part for part, _ in odd], [list(borders(sound))[place] for _, place in odd]
    expected = seen(sound)
    assert not isinstance(expected, str)
    assert np.array_equal(seen(with_parts(sound, places, parts)), expected)
    damaged = overwritten(sound, at)
    assert isinstance(seen(damaged), str)
    assert seen(with_parts(damaged, places, parts)) == seen(damaged)
    cut = sound[: sound.find(b"\xff\xda") + 60]
    assert seen(with_parts(cut, places, parts)) == seen(cut) == "truncated"


@pytest.mark.parametrize(
    ("at", "given"),
    [
        (JFIF, segment(JFIF, b"JFIF\0\x09\x01\0\0\x01\0\x01\0\0")),
        (ADOBE, segment(ADOBE, b"Adobe\0\x64\0\0\0\0\x07")),
    ],
)
def test_a_header_of_which_libjpeg_warns_hides_no_damage(at: int, given: bytes) -> None:
    sound = JPEGS[0]
    start = sound.find(bytes((0xFF, JFIF)))
    end = start + 2 + int.from_bytes(sound[start + 2 : start + 4], "big")

    def odd(data: bytes) -> bytes:
        return data[:start] + given + data[end:]

    assert np.array_equal(seen(odd(sound)), seen(sound))
    assert seen(odd(overwritten(sound, 3))) == "damaged"


def test_bytes_that_an_earlier_release_accepted_are_decoded_as_it_did() -> None:
    """A job that has begun is not ended by a rule that came later."""
    damaged = overwritten(JPEGS[0], 3)
    table = damaged.find(b"\xff\xdb")
    hidden = damaged[:table] + b"junk" + damaged[table:]
    assert seen(hidden) == "damaged"
    assert not isinstance(seen(hidden, accepted=True), str)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_broken_exif_of_other_formats_is_ignored_too(kind: str) -> None:
    image = Image.new("RGB", (20, 10), "teal")
    plain, broken = io.BytesIO(), io.BytesIO()
    image.save(plain, kind, lossless=True)
    image.save(broken, kind, lossless=True, exif=b"Exif\0\0nothing")
    assert np.array_equal(seen(broken.getvalue()), seen(plain.getvalue()))
