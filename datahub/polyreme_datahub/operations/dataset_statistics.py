"""Statistics of a dataset: counts and quantiles, merged from parts in any order to the same bytes.

Integers only: values in whole units, in buckets that are exact up to 255 and less than 1/128 of the value wide above.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Self

from polyreme_datahub.index.sample_bytes import REJECTED, texts_of
from polyreme_datahub.operations.filters import images_of

EXACT_BITS = 8
VALUE_MAX = 2**53
"""Larger values count as this one; JSON readers know all integers up to it."""
MEASURES: Mapping[str, str] = {
    "width": "width_px",
    "height": "height_px",
    "aspect": "aspect_thousandths",
    "text": "text_characters",
}
"""Each distribution with its name for people."""
PAIR_MEASURES: Mapping[str, str] = {
    "chosen": "chosen_characters",
    "rejected": "rejected_characters",
    "same": "same_first_words_percent",
}
"""Those of preferences alone."""
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclasses.dataclass(slots=True)
class Distribution:
    """Counts of whole numbers from 0."""

    count: int = 0
    total: int = 0
    least: int | None = None
    largest: int | None = None
    buckets: dict[int, int] = dataclasses.field(default_factory=dict)
    """The smallest value of a bucket -> how many values are in it."""

    def add(self, value: int, times: int = 1) -> None:
        """Count a value.

        Raises:
            ValueError: If it is negative.
        """
        if value < 0:
            raise ValueError(f"value is {value}, expected at least 0")
        value = min(value, VALUE_MAX)
        start = bucket_of(value)
        self.buckets[start] = self.buckets.get(start, 0) + times
        self.count += times
        self.total += value * times
        self.least = value if self.least is None else min(self.least, value)
        self.largest = value if self.largest is None else max(self.largest, value)

    def merge(self, other: Distribution) -> None:
        """Count all that another distribution has counted."""
        for start, times in other.buckets.items():
            self.buckets[start] = self.buckets.get(start, 0) + times
        self.count += other.count
        self.total += other.total
        self.least = min((v for v in (self.least, other.least) if v is not None), default=None)
        self.largest = max((v for v in (self.largest, other.largest) if v is not None), default=None)

    def quantile(self, share: float) -> int | None:
        """Return a value that is at least as large as this share of all, to 1/128; None without values."""
        if not self.count or self.least is None or self.largest is None:
            return None
        wanted, seen = max(1, -int(-share * self.count // 1)), 0
        for start in sorted(self.buckets):
            seen += self.buckets[start]
            if seen >= wanted:
                return min(max(start, self.least), self.largest)
        return self.largest

    def to_json(self) -> dict[str, Any]:
        """Write the state in a form that ``from_json`` reads."""
        buckets = [[start, self.buckets[start]] for start in sorted(self.buckets)]
        return {**dataclasses.asdict(self), "buckets": buckets}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read the state."""
        buckets = dict(value["buckets"])
        return cls(value["count"], value["total"], value["least"], value["largest"], buckets)


def bucket_of(value: int) -> int:
    """Return the smallest value of the bucket that holds a value."""
    shift = max(0, value.bit_length() - EXACT_BITS)
    return value >> shift << shift


@dataclasses.dataclass(slots=True)
class DatasetStatistics:
    """What is counted of a dataset."""

    samples: int = 0
    images: int = 0
    turns: int = 0
    width: Distribution = dataclasses.field(default_factory=Distribution)
    height: Distribution = dataclasses.field(default_factory=Distribution)
    aspect: Distribution = dataclasses.field(default_factory=Distribution)
    """Longer side over shorter side [thousandths]."""
    text: Distribution = dataclasses.field(default_factory=Distribution)
    """Characters of a sample's turns, and of a rejected answer."""
    chosen: Distribution = dataclasses.field(default_factory=Distribution)
    """Characters of a preference's chosen answer."""
    rejected: Distribution = dataclasses.field(default_factory=Distribution)
    """Characters of its rejected answer."""
    same: Distribution = dataclasses.field(default_factory=Distribution)
    """Words with which both answers begin, of those of the longer one [%]."""

    def add(self, record: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Count a sample by its record and decode's facts."""
        turns = record["conversations"]
        self.samples += 1
        self.turns += len(turns)
        self.text.add(sum(map(len, texts_of(record))))
        if REJECTED in record:
            chosen, rejected = turns[-1]["content"], record[REJECTED]
            self.chosen.add(len(chosen))
            self.rejected.add(len(rejected))
            self.same.add(same_first_words(chosen, rejected))
        for image in images_of(facts):
            width, height = image["width"], image["height"]
            self.images += 1
            self.width.add(width)
            self.height.add(height)
            self.aspect.add(1000 * max(width, height) // min(width, height))

    def merge(self, others: Iterable[DatasetStatistics]) -> None:
        """Count all that others have counted."""
        for other in others:
            self.samples += other.samples
            self.images += other.images
            self.turns += other.turns
            for name in (*MEASURES, *PAIR_MEASURES):
                getattr(self, name).merge(getattr(other, name))

    def to_json(self) -> dict[str, Any]:
        """Write the state in a form that ``from_json`` reads."""
        counts = {"samples": self.samples, "images": self.images, "turns": self.turns}
        return {**counts, **{name: getattr(self, name).to_json() for name in self._measures()}}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read the state."""
        names = [name for name in (*MEASURES, *PAIR_MEASURES) if name in value]
        parts = {name: Distribution.from_json(value[name]) for name in names}
        return cls(samples=value["samples"], images=value["images"], turns=value["turns"], **parts)

    def summary(self) -> dict[str, Any]:
        """Return counts and quantiles for people."""
        named = {title: getattr(self, name) for name, title in self._measures().items()}
        quantiles = {
            name: {
                "least": one.least,
                "largest": one.largest,
                **{f"p{share * 100:g}": one.quantile(share) for share in QUANTILES},
            }
            for name, one in named.items()
        }
        counts = {"samples": self.samples, "images": self.images, "turns": self.turns}
        return {**counts, **({"pairs": self.chosen.count} if self.chosen.count else {}), **quantiles}

    def _measures(self) -> Mapping[str, str]:
        return {**MEASURES, **PAIR_MEASURES} if self.chosen.count else MEASURES


def same_first_words(one: str, other: str) -> int:
    """Return the share of the longer text's words with which both begin [%]."""
    words, others = one.split(), other.split()
    same = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, words, others)))
    return 100 * same // max(1, len(words), len(others))
