"""Commands as README and how-tos show them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "how-to").glob("*.md")))
PROGRAMS = ("polyreme", "kubectl polyreme", "polyreme-operator", "make", "pip install")
_FENCED = re.compile(r"^```(?:bash)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"^(?:    .*\n)+", re.MULTILINE)
_INLINE = re.compile(r"`((?:kubectl )?polyreme [^`]+|polyreme-operator [^`]+)`")


def commands(page: Path) -> list[str]:
    """Commands of a page's blocks, in order: each as it is typed, without what follows a ``#``."""
    text = page.read_text()
    blocks = sorted([*_FENCED.finditer(text), *_INDENTED.finditer(text)], key=lambda block: block.start())
    lines = (line.strip().removeprefix("$ ") for block in blocks for line in block[0].splitlines())
    return [command for line in lines for command in _parts(line)]


def inline(page: Path) -> list[str]:
    """Commands that a page's sentences name, often without their arguments."""
    return [" ".join(found.split()) for found in _INLINE.findall(page.read_text())]


def words(command: str) -> list[str]:
    """Split a command as a shell does."""
    return shlex.split(command, comments=True)


def _parts(line: str) -> Iterator[str]:
    for part in re.split(r"; |&& ", re.sub(r"\s#\s.*", "", line)):
        if part.startswith(tuple(f"{program} " for program in PROGRAMS)) and "=" not in part.split()[0]:
            yield part.strip()
