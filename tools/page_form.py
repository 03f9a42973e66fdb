"""Faults in the form of Markdown pages: walls of text, headings that swallow a paragraph, joined bullets, broken wraps.

``tests/unit/house`` runs it on every page that git tracks, and ``make docs`` does too.
"""

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tools.links import pages

WORDS_MAX = 120
HEADING_LENGTH_MAX = 100
LONG_LINE = 100
BROKEN_LINE = 72
"""A line that ends before this column, in a paragraph with a long line, although the next word had room."""

FENCE = re.compile(r"^ *(```|~~~)")
ITEM = re.compile(r"^\s*([-*]|\d+\.) ")
OWN_LINE = re.compile(r"^\s*[#|]")
JOINED_BULLET = re.compile(r"[.:;]\s+- (?:[A-Z`]|\*\*)")


class Block(NamedTuple):
    """A paragraph, an item of a list, a heading or a row of a table, with the number of its first line."""

    line: int
    lines: list[str]


def main() -> int:
    """Check every page that git knows; 1 when one has a fault."""
    root = Path(__file__).parent.parent
    found = [f"{page.relative_to(root)}:{fault}" for page in pages(root) for fault in faults(page.read_text("utf-8"))]
    print("\n".join(found) or "every page is in form", file=sys.stderr)
    return int(bool(found))


def faults(page: str) -> Iterator[str]:
    """Name each fault of a page with its line."""
    for line, lines in blocks(page):
        text = " ".join(lines)
        if text.startswith("#"):
            if len(text) > HEADING_LENGTH_MAX or ".  " in text:
                yield f"{line}: a heading of {len(text)} characters: is its paragraph on the same line?"
            continue
        if OWN_LINE.match(text):
            continue
        if (words := len(text.split())) > WORDS_MAX:
            yield f"{line}: a paragraph of {words} words, at most {WORDS_MAX}"
        if JOINED_BULLET.search(text):
            yield f"{line}: two bullets in one line"
        yield from _broken_wraps(line, lines)


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page outside of code."""
    is_code, block = False, Block(1, [])
    for number, line in enumerate(page.splitlines(), start=1):
        is_fence = FENCE.match(line) is not None
        is_code ^= is_fence
        is_indented = line.startswith("    ") and not block.lines
        starts_alone = is_fence or is_code or is_indented or not line.strip() or OWN_LINE.match(line) is not None
        if block.lines and (starts_alone or ITEM.match(line)):
            yield block
            block = Block(number, [])
        if not starts_alone:
            block = block if block.lines else Block(number, [])
            block.lines.append(line)
        elif OWN_LINE.match(line) and not is_code:
            yield Block(number, [line])
    if block.lines:
        yield block


def _broken_wraps(first: int, lines: list[str]) -> Iterator[str]:
    if max(map(len, lines)) <= LONG_LINE:
        return
    for number, (line, following) in enumerate(pairwise(lines), start=first):
        if len(line) + 1 + len(following.split()[0]) <= BROKEN_LINE:
            yield f"{number}: the line breaks early"


if __name__ == "__main__":
    sys.exit(main())
