"""The table of leases of a job's budget, in its object store: each generation is an object, created if absent.

Old generations are removed, so a process that slept may create one that others made and removed long ago. Whoever
created a generation therefore looks whether there is a newer one: the newest is always there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping

from polyreme_api.store import ObjectExistsError, ObjectNotFoundError, ObjectStore, StoreFailedError
from polyreme_datahub.loader.read.budget_rules import Lease, Rate, Table

FOLDER = "budgets"
KEPT = 3
"""Generations that are kept: somebody may just read the second newest."""
DIGITS = 12
"""Of a generation's number: keys have its order."""
READ_TRIES_MAX = 8
"""Looks for the newest generation while others replace it."""


class LeaseTable:
    """The leases of one job.

    Args:
        store: Where they lie.
        job: The job's id.
    """

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store, self._folder = store, f"{FOLDER}/{job}/"

    def newest(self) -> Table:
        """Read the newest generation.

        Raises:
            StoreFailedError: If the store stays away, or others replace the table faster than it can be read.
        """
        for _ in range(READ_TRIES_MAX):
            keys = self._keys()
            if not keys:
                return Table()
            try:
                return _parsed(self._store.get(keys[-1]), keys[-1])
            except ObjectNotFoundError:
                continue
        raise StoreFailedError(f"leases below {self._folder} changed {READ_TRIES_MAX} times while they were read")

    def replace(self, table: Table) -> bool:
        """Write the generation that follows the newest; False: another process wrote one before.

        Raises:
            StoreFailedError: If the store stays away.
        """
        key = f"{self._folder}{table.generation:0{DIGITS}d}.json"
        try:
            self._store.put_if_absent(key, json.dumps(dataclasses.asdict(table)).encode())
        except ObjectExistsError:
            return False
        keys = self._keys()
        if keys[-1] != key:
            self._store.delete(key)
            return False
        for old in keys[: -1 - KEPT]:
            self._store.delete(old)
        return True

    def _keys(self) -> list[str]:
        return [info.key for info in self._store.list(self._folder)]


def _parsed(data: bytes, key: str) -> Table:
    try:
        value = json.loads(data)
        leases = tuple(
            Lease(
                holder=str(each["holder"]),
                process=str(each["process"]),
                wanted=_rate(each["wanted"]),
                share=_rate(each["share"]),
                until_s=float(each["until_s"]),
            )
            for each in value["leases"]
        )
        return Table(generation=int(value["generation"]), leases=leases, shrunk_s=float(value["shrunk_s"]))
    except (ValueError, KeyError, TypeError) as error:
        raise StoreFailedError(f"leases at {key} can't be read ({error!r}); delete the folder {FOLDER}") from error


def _rate(value: Mapping[str, float]) -> Rate:
    return Rate(float(value["requests"]), float(value["bytes"]))
