"""Values between the steps of a recipe: blobs, values, and the reason why a sample was dropped.

Light to import: pixels are decoded by Pillow, which is imported with the first image.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from polyreme_datahub.digests import canonical_json, digest_bytes
from polyreme_datahub.operations.open_rules import OpenRules

if TYPE_CHECKING:
    from PIL import Image


class Blob:
    """Bytes with their digest. Pixels are decoded once and kept until the sample has left the process."""

    __slots__ = ("_pixels", "data", "digest")

    def __init__(self, data: bytes, *, digest: str | None = None) -> None:
        """Wrap bytes.

        Args:
            data: The bytes.
            digest: Their sha256, where the caller has checked it; computed otherwise.
        """
        self.data = data
        self.digest = digest_bytes(data) if digest is None else digest
        self._pixels: dict[OpenRules, Image.Image] = {}

    def pixels(self, rules: OpenRules | None = None) -> Image.Image:
        """Return the image: upright, gray or RGB, 8 bits a channel. Every caller gets the same object: don't change it.

        Args:
            rules: How to open what is refused by default.

        Raises:
            BadRecordError: If the bytes break one of the rules of ``operations.images``.
        """
        chosen = rules or OpenRules()
        if chosen not in self._pixels:
            from polyreme_datahub.operations.images import open_upright

            self._pixels[chosen] = open_upright(self.data, chosen)
        return self._pixels[chosen]

    def keep_pixels(self, image: Image.Image) -> None:
        """Take pixels that were just encoded without loss, so that a step after this one need not decode them."""
        self._pixels[OpenRules()] = image

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blob) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Blob({self.digest[:12]}, {len(self.data)} bytes)"


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """What a step made of a sample, or the raw record itself."""

    data: Mapping[str, Any]
    """JSON-able; names blobs by their digest."""
    blobs: Mapping[str, Blob] = dataclasses.field(default_factory=dict)
    """The blobs that ``data`` names, by digest."""
    new: frozenset[str] = frozenset()
    """Digests of the blobs that this step made, and that must be stored; the others are stored already."""

    @classmethod
    def of(cls, data: Mapping[str, Any], *, made: Iterable[Blob] = (), kept: Iterable[Blob] = ()) -> Value:
        """Build a value from blobs that the step made and blobs that it passes on."""
        new = {blob.digest: blob for blob in made}
        return cls(data=data, blobs={**{blob.digest: blob for blob in kept}, **new}, new=frozenset(new))

    def encoded(self) -> bytes:
        """Return ``data`` in its canonical form; the value's digest is the digest of these bytes."""
        return canonical_json(self.data)

    @property
    def digest(self) -> str:
        """Digest of ``data``."""
        return digest_bytes(self.encoded())


class Dropped(Exception):  # noqa: N818 - not an error: a filter's decision
    """Raised by a filter: the sample ends here, on purpose."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
