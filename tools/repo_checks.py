"""The house rules that no linter checks, each a pure function from files to the offences it finds.

``tests/unit/house`` runs every guard on this repository, and on a small case that must be found.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
CLASS_MAX = {"lines": 250, "attributes": 15, "constructor parameters": 7}
"""Attributes are the names that a class assigns on ``self``; a class with more has more than one concern."""
README_LINES_MAX = 150
INNER_IMPORTS_MAX = 60
"""Imports of our own modules inside functions: each defers torch or another large library until a command needs it."""
SOURCE_ROOTS = ("api", "operator", "trainer", "datahub", "cli")

# Written with classes of one letter, so that this file does not offend itself.
MACHINE_PATH = re.compile(
    r"(?<![\w.*~:/{}-])/(?:[w]ork|[r]oot|[h]ome/[a-z][\w-]*|[U]sers/[A-Za-z][\w-]*|opt/wheels)(?:/|\b)"
)
ADDRESS = re.compile(
    r"[p]ypi\.org|[p]ythonhosted\.org|[p]roxy\.golang\.org|[r]egistry\.npmjs|repo1?\.[m]aven|[c]rates\.io",
    re.IGNORECASE,
)
CREDENTIALS = re.compile(r"://[^\s/]*@")
UNFINISHED = re.compile(r"\b(?:[T]ODO|[F]IXME|[X]XX|[H]ACK)\b")
EXIT_CODE_MAX = 192
"""128 + the largest number of a signal; larger numbers in a ``code`` are those of HTTP."""
EXIT_CALLS = frozenset({"exit", "_exit", "SystemExit", "Exit"})
EXIT_NAMES = re.compile(r"(?:pod_|exit_?)?code|returncode|(?:\w+_)?(?:CODE|EXIT)(?:_(?!MAX$|BITS)[A-Z]+)*")
ADR_NAME = re.compile(r"(\d{4})-[a-z0-9-]+\.md")


def tracked_texts(root: Path) -> dict[PurePosixPath, str]:
    """Every text file that git tracks or would track, by its path in the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    texts = {}
    for name in filter(None, listing.split("\0")):
        try:
            texts[PurePosixPath(name)] = (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
            continue
    return texts


def shadowing_packages(paths: Iterable[PurePosixPath]) -> list[PurePosixPath]:
    """Packages that Python may take for a module of the standard library; one inside another package is safe."""
    packages = {path.parent for path in paths if path.name == "__init__.py"}
    return sorted(
        folder / "__init__.py"
        for folder in packages
        if folder.name in sys.stdlib_module_names and folder.parent not in packages
    )


def packages_where_none_may_be(paths: Iterable[PurePosixPath]) -> list[PurePosixPath]:
    """``__init__.py`` in a source root, or anywhere under ``tests`` and ``tools``."""
    return [
        path
        for path in paths
        if path.name == "__init__.py"
        and (
            path.parts[0] in {"tests", "tools", "benchmarks"}
            or len(path.parts) == 1
            or path.parts[:-1] in {(root,) for root in SOURCE_ROOTS}
        )
    ]


def repeated_test_names(paths: Iterable[PurePosixPath]) -> list[str]:
    """Names that two test files share: pytest and a reader take one for the other."""
    names = Counter(path.name for path in paths if path.parts[0] == "tests" and path.name.startswith("test_"))
    return sorted(name for name, count in names.items() if count > 1)


def long_files(texts: Mapping[PurePosixPath, str]) -> list[str]:
    """Python files that are too long, and a README that is too long to be read to its end."""
    limits = {path: FILE_LINES_MAX for path in texts if path.suffix == ".py"} | {
        PurePosixPath("README.md"): README_LINES_MAX
    }
    lengths = {path: len(texts[path].splitlines()) for path in limits if path in texts}
    return [
        f"{path}: {length} lines, at most {limits[path]}" for path, length in lengths.items() if length > limits[path]
    ]


def long_functions(texts: Mapping[PurePosixPath, str]) -> list[str]:
    """Functions that do not fit a screen."""
    return [
        f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"
        for path, node in _functions(texts)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def large_classes(texts: Mapping[PurePosixPath, str]) -> dict[str, int]:
    """Sizes of classes over a limit, by ``name: measure``."""
    return {
        f"{node.name}: {measure}": size
        for path, text in texts.items()
        if path.suffix == ".py" and path.parts[0] in SOURCE_ROOTS
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        for measure, size in _class_sizes(node).items()
        if size > CLASS_MAX[measure]
    }


def _class_sizes(found: ast.ClassDef) -> dict[str, int]:
    assigned = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    constructors = [node.args for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    parameters = [len(each.posonlyargs) + len(each.args) + len(each.kwonlyargs) - 1 for each in constructors]
    return {
        "lines": (found.end_lineno or found.lineno) - found.lineno + 1,
        "attributes": len(assigned),
        "constructor parameters": max(parameters, default=0),
    }


def matches(texts: Mapping[PurePosixPath, str], pattern: re.Pattern[str]) -> list[str]:
    """Lines in which a pattern that may not stand in the repository does."""
    return [
        f"{path}:{number}: {found[0]}"
        for path, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if (found := pattern.search(line))
    ]


def foreign_imports(texts: Mapping[PurePosixPath, str], allowed: Iterable[str]) -> list[str]:
    """Imports of anything but the standard library and ``allowed``, at any depth of the file."""
    known = sys.stdlib_module_names | set(allowed)
    return [
        f"{path}: {module}"
        for path, text in texts.items()
        for node in ast.walk(ast.parse(text))
        for module in _modules(node)
        if module.partition(".")[0] not in known
    ]


def imports_of(texts: Mapping[PurePosixPath, str], libraries: Collection[str]) -> list[str]:
    """Imports of these libraries, at any depth of the file."""
    return [
        f"{path}: {module}"
        for path, text in texts.items()
        for node in ast.walk(ast.parse(text))
        for module in _modules(node)
        if module.partition(".")[0] in libraries
    ]


def inner_imports(texts: Mapping[PurePosixPath, str]) -> list[str]:
    """Imports of our own modules inside functions of the source roots."""
    inside = {
        (path, node.lineno, module)
        for path, text in texts.items()
        if path.suffix == ".py" and path.parts[0] in SOURCE_ROOTS
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in _modules(node)
        if module.startswith("polyreme")
    }
    return [f"{path}:{line}: {module}" for path, line, module in sorted(inside)]


def bare_exit_codes(texts: Mapping[PurePosixPath, str]) -> list[str]:
    """Exit codes written as numbers outside their table: passed to an exit, given a name, compared, or returned."""
    return [
        f"{path}:{node.lineno}: exit code {node.value}"
        for path, text in texts.items()
        if path.suffix == ".py" and path.parts[0] in SOURCE_ROOTS and path.name != "exit_codes.py"
        for parent in ast.walk(ast.parse(text))
        for node in _exit_codes(parent)
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value <= EXIT_CODE_MAX
    ]


def misnumbered_records(names: Iterable[str]) -> list[str]:
    """Decision records whose numbers are missing, repeated, or leave a gap."""
    offences, numbers = [], []
    for name in sorted(names):
        if (matched := ADR_NAME.fullmatch(name)) is None:
            offences.append(f"{name}: not NNNN-title.md")
        else:
            numbers.append(int(matched[1]))
    expected = list(range(1, len(numbers) + 1))
    if numbers != expected:
        offences.append(f"numbers {numbers}, expected {expected}")
    return offences


def _functions(
    texts: Mapping[PurePosixPath, str],
) -> Iterator[tuple[PurePosixPath, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path, text in texts.items():
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield path, node


def _exit_codes(node: ast.AST) -> list[ast.expr]:
    """Expressions that are exit codes by what a node does with them."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=arguments, keywords=keywords):
            named = [keyword.value for keyword in keywords if _names_exit_code(keyword.arg)]
            return [*arguments, *named] if name in EXIT_CALLS else named
        case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=ast.expr() as value):
            return [value] if _names_exit_code(target) else []
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn()], comparators=[right]):
            sides = [left, right] if _names_exit_code(left) or _names_exit_code(right) else []
            return [one for side in sides for one in (side.elts if isinstance(side, ast.Set | ast.Tuple) else [side])]
        case ast.arguments(args=positional, defaults=defaults, kwonlyargs=others, kw_defaults=for_others):
            pairs = [*zip(positional[len(positional) - len(defaults) :], defaults, strict=True)]
            pairs += [(name, value) for name, value in zip(others, for_others, strict=True) if value is not None]
            return [value for argument, value in pairs if _names_exit_code(argument.arg)]
        case ast.FunctionDef(name="main"):
            returns = (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return))
            return [value for value in returns if value is not None]
        case _:
            return []


def _names_exit_code(target: ast.expr | str | None) -> bool:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name) | str(name):
            return EXIT_NAMES.fullmatch(name) is not None
        case _:
            return False


def _modules(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(level=0, module=str(module)):
            return [module]
        case _:
            return []
