"""One stored object: its parsed form for reading inside, and its frozen bytes, which are copied for every caller."""

from __future__ import annotations

import dataclasses
import json
import marshal
from typing import Any, cast

from polyreme_cluster.port import InvalidObjectError, Manifest, ObjectRef, WatchEvent, WatchEventType

_ENCODER = json.JSONEncoder(allow_nan=False)
_MARSHAL_VERSION = 2
"""Later versions keep two uses of one dictionary as one: a caller's change to its copy would then show twice."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """An object at one version. ``manifest`` is shared and never changed; ``blob`` is what copies are made of."""

    kind: str
    namespace: str
    name: str
    version: int
    manifest: Manifest
    blob: bytes

    @classmethod
    def of(cls, manifest: Manifest) -> Record:
        """Freeze an object that no one else holds."""
        metadata = manifest["metadata"]
        return cls(
            manifest["kind"],
            metadata.get("namespace", ""),
            metadata["name"],
            int(metadata["resourceVersion"]),
            manifest,
            frozen(manifest),
        )

    def copy(self) -> Manifest:
        """Return a copy that the caller owns."""
        # Bytes that this process made a moment ago: copying by marshal is several times faster than copy.deepcopy.
        return cast("Manifest", marshal.loads(self.blob))  # noqa: S302

    @property
    def uid(self) -> str:
        """The object's UID."""
        return cast("str", self.manifest["metadata"]["uid"])

    @property
    def ref(self) -> ObjectRef:
        """The object's name."""
        return ObjectRef(kind=self.kind, namespace=self.namespace, name=self.name)


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """One entry of the watch history."""

    type: WatchEventType
    record: Record
    """State after the change; for DELETED the last state with the version of the delete."""

    @property
    def version(self) -> int:
        """Resource version of the change."""
        return self.record.version

    def event(self) -> WatchEvent:
        """Return the event with an object that the caller owns."""
        return WatchEvent(type=self.type, object=self.record.copy())


def frozen(value: Any) -> bytes:
    """Return the bytes by which a blob holds a value."""
    return marshal.dumps(value, _MARSHAL_VERSION)


def own_json(value: Any) -> Any:
    """Copy what a caller hands in, as it would come over the wire: enumerations become text, tuples become lists.

    Raises:
        InvalidObjectError: If it holds what JSON can't.
    """
    try:
        return json.loads(_ENCODER.encode(value))
    except (TypeError, ValueError) as error:
        raise InvalidObjectError(f"object is no JSON: {error}") from error


def merge(target: Any, patch: Any) -> Any:
    """Merge a patch into a value (RFC 7386), sharing what did not change; neither argument is changed."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge(result.get(key), value)
    return result
