"""The last lines of a log, so few and so short that a page can show them."""

from __future__ import annotations

from pathlib import Path

LINES = 300
CHARACTERS_MAX = 2000
"""Of a line; longer ones are cut, and say so."""
END_BYTES = 1 << 20
"""Read of a file, from its end."""


def last_lines(path: Path) -> list[str]:
    """Return the last lines of a file, from its last ``END_BYTES``, each cut where it is too long."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - END_BYTES))
        text = file.read().decode(errors="replace")
    return [cut_line(line) for line in text.splitlines()[-LINES:]]


def cut_line(line: str) -> str:
    """Cut a line that is too long, and say by how much."""
    return line if len(line) <= CHARACTERS_MAX else f"{line[:CHARACTERS_MAX]} [{len(line) - CHARACTERS_MAX:,} more]"
