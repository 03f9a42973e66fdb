"""Findings of the registration of a source, for the person who waits for it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from polyreme_datahub.sources.listing import Entry

SUFFIXES_MAX = 16
"""Suffixes that are counted each by itself."""
OF_MAC = "._* of macOS"


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
    left: Counter[str] = dataclasses.field(default_factory=Counter)
    """Other files and members, which are not read, by suffix."""
    metadata: str = ""
    """The file that names the images of a folder."""
    images_below: int = 0
    texts_below: int = 0
    """Images and texts of that folder, named or not."""

    def leave(self, names: Iterable[str]) -> None:
        """Count files or members that are not read."""
        for name in names:
            suffix = OF_MAC if is_of_mac(name) else PurePosixPath(name).suffix.lower() or "without suffix"
            self.left[suffix if suffix in self.left or len(self.left) < SUFFIXES_MAX else "others"] += 1

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
        return {
            **dataclasses.asdict(self),
            "unread": dict(sorted(self.unread.items())),
            "left": dict(sorted(self.left.items())),
        }


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
        _left(sum(counts["left"].values()), "other file", f" ({', '.join(counts['left'])})"),
    ]
    return ", ".join(part for part in parts if part)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}" if count else ""


def is_of_mac(name: str) -> bool:
    """Tell whether a file holds what macOS keeps about another (AppleDouble), and so is never read."""
    return name.rpartition("/")[2].startswith("._") or name.startswith("__MACOSX/")


def _left(count: int, noun: str, what: str) -> str:
    return f"{_count(count, noun)}{what}, not read" if count else ""


def _letters(count: int, noun: str, how: str) -> str:
    if not count:
        return ""
    return f"{_count(count, noun)}{how} that will be {'a dead letter' if count == 1 else 'dead letters'}"
