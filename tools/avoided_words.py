"""Find words that plain English avoids, in text that users read: pages, manifests and messages in the sources.

Each finding names the standard word. ``make lint`` runs it; EXCEPTIONS lists the words that are right where they are.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

SOURCE_ROOTS = ("api", "operator", "trainer", "datahub", "cli")
# Docstrings in these files are the help of a command.
HELP_FILES = re.compile(r"^cli/polyreme/(main|(plugin/)?commands/\w+|plugin/main)\.py$")
# CRDs are generated from the sources; decision records are history, which is not rewritten.
NOT_CHECKED = re.compile(r"^(manifests/(crd-\w+\.yaml|crds/.*)|docs/adr/.*)$")

# What a pattern finds (whole words, any case), and what to write instead.
AVOIDED = {
    r"anew|afresh": "again, or the exact verb: recreate, rewrite, retry",
    r"thereof|whence|lest|in vain": "a plain clause",
    r"nobody|somebody|whoever": "name who: no rank, another user, the process that",
    r"mend|mends|mended|mending": "fix, repair",
    r"(hang|hangs|hanging|hung) on": "depend on",
    r"(stand|stands|stood|standing) still": "is frozen, makes no progress",
    r"stands": "is",
    r"told|telling|is said|are said|was said": "report",
    r"(go|goes|going|went|gone) on(?! (the|a|to|each|one|PATH))": "continue",
    r"(make|makes|made|making) way": "be preempted, give up its place",
    r"what it takes": "cost",
    r"besides": "also",
    r"behind": "after",
    r"of which": "name the thing again",
    r"(made|make|makes|making) (it |them |\w+ )?again": "recreate, recompute, reprocess",
    r"(taken|took|mistaken) for": "counted as, treated as",
    r"for ever": "forever",
}
PATTERNS = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): instead for pattern, instead in AVOIDED.items()}
ANY = re.compile("|".join(pattern.pattern for pattern in PATTERNS), re.IGNORECASE)

# Path and exact text of what may stay, and why. Keep it short: reword the sentence first.
EXCEPTIONS: dict[tuple[str, str], str] = {}

# Code spans and targets of links hold names.
NAMES = re.compile(r"`[^`\s]+`|\]\([^)]*\)")


def main() -> int:
    """Check every file that git tracks or would track; 1 when a word is found."""
    root = Path(__file__).parent.parent
    found = [f"{path}:{line}: {text}" for path, line, text in findings(user_files(root))]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return int(bool(found))


def user_files(root: Path) -> dict[PurePosixPath, str]:
    """Pages, manifests and Python sources, by their path in the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    command += ["*.md", "manifests/*.yaml", *(f"{name}/*.py" for name in SOURCE_ROOTS)]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    names = [name for name in listing.split("\0") if name and not NOT_CHECKED.match(name) and (root / name).exists()]
    return {PurePosixPath(name): (root / name).read_text(encoding="utf-8") for name in names}


def findings(
    files: Mapping[PurePosixPath, str], exceptions: Mapping[tuple[str, str], str] = EXCEPTIONS
) -> list[tuple[PurePosixPath, int, str]]:
    """Path, line and sentence of each avoided word that no exception covers."""
    return [
        (path, line, f"{found[0]!r}: write {instead}; in {text.strip()[:100]!r}")
        for path, content in files.items()
        # Most files have none of the words: parsing only the others keeps the check fast.
        if ANY.search(content)
        for line, text in user_texts(path, content)
        for pattern, instead in PATTERNS.items()
        for found in pattern.finditer(text)
        if not excepted(path, text, found, exceptions)
    ]


def excepted(path: PurePosixPath, text: str, found: re.Match[str], exceptions: Mapping[tuple[str, str], str]) -> bool:
    """Whether an exception of this file covers the place of the word."""
    return any(
        place.start() <= found.start() and found.end() <= place.end()
        for name, allowed in exceptions
        if str(path) == name
        for place in re.finditer(re.escape(allowed), text)
    )


def user_texts(path: PurePosixPath, content: str) -> Iterator[tuple[int, str]]:
    """What users read of a file, by line; names and links are left out."""
    if path.suffix == ".py":
        yield from _messages(ast.parse(content), commands=bool(HELP_FILES.match(str(path))))
    else:
        for number, line in enumerate(content.splitlines(), start=1):
            yield number, NAMES.sub("", line)


def _messages(tree: ast.Module, *, commands: bool) -> Iterator[tuple[int, str]]:
    """Texts of a module that are not names: messages, helps, reasons; docstrings only where they are help."""
    docstrings = set() if commands else {id(node) for node in _docstrings(tree)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or id(node) in docstrings:
            continue
        if isinstance(node.value, str) and not node.value.isidentifier():
            yield node.lineno, node.value


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Texts that are statements by themselves: docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


if __name__ == "__main__":
    sys.exit(main())
