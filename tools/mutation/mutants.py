"""Mutants of a module's functions: where they are, what they are called, and the code that they become.

A mutant is named by file, function, operator, the expression that it changes, and which occurrence of it: reformatting,
moved lines and moved files leave the name as it is. Not mutated are messages, logging, assertions (``zip``'s ``strict``
is one) and annotations; guards against None, without which mypy refuses the function; and whatever lies outside
functions, since only the code of a function can be replaced while everybody holds it.
"""

from __future__ import annotations

import ast
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.Pow: ast.Mult,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGS = frozenset({"debug", "info", "warning", "error", "exception"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mutant:
    """The name of one mutant."""

    file: str
    """Path inside the repository."""
    function: str
    """Qualified name of the outermost function."""
    operator: str
    expression: str
    """The source that is changed, in Python's own format."""
    occurrence: int = 0
    """Which of the equal expressions in the function."""

    @property
    def where(self) -> tuple[str, str, str, int]:
        """The name without the file, which may move."""
        return self.function, self.operator, self.expression, self.occurrence


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A mutant in one parsed module."""

    mutant: Mutant
    lines: range
    apply: Callable[[], None]
    """Change the tree; once a tree."""


def sites_of(tree: ast.Module, file: str) -> Iterator[Site]:
    """Yield every mutant of a module's functions, in the order of its source."""
    for name, function in _functions(tree.body, ""):
        seen: Counter[tuple[str, str]] = Counter()
        for operator, node, apply in _changes(function):
            expression = ast.unparse(node)
            occurrence = seen[operator, expression]
            seen[operator, expression] += 1
            mutant = Mutant(file=file, function=name, operator=operator, expression=expression, occurrence=occurrence)
            assert isinstance(node, ast.expr | ast.stmt | ast.keyword | ast.comprehension), "these alone are mutated"
            yield Site(mutant, _lines(node), apply)


def mutants_of(root: Path, file: str) -> dict[Mutant, range]:
    """Return every mutant of a file, and the lines on which it lies."""
    return {site.mutant: site.lines for site in sites_of(ast.parse((root / file).read_text("utf-8")), file)}


def planted(path: Path, source: str, mutant: Mutant) -> tuple[CodeType, CodeType] | None:
    """Return a function's code and what the mutant makes of it; None if it can't be exchanged.

    Args:
        path: Where the module was loaded from.
        source: Its text at that time.
        mutant: What to plant.
    """
    before, tree = ast.parse(source), ast.parse(source)
    for site in sites_of(tree, mutant.file):
        if site.mutant == mutant:
            site.apply()
            break
    else:
        return None
    codes = [_code_of(compile(each, str(path), "exec", dont_inherit=True), mutant.function) for each in (before, tree)]
    old, new = codes
    if old is None or new is None or old.co_freevars != new.co_freevars:
        return None
    return old, new


def _code_of(code: CodeType, function: str) -> CodeType | None:
    for constant in code.co_consts:
        if not isinstance(constant, CodeType):
            continue
        if constant.co_qualname == function:
            return constant
        if function.startswith(constant.co_qualname + "."):
            return _code_of(constant, function)
    return None


def _functions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node


def _lines(node: ast.expr | ast.stmt | ast.keyword | ast.comprehension) -> range:
    at = node.target if isinstance(node, ast.comprehension) else node
    last = node.ifs[-1] if isinstance(node, ast.comprehension) else node
    return range(at.lineno, (last.end_lineno or at.lineno) + 1)


_Change = tuple[str, ast.AST, Callable[[], None]]


def _changes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[_Change]:
    """Yield what can be changed in a function's body: operator, what it replaces, and how."""
    for parent, field, at, node in _walk(function):
        swap = _Swap(parent, field, at)
        match node:
            case ast.Compare():
                yield from _of_comparison(node)
            case ast.BoolOp():
                yield from _of_boolean(node, swap)
            case ast.UnaryOp(op=ast.Not()):
                yield "drop not", node, swap(node.operand)
            case ast.If() | ast.IfExp() if not _is_guard(node.test):
                yield "always", node.test, _Swap(node, "test")(ast.Constant(True))
                yield "never", node.test, _Swap(node, "test")(ast.Constant(False))
            case ast.comprehension() if node.ifs:
                yield "drop filter", node, _Swap(node, "ifs")([])
            case ast.BinOp() | ast.AugAssign() if type(node.op) in _ARITHMETIC:
                other = _ARITHMETIC[type(node.op)]
                yield f"{type(node.op).__name__} to {other.__name__}", node, _Swap(node, "op")(other())
            case ast.Constant(value=bool()):
                yield "flip", node, swap(ast.Constant(not node.value))
            case ast.Constant(value=int() | float() as value):
                yield "one more", node, swap(ast.Constant(value + 1))
            case ast.Call():
                yield from _of_call(node)
            case _:
                pass
        if isinstance(node, ast.stmt):
            yield from _of_statement(node, swap)


def _of_comparison(node: ast.Compare) -> Iterator[_Change]:
    for at, op in enumerate(node.ops):
        other = _COMPARISONS[type(op)]
        yield f"{type(op).__name__} to {other.__name__}", node, _Swap(node, "ops", at)(other())


def _of_boolean(node: ast.BoolOp, swap: _Swap) -> Iterator[_Change]:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    if not _is_guard(node):
        yield f"{type(node.op).__name__} to {type(other).__name__}", node, _Swap(node, "op")(other)
    for at, operand in enumerate(node.values):
        if _is_guard(operand):
            continue
        rest = [value for number, value in enumerate(node.values) if number != at]
        yield "drop operand", operand, swap(rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))


def _of_call(node: ast.Call) -> Iterator[_Change]:
    if isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        other = _CALLS[node.func.id]
        yield f"{node.func.id} to {other}", node, _Swap(node, "func")(ast.Name(other, ast.Load()))
    for at, keyword in enumerate(node.keywords):
        if keyword.arg not in {None, "strict"}:
            rest = [each for number, each in enumerate(node.keywords) if number != at]
            yield "drop argument", keyword, _Swap(node, "keywords")(rest)


def _of_statement(node: ast.stmt, swap: _Swap) -> Iterator[_Change]:
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "drop statement", node, swap(ast.Pass())
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield "drop statement", node, swap(ast.Pass())
        case ast.Continue():
            yield "Continue to Break", node, swap(ast.Break())
        case ast.Break():
            yield "Break to Continue", node, swap(ast.Continue())
        case _:
            pass


class _Swap:
    """A place in the tree, and how another node comes there."""

    def __init__(self, parent: ast.AST, field: str, at: int | None = None) -> None:
        self._parent, self._field, self._at = parent, field, at

    def __call__(self, node: ast.AST | list[ast.keyword] | list[ast.expr]) -> Callable[[], None]:
        """Return what puts a node there."""

        def apply() -> None:
            if self._at is None:
                setattr(self._parent, self._field, node)
            else:
                getattr(self._parent, self._field)[self._at] = node
            ast.fix_missing_locations(self._parent)

        return apply


def _walk(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield what lies below a node that may be mutated, each before its own parts."""
    for field, value in ast.iter_fields(node):
        if field in {"args", "decorator_list", "returns", "annotation"} and not isinstance(node, ast.Call):
            continue
        for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _is_left_alone(child):
                yield node, field, at, child
                yield from _walk(child)


def _is_guard(test: ast.expr) -> bool:
    """Tell whether an expression does nothing but compare with None: mypy narrows types by it."""
    if isinstance(test, ast.BoolOp):
        return all(map(_is_guard, test.values))
    if not isinstance(test, ast.Compare):
        return False
    return any(isinstance(each, ast.Constant) and each.value is None for each in test.comparators)


def _is_left_alone(node: ast.AST) -> bool:
    """Tell whether a node only speaks to people or to the type checker."""
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in _LOGS:
            return True
        case _:
            return False
