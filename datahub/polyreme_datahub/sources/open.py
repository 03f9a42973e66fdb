"""From what a user names to a description, and from a description to a source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.sources import digits, files
from polyreme_datahub.sources.types import Source


def describe_source(source: str | Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Describe a source and count its records.

    Args:
        source: Path of a JSON Lines file or a folder of images, or the description of a generated source
            (``sources.digits.describe``).

    Raises:
        SourceInvalidError: If it is none of these.
    """
    if isinstance(source, Mapping):
        if source.get("kind") != digits.KIND:
            raise SourceInvalidError(f"unknown kind of source: {source.get('kind')!r}, known is digits", field="source")
        description = digits.describe(
            digits=source["digits"], pages=source["pages"], seed=source["seed"], heldout=source["heldout"]
        )
        return {**description, "scans": digits.scans_digest()}, description["pages"]
    path = Path(source)
    if path.is_dir():
        return files.describe_folder(path)
    if path.suffix not in {".jsonl", ".ndjson"}:
        raise SourceInvalidError(
            f"not a dataset source: {source}, expected a folder of images or a .jsonl file", field="source"
        )
    return files.describe_jsonl(path)


def open_source(description: Mapping[str, Any]) -> Source:
    """Open a described source."""
    kinds: dict[str, type[digits.DigitsSource | files.JsonlSource | files.FolderSource]] = {
        digits.KIND: digits.DigitsSource,
        files.JSONL: files.JsonlSource,
        files.FOLDER: files.FolderSource,
    }
    return kinds[description["kind"]](description)
