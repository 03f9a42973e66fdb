"""Description of a flow for its workers, by the flow's id: written once, before its first work item."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select

from polyreme_datahub.digests import canonical_json
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.engine import Database


def add_flow(database: Database, flow: str, body: Mapping[str, Any], *, now_s: float) -> None:
    """Store a JSON-able description; an id that is there already keeps its own, which says the same."""
    row = {"id": flow, "body": canonical_json(body).decode(), "created_s": now_s}
    database.write(lambda connection: insert_new(connection, schema.flows, [row]))


def find_flow(database: Database, flow: str) -> dict[str, Any] | None:
    """Return the description of a flow, or None if there is none."""
    query = select(schema.flows.c.body).where(schema.flows.c.id == flow)
    body = database.read(lambda connection: connection.execute(query).scalar())
    return None if body is None else dict(json.loads(body))
