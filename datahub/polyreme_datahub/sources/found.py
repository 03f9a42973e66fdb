"""What registering a source found, for the person who waits for it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from polyreme_datahub.sources.listing import Entry


@dataclasses.dataclass(slots=True)
class Found:
    """Counts of a source, growing while it is listed."""

    files: int = 0
    bytes: int = 0
    lines: int = 0
    images: int = 0
    """Files that are read, in JSON Lines masks too; each as often as it is named."""
    documents: int = 0
    pages: int = 0
    images_alone: int = 0
    """Images in a folder without a text."""
    texts_alone: int = 0
    """Texts in a folder without an image."""
    unread: Counter[str] = dataclasses.field(default_factory=Counter)
    """Files of image formats that are not read, by format."""
    problems: int = 0
    """Files that can't be read."""
    mac_files: int = 0
    """What macOS leaves beside files (AppleDouble), which is never read."""
    metadata: str = ""
    """The file that names the images of a folder."""
    images_below: int = 0
    texts_below: int = 0
    """Images and texts of that folder, named or not."""

    def note(self, entry: Entry, *, unread: str) -> None:
        """Count an entry of the listing."""
        self.files += not entry.is_line and entry.page < 1
        self.bytes += entry.size if entry.page < 1 else 0
        if entry.page >= 0:
            self.pages += 1
            self.documents += entry.page == 0
        elif entry.row >= 0 or entry.is_line or (entry.member or entry.path).lower().endswith((".txt", ".json")):
            pass
        elif entry.problem:
            self.problems += 1
        elif unread:
            self.unread[unread] += 1
        else:
            self.images += 1

    def counts(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {**dataclasses.asdict(self), "unread": dict(sorted(self.unread.items()))}


def sentence(counts: dict[str, Any]) -> str:
    """Say what was found."""
    unread = counts["unread"]
    parts = [
        _count(counts["lines"], "record"),
        _count(counts["images"], "image"),
        _count(counts["pages"], "page") + " of " + _count(counts["documents"], "PDF") if counts["pages"] else "",
        _count(counts["texts_alone"], "text") + " without image" if counts["texts_alone"] else "",
        _letters(counts["images_alone"], "image", " without text"),
        *(_letters(unread[kind], f"{kind} file", "") for kind in sorted(unread)),
        _letters(counts["problems"], "file", " that can't be read"),
        _left(max(0, counts["images_below"] - counts["images"]), "image", f" that {counts['metadata']} does not name"),
        _left(counts["texts_below"], "text", f" beside images that {counts['metadata']} names"),
        _left(counts["mac_files"], "file", " of macOS (._*)"),
    ]
    return ", ".join(part for part in parts if part)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}" if count else ""


def _left(count: int, noun: str, what: str) -> str:
    return f"{_count(count, noun)}{what}, not read" if count else ""


def _letters(count: int, noun: str, how: str) -> str:
    if not count:
        return ""
    return f"{_count(count, noun)}{how} that will be {'a dead letter' if count == 1 else 'dead letters'}"
