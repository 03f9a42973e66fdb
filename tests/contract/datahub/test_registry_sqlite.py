"""The registry on SQLite, in a file with a write-ahead log."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.registry.engine import open_database
from tests.contract.datahub.lifecycle_contract import LifecycleContract
from tests.contract.datahub.registry_contract import RegistryContract
from tests.contract.datahub.work_contract import WorkContract


class TestSqlite(RegistryContract, WorkContract, LifecycleContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/registry.sqlite"


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://host/db", "nonsense"])
def test_a_registry_that_keeps_nothing_or_is_not_known_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfigError):
        open_database(url)
