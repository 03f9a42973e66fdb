"""Index of a home's runs, so that no page reads the files of all: a SQLite file that is refreshed, and may be deleted.

A look at the home compares times of files; only what changed is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from polyreme.console.run_fields import fields_of, spellings_of
from polyreme.console.run_source import ALL_NAMESPACES, SORTED_BY, RunList, RunQuery, RunRow
from polyreme.report.run_summary import describe
from polyreme.run_files.paths import PREVIOUS_SUFFIX, Home, RunDirectory
from polyreme_datahub_service.stored_job import load_yaml
from polyreme_system.files import read_json

BATCH = 200
"""Runs that are written in one transaction."""
PAUSE_S = 0.002
"""Rest after a batch, for the threads that answer."""
NAMESPACES_MAX = 200
_COLUMNS = (
    "namespace",
    "name",
    "state",
    "step",
    "steps",
    "loss",
    "held_out",
    "goodput",
    "attempt",
    "changed",
    "message",
)
_NAMED = "(SELECT id FROM fields WHERE name = ?)"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
  id INTEGER PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL, step INTEGER,
  steps INTEGER, loss REAL, held_out REAL, goodput REAL, attempt INTEGER, changed REAL NOT NULL, settled INTEGER,
  message TEXT NOT NULL, stamp TEXT NOT NULL, UNIQUE (namespace, name));
CREATE INDEX IF NOT EXISTS runs_changed ON runs (changed);
CREATE INDEX IF NOT EXISTS runs_loss ON runs (loss);
CREATE INDEX IF NOT EXISTS runs_state ON runs (state, changed DESC);
CREATE TABLE IF NOT EXISTS fields (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS parameters (
  run INTEGER NOT NULL, field INTEGER NOT NULL, value, PRIMARY KEY (run, field)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS parameters_value ON parameters (field, value);
"""


class RunIndex:
    """The index of one home."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._path = home.path / "console" / f"runs-{hashlib.sha256(_SCHEMA.encode()).hexdigest()[:8]}.sqlite"
        self._lock = threading.Lock()
        self._fields: dict[str, int] = {}

    def refresh(self) -> float:
        """Read what changed in the home since the last call; return how long that took [s]."""
        began_s = time.monotonic()
        with self._lock, self._open() as database:
            self._fields = dict(database.execute("SELECT name, id FROM fields"))
            seen = self._update(database)
            gone = [(key,) for (key,) in database.execute("SELECT id FROM runs") if key not in seen]
            database.executemany("DELETE FROM runs WHERE id = ?", gone)
            database.executemany("DELETE FROM parameters WHERE run = ?", gone)
            database.commit()
        return time.monotonic() - began_s

    def find(self, query: RunQuery) -> RunList:
        """Return a page of runs."""
        condition, values = _condition(query)
        with self._open() as database:
            counted = f"SELECT count(*) FROM runs WHERE {condition}"  # noqa: S608 (the condition is of this module)
            total = database.execute(counted, values).fetchone()[0]
            rows = _page(database, query, condition, values)
            fields = _fields_of(database, [key for key, *_ in rows])
            states = dict(database.execute(*_states_of(query)))
        found = [RunRow(**dict(zip(_COLUMNS, row, strict=True)), fields=fields.get(key, {})) for key, *row in rows]
        return RunList(rows=found, total=total, states=states)

    def namespaces(self) -> list[str]:
        """Return the namespaces that have runs."""
        with self._open() as database:
            rows = database.execute("SELECT DISTINCT namespace FROM runs ORDER BY namespace LIMIT ?", (NAMESPACES_MAX,))
            return [name for (name,) in rows]

    def _update(self, database: sqlite3.Connection) -> set[int]:
        """Bring every run of the home up to date, and return their keys."""
        seen: set[int] = set()
        for number, (run, stamp) in enumerate(_stamped(self._home)):
            known = database.execute(
                "SELECT id, stamp, settled FROM runs WHERE namespace = ? AND name = ?", (run.namespace, run.name)
            ).fetchone()
            if known is None or known[1] != stamp or not known[2]:
                seen.add(self._write(database, run, stamp, known))
            else:
                seen.add(known[0])
            if number % BATCH == BATCH - 1:
                database.commit()
                time.sleep(PAUSE_S)
        return seen

    def _write(self, database: sqlite3.Connection, run: RunDirectory, stamp: str, known: tuple[Any, ...] | None) -> int:
        row, state = describe(run), read_json(run.state_file) or {}
        values = {
            "namespace": run.namespace,
            "name": run.name,
            "state": str(row["state"]),
            "step": _integer(row["step"]),
            "steps": _integer(row["steps"]),
            "loss": _number(row["loss"]),
            "held_out": _number(state.get("heldOutLoss", state.get("heldoutLoss"))),
            "goodput": _number(state.get("goodputRatio")),
            "attempt": _integer(row["attempt"]),
            "changed": float(stamp.partition(" ")[0]),
            "settled": int(row["pid"] is None),
            "message": str(row["message"] or "")[:1000],
            "stamp": stamp,
        }
        names = ", ".join(values)
        updates = ", ".join(f"{name} = excluded.{name}" for name in values)
        statement = (
            f"INSERT INTO runs ({names}) VALUES ({', '.join('?' * len(values))}) "  # noqa: S608 (names of this module)
            f"ON CONFLICT (namespace, name) DO UPDATE SET {updates}"
        )
        database.execute(statement, list(values.values()))
        found = database.execute(
            "SELECT id FROM runs WHERE namespace = ? AND name = ?", (run.namespace, run.name)
        ).fetchone()
        key = int(found[0])
        if known is None or known[1].partition(" ")[2] != stamp.partition(" ")[2]:
            self._write_fields(database, key, run.job_file)
        return key

    def _write_fields(self, database: sqlite3.Connection, key: int, job_file: Path) -> None:
        database.execute("DELETE FROM parameters WHERE run = ?", (key,))
        rows = [(key, self._field(database, name), value) for name, value in spec_fields(job_file)]
        database.executemany("INSERT OR REPLACE INTO parameters VALUES (?, ?, ?)", rows)

    def _field(self, database: sqlite3.Connection, name: str) -> int:
        if name not in self._fields:
            self._fields[name] = int(database.execute("INSERT INTO fields (name) VALUES (?)", (name,)).lastrowid or 0)
        return self._fields[name]

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the file; one that is no index is replaced."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            database = _connect(self._path)
        except sqlite3.DatabaseError:
            self._path.unlink()
            database = _connect(self._path)
        with contextlib.closing(database):
            yield database


def spec_fields(job_file: Path) -> list[tuple[str, Any]]:
    """Return the fields of a stored job below spec; none where the file is gone or damaged."""
    try:
        spec = load_yaml(job_file.read_bytes())["spec"]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        return []
    return fields_of(spec)


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=30, check_same_thread=False)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = OFF")
    database.executescript(_SCHEMA)
    return database


def _stamped(home: Home) -> Iterator[tuple[RunDirectory, str]]:
    """Yield the runs of a home with the time of the last change and what identifies it: no file is opened."""
    for namespace in _folders(home.path / "runs"):
        for name in _folders(home.path / "runs" / namespace):
            if name.endswith(PREVIOUS_SUFFIX):
                continue
            run = home.run(namespace, name)
            identity, state, job = map(_changed_ns, (run.identity_file, run.state_file, run.job_file))
            if identity or state or run.exists:
                yield run, f"{max(identity, state) / 1e9:.3f} {job}"


def _folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return []


def _changed_ns(path: Path) -> int:
    try:
        return os.stat(path).st_mtime_ns  # noqa: PTH116 - many of them
    except OSError:
        return 0


def _page(database: sqlite3.Connection, query: RunQuery, condition: str, values: list[Any]) -> list[Any]:
    """Return key and columns of the runs of a page: each order is read from an index, up to the page's end."""
    direction, part = "DESC" if query.descending else "ASC", (query.count, query.offset)
    if query.sort in SORTED_BY:
        return _rows(database, f"runs WHERE {condition} ORDER BY {query.sort} {direction} NULLS LAST", values, part)
    having = f"parameters AS p JOIN runs ON runs.id = p.run AND p.field = {_NAMED} WHERE {condition}"
    rows = _rows(database, f"{having} ORDER BY p.value {direction}", [query.sort, *values], part)
    if len(rows) == query.count:
        return rows
    # Runs that have no such field come last.
    have = database.execute(f"SELECT count(*) FROM {having}", [query.sort, *values]).fetchone()[0]  # noqa: S608 (above)
    lacking = f"NOT EXISTS (SELECT 1 FROM parameters WHERE run = runs.id AND field = {_NAMED})"  # noqa: S608 (above)
    part = (query.count - len(rows), max(0, query.offset - have))
    return rows + _rows(
        database, f"runs WHERE {condition} AND {lacking} ORDER BY changed DESC", [*values, query.sort], part
    )


def _rows(database: sqlite3.Connection, ordered: str, values: list[Any], part: tuple[int, int]) -> list[Any]:
    statement = f"SELECT id, {', '.join(_COLUMNS)} FROM {ordered}, runs.id DESC LIMIT ? OFFSET ?"  # noqa: S608 (above)
    return database.execute(statement, [*values, *part]).fetchall()


def _states_of(query: RunQuery) -> tuple[str, list[Any]]:
    condition, values = _condition(RunQuery(namespace=query.namespace))
    return f"SELECT state, count(*) FROM runs WHERE {condition} GROUP BY state", values  # noqa: S608 (as above)


def _condition(query: RunQuery) -> tuple[str, list[Any]]:
    parts, values = ["1"], list[Any]()
    if query.namespace not in {"", ALL_NAMESPACES}:
        parts.append("namespace = ?")
        values.append(query.namespace)
    if query.text:
        parts.append("(instr(name, ?) OR instr(namespace, ?))")
        values += [query.text.lower()] * 2
    if query.state:
        parts.append("state = ?")
        values.append(query.state)
    for field, value in query.where:
        same = spellings_of(value)
        parts.append(
            f"runs.id IN (SELECT run FROM parameters WHERE field = {_NAMED} AND value IN (?, ?))"  # noqa: S608 (as above)
        )
        values += [field, *same]
    return " AND ".join(parts), values


def _fields_of(database: sqlite3.Connection, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    marks = ", ".join("?" * len(ids))
    found: dict[int, dict[str, Any]] = {}
    columns = "run, name, value FROM parameters JOIN fields ON fields.id = field"
    statement = f"SELECT {columns} WHERE run IN ({marks})"
    for run, name, value in database.execute(statement, list(ids)):
        found.setdefault(run, {})[name] = value
    return found


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and abs(value) < 2**63 else None
