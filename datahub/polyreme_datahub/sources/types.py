"""Types of sources: records by ordinal, each with its raw bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

ROLES = ("system", "user", "assistant")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RawRecord:
    """A record as it came: JSON-able content that names its raw bytes by digest, and those bytes."""

    sample_id: str
    content: Mapping[str, Any]
    """At least ``id``, ``kind`` and ``conversations``; canonical form is what the record's digest is of."""
    blobs: Sequence[bytes]
    digests: Sequence[str] = ()
    """Of the blobs, from a source that knows them: one that gives the same bytes with many records digests them once.
    Empty: they are computed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What a record was understood to be."""

    kind: str
    """In the plural, for people."""
    unread: Sequence[str] = ()
    """Fields that are not read."""


class Source(Protocol):
    """Records of a dataset version, addressed by ordinal."""

    def record_id(self, ordinal: int) -> str:
        """Name a record even if it can't be read."""
        ...

    def read(self, ordinal: int) -> RawRecord:
        """Read a record.

        Raises:
            BadRecordError: If the record breaks a rule.
        """
        ...
