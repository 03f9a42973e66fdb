"""Rule of accounting: device time sums to wall time x devices, as the log of the store shows it, and never shrinks."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_api.job.accounting import SUSPENDED, Accounting, Table, Use, table_of
from polyreme_api.times import parse_rfc3339
from polyreme_cluster.port import Manifest
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState

RULE = "device time sums to wall time x devices"


@dataclasses.dataclass(slots=True, eq=False)
class AccountingFacts:
    """What every job was to be charged."""

    observed: ObservedState
    charged: dict[str, int] = dataclasses.field(default_factory=dict)
    """Device-milliseconds of the spans that are over, by UID of the job."""

    def changed(self, known: Manifest, manifest: Manifest, world: ClusterView) -> None:
        """Take a change of a job.

        Args:
            known: The job before it.
            manifest: The job after it.
            world: The cluster.
        """
        meta, status = manifest["metadata"], manifest.get("status") or {}
        before = known.get("status") or {}
        attempt = status.get("attempt") or {}
        old, new = _accounts(before), _accounts(status)
        if not (new.until or attempt.get("startedAt")):
            return  # nothing is charged before the first admission or suspension
        begins = _ms(old.until or meta["creationTimestamp"])
        # A span that is over was spent on what the job held while it lasted.
        spent = self.charged.get(meta["uid"], 0) + (max(begins, _ms(new.until)) - begins) * _devices(before, manifest)
        self.charged[meta["uid"]] = spent
        fault = _fault(old, new, spent, status, before)
        if fault:
            self.observed.broke(RULE, f"{meta['name']} attempt {attempt.get('number')}: {fault}", world)


def _fault(old: Accounting, new: Accounting, spent: int, status: dict[str, Any], before: dict[str, Any]) -> str:
    attempt, settled = status.get("attempt") or {}, _settled(new)
    begun = attempt.get("number") != (before.get("attempt") or {}).get("number")
    if begun and _ms(new.until) < _ms(attempt["startedAt"]):
        return f"it begins at {attempt['startedAt']}, and time is charged until {new.until} only"
    closed = sum(new.table.values()) - sum(settled.values())
    if closed != spent:
        return f"{closed} device-ms are charged for {spent}"
    if new.settled is not None:
        most = (_ms(new.settled.at) - _ms(new.until)) * attempt["replicas"] * attempt["devices"]
        if sum(settled.values()) > most:
            return f"{sum(settled.values())} device-ms are settled of {most}"
    shrunk = [pair for pair, time in old.table.items() if new.table.get(pair, 0) < time]
    if shrunk:
        return f"{shrunk[0]} shrank"
    days = sum(day.held_device_milliseconds + day.queued_device_milliseconds for day in new.days)
    charged = sum(time for pair, time in new.table.items() if pair != (Use.QUEUED, SUSPENDED))
    if days != charged:
        return f"its days sum to {days} device-ms, its cells to {charged}"
    return ""


def _accounts(status: dict[str, Any]) -> Accounting:
    return Accounting.model_validate(status.get("accounting") or {})


def _settled(accounts: Accounting) -> Table:
    return {} if accounts.settled is None else table_of(accounts.settled.cells)


def _devices(before: dict[str, Any], manifest: Manifest) -> int:
    """Return the devices that a job held before a change, or, without an admission, asks for."""
    admitted = any(
        entry["type"] == "Admitted" and entry["status"] == "True" for entry in before.get("conditions") or ()
    )
    holder = before["attempt"] if admitted else manifest["spec"]["workers"]
    return int(holder.get("replicas", 1)) * int(holder.get("devices", 1))


def _ms(at: str) -> int:
    return round(parse_rfc3339(at) * 1000) if at else 0
