"""Expressions that choose samples by columns: ``width >= 512 and (lang in ["en", "de"] or not blurred)``.

Comparisons of columns and constants, ``in`` lists of constants, ``and``, ``or``, ``not``: nothing can be called, and
nothing is evaluated by Python itself. A missing value (None) meets no comparison but ``== None`` and ``!= None``.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

from polyreme_datahub.errors import PredicateInvalidError

CHARACTERS_MAX = 10_000
DEPTH_MAX = 50
Predicate = Callable[[Mapping[str, Any]], bool]
_Term = Callable[[Mapping[str, Any]], Any]
_ORDERS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def parse_predicate(text: str, columns: Collection[str]) -> Predicate:
    """Return the function that an expression describes.

    Args:
        text: The expression.
        columns: Names that it may use.

    Raises:
        PredicateInvalidError: If it is no such expression, or names another column.
    """
    if len(text) > CHARACTERS_MAX:
        raise _invalid(text, f"has {len(text)} characters, expected at most {CHARACTERS_MAX}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _invalid(text, f"is no expression: {error}") from error
    return _Parser(text, columns).truth(tree.body, 0)


class _Parser:
    def __init__(self, text: str, columns: Collection[str]) -> None:
        self._text = text
        self._columns = columns

    def truth(self, node: ast.expr, depth: int) -> Predicate:
        if depth > DEPTH_MAX:
            raise _invalid(self._text, f"is nested deeper than {DEPTH_MAX}")
        match node:
            case ast.BoolOp(op=op, values=values):
                parts = [self.truth(value, depth + 1) for value in values]
                joined = all if isinstance(op, ast.And) else any
                return lambda row: joined(part(row) for part in parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.truth(operand, depth + 1)
                return lambda row: not inner(row)
            case ast.Compare(left=left, ops=ops, comparators=right):
                return self._compare(left, ops, right)
            case ast.Name() | ast.Constant(value=True | False):
                term = self._term(node)
                return lambda row: bool(term(row))
        raise self._refused(node)

    def _compare(self, left: ast.expr, ops: list[ast.cmpop], right: list[ast.expr]) -> Predicate:
        links: list[Predicate] = []
        for op, one, other in zip(ops, [left, *right], right, strict=False):
            first = self._term(one)
            if isinstance(op, (ast.In, ast.NotIn)):
                links.append(self._member(first, other, wanted=isinstance(op, ast.In)))
                continue
            links.append(self._ordered(op, first, self._term(other)))
        return lambda row: all(link(row) for link in links)

    def _ordered(self, op: ast.cmpop, first: _Term, second: _Term) -> Predicate:
        if isinstance(op, ast.Eq):
            return lambda row: bool(first(row) == second(row))
        if isinstance(op, ast.NotEq):
            return lambda row: bool(first(row) != second(row))
        if type(op) not in _ORDERS:
            raise _invalid(self._text, "uses `is`: expected ==, !=, <, <=, >, >= or in")
        order = _ORDERS[type(op)]

        def holds(row: Mapping[str, Any]) -> bool:
            one, other = first(row), second(row)
            if one is None or other is None:
                return False
            try:
                return bool(order(one, other))
            except TypeError as error:
                raise _invalid(self._text, f"compares {one!r} with {other!r}, which have no order") from error

        return holds

    def _member(self, first: _Term, values: ast.expr, *, wanted: bool) -> Predicate:
        if not isinstance(values, (ast.List, ast.Tuple, ast.Set)):
            raise _invalid(self._text, 'expected a list after `in`: lang in ["en", "de"]')
        constants = [self._constant(value) for value in values.elts]
        return lambda row: (first(row) in constants) is wanted

    def _term(self, node: ast.expr) -> _Term:
        if isinstance(node, ast.Name):
            if node.id not in self._columns:
                shown = ", ".join(sorted(self._columns))
                raise _invalid(self._text, f"names the column {node.id!r}, expected one of {shown}")
            name = node.id
            return lambda row: row.get(name)
        value = self._constant(node)
        return lambda _row: value

    def _constant(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=str() | int() | float() | None):
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
        raise self._refused(node)

    def _refused(self, node: ast.expr) -> PredicateInvalidError:
        part = ast.get_source_segment(self._text.strip(), node) or type(node).__name__
        return _invalid(self._text, f"has {part!r}: expected columns, constants, comparisons, in, and, or, not")


def _invalid(text: str, why: str) -> PredicateInvalidError:
    shown = text if len(text) <= 200 else f"{text[:200]}..."
    return PredicateInvalidError(f"expression {shown!r} {why}", field="where")
