"""Nodes of an attempt's workers, written short: 15,000 names of nodes fit into one status.

Names of nodes are made by rule: some text with numbers in it. Names of the same text share one entry that says the text
once and each of its numbers as a column; columns are runs of integers, as is the order in which workers sit on nodes.
Names that follow no rule share what they begin and end with.
"""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Annotated

from pydantic import Field

from polyreme_api.fields import StatusPart

NODES_MAX = 15_000
PARTS_MAX = 128
"""Texts around the numbers of one name: a name has at most 253 characters."""
RUNS_CHARACTERS_MAX = 2**22
FEW = 4
"""Names of one text that are worth an entry of their own."""

_NUMBERS = re.compile(r"([0-9]+)")
Runs = Annotated[str, Field(max_length=RUNS_CHARACTERS_MAX)]
Text = Annotated[str, Field(max_length=253)]


def runs_of(values: Iterable[int]) -> str:
    """Write integers of 0 or more as runs: ``0-2,7x3,4-5x2`` is 0, 1, 2, 7, 7, 7, 4, 4, 5, 5."""
    runs: list[list[int]] = []
    last, count = -1, 0
    for value in chain(values, (-1,)):
        if value == last:
            count += 1
            continue
        if count:
            if runs and runs[-1][1] + 1 == last and runs[-1][2] == count:
                runs[-1][1] = last
            else:
                runs.append([last, last, count])
        last, count = value, 1
    return ",".join(
        f"{first}{f'-{end}' if end > first else ''}{f'x{count}' if count > 1 else ''}" for first, end, count in runs
    )


def values_of(runs: str) -> list[int]:
    """Read runs back.

    Raises:
        ValueError: If they are none, or more than a gang can have.
    """
    values: list[int] = []
    for run in runs.split(",") if runs else ():
        if run.isdecimal():
            values.append(int(run))
            continue
        span, _, count = run.partition("x")
        first, _, end = span.partition("-")
        each = range(int(first), int(end or first) + 1)
        if len(each) * int(count or 1) > NODES_MAX:
            raise ValueError(f"run {run[:40]!r} is longer than {NODES_MAX}, the most nodes of a gang")
        values += each if not count else [value for value in each for _ in range(int(count))]
    return values


class NodeNames(StatusPart):
    """Names of nodes that have the same text."""

    parts: Annotated[list[Text], Field(min_length=2, max_length=PARTS_MAX)]
    """The text, cut where numbers stand."""
    numbers: Annotated[list[Runs], Field(max_length=PARTS_MAX)] = Field(default_factory=list)
    """For each cut the numbers of all names, as runs: ``0-2,7x3`` is 0, 1, 2, 7, 7, 7."""
    digits: Annotated[list[Annotated[int, Field(ge=1, le=253)]], Field(max_length=PARTS_MAX)] = Field(
        default_factory=list
    )
    """For each cut the fewest digits: shorter numbers begin with zeros."""
    texts: Annotated[list[Text], Field(max_length=NODES_MAX)] = Field(default_factory=list)
    """Instead of numbers: the text at the only cut, for each name."""

    def names(self) -> list[str]:
        """Return the names in order."""
        head, *tails = self.parts
        if not self.numbers:
            return [f"{head}{text}{tails[0]}" for text in self.texts]
        columns = [
            [str(number).zfill(digits) for number in values_of(runs)]
            for runs, digits in zip(self.numbers, self.digits, strict=True)
        ]
        form = "%s".join(part.replace("%", "%%") for part in self.parts)
        return [form % row for row in zip(*columns, strict=True)]


class Placement(StatusPart):
    """Nodes of an attempt's workers: names of nodes, and for each worker index a position among them."""

    nodes: Annotated[list[NodeNames], Field(max_length=NODES_MAX)] = Field(default_factory=list)
    """Names of the nodes; positions count through all entries, from 0."""
    order: Runs = ""
    """Position of the node of each worker index, as runs: ``0-2,7x3`` is 0, 1, 2, 7, 7, 7."""

    @classmethod
    def of(cls, node_by_index: Sequence[str]) -> "Placement":
        """Encode the node of each worker index."""
        names = list(dict.fromkeys(node_by_index))
        groups = _by_text(names)
        placement = cls._from(groups, node_by_index)
        if len(groups) <= FEW:
            return placement
        plain = cls._from([(names, _plain(names))], node_by_index)
        return min(placement, plain, key=lambda candidate: len(candidate.model_dump_json()))

    @classmethod
    def _from(cls, groups: list[tuple[list[str], NodeNames]], node_by_index: Sequence[str]) -> "Placement":
        named = chain.from_iterable(names for names, _ in groups)
        position = {name: at for at, name in enumerate(named)}
        return cls(nodes=[entry for _, entry in groups], order=runs_of(position[name] for name in node_by_index))

    def node_by_index(self) -> list[str]:
        """Decode to the node of each worker index."""
        return list(self._decoded)

    @cached_property
    def _decoded(self) -> tuple[str, ...]:
        names = [name for entry in self.nodes for name in entry.names()]
        return tuple([names[position] for position in values_of(self.order)])


def _by_text(names: list[str]) -> list[tuple[list[str], NodeNames]]:
    """Group names by the text around their numbers; what is left over makes one group without numbers."""
    by_text: dict[tuple[str, ...], list[tuple[str, list[str]]]] = {}
    for name in names:
        pieces = _NUMBERS.split(name)
        by_text.setdefault(tuple(pieces[::2]), []).append((name, pieces[1::2]))
    groups: list[tuple[list[str], NodeNames]] = []
    left: list[str] = []
    for text, rows in by_text.items():
        if len(text) == 1 or (len(rows) < FEW and len(by_text) > 1):
            left += [name for name, _ in rows]
            continue
        for alike in _of_one_width(rows):
            columns = list(zip(*(numbers for _, numbers in alike), strict=True))
            entry = NodeNames(
                parts=list(text),
                numbers=[runs_of(map(int, column)) for column in columns],
                digits=[_digits(column) or 1 for column in columns],
            )
            groups.append(([name for name, _ in alike], entry))
    return [*groups, (left, _plain(left))] if left else groups


def _of_one_width(rows: list[tuple[str, list[str]]]) -> list[list[tuple[str, list[str]]]]:
    """Split rows until each column of each has one width to which zeros fill it up."""
    columns = zip(*(numbers for _, numbers in rows), strict=True)
    if all(_digits(column) is not None for column in columns):
        return [rows]
    by_width: dict[tuple[int, ...], list[tuple[str, list[str]]]] = {}
    for row in rows:
        by_width.setdefault(tuple(len(number) for number in row[1]), []).append(row)
    return list(by_width.values())


def _digits(column: Sequence[str]) -> int | None:
    """Fewest digits of the numbers of a column; None where ``7`` and ``07`` both stand, so that none says it."""
    shortest = min(map(len, column))
    filled = {len(number) for number in column if number[0] == "0" and number != "0"}
    if not filled:
        return 1
    return shortest if filled == {shortest} else None


def _plain(names: list[str]) -> NodeNames:
    """Say once what all names begin and end with."""
    head = _common(min(names), max(names))
    rests = [name[len(head) :] for name in names]
    backwards = [rest[::-1] for rest in rests]
    tail = _common(min(backwards), max(backwards))[::-1]
    return NodeNames(parts=[head, tail], texts=[rest.removesuffix(tail) for rest in rests])


def _common(one: str, other: str) -> str:
    """Return what two texts both begin with; of the least and the greatest of many, it is what all do."""
    same = next((at for at, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its), None)
    return one[: min(len(one), len(other)) if same is None else same]
