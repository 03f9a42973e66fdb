"""What a sample's text forbids: coordinates written in it would be wrong after a crop, "left" after a mirror.

Marks such as ``<box:0>`` follow their shapes and forbid nothing. Words are not swapped: "right" may mean "correct", and
another word may have another number of tokens. A sample that declares ``mirrorSafe`` is believed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from polyreme_datahub.index.sample_bytes import MIRROR_SAFE
from polyreme_datahub.loader.sample.augment import AugmentSettings

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
class TextRules:
    """What a sample's text forbids, each with the reason; empty: it may be done."""

    geometry: str
    """Crop, scale and mirror."""
    mirror: str


NOTHING_FORBIDDEN = TextRules(geometry="", mirror="")


def text_rules(record: Mapping[str, Any], settings: AugmentSettings | None) -> TextRules:
    """Look through the turns of a sample for what the settings ask for.

    Args:
        record: As it is stored: its turns have marks where coordinates will be written.
        settings: Of its source; None: it is not augmented.
    """
    if settings is None or not settings.moves:
        return NOTHING_FORBIDDEN
    texts = [turn["content"] for turn in record["conversations"]]
    for rule in COORDINATES:
        if geometry := _found(rule, texts, "its text holds coordinates"):
            return TextRules(geometry=geometry, mirror=geometry)
    safe = record.get(MIRROR_SAFE)
    if settings.mirror_probability is None or safe:
        return NOTHING_FORBIDDEN
    if safe is False:
        return TextRules(geometry="", mirror="it declares mirrorSafe: false")
    lower = [text.lower() for text in texts]
    suspects = [text for text in lower if any(stem in text for stem in STEMS)]
    return TextRules(geometry="", mirror=_found(ORIENTATION, suspects, "its text names a side"))


def _found(rule: re.Pattern[str], texts: list[str], why: str) -> str:
    for text in texts:
        if (found := rule.search(text)) is not None:
            return f"{why}: {found[0][:SEEN_CHARACTERS_MAX]!r}"
    return ""
