"""How-to pages that are run: their ``bash`` blocks in order, each compared with the ``text`` block after it."""

import dataclasses
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

FENCE = re.compile(r"^```(bash|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block to run, and what it shall print."""

    script: str
    expected: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    """Read a page's blocks; a ``bash`` block has at most one ``text`` block after it."""
    found: list[Block] = []
    for language, content in FENCE.findall(page.read_text()):
        if language == "bash":
            found.append(Block(script=content, expected=()))
        else:
            found[-1] = dataclasses.replace(found[-1], expected=tuple(content.splitlines()))
    return found


def run_block(block: Block, environment: Mapping[str, str], *, timeout_s: float) -> str:
    """Run a block and return what it printed.

    Raises:
        AssertionError: If it fails, or prints something else.
    """
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.script],
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, f"{block.script}\nexited with {done.returncode}: {done.stdout}\n{done.stderr}"
    assert matches(done.stdout.splitlines(), block.expected), (
        f"{block.script}\nprinted\n{done.stdout}\nnot\n" + "\n".join(block.expected)
    )
    return done.stdout


def matches(lines: list[str], patterns: tuple[str, ...]) -> bool:
    """Tell whether lines are what a page says: ``...`` is anything, alone on a line any number of lines."""
    if not patterns:
        return not lines
    first, rest = patterns[0], patterns[1:]
    if first == "...":
        return any(matches(lines[skip:], rest) for skip in range(len(lines) + 1))
    return bool(lines) and fits(lines[0], first) and matches(lines[1:], rest)


def fits(line: str, pattern: str) -> bool:
    """Tell whether one line is what a page says; runs of spaces count as one."""
    parts = re.split(r"\s*\.\.\.\s*", " ".join(pattern.split()))
    return re.fullmatch(".*".join(map(re.escape, parts)), " ".join(line.split())) is not None
