"""Tracker: one CSV file, a line a step and a column a name; ``-`` is standard output."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyreme.tracking.port import Point, TrackedRun
from polyreme_api.errors import InvalidConfigError
from polyreme_system.files import write_atomically

STANDARD_OUTPUT = "-"


class CsvFile:
    """Collects the steps and writes them as a whole, since a later step may have a name that no earlier one has."""

    def __init__(self, where: str) -> None:
        """Name the file.

        Raises:
            InvalidConfigError: If a folder lies there, or its own folder is missing.
        """
        self._where = where
        path = Path(where)
        if where != STANDARD_OUTPUT and (path.is_dir() or not path.parent.is_dir()):
            wrong = "is a folder" if path.is_dir() else "lies in a folder that does not exist"
            raise InvalidConfigError(
                f"no CSV file can be written: {where} {wrong}, expected a file or -", field="--csv"
            )
        self._rows: dict[int, dict[str, float]] = {}

    def open(self, run: TrackedRun) -> Mapping[str, int]:  # noqa: ARG002 (a part of the interface)
        """Begin an empty file."""
        self._rows = {}
        return {}

    def write(self, points: Sequence[Point]) -> None:
        """Keep points."""
        for point in points:
            self._rows.setdefault(point.step, {"step": point.step, "wall_time": point.at_s}).update(point.values)

    def describe(self, run: TrackedRun) -> None:
        """Leave state and tags out."""

    def close(self) -> None:
        """Write the file."""
        text = io.StringIO()
        names = dict.fromkeys(name for row in self._rows.values() for name in row)
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows.values())
        if self._where == STANDARD_OUTPUT:
            sys.stdout.write(text.getvalue())
        else:
            write_atomically(Path(self._where), text.getvalue())

    def shown_at(self) -> str:
        """Path of the file."""
        return self._where
