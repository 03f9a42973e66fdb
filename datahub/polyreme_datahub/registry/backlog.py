"""Work items due, at work and done, by operation: for metrics, and for the sizes of worker pools."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sqlalchemy import case, func, select

from polyreme_datahub.registry import flows, schema
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.work_items import DONE, OPEN

GROUPS_MAX = 1000
"""Most pairs of flow and operation that one look reads."""
_ITEMS = schema.work.c


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Open items of one operation, over all flows."""

    operation: str
    device: str
    """Which workers do them: ``cpu`` or ``gpu``."""
    items: int
    records: int
    leased: int
    """Items that a worker has at the moment."""


class BacklogReader:
    """Reads backlogs; which device an operation of a flow needs is read once.

    Args:
        database: The registry.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._devices: dict[str, Mapping[str, str]] = {}

    def read(self, *, now_s: float) -> list[Backlog]:
        """Return the backlog of each operation that has open items, by its name."""
        leased = func.sum(case((_ITEMS.lease_until_s > now_s, 1), else_=0))
        query = (
            select(_ITEMS.flow, _ITEMS.stage, func.count(), func.sum(_ITEMS["count"]), leased)
            .where(_ITEMS.state == OPEN)
            .group_by(_ITEMS.flow, _ITEMS.stage)
            .order_by(_ITEMS.flow, _ITEMS.stage)
            .limit(GROUPS_MAX)
        )
        rows = self._database.read(lambda connection: connection.execute(query).all())
        known = {row[0] for row in rows}
        self._devices = {flow: devices for flow, devices in self._devices.items() if flow in known}
        found: dict[tuple[str, str], Backlog] = {}
        for flow, operation, items, records, held in rows:
            device = self._device(flow, operation)
            before = found.get((operation, device))
            found[operation, device] = Backlog(
                operation=operation,
                device=device,
                items=int(items) + (0 if before is None else before.items),
                records=int(records) + (0 if before is None else before.records),
                leased=int(held or 0) + (0 if before is None else before.leased),
            )
        return [found[key] for key in sorted(found)]

    def _device(self, flow: str, operation: str) -> str:
        if flow not in self._devices:
            body = flows.find_flow(self._database, flow) or {}
            self._devices[flow] = {step["step"]: step.get("device", "cpu") for step in body.get("steps", ())}
        return self._devices[flow].get(operation, "cpu")


def done_since(database: Database, since_s: float) -> dict[str, int]:
    """Count the items of each operation that ended after a time [s since the epoch]."""
    query = (
        select(_ITEMS.stage, func.count())
        .where(_ITEMS.state == DONE, _ITEMS.ended_s > since_s)
        .group_by(_ITEMS.stage)
        .limit(GROUPS_MAX)
    )
    return database.read(lambda connection: {operation: int(count) for operation, count in connection.execute(query)})


def dead_letters(database: Database) -> dict[str, int]:
    """Count the dead letters of each operation, over all versions."""
    letters = schema.dead_letters.c
    query = select(letters.operation, func.count()).group_by(letters.operation).limit(GROUPS_MAX)
    return database.read(lambda connection: {name: int(count) for name, count in connection.execute(query)})
