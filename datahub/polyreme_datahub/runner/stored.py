"""The stored form of a step's value: its data, and the digests of the blobs that it names."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from polyreme_datahub.digests import canonical_json, digest_bytes
from polyreme_datahub.operations.values import Value


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A value as it is stored; its digest is the digest of ``to_bytes``."""

    data: Mapping[str, Any]
    blobs: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: Mapping[str, Any], blobs: Collection[str]) -> Stored:
        """Build the one canonical form: digests sorted."""
        return cls(data=data, blobs=tuple(sorted(blobs)))

    @classmethod
    def from_bytes(cls, data: bytes | str) -> Stored:
        """Read what ``to_bytes`` wrote."""
        value = json.loads(data)
        return cls(data=value["data"], blobs=tuple(value["blobs"]))

    @classmethod
    def of_record(cls, content: Mapping[str, Any]) -> Stored:
        """Return a raw record, which is stored as it is: its images and masks are its blobs."""
        masks = [mask for mask in content.get("masks", ()) if mask is not None]
        return cls.of(content, {*content.get("images", ()), *content.get("documents", ()), *masks})

    def to_bytes(self) -> bytes:
        """Write the value in its one canonical form."""
        return canonical_json({"blobs": list(self.blobs), "data": self.data})

    @property
    def digest(self) -> str:
        """Digest of the stored form."""
        return digest_bytes(self.to_bytes())


def digests_of(shared: Mapping[str, Value]) -> dict[str, str]:
    """Return the digests by which the keys of actions name values that are the same for every sample."""
    return {name: Stored.of(value.data, value.blobs).digest for name, value in shared.items()}
