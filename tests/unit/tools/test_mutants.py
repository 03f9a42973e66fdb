"""Mutants are named by what they change, so that their list survives edits elsewhere."""

import ast
import json
from pathlib import Path

from tools.mutation.mutants import Mutant, planted, sites_of

SOURCE = '''
def f(a, b):
    """Say a < b."""
    if a is None:
        raise ValueError(f"{a + b}")
    total = min(a, b) if a < b and b else 0
    return total

class C:
    def f(self):
        return [x for x in range(3) if x > 1]
'''
ROOT = Path(__file__).parents[3]


def names(source: str, file: str = "m.py") -> set[tuple[str, str, str, int]]:
    return {site.mutant.where for site in sites_of(ast.parse(source), file)}


def test_names_depend_on_neither_lines_nor_format_nor_other_functions() -> None:
    moved = "import os\n\n\n\n" + SOURCE.replace("a < b and b", "(a <\n        b) and (b)")
    assert names(SOURCE) == names(moved)
    assert ("C.f", "Gt to GtE", "x > 1", 0) in names(SOURCE)


def test_messages_and_guards_against_none_are_left_alone() -> None:
    expressions = {expression for _, _, expression, _ in names(SOURCE)}
    assert "a + b" not in expressions
    assert not any(operator in {"always", "never"} for _, operator, text, _ in names(SOURCE) if "None" in text)


def test_a_planted_mutant_changes_one_thing() -> None:
    wanted = Mutant(file="m.py", function="f", operator="Lt to LtE", expression="a < b")
    codes = planted(Path("m.py"), SOURCE, wanted)
    assert codes is not None
    results = []
    for code in codes:
        scope: dict[str, object] = {}
        exec(compile(SOURCE, "m.py", "exec"), scope)
        function = scope["f"]
        function.__code__ = code  # type: ignore[attr-defined]
        results.append([function(*pair) for pair in ((1, 2), (2, 2), (3, 2))])  # type: ignore[operator]
    assert results == [[1, 0, 0], [1, 2, 0]]


def test_the_list_holds_at_least_400_mutants_each_once() -> None:
    entries = json.loads((ROOT / "tests" / "soak" / "mutation_list.json").read_text("utf-8"))
    named = {
        tuple(entry[key] for key in ("file", "function", "operator", "expression", "occurrence")) for entry in entries
    }
    assert len(entries) == len(named) >= 400


def test_every_mutant_of_the_list_is_in_a_function_that_exists() -> None:
    entries = json.loads((ROOT / "tests" / "soak" / "mutation_list.json").read_text("utf-8"))
    known = {
        file: {site.mutant.function for site in sites_of(ast.parse((ROOT / file).read_text("utf-8")), file)}
        for file in {entry["file"] for entry in entries}
    }
    assert [entry for entry in entries if entry["function"] not in known[entry["file"]]] == []


def test_the_folders_that_are_mutated_and_tested_exist() -> None:
    tree = ast.parse((ROOT / "tests/soak/mutation.py").read_text("utf-8"))
    lists = {
        node.targets[0].id: [one.value for one in ast.walk(node.value) if isinstance(one, ast.Constant)]
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    assert lists["TESTS"]
    assert [name for name in lists["TESTS"] if not (ROOT / "tests" / str(name)).is_dir()] == []
