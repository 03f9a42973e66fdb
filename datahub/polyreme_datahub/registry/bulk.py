"""Bulk inserts: COPY on PostgreSQL, executemany on SQLite. The first row of a key wins on both."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import sqlalchemy
from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite

COPY_ROWS_MIN = 200
"""Fewest rows for which COPY through a temporary table costs less than one INSERT of many values."""
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def insert_new(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows; one whose key is there already changes nothing (the first commit wins).

    Args:
        connection: A transaction.
        table: The table.
        rows: Rows, all with the same columns.
    """
    if not rows:
        return
    keys = [column.name for column in table.primary_key.columns if column.name in rows[0]]
    # Commits that share keys lock them in one order: no deadlock.
    ordered = sorted(rows, key=lambda row: tuple(row[key] for key in keys)) if keys else list(rows)
    if connection.dialect.name != "postgresql":
        connection.execute(sqlite.insert(table).on_conflict_do_nothing(), ordered)
    elif len(ordered) < COPY_ROWS_MIN:
        connection.execute(postgresql.insert(table).on_conflict_do_nothing(), ordered)
    else:
        copy_new(connection, table, ordered)


def copy_new(connection: Connection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert rows into PostgreSQL through COPY into a temporary table, which lives as long as the connection."""
    names = list(rows[0])
    listed = ", ".join(f'"{name}"' for name in names)
    copied = f"copy_{table.name}_{len(names)}"
    kinds = ", ".join(f'"{name}" {table.c[name].type.compile(connection.dialect)}' for name in names)
    connection.exec_driver_sql(f"CREATE TEMPORARY TABLE IF NOT EXISTS {copied} ({kinds}) ON COMMIT DELETE ROWS")
    with closing(connection.connection.cursor()) as cursor:
        cursor.copy_expert(f"COPY {copied} ({listed}) FROM STDIN", io.StringIO(copy_text(rows, names)))
    source = sqlalchemy.table(copied, *(sqlalchemy.column(name) for name in names))
    insert = postgresql.insert(table).from_select(names, sqlalchemy.select(source))
    connection.execute(insert.on_conflict_do_nothing())
    connection.execute(sqlalchemy.delete(source))


def copy_text(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Write rows in the text format of COPY."""
    return "".join("\t".join([_field(row[name]) for name in names]) + "\n" for row in rows)


def _field(value: object) -> str:
    if value is None:
        return "\\N"
    if isinstance(value, str):
        return value if value.isalnum() else value.translate(_ESCAPES)
    return repr(value)
