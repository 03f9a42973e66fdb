"""Draws how the images of a sample change at one visit, and finds what its text forbids.

A draw is a function of (seed, source, sample, visit, image, operation) and of nothing else. All arithmetic is of single
IEEE operations and square roots, so that every machine draws the same. ``pixels`` makes the changed pages.

Coordinates written in a text would be wrong after a crop, "left" after a mirror. Marks such as ``<box:0>`` follow their
shapes and forbid nothing. Words are not swapped: "right" may mean "correct", and another word may have another number
of tokens. A sample that declares ``mirrorSafe`` is believed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from polyreme_datahub.index.sample_bytes import MIRROR_SAFE, texts_of
from polyreme_datahub.index.shapes import vertices_of
from polyreme_datahub.loader.sample.pixels import Box, ColorChange, ImageChange, unchanged

if TYPE_CHECKING:
    from polyreme_api.job.data import Augment

AUGMENT_VERSION = 1
"""Goes up when the same settings give other pixels or tokens: loader states of another version are refused."""
CROP, SCALE, MIRROR, COLOR = range(4)
"""Operations, as the counter names them."""
DRAWS = 4
"""Numbers of one operation."""
_NUMBER = r"[-+]?\d+(?:\.\d+)?"
COORDINATES = (
    re.compile(rf"[\[({{]\s*{_NUMBER}(?:\s*[,;]\s*{_NUMBER})+\s*[\])}}]"),
    re.compile(r"<\|?(?i:box|point|poly|polygon|quad|ref|bbox|loc)(?:_?(?:start|end|\d+))?\|?>"),
    re.compile(r"[xyXY](?<!\w[xyXY])[12]?\s*[=:]\s*[-+]?\.?\d"),
)
"""``(12, 30)``; tags of other models; ``x = 12``. Each begins with a set of characters, which the engine finds fast."""
ORIENTATION = re.compile(
    r"left|\bright|clockwise|\b(?:east|west)|mirror|starboard|\bport side"
    r"|\blinke?[nrs]?\b|\brechte?[nrs]?\b|\bgauche|\bdroite?\b|\bizquierd|\bderech|\bsinistr|\bdestr[ao]|\besquerd|\bdireit"
    r"|слева|справа|лев|прав|左|右|왼|오른|يسار|يمين|बाएं|दाएं"
)
"""Words of orientation: English, German, French, Spanish, Italian, Portuguese, Russian, Chinese, Japanese, Korean,
Arabic, Hindi. Others are not known: declare ``mirrorSafe: false``, or don't mirror the source."""
STEMS = (
    *("left", "right", "clockwise", "east", "west", "mirror", "starboard", "port side", "link", "recht", "gauch"),
    *("droit", "izquierd", "derech", "sinistr", "destr", "esquerd", "direit", "лев", "прав", "左", "右", "왼", "오른"),
    *("يسار", "يمين", "बाएं", "दाएं"),
)
"""One of them is in every text that has a word of orientation; a plain search is ten times as fast as the words'."""
SEEN_CHARACTERS_MAX = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AugmentSettings:
    """What may change, as shares; None: this operation is off."""

    crop_area_min: float | None = None
    crop_stretch_max: float = 0.0
    scale_min: float | None = None
    mirror_probability: float | None = None
    color: tuple[float, float, float] | None = None
    """Brightness, contrast, saturation: most that a factor differs from 1."""

    @property
    def moves(self) -> bool:
        """Whether anything on an image may get another place."""
        return (self.crop_area_min, self.scale_min, self.mirror_probability) != (None, None, None)


def settings_of(augment: Augment | None) -> AugmentSettings | None:
    """Read the settings of a source; None where nothing changes."""
    if augment is None:
        return None
    crop, scale, mirror, color = augment.crop, augment.scale, augment.mirror, augment.color
    found = AugmentSettings(
        crop_area_min=None if crop is None else crop.min_area_percent / 100,
        crop_stretch_max=0.0 if crop is None else crop.max_stretch_percent / 100,
        scale_min=None if scale is None else scale.min_percent / 100,
        mirror_probability=None if mirror is None else float(mirror.probability),
        color=None
        if color is None
        else (color.brightness_percent / 100, color.contrast_percent / 100, color.saturation_percent / 100),
    )
    return None if found == AugmentSettings() else found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One visit of a sample by a run."""

    settings: AugmentSettings
    seed: int
    source: str
    sample_id: str
    number: int
    """How often the source has come round before; counts from 0."""

    def draw(self, image: int, operation: int) -> tuple[float, ...]:
        """Return numbers of [0, 1): Philox 4x64, whose streams NumPy keeps (NEP 19)."""
        name = f"{self.seed}:{self.source}:{self.sample_id}".encode()
        digest = hashlib.blake2b(name, digest_size=16, person=b"augment").digest()
        key = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        counter = np.array([0, self.number, image, operation], dtype=np.uint64)
        words = np.random.Philox(key=key, counter=counter).random_raw(DRAWS)
        return tuple((int(word) >> 11) * 2.0**-53 for word in words)


def draw_change(
    visit: Visit, image: int, size: tuple[int, int], kept: Box | None, *, geometry: bool, mirror: bool
) -> ImageChange:
    """Draw how an image changes.

    Args:
        visit: Whose.
        image: Number of the image in its sample.
        size: Width and height of its page.
        kept: What every window must contain; None: nothing in particular.
        geometry: Whether it may be cropped, scaled and mirrored.
        mirror: Whether it may be mirrored.
    """
    settings, change = visit.settings, unchanged(*size)
    if geometry and settings.crop_area_min is not None:
        window = _window(settings, visit.draw(image, CROP), size, kept)
        change = dataclasses.replace(change, window=window)
    if geometry and settings.scale_min is not None:
        inner, offset = _placed(settings.scale_min, visit.draw(image, SCALE), size)
        change = dataclasses.replace(change, inner=inner, offset=offset)
    if geometry and mirror and settings.mirror_probability is not None:
        mirrored = visit.draw(image, MIRROR)[0] < settings.mirror_probability
        change = dataclasses.replace(change, mirrored=mirrored)
    if settings.color is not None:
        brightness, contrast, saturation = (
            1.0 + most * (2.0 * drawn - 1.0)
            for most, drawn in zip(settings.color, visit.draw(image, COLOR), strict=False)
        )
        color = ColorChange(brightness=brightness, contrast=contrast, saturation=saturation)
        change = dataclasses.replace(change, color=color)
    return change


def change_at(
    visit: Visit, image: int, size: tuple[int, int], shapes: Mapping[str, Sequence[Any]], rules: TextRules
) -> ImageChange:
    """Draw how an image changes at a visit, as far as its sample's text and shapes allow.

    Args:
        visit: Whose.
        image: Number of the image in its sample.
        size: Width and height of its page.
        shapes: Boxes, points and polygons of the sample, by field: a window holds all of the image.
        rules: What the text forbids.
    """
    vertices = [
        vertex for items in shapes.values() for item in items if item["image"] == image for vertex in vertices_of(item)
    ]
    across, down = zip(*vertices, strict=True) if vertices else ((), ())
    kept = (min(across), min(down), max(across), max(down)) if vertices else None
    return draw_change(visit, image, size, kept, geometry=not rules.geometry, mirror=not rules.mirror)


def _window(settings: AugmentSettings, draws: Sequence[float], size: tuple[int, int], kept: Box | None) -> Box:
    """Draw area, shape and place of a window that contains what is kept."""
    area = 1.0 - draws[0] * (1.0 - (settings.crop_area_min or 1.0))
    lean = settings.crop_stretch_max * (2.0 * draws[1] - 1.0)
    stretch = 1.0 + lean if lean >= 0.0 else 1.0 / (1.0 - lean)
    wanted = (size[0] * math.sqrt(area * stretch), size[1] * math.sqrt(area / stretch))
    spans = [(0.0, 0.0), (0.0, 0.0)]
    if kept is not None:
        spans = [(_inside(kept[at], size[at]), _inside(kept[at + 2], size[at])) for at in (0, 1)]
        larger = [(high - low) / side for (low, high), side in zip(spans, wanted, strict=True)]
        wanted = (wanted[0] * max(1.0, *larger), wanted[1] * max(1.0, *larger))
    else:
        spans = [(float(side), 0.0) for side in size]
    begins, ends = [], []
    for side, want, (low, high), drawn in zip(size, wanted, spans, draws[2:], strict=True):
        length = min(float(side), want)
        first, last = max(0.0, high - length), min(low, side - length)
        begin = first + drawn * max(0.0, last - first)
        begins.append(begin)
        ends.append(min(float(side), begin + length))
    return begins[0], begins[1], ends[0], ends[1]


def _inside(value: float, side: int) -> float:
    return min(float(side), max(0.0, float(value)))


def _placed(scale_min: float, draws: Sequence[float], size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Draw the size and place of the window on its page."""
    scale = 1.0 - draws[0] * (1.0 - scale_min)
    width, height = (max(1, round(side * scale)) for side in size)
    across, down = int(draws[1] * (size[0] - width + 1)), int(draws[2] * (size[1] - height + 1))
    return (width, height), (across, down)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """What a sample's text forbids, each with the reason; empty: it may be done."""

    geometry: str = ""
    """Crop, scale and mirror."""
    mirror: str = ""

    @property
    def words(self) -> str:
        """Say what is forbidden, for people; empty: nothing."""
        if self.geometry:
            return f"no crop, scale or mirror: {self.geometry}"
        return f"no mirror: {self.mirror}" if self.mirror else ""


NOTHING_FORBIDDEN = TextRules()


def text_rules(record: Mapping[str, Any], settings: AugmentSettings | None) -> TextRules:
    """Look through the turns of a sample for what the settings ask for.

    Args:
        record: As it is stored: its turns have marks where coordinates will be written.
        settings: Of its source; None: it is not augmented.
    """
    if settings is None or not settings.moves:
        return NOTHING_FORBIDDEN
    texts = texts_of(record)
    for rule in COORDINATES:
        if geometry := _found(rule, texts, "its text holds coordinates"):
            return TextRules(geometry=geometry, mirror=geometry)
    safe = record.get(MIRROR_SAFE)
    if settings.mirror_probability is None or safe:
        return NOTHING_FORBIDDEN
    if safe is False:
        return TextRules(mirror="it declares mirrorSafe: false")
    lower = [text.lower() for text in texts]
    suspects = [text for text in lower if any(stem in text for stem in STEMS)]
    return TextRules(mirror=_found(ORIENTATION, suspects, "its text names a side"))


def _found(rule: re.Pattern[str], texts: list[str], why: str) -> str:
    for text in texts:
        if (found := rule.search(text)) is not None:
            return f"{why}: {found[0][:SEEN_CHARACTERS_MAX]!r}"
    return ""
