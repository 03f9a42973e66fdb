"""Rules by which bytes become an image: upright, gray or RGB, 8 bits a channel, in sRGB. Content decides, not the name.

Every refusal has a rule of its own: ``empty``, ``image-format``, ``image-size``, ``image-depth``, ``animated``,
``truncated``, ``damaged``, and ``image`` for what a decoder refuses otherwise.

JPEG is decoded by simplejpeg, whose pixels equal Pillow's, because it reports what libjpeg only warns of: damage in
the middle of a file otherwise ends as shifted or gray blocks. Damage of some hundred bytes is found nearly always (of
600 files with 512 bytes or more lost, zeroed, doubled or overwritten, 592); a few flipped bits often decode. Metadata
never decide: what can't be read of EXIF or a profile is ignored, and so are odd bytes between a header's segments.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Mapping
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image, UnidentifiedImageError

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.image_colors import in_eight_bits, on_white, to_srgb
from polyreme_datahub.operations.jpeg_header import without_metadata
from polyreme_datahub.operations.open_rules import OpenRules

PIXELS_MAX = 100_000_000
Image.MAX_IMAGE_PIXELS = None
"""Pillow warns and raises at limits of its own; ours is checked right after the header, before any pixel."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
"""Pillow knows more, and starts programs for some of them."""
FRAMES_MAX = 64
"""Pages of a TIFF that are looked at."""
REDUCED = 254
"""TIFF's tag NewSubfileType: bit 0 marks a smaller copy of another page."""
ORIENTATION = 0x0112
"""Of EXIF."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright, by its orientation."""
SIDEWAYS = {5, 6, 7, 8}
"""Orientations that exchange width and height."""
SCALES = (8, 4, 2)
UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    zlib.error,
    struct.error,
)
"""What decoders raise on bad bytes."""
TRUNCATED = re.compile(r"truncated|premature end of jpeg|unexpected end|not enough", re.IGNORECASE)
DAMAGED = re.compile(
    r"broken|corrupt|bad huffman|decoder error|decoding error|found marker|inconsistent", re.IGNORECASE
)
MEMORY = re.compile(r"out of memory|memory allocation failure|insufficient memory", re.IGNORECASE)
ADDRESS = re.compile(r"<[\w.]+ object at 0x[0-9a-fA-F]+>")
KNOWN = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"BM", b"II*\0", b"MM\0*", b"GIF87a", b"GIF89a")
BRANDS = {
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"), "HEIC"),
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
}
OTHERS = (
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"8BPS", "Photoshop"),
    (b"%PDF", "PDF"),
    (b"PK\x03\x04", "ZIP"),
    (b"<svg", "SVG"),
    (b"<?xml", "XML or SVG"),
    (b"<!doctype html", "HTML"),
    (b"<html", "HTML"),
    (b"version https://git-lfs", "Git LFS pointer"),
)


def open_upright(
    data: bytes, rules: OpenRules | None = None, *, least: tuple[int, int] | None = None, accepted: bool = False
) -> Image.Image:
    """Decode an image: upright, gray or RGB, in sRGB; transparent parts lie on white.

    Args:
        data: Its bytes.
        rules: How to open what is refused by default.
        least: Width and height that suffice, upright: a JPEG with more is decoded at a half, a quarter or an eighth of
            its scale. All of it is read, so the same damage is found. None: its own size.
        accepted: Whether these very bytes were accepted before, perhaps by an earlier release: what only a decoder of
            this one calls damage refuses no image then.

    Raises:
        BadRecordError: If the bytes break a rule.
        MemoryError: If this process has too little memory for it.
    """
    if not data:
        raise BadRecordError("image is empty: 0 bytes", rule="empty")
    rules = rules or OpenRules()
    try:
        with open_header(data) as image:
            _check_header(image, rules)
            is_jpeg = image.format in {"JPEG", "MPO"}
            loaded = _load_jpeg(image, data, least, accepted=accepted) if is_jpeg else _load(image)
            return upright(loaded, _orientation(image), rules)
    except UnidentifiedImageError as error:
        raise _unknown_format(data) from error
    except UNREADABLE as error:
        if _is_cut_webp(data):
            raise _unknown_format(data) from error
        _refuse(error)


def upright(image: Image.Image, orientation: int, rules: OpenRules) -> Image.Image:
    """Return a decoded image upright, gray or RGB, in sRGB, on white.

    Raises:
        BadRecordError: If its pixels break a rule.
    """
    # Most photographs have pixels in that form already.
    is_plain = image.mode in {"L", "RGB"} and not {"icc_profile", "transparency"} & image.info.keys()
    colored = image if is_plain else to_srgb(in_eight_bits(image, rules))
    turn = TURNS.get(orientation)
    turned = colored if turn is None else colored.transpose(turn)
    plain = turned if is_plain else on_white(turned)
    plain.info.clear()
    return plain


def open_header(data: bytes | memoryview) -> Image.Image:
    """Read an image's header; that of a JPEG whose metadata Pillow can't take once more, with its EXIF alone."""
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if bytes(data[:3]) != KNOWN[0]:
            raise
        return Image.open(io.BytesIO(without_metadata(bytes(data), exif=True)), formats=FORMATS)


def _check_header(image: Image.Image, rules: OpenRules) -> None:
    if image.width * image.height > PIXELS_MAX:
        raise BadRecordError(
            f"image is too large: {image.width} x {image.height} pixels, expected at most {PIXELS_MAX}",
            rule="image-size",
        )
    if not rules.first_frame and _is_animated(image):
        raise BadRecordError(
            f"image has several frames or pages ({image.format}), expected one; set the parameter first_frame to "
            "take the first",
            rule="animated",
        )


def _is_animated(image: Image.Image) -> bool:
    """Tell whether there are several images. Not in a JPEG: phones add depth and gain maps; nor copies in a TIFF."""
    if image.format in {"JPEG", "MPO"} or not getattr(image, "is_animated", False):
        return False
    if image.format != "TIFF":
        return True
    pages = 0
    for at in range(min(int(getattr(image, "n_frames", 1)), FRAMES_MAX)):
        image.seek(at)
        pages += not int(getattr(image, "tag_v2", {}).get(REDUCED, 0)) & 1
    image.seek(0)
    return pages > 1


def _load(image: Image.Image) -> Image.Image:
    image.load()
    return image


def _orientation(image: Image.Image) -> int:
    """Return how an image is turned; 1, upright, where its EXIF is broken. A loaded TIFF is upright."""
    try:
        found = image.getexif().get(ORIENTATION)
    except UNREADABLE:
        return 1
    return found if isinstance(found, int) else 1


def _load_jpeg(image: Image.Image, data: bytes, least: tuple[int, int] | None, *, accepted: bool) -> Image.Image:
    """Decode a JPEG by simplejpeg; by Pillow, where simplejpeg can't read one that is not damaged."""
    sideways = _orientation(image) in SIDEWAYS
    scaled = {} if least is None else _scaled_size(image.size, least[::-1] if sideways else least)
    colors = {"RGB": "RGB", "L": "GRAY", "CMYK": "CMYK"}[image.mode]
    try:
        pixels = _decoded(data, colors, scaled)
    except ValueError as error:
        text = str(error)
        if MEMORY.search(text) or (not accepted and (DAMAGED.search(text) or TRUNCATED.search(text))):
            raise
        return _load(image)
    if colors == "CMYK" and "adobe" in image.info:
        pixels = 255 - pixels  # Adobe's form: 0 is full ink
    loaded = Image.fromarray(pixels[:, :, 0] if colors == "GRAY" else pixels, mode=image.mode)
    loaded.info = image.info
    return loaded


def _decoded(data: bytes, colors: str, scaled: Mapping[str, int]) -> npt.NDArray[np.uint8]:
    """Decode a JPEG; where its header may hide whether it is damaged, once more without what says nothing of pixels."""
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colors, **scaled)
    except ValueError as error:
        if MEMORY.search(str(error)) or (plain := without_metadata(data)) == data:
            raise
        pixels = simplejpeg.decode_jpeg(plain, colors, **scaled)
    return pixels


def _scaled_size(size: tuple[int, int], least: tuple[int, int]) -> dict[str, int]:
    """Return the least height and width for the decoder, or nothing for its own scale.

    Other scales are slower to decode, and sides that a scale does not divide would be stretched by part of a pixel.
    """
    for scale in SCALES:
        if size[0] % scale == size[1] % scale == 0 and size[0] >= scale * least[0] and size[1] >= scale * least[1]:
            return {"min_width": size[0] // scale, "min_height": size[1] // scale}
    return {}


def _refuse(error: Exception) -> NoReturn:
    text = ADDRESS.sub("", str(error)).strip() or type(error).__name__
    if MEMORY.search(text):
        raise MemoryError(text) from error
    if TRUNCATED.search(text) or isinstance(error, EOFError):
        raise BadRecordError(f"image is truncated: {text}", rule="truncated") from error
    if DAMAGED.search(text):
        raise BadRecordError(f"image is damaged: {text}", rule="damaged") from error
    raise BadRecordError(f"image can't be decoded: {text}", rule="image") from error


def _unknown_format(data: bytes) -> BadRecordError:
    """Say what bytes are that no decoder takes."""
    expected = f"expected one of {', '.join(FORMATS)}"
    if data.startswith(KNOWN):
        return BadRecordError("image is damaged: its header can't be read", rule="damaged")
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "truncated" if _is_cut_webp(data) else "damaged"
        return BadRecordError(f"image is {kind}: WebP of {len(data)} bytes", rule=kind)
    if data[4:8] == b"ftyp":
        return BadRecordError(
            f"image is {BRANDS.get(data[8:12], 'a video or an unknown kind of ISO media')}, {expected}",
            rule="image-format",
        )
    start = data[:64].lstrip().lower()
    for magic, name in OTHERS:
        if data.startswith(magic) or start.startswith(magic):
            return BadRecordError(f"image is {name}, {expected}", rule="image-format")
    return BadRecordError(f"not an image: begins with {data[:8]!r}, {expected}", rule="image-format")


def _is_cut_webp(data: bytes) -> bool:
    if len(data) < 12 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return False
    return len(data) < 8 + int.from_bytes(data[4:8], "little")
