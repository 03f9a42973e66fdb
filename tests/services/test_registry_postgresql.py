"""The registry on a real PostgreSQL, through psycopg2."""

from __future__ import annotations

import itertools
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import create_engine, text

from tests.contract.datahub.lifecycle_contract import LifecycleContract
from tests.contract.datahub.registry_contract import RegistryContract
from tests.contract.datahub.work_contract import WorkContract

pytestmark = pytest.mark.services
_numbers = itertools.count()


class TestPostgresql(RegistryContract, WorkContract, LifecycleContract):
    @pytest.fixture
    def url(self, postgresql_server: str) -> str:
        host = parse_qs(urlsplit(postgresql_server).query)["host"][0]
        server = f"postgresql+psycopg2://postgres@/{{}}?host={host}"
        name = f"registry_{next(_numbers)}"
        engine = create_engine(server.format("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(f"CREATE DATABASE {name}"))
        engine.dispose()
        return server.format(name)
