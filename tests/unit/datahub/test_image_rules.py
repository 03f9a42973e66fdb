"""Rules for opening images: the right pixels, or a verdict that names what is wrong."""

from __future__ import annotations

import contextlib
import io
import re
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image, ImageChops

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.images import open_upright
from polyreme_datahub.operations.open_rules import OpenRules
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.sandbox.sandbox import Sandbox
from polyreme_datahub.sandbox.tasks import Limits, SampleTask, SandboxStep, StepMade
from tests.unit.datahub.color_profiles import cmyk_profile, gray_profile, rgb_profile

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def photo(width: int = 120, height: int = 90, seed: int = 0) -> Image.Image:
    """Smooth colors, as photographs have."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 12 + 2, width // 12 + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def pixels(data: bytes, **rules: bool) -> npt.NDArray[np.int16]:
    return np.asarray(open_upright(data, OpenRules(**rules))).astype(np.int16)


def rule_of(data: bytes) -> str:
    with pytest.raises(BadRecordError) as refused:
        open_upright(data)
    assert " at 0x" not in refused.value.message
    return refused.value.rule


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "4:1:1", "gray", "kept rgb"])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpegs_have_the_pixels_that_pillow_decodes(subsampling: str, progressive: bool) -> None:
    for width, height in ((1, 1), (2, 3), (7, 9), (16, 16), (31, 33), (101, 77)):
        image = photo(width, height)
        options: dict[str, Any] = {"quality": 70, "progressive": progressive}
        if subsampling == "gray":
            image = image.convert("L")
        elif subsampling == "kept rgb":
            options["keep_rgb"] = True
        else:
            options["subsampling"] = subsampling
        data = encoded(image, "JPEG", **options)
        expected = np.asarray(Image.open(io.BytesIO(data)))
        assert np.array_equal(np.asarray(open_upright(data)), expected)


def without_adobe_marker(data: bytes) -> bytes:
    at = data.index(b"\xff\xee")
    (size,) = struct.unpack(">H", data[at + 2 : at + 4])
    return data[:at] + data[at + 2 + size :]


def test_cmyk_has_its_colors_with_and_without_adobes_marker() -> None:
    cmyk = photo().convert("CMYK")
    expected = np.asarray(cmyk.convert("RGB")).astype(np.int16)
    with_marker = encoded(cmyk, "JPEG", quality=95)
    without = without_adobe_marker(encoded(ImageChops.invert(cmyk), "JPEG", quality=95))
    assert expected.mean() > 80
    for data in (with_marker, without):
        assert np.abs(pixels(data) - expected).mean() < 3


def test_cmyk_with_a_profile_has_the_profiles_colors() -> None:
    profile = cmyk_profile({(0, 0, 0, 0): (255, 128, 128), (1, 0, 0, 0): (138, 208, 195)})  # cyan ink that is red
    data = encoded(Image.new("CMYK", (32, 32), (255, 0, 0, 0)), "JPEG", quality=100, icc_profile=profile)
    red, green, blue = pixels(data)[16, 16]
    assert red > 180
    assert max(green, blue) < 100
    assert pixels(encoded(Image.new("CMYK", (8, 8)), "JPEG", icc_profile=profile)).min() > 250


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_profiles_are_converted_to_srgb(kind: str, mode: str) -> None:
    if kind == "JPEG" and mode == "RGBA":
        mode = "RGB"
    image = Image.new(mode, (32, 32), (200, 60, 60, 255)[: len(mode)])
    data = encoded(image, kind, icc_profile=rgb_profile(), **({"lossless": True} if kind == "WEBP" else {}))
    red, green, blue = pixels(data)[16, 16]
    assert red > 215  # Adobe RGB's red is beyond sRGB's
    assert abs(green - 58) < 8
    assert abs(blue - 58) < 8


def test_gray_profiles_and_palettes_are_converted_too() -> None:
    ramp = Image.linear_gradient("L")
    brighter = pixels(encoded(ramp, "PNG", icc_profile=gray_profile(gamma=1.0)))
    assert brighter.shape == (256, 256)
    assert brighter[55, 0] > 120
    palette = Image.new("RGB", (32, 32), (200, 60, 60)).quantize(4)
    assert pixels(encoded(palette, "PNG", icc_profile=rgb_profile()))[16, 16, 0] > 215


def test_an_srgb_profile_a_broken_one_and_one_for_other_colors_change_no_pixel() -> None:
    from PIL import ImageCms

    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for profile in (srgb, b"no profile", gray_profile(gamma=1.0)):
        for image in (photo(), photo().convert("RGBA")):
            plain = pixels(encoded(image, "PNG"))
            assert np.array_equal(pixels(encoded(image, "PNG", icc_profile=profile)), plain)


def test_sixteen_bits_are_scaled_by_the_range_that_is_known() -> None:
    full = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    expected = (full.astype(np.int64) * 255 + 32767) // 65535
    for kind in ("PNG", "TIFF"):
        assert np.array_equal(pixels(encoded(Image.fromarray(full), kind)), expected)
    twelve = Image.fromarray(full >> 4)
    assert rule_of(encoded(twelve, "TIFF")) == "image-depth"
    stated = encoded(twelve, "TIFF", tiffinfo={281: 4095})
    for data, rules in ((stated, {}), (encoded(twelve, "TIFF"), {"scale_deep": True})):
        assert np.abs(pixels(data, **rules) - expected).max() <= 1
    assert pixels(encoded(Image.new("I;16", (8, 8)), "TIFF")).max() == 0
    assert rule_of(encoded(Image.new("F", (8, 8)), "TIFF")) == "image-depth"


FRAMES = [photo(seed=1), photo(seed=2)]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_and_pages_are_refused_or_their_first_frame_is_taken(kind: str) -> None:
    data = encoded(FRAMES[0], kind, save_all=True, append_images=FRAMES[1:])
    assert rule_of(data) == "animated"
    first = pixels(data, first_frame=True)
    assert np.abs(first - np.asarray(FRAMES[0])).mean() < 15
    still = encoded(FRAMES[0], kind)
    assert rule_of_none(still)


def rule_of_none(data: bytes) -> bool:
    return open_upright(data).size == (120, 90)


def test_the_further_images_of_phones_and_pyramids_are_no_pages() -> None:
    assert rule_of_none(encoded(FRAMES[0], "MPO", save_all=True, append_images=FRAMES[1:]))
    small = photo(60, 45)
    small.encoderinfo = {"tiffinfo": {254: 1}}
    pyramid = encoded(FRAMES[0], "TIFF", save_all=True, append_images=[small])
    assert rule_of_none(pyramid)


def jpeg() -> bytes:
    return encoded(photo(400, 300), "JPEG", quality=90)


def damaged_jpeg(kind: str, at: int) -> bytes:
    data = jpeg()
    start = len(data) // 12 * (at + 1)
    hole = {"zeroed": bytes(2048), "lost": b"", "overwritten": np.random.default_rng(at).bytes(2048)}[kind]
    return data[:start] + hole + data[start + 2048 :]


@pytest.mark.parametrize("kind", ["zeroed", "lost", "overwritten"])
def test_damage_in_the_middle_of_a_jpeg_is_refused(kind: str) -> None:
    silent = 0
    for at in range(8):
        data = damaged_jpeg(kind, at)
        assert rule_of(data) == "damaged"
        with Image.open(io.BytesIO(data)) as image, contextlib.suppress(OSError):
            image.load()
            silent += 1
    assert silent, "Pillow alone sees the damage, so this needs no simplejpeg"


def test_bytes_between_the_segments_of_a_header_do_no_harm() -> None:
    data = jpeg()
    odd = data[:2] + b"\xff\xfe\0\x04ab" + b"junk" + data[2:]
    assert np.array_equal(pixels(odd), pixels(data))
    table = data.find(b"\xff\xdb")
    for at in range(8):
        bad = damaged_jpeg("overwritten", at)
        assert rule_of(bad[:table] + b"\0\0\0\x11" + bad[table:]) == "damaged"
    assert np.array_equal(pixels(data + b"trailing bytes"), pixels(data))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_header(width: int, height: int, color: int = 6) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, color, 0, 0, 0))


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=np.uint8))


def cut(kind: str, **options: Any) -> bytes:
    data = encoded(NOISE, kind, **options)
    return data[: len(data) // 2]


def flipped(kind: str) -> bytes:
    data = bytearray(encoded(NOISE, kind))
    data[len(data) // 2] ^= 0x55
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "empty"),
        (cut("JPEG"), "truncated"),
        (cut("PNG"), "truncated"),
        (cut("WEBP"), "truncated"),
        (cut("BMP"), "truncated"),
        (cut("GIF"), "truncated"),
        (cut("TIFF"), "truncated"),
        (cut("TIFF", compression="tiff_lzw"), "damaged"),
        (jpeg()[:-2], "truncated"),
        (jpeg()[:20], "damaged"),
        (flipped("PNG"), "damaged"),
        (b"\xff\xd8\xff", "damaged"),
        (b"hello, I am text", "image-format"),
        (encoded(NOISE, "AVIF"), "image-format"),
        (b"\0\0\0\x18ftypheic" + bytes(100), "image-format"),
        (b"\0\0\0\x18ftypisom" + bytes(100), "image-format"),
        (b"%PDF-1.7\n" + bytes(100), "image-format"),
        (b"\n <svg xmlns='x'/>", "image-format"),
        (encoded(NOISE, "PPM"), "image-format"),
        (png_header(40_000, 40_000) + png_chunk(b"IDAT", b""), "image-size"),
        (png_header(0, 10) + png_chunk(b"IDAT", b""), "damaged"),
    ],
)
def test_each_kind_of_bad_bytes_has_its_rule(data: bytes, rule: str) -> None:
    assert rule_of(data) == rule


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (encoded(NOISE, "AVIF"), "AVIF"),
        (b"\0\0\0\x18ftypheic" + bytes(9), "HEIC"),
        (b"\xff\x0a" + bytes(9), "JPEG XL"),
        (b"<!DOCTYPE html><title>404</title>", "HTML"),
    ],
)
def test_formats_that_are_not_read_are_named(data: bytes, name: str) -> None:
    with pytest.raises(BadRecordError, match=re.escape(name)):
        open_upright(data)


def test_the_content_decides_and_not_the_name() -> None:
    assert np.array_equal(pixels(encoded(NOISE, "PNG")), np.asarray(NOISE))


def test_transparent_parts_lie_on_white_in_strips_as_at_once() -> None:
    alpha = photo(300, 200).convert("RGBA")
    alpha.putalpha(Image.linear_gradient("L").resize(alpha.size))
    at_once = Image.alpha_composite(Image.new("RGBA", alpha.size, "white"), alpha).convert("RGB")
    import polyreme_datahub.operations.image_colors as colors

    assert np.array_equal(np.asarray(colors.on_white(alpha)), np.asarray(at_once))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(colors, "STRIP_PIXELS", 1000)
        assert np.array_equal(np.asarray(colors.on_white(alpha)), np.asarray(at_once))


def test_a_transparent_image_of_100_megapixels_fits_in_1_gib() -> None:
    line = zlib.compressobj(1)
    body = b"".join(line.compress(b"\0" + b"\x10\x20\x30\x80" * 9999) for _ in range(9999)) + line.flush()
    bomb = Blob(png_header(9999, 9999) + png_chunk(b"IDAT", body) + png_chunk(b"IEND", b""))
    assert len(bomb.data) < 4e6
    content = {"kind": "images", "images": [bomb.digest], "masks": [None], "boxes": []}
    step = SandboxStep(name="decode", operation="decode", inputs=("record",))
    with Sandbox([step], Limits(memory_bytes=2**30)) as chain:
        (outcome,) = chain.run([SampleTask(key="a", values={"record": Value.of(content, kept=[bomb])})])
    assert isinstance(outcome.steps[0], StepMade), outcome
