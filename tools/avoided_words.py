"""Find words that plain English avoids: in pages, manifests, and in the messages, comments and names of the sources.

Each finding names the standard word. ``make lint`` runs it; EXCEPTIONS lists the words that are right where they are.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

SOURCE_ROOTS = ("api", "operator", "trainer", "datahub", "cli", "tools", "benchmarks")
# Only comments and docstrings are checked here: messages and names of tests may be those that a test plants.
TESTS = "tests"
# CRDs are generated from the sources; decision records are history, which is not rewritten; this file lists the words.
NOT_CHECKED = re.compile(r"^(manifests/(crd-\w+\.yaml|crds/.*)|docs/adr/.*|tools/avoided_words\.py)$")

# What a pattern finds (whole words, any case, also across lines), and what to write instead.
AVOIDED = {
    r"anew|afresh": "again, or the exact verb: recreate, rewrite, retry",
    r"thereof|whence|lest|in vain": "a plain clause",
    r"nobody|somebody|whoever": "name who: no rank, another user, the process that",
    r"mend|mends|mended|mending": "fix, repair",
    r"(hang|hangs|hanging|hung) on": "depend on",
    r"(stand|stands|stood|standing) still": "is frozen, makes no progress",
    r"stands(?! (for|still|in for))": "is",
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
# Words of a name, which is split at underscores and capitals, and what such names are called here.
AVOIDED_NAMES = {
    "told|untold|telling": "reported, notified, printed",
    "nobody|somebody|whoever": "name who",
    "anew": "recreated, recomputed",
    "behind": "after",
    "besides": "others",
    "stands|standing": "position, queue_status",
    "surroundings": "context, environment",
    "wish": "request",
    "misfit": "unschedulable",
    "clearing": "victim_search",
    "scene": "snapshot",
    "announcer": "event_recorder",
    "sighting|sightings|viewing": "stats, view",
    "zygote": "fork_server",
    "mend|mended": "repair",
    "mourn|bury|buried": "record_damaged, reject",
    "hole|holes": "placeholder",
    "rider|riders": "piggybacked",
    "deal|dealing|guest|way_home": "balance, remote_image, return_route",
}
PATTERNS = {
    re.compile(rf"\b(?:{words})\b".replace(" ", r"\s+"), re.IGNORECASE): instead for words, instead in AVOIDED.items()
}
NAME_PATTERNS = {re.compile(rf"_(?:{words})_"): instead for words, instead in AVOIDED_NAMES.items()}
# Most files have none of the words: parsing only the others keeps the check fast. A pattern of one case is much faster.
IN_LOWER_CASE = re.compile(rf"(?<![a-z])(?:{'|'.join([*AVOIDED, *AVOIDED_NAMES])})(?![a-z])".replace(" ", r"[\s#]+"))
IN_CLASS_NAMES = re.compile(f"(?:{'|'.join(AVOIDED_NAMES).title()})(?![a-z])")

# A module's docstring names what the module holds or does.
QUESTION = re.compile(r'"""(Who|Whose|Whom|What|How|Which|Whether|When|Where)\b')

# Path and exact text of what may stay, and why. Keep it short: reword the sentence first.
EXCEPTIONS: dict[tuple[str, str], str] = {}

# Code spans and targets of links hold names.
CODE = re.compile(r"`[^`\s]+`|\]\([^)\n]*\)")


def main() -> int:
    """Check every file that git tracks or would track; 1 when a word is found."""
    root = Path(__file__).parent.parent
    found = [f"{path}:{line}: {text}" for path, line, text in findings(checked_files(root))]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return int(bool(found))


def checked_files(root: Path) -> dict[PurePosixPath, str]:
    """Pages, manifests and Python sources, by their path in the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    command += ["*.md", "manifests/*.yaml", *(f"{name}/*.py" for name in (*SOURCE_ROOTS, TESTS))]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    names = [name for name in listing.split("\0") if name and not NOT_CHECKED.match(name) and (root / name).exists()]
    return {PurePosixPath(name): (root / name).read_text(encoding="utf-8") for name in names}


def findings(
    files: Mapping[PurePosixPath, str], exceptions: Mapping[tuple[str, str], str] = EXCEPTIONS
) -> list[tuple[PurePosixPath, int, str]]:
    """Path, line and sentence of each avoided word that no exception covers."""
    found: list[tuple[PurePosixPath, int, str]] = []
    for path, content in files.items():
        allowed = [text for name, text in exceptions if name == str(path)]
        if QUESTION.match(content) and path.parts[0] != TESTS:
            found.append((path, 1, "a module's docstring begins with a noun or a verb"))
        if not (IN_LOWER_CASE.search(f"{path} {content}".lower()) or IN_CLASS_NAMES.search(content)):
            continue
        if path.suffix != ".py":
            found += _in_texts(path, [(1, content)], allowed)
        else:
            tree = ast.parse(content)
            strings = _docstrings(tree) if path.parts[0] == TESTS else _messages(tree)
            found += _in_texts(path, [*_texts(strings), *_comments(content)], allowed)
            if path.parts[0] != TESTS:
                found += _in_names(path, [(1, path.stem), *_names(tree)])
    return found


def _in_texts(
    path: PurePosixPath, texts: Iterable[tuple[int, str]], allowed: Iterable[str]
) -> Iterator[tuple[PurePosixPath, int, str]]:
    """Avoided words of texts, each with the line it begins at."""
    for first, written in texts:
        text = CODE.sub("`", written)
        excepted = [place.span() for part in allowed for place in re.finditer(re.escape(part), text)]
        for pattern, instead in PATTERNS.items():
            for found in pattern.finditer(text):
                if not any(begin <= found.start() and found.end() <= end for begin, end in excepted):
                    sentence = " ".join(text[max(0, found.start() - 50) : found.end() + 50].split())
                    line = first + text.count("\n", 0, found.start())
                    yield path, line, f"{found[0]!r}: write {instead}; in {sentence!r}"


def _in_names(path: PurePosixPath, names: Iterable[tuple[int, str]]) -> Iterator[tuple[PurePosixPath, int, str]]:
    """Avoided words of names, each with its line."""
    for line, name in names:
        words = "_".join(["", *re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name), ""]).lower()
        for pattern, instead in NAME_PATTERNS.items():
            if pattern.search(words):
                yield path, line, f"name {name!r}: as in {instead}"


def _messages(tree: ast.Module) -> Iterator[ast.Constant]:
    """Strings of a module that are not names: messages, helps, reasons, docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not node.value.isidentifier():
            yield node


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Strings that are statements by themselves: docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _texts(strings: Iterable[ast.Constant]) -> Iterator[tuple[int, str]]:
    """Strings with the line that they begin at; escaped line breaks count as spaces."""
    for node in strings:
        text = str(node.value)
        yield node.lineno, text if node.lineno != node.end_lineno else text.replace("\n", " ")


def _comments(content: str) -> Iterator[tuple[int, str]]:
    """Comments; those of adjacent lines are one text."""
    first, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] != first + len(lines):
            yield first, "\n".join(lines)
            lines = []
        first = first if lines else token.start[0]
        lines.append(token.string.lstrip("#: "))
    if lines:
        yield first, "\n".join(lines)


def _names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Names of classes, functions, methods, parameters and fields, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.lineno, node.target.id


if __name__ == "__main__":
    sys.exit(main())
