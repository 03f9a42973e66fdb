"""Walks over what was made of what: from an output to the raw objects that it was made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Select, bindparam, literal, select

from polyreme_datahub.registry import schema
from polyreme_datahub.registry.engine import ROWS_MAX, Database, pages
from polyreme_datahub.registry.rows import SampleRow

DEPTH_MAX = 64
"""Most actions in a row."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One way in which a digest came to be."""

    depth: int
    """0 for the digest that was asked for."""
    output: str
    action: str
    operation: str
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where an output comes from, nearest first."""

    made: Sequence[Made]
    raw: Sequence[str]
    """Digests that no action made: raw objects."""
    complete: bool
    """False if the walk ended at its maximum."""


def lineage_of(database: Database, digest: str, *, count_max: int) -> Lineage:
    """Walk from an output to the raw objects that it was made from: two queries, whatever its depth.

    Args:
        database: The registry.
        digest: The output.
        count_max: Most actions of the answer; those nearest to the output come first.
    """

    def work(connection: Connection) -> Lineage:
        rows = connection.execute(_WALK, {"digest": digest, "count_max": count_max + 1}).all()
        depths: dict[str, tuple[int, str, str]] = {}
        for row in rows[:count_max]:
            depths.setdefault(row.action, (row.depth, row.output, row.operation))
        inputs = _inputs(connection, list(depths))
        made = [
            Made(depth=depth, output=output, action=action, operation=operation, inputs=tuple(inputs[action]))
            for action, (depth, output, operation) in depths.items()
        ]
        outputs = {one.output for one in made}
        complete = len(rows) <= count_max
        read = dict.fromkeys(name for one in made for name in one.inputs) if made else {digest: None}
        return Lineage(
            made=made, raw=[one for one in read if one not in outputs] if complete else [], complete=complete
        )

    return database.read(work)


def samples_after(database: Database, version_id: int, after: int) -> list[SampleRow]:
    """Return the next samples of a version, at most ``ROWS_MAX``, by ordinal."""
    table = schema.samples.c
    query = (
        select(table.ordinal, table.sample_id, table.record)
        .where(table.version_id == version_id, table.ordinal > after)
        .order_by(table.ordinal)
        .limit(ROWS_MAX)
    )

    def work(connection: Connection) -> list[SampleRow]:
        rows = connection.execute(query)
        return [SampleRow(ordinal=ordinal, sample_id=sample_id, record=record) for ordinal, sample_id, record in rows]

    return database.read(work)


def _inputs(connection: Connection, actions: Sequence[str]) -> dict[str, list[str]]:
    """Return the inputs of actions, in order."""
    inputs = schema.action_inputs.c
    read: dict[str, list[str]] = {key: [] for key in actions}
    for some in pages(actions):
        listed = select(inputs.action, inputs.digest).where(inputs.action.in_(some))
        for action, digest in connection.execute(listed.order_by(inputs.action, inputs.position)):
            read[action].append(digest)
    return read


def _walk() -> Select[Any]:
    """Return the query that follows inputs back to the actions that made them, nearest first."""
    actions, inputs = schema.actions.c, schema.action_inputs.c
    columns = (actions.output, actions.key.label("action"), actions.operation)
    begun = select(*columns, literal(0).label("depth")).where(actions.output == bindparam("digest"))
    walk = begun.cte("walk", recursive=True)
    back = (
        select(*columns, (walk.c.depth + 1).label("depth"))
        .join(schema.action_inputs, inputs.digest == actions.output)
        .join(walk, walk.c.action == inputs.action)
        .where(walk.c.depth < DEPTH_MAX)
    )
    return select(walk.union(back)).limit(bindparam("count_max"))


_WALK = _walk()
