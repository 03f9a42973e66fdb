"""Brings pixels into one form: 16 bits to 8, profiles and CMYK to sRGB, transparency onto white."""

from __future__ import annotations

import functools
import io

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.open_rules import OpenRules

DEEP_MAX = 65_535
DEEP_USED_MIN = 4096
"""A 16-bit image whose largest value is below it uses 12 bits or fewer: cameras and microscopes write such files."""
MAX_SAMPLE_VALUE = 281
"""The TIFF tag."""
SAME_MAX = 2
"""Profiles that change no color by more than this are sRGB: those pixels stay as they are."""
STRIP_PIXELS = 2**22
PROFILES_MAX = 64


def in_eight_bits(image: Image.Image, rules: OpenRules) -> Image.Image:
    """Scale 16-bit gray to 8 bits: Pillow's own conversion clips it to white.

    The range is the full one, or what TIFF's MaxSampleValue says. Pixels that use 12 bits or fewer of 16 are refused:
    they may be a dark image or a bright one in fewer bits. With ``scale_deep`` they count as the latter.

    Raises:
        BadRecordError: If the range of the pixels is not known.
    """
    if image.mode == "F":
        raise BadRecordError(
            "image has floating-point pixels, expected 1, 8 or 16 bits per channel", rule="image-depth"
        )
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    deep_HW = np.asarray(image)
    low, high = int(deep_HW.min()), int(deep_HW.max())
    if low < 0 or high > DEEP_MAX:
        raise BadRecordError(
            f"image has pixels outside 0..{DEEP_MAX}, expected 1, 8 or 16 bits per channel", rule="image-depth"
        )
    plain = Image.fromarray(_scale_table(_range_of(image, high, rules))[deep_HW.astype(np.uint16, copy=False)])
    plain.info = image.info
    return plain


def _range_of(image: Image.Image, high: int, rules: OpenRules) -> int:
    """Return the value that is white."""
    stated = getattr(image, "tag_v2", {}).get(MAX_SAMPLE_VALUE)
    stated = stated[0] if isinstance(stated, tuple) and stated else stated
    if isinstance(stated, int) and max(high, 1) <= stated <= DEEP_MAX:
        return stated
    if high >= DEEP_USED_MIN or high == 0:
        return DEEP_MAX
    if rules.scale_deep:
        return max(255, (1 << high.bit_length()) - 1)
    raise BadRecordError(
        f"16-bit image has no pixel above {high}, so its range is not known, expected one of at least "
        f"{DEEP_USED_MIN}; set the parameter scale_deep if it has fewer bits",
        rule="image-depth",
    )


@functools.lru_cache(maxsize=8)
def _scale_table(white: int) -> npt.NDArray[np.uint8]:
    values = np.minimum(np.arange(DEEP_MAX + 1, dtype=np.int64), white)
    return ((values * 255 + white // 2) // white).astype(np.uint8)


def to_srgb(image: Image.Image) -> Image.Image:
    """Apply the image's ICC profile; without a valid one, CMYK is converted plainly and others count as sRGB."""
    profile = image.info.get("icc_profile")
    if image.mode in {"P", "PA"} and profile:
        transparent = image.mode == "PA" or "transparency" in image.info
        image = image.convert("RGBA" if transparent else "RGB")
    if isinstance(profile, bytes) and profile:
        if image.mode in {"L", "LA"} and (table := _gray_table(profile)) is not None:
            return _with_table(image, table)
        if image.mode in {"RGB", "RGBA", "CMYK"} and (transform := _transform(profile, image.mode)) is not None:
            return _transformed(image, transform)
    return image.convert("RGB") if image.mode == "CMYK" else image


def _transformed(image: Image.Image, transform: ImageCms.ImageCmsTransform) -> Image.Image:
    changed = ImageCms.applyTransform(image, transform)
    assert changed is not None
    changed.info = image.info
    return changed


def _with_table(image: Image.Image, table: tuple[int, ...]) -> Image.Image:
    bands = list(image.split())
    bands[0] = bands[0].point(table)
    changed = bands[0] if len(bands) == 1 else Image.merge(image.mode, bands)
    changed.info = image.info
    return changed


@functools.lru_cache(maxsize=PROFILES_MAX)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Build the conversion of a profile to sRGB; None if it is broken, for other colors, or sRGB itself."""
    made = "RGBA" if mode == "RGBA" else "RGB"
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() != ("CMYK" if mode == "CMYK" else "RGB"):
            return None
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, made)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    return None if mode != "CMYK" and _changes_nothing(transform, made) else transform


def _changes_nothing(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    steps = np.linspace(0, 255, 9).astype(np.uint8)
    colors = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1).reshape(27, 27, 3)
    image = Image.fromarray(colors).convert(mode)
    changed = ImageCms.applyTransform(image, transform)
    assert changed is not None
    difference = np.asarray(changed.convert("RGB")).astype(np.int16) - colors
    return bool(np.abs(difference).max() <= SAME_MAX)


@functools.lru_cache(maxsize=PROFILES_MAX)
def _gray_table(profile: bytes) -> tuple[int, ...] | None:
    """Tabulate a gray profile's conversion to sRGB; None if it is broken, for other colors, or sRGB itself."""
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(1, 256))
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() != "GRAY":
            return None
        changed = ImageCms.profileToProfile(ramp, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None
    assert changed is not None
    green = np.asarray(changed)[0, :, 1].astype(np.int16)
    if int(np.abs(green - np.arange(256)).max()) <= SAME_MAX:
        return None
    return tuple(int(value) for value in green)


def on_white(image: Image.Image) -> Image.Image:
    """Return the image as gray or RGB, transparent parts on white; strip by strip, so that few copies exist at once."""
    if image.mode not in {"RGBA", "LA", "PA"} and "transparency" not in image.info:
        return image if image.mode in {"L", "RGB"} else image.convert("L" if image.mode == "1" else "RGB")
    opaque = Image.new("RGB", image.size)
    rows = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(image.height, top + rows)))
        strip.info = image.info
        strip = strip.convert("RGBA")
        paper = Image.new("RGBA", strip.size, "white")
        opaque.paste(Image.alpha_composite(paper, strip).convert("RGB"), (0, top))
    return opaque
