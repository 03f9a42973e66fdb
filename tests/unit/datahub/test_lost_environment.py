"""A store that fails ends the run with an environment error; the next run goes on from there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polyreme_api.errors import EnvironmentFailedError, ExitCode
from polyreme_api.store import ObjectInfo, ObjectStore, StoreFailedError
from polyreme_datahub.objects import open_store
from polyreme_datahub.processing import Processing
from polyreme_datahub.registry.engine import open_database
from tests.unit.datahub.jobs import Home, digits, make_spec

pytestmark = pytest.mark.slow


class FullStore:
    """A store whose disk is full after some writes."""

    def __init__(self, store: ObjectStore, *, writes: int) -> None:
        self._store = store
        self._left = writes

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        return self._store.get_range(key, start=start, length=length)

    def put(self, key: str, data: bytes) -> None:
        self._spend()
        self._store.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._spend()
        self._store.put_if_absent(key, data)

    def exists(self, key: str) -> bool:
        return self._store.exists(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise StoreFailedError("object store failed: no space left on device")


@pytest.mark.parametrize("writes", [0, 2, 5, 8])
def test_a_full_disk_ends_the_run_and_the_next_run_goes_on(tmp_path: Path, writes: int) -> None:
    home = Home(tmp_path)
    home.register("two", digits(2, pages=600))
    spec = make_spec(["two"])
    database = open_database(home.registry)
    with pytest.raises(EnvironmentFailedError) as failed:
        Processing(database, FullStore(open_store(home.objects), writes=writes)).process(spec, job="")
    assert failed.value.exit_code is ExitCode.ENVIRONMENT
    database.close()
    report = home.process(spec)
    assert (report.datasets[0].samples, report.datasets[0].dead_letters) == (600, ())
    if writes >= 2:
        assert report.stages[0].misses < 600
