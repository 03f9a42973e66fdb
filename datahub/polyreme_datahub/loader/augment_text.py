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

_NUMBER = r"[-+]?\d+(?:\.\d+)?"
COORDINATES = re.compile(
    rf"[\[({{]\s*{_NUMBER}(?:\s*[,;]\s*{_NUMBER})+\s*[\])}}]"  # (12, 30), [12, 30, 80, 90]
    r"|<\|?(?:box|point|poly|polygon|quad|ref|bbox|loc)(?:_?(?:start|end|\d+))?\|?>"  # tags of other models
    r"|\b[xy][12]?\s*[=:]\s*[-+]?\.?\d",  # x = 12
    re.IGNORECASE,
)
ORIENTATION = re.compile(
    r"left|\bright|clockwise|\b(?:east|west)|mirror|starboard|\bport side"
    r"|\blinke?[nrs]?\b|\brechte?[nrs]?\b|\bgauche|\bdroite?\b|\bizquierd|\bderech|\bsinistr|\bdestr[ao]|\besquerd|\bdireit"
    r"|слева|справа|лев|прав|左|右|왼|오른|يسار|يمين|बाएं|दाएं",
    re.IGNORECASE,
)
"""Words of orientation: English, German, French, Spanish, Italian, Portuguese, Russian, Chinese, Japanese, Korean,
Arabic, Hindi. Others are not known: declare ``mirrorSafe: false``, or don't mirror the source."""
SEEN_CHARACTERS_MAX = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """What a sample's text forbids, each with the reason; empty: it may be done."""

    geometry: str
    """Crop, scale and mirror."""
    mirror: str


def text_rules(record: Mapping[str, Any]) -> TextRules:
    """Look through the turns of a sample, as they were before coordinates were written in place of marks."""
    texts = [turn["content"] for turn in record["conversations"]]
    geometry = _found(COORDINATES, texts, "its text holds coordinates")
    safe = record.get(MIRROR_SAFE)
    if safe is not None:
        return TextRules(geometry=geometry, mirror="" if safe else "it declares mirrorSafe: false")
    return TextRules(geometry=geometry, mirror=_found(ORIENTATION, texts, "its text names a side"))


def _found(rule: re.Pattern[str], texts: list[str], why: str) -> str:
    for text in texts:
        if (found := rule.search(text)) is not None:
            return f"{why}: {found[0][:SEEN_CHARACTERS_MAX]!r}"
    return ""
