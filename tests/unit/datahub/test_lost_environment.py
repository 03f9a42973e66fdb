"""A store that fails ends the run with an environment error; the next run continues from there."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import func, select

from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.store import Data, ObjectStore, StoreFailedError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.processing import Processing
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.runner.context import RunContext
from tests.unit.datahub.jobs import Home, digits, make_spec
from tests.unit.datahub.stores import PassingStore

pytestmark = pytest.mark.slow


class FullStore(PassingStore):
    """A store whose disk is full after some writes."""

    def __init__(self, store: ObjectStore, *, writes: int) -> None:
        super().__init__(store)
        self._left = writes

    def put(self, key: str, data: Data) -> None:
        self._spend()
        super().put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._spend()
        super().put_if_absent(key, data)

    def _spend(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise StoreFailedError("object store failed: no space left on device")


@pytest.mark.parametrize("writes", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 8)), 5])
def test_a_full_disk_ends_the_run_and_the_next_run_goes_on(tmp_path: Path, writes: int) -> None:
    home = Home(tmp_path)
    home.register("two", digits(2, pages=600))
    spec = make_spec(["two"])
    database = open_database(home.registry)
    lakehouse = Lakehouse(FullStore(open_store(home.objects), writes=writes))
    with pytest.raises(EnvironmentFailedError) as failed:
        Processing(RunContext(database=database, lakehouse=lakehouse, backoff_s=0.001)).process(spec, job="")
    assert failed.value.exit_code is ExitCode.ENVIRONMENT
    kept = database.read(lambda connection: connection.scalar(select(func.count()).select_from(schema.samples))) or 0
    database.close()
    report = home.process(spec)
    assert (report.datasets[0].samples, report.datasets[0].dead_letters) == (600, ())
    assert report.operations[0].misses == 600 - kept
    assert kept or writes < 8, "eight writes hold the results of some records, and none of them is made again"
