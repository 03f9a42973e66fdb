"""The fault table: what each code means for a node. The data are ``table.csv``; this reads them.

Columns: ``code``; ``class``; ``action``; ``count`` within ``window_s`` from which on the action is due (0: no window);
``sticky_s``, how long a node stays out after the last event at least; ``fatal``, whether repetition on one device
escalates; ``condition``, whether the code is itself a type of condition that node-problem-detector writes; ``source``;
``meaning``.

Sources: N, NVIDIA's XID catalog; E, EKS node monitoring's list of fatal XIDs; S, NVSentinel's mappings; C, Crusoe's
instance health; A, AKS; P, node-problem-detector; H, SageMaker HyperPod; B, ByteRobust (arXiv 2509.16293);
K, what kubelets do with pods. Where they disagree, the meaning says so; a NodeFaultPolicy overrides a row by a rule of
its own.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Literal, get_args

from polyreme_api.faults.classes import FaultClass

FaultAction = Literal["None", "Watch", "RestartApplication", "Reset", "Reboot", "Replace", "Support"]
"""What a fault asks for: nothing, counting, a restart of the ranks, a reset of the device, a reboot, another node, or a
person."""
ROWS_MAX = 1_024
SOURCES = frozenset("NESCAPHBK")
_CODE = re.compile(r"[A-Z][A-Za-z0-9]{0,62}")
_COLUMNS = ("code", "class", "action", "count", "window_s", "sticky_s", "fatal", "condition", "source", "meaning")
_SWITCH = {"yes": True, "no": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """One row of the table."""

    code: str
    fault_class: str
    """A ``FaultClass``, or ``unknown`` for a code that the table lacks."""
    action: str
    """A ``FaultAction``."""
    count: int = 1
    window_s: float = 0.0
    """Sliding window of ``count``; 0: none."""
    sticky_s: float = 0.0
    """How long after its last event the taint is kept at least."""
    fatal: bool = False
    """Whether repetition on one device escalates."""
    is_condition: bool = False
    sources: frozenset[str] = frozenset()
    meaning: str = ""


@functools.cache
def fault_table() -> Mapping[str, FaultRow]:
    """Return the shipped rows by code."""
    return parse_table((resources.files("polyreme_api.faults") / "table.csv").read_text(encoding="utf-8"))


def parse_table(text: str) -> Mapping[str, FaultRow]:
    """Read a table.

    Raises:
        ValueError: Naming the line, the value and what is expected.
    """
    reader = csv.reader(text.splitlines())
    if tuple(next(reader, ())) != _COLUMNS:
        raise ValueError(f"fault table: line 1 must be {','.join(_COLUMNS)}")
    rows: dict[str, FaultRow] = {}
    for line, cells in enumerate(reader, start=2):
        if len(cells) != len(_COLUMNS) or len(rows) >= ROWS_MAX:
            raise ValueError(f"fault table: line {line} has {len(cells)} cells, expected {len(_COLUMNS)}")
        row = _row(dict(zip(_COLUMNS, cells, strict=True)), line)
        if row.code in rows:
            raise ValueError(f"fault table: line {line} has the code {row.code}, which an earlier line has")
        rows[row.code] = row
    return rows


def _row(cells: Mapping[str, str], line: int) -> FaultRow:
    def expect(column: str, right: bool, expected: str) -> None:
        if not right:
            raise ValueError(f"fault table: line {line} has {column} {cells[column]!r}, expected {expected}")

    sources = frozenset(cells["source"].split("+"))
    expect("code", _CODE.fullmatch(cells["code"]) is not None, "CamelCase")
    expect("class", cells["class"] in get_args(FaultClass), f"one of {', '.join(get_args(FaultClass))}")
    expect("action", cells["action"] in get_args(FaultAction), f"one of {', '.join(get_args(FaultAction))}")
    for column in ("count", "window_s", "sticky_s"):
        expect(column, cells[column].isascii() and cells[column].isdigit(), "a whole number")
    for column in ("fatal", "condition"):
        expect(column, cells[column] in _SWITCH, "yes or no")
    expect("source", sources <= SOURCES, f"letters of {'+'.join(sorted(SOURCES))}")
    expect("meaning", bool(cells["meaning"]), "a text")
    expect("window_s", int(cells["count"]) <= 1 or int(cells["window_s"]) > 0, "a window where count is above 1")
    return FaultRow(
        code=cells["code"],
        fault_class=cells["class"],
        action=cells["action"],
        count=max(1, int(cells["count"])),
        window_s=float(cells["window_s"]),
        sticky_s=float(cells["sticky_s"]),
        fatal=_SWITCH[cells["fatal"]],
        is_condition=_SWITCH[cells["condition"]],
        sources=sources,
        meaning=cells["meaning"],
    )
