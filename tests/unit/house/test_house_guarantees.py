"""The page of guarantees names tests that exist, with the command that runs them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "guarantees.md"
ROWS_MIN = 50
ROW = re.compile(r"^\| [^|]+ \| [^|]+ \| (?P<tier>[\w-]+) \| `(?P<path>[\w/]+\.py)::(?P<name>\w+)` \|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
SERVERS = ("tests/browser/", "tests/cluster/", "tests/nodes/", "tests/services/")


def offences(page: str, root: Path) -> Iterator[str]:
    """What a page says of tests that is not so."""
    for path, name in NAMED.findall(page):
        if not (root / path).is_file():
            yield f"{path} does not exist"
        elif name and name not in functions(root / path):
            yield f"{path} has no {name}"
    for row in ROW.finditer(page):
        if row["tier"] != (runs_in := tier(row["path"], functions(root / row["path"]).get(row["name"], ""))):
            yield f"{row['path']} runs in {runs_in}, the page says {row['tier']}"
    lines = [line for line in page.splitlines() if line.startswith("| ") and "::" in line]
    yield from (f"no row of four cells: {line}" for line in lines if not ROW.fullmatch(line))


def functions(path: Path) -> dict[str, str]:
    """Names of a file's functions and methods, each with its decorators; none of a file that does not exist."""
    definitions = ast.FunctionDef, ast.AsyncFunctionDef
    nodes = ast.walk(ast.parse(path.read_text())) if path.is_file() else ()
    return {
        node.name: " ".join(map(ast.unparse, node.decorator_list)) for node in nodes if isinstance(node, definitions)
    }


def tier(path: str, decorators: str) -> str:
    """The command that runs a test."""
    if path.startswith("tests/soak/") or decorators == "pytest.mark.soak":
        return "soak"
    return "test-servers" if path.startswith(SERVERS) else "test"


def test_every_test_on_the_page_of_guarantees_exists_and_runs_where_the_page_says() -> None:
    page = PAGE.read_text()
    assert list(offences(page, ROOT)) == []
    owners = [(row["path"], row["name"]) for row in ROW.finditer(page)]
    assert len(owners) >= ROWS_MIN
    assert len(set(owners)) == len(owners), "each test owns one promise"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("| a | c | test | `tests/unit/test_a.py::test_b` |", "tests/unit/test_a.py has no test_b"),
        ("| a | c | test | `tests/unit/test_z.py::test_a` |", "tests/unit/test_z.py does not exist"),
        ("| a | c | soak | `tests/unit/test_a.py::test_a` |", "tests/unit/test_a.py runs in test, the page says soak"),
        ("| a | c | test | `tests/unit/test_a.py::test_s` |", "tests/unit/test_a.py runs in soak, the page says test"),
        ("| a | test | `tests/unit/test_a.py::test_a` |", "no row of four cells"),
    ],
)
def test_a_wrong_row_is_found(tmp_path: Path, row: str, said: str) -> None:
    (tmp_path / "tests/unit").mkdir(parents=True)
    (tmp_path / "tests/unit/test_a.py").write_text(
        "async def test_a() -> None: ...\n@pytest.mark.soak\ndef test_s() -> None: ...\n"
    )
    assert list(offences("| a | c | test | `tests/unit/test_a.py::test_a` |", tmp_path)) == []
    (found,) = offences(row, tmp_path)
    assert found.startswith(said)
