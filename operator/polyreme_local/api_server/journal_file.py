"""The journal's lines: written, read back, checked.

A line is the CRC-32 of its JSON in 8 hexadecimal digits, a space, the JSON. What a crash leaves half written at the end
is cut off. A bad line with good ones after it is damage: it is left out and counted, and the caller that opens the
journal decides what to do without it.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyreme_api.errors import EnvironmentFailedError
from polyreme_cluster.port import Manifest, WatchEventType
from polyreme_local.api_server.record import Change

FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JournalContent:
    """What a journal holds."""

    manifests: Sequence[Manifest]
    version: int
    lines: int
    size_bytes: int
    """Bytes up to the end of the last good line."""
    torn_bytes: int
    """Bytes after it, left by a crash."""
    damaged_lines: int = 0
    """Bad lines that were left out; what they changed is not known."""

    @property
    def damaged(self) -> bool:
        """Whether anything that was written is missing; a torn last line never was."""
        return self.damaged_lines > 0


def read_journal(path: Path) -> JournalContent:
    """Read a journal: live objects and the newest version.

    Raises:
        EnvironmentFailedError: If the format is another, or the disk refuses.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return JournalContent(manifests=(), version=0, lines=0, size_bytes=0, torn_bytes=0)
    except OSError as error:
        raise EnvironmentFailedError(f"journal {path} can't be read: {error.strerror}") from error
    objects: dict[tuple[str, str, str], Manifest] = {}
    version = lines = good = start = bad = damaged = 0
    while (end := data.find(b"\n", start)) >= 0:
        entry = _parse(data[start:end])
        start = end + 1
        if entry is None:
            bad += 1
            continue
        if "format" in entry and entry["format"] != FORMAT:
            raise EnvironmentFailedError(f"journal {path} has format {entry['format']}, expected {FORMAT}")
        version = max(version, _apply(entry, objects))
        lines += 1
        good, damaged = start, bad
    # Without a good line there was at least a header, unless the file had just been made.
    damaged += lines == 0 and bad > 0
    return JournalContent(
        manifests=list(objects.values()),
        version=version,
        lines=lines,
        size_bytes=good,
        torn_bytes=len(data) - good,
        damaged_lines=damaged,
    )


def _apply(entry: dict[str, Any], objects: dict[tuple[str, str, str], Manifest]) -> int:
    """Take one entry; return its version."""
    manifest = entry.get("put") or entry.get("delete")
    if manifest is None:
        return int(entry.get("version", 0))
    metadata = manifest["metadata"]
    key = (manifest["kind"], metadata.get("namespace", ""), metadata["name"])
    if "put" in entry:
        objects[key] = manifest
    else:
        objects.pop(key, None)
    return int(metadata["resourceVersion"])


def change_line(change: Change) -> bytes:
    """Write a change."""
    if change.type is not WatchEventType.DELETED:
        return entry_line({"put": change.record.manifest})
    metadata = change.record.manifest["metadata"]
    kept = {key: metadata[key] for key in ("name", "namespace", "resourceVersion") if key in metadata}
    return entry_line({"delete": {"kind": change.record.kind, "metadata": kept}})


def header_line() -> bytes:
    """Write the first line, which names the format."""
    return entry_line({"format": FORMAT})


def entry_line(entry: dict[str, Any]) -> bytes:
    """Write an entry: ``put`` with an object, ``delete`` with its names and version, or ``version`` alone."""
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse(line: bytes) -> dict[str, Any] | None:
    digits, _, text = line.partition(b" ")
    try:
        if int(digits, 16) != zlib.crc32(text):
            return None
        entry: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return entry
