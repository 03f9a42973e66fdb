"""Real servers for these tests, of this checkout's own. One that can't be started fails them: nothing is skipped."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import create_engine, text

from tools.services.services import shared

DATABASE_PASSWORD = "hush-hush"
"""Given to every database; the server of these tests trusts its own user and ignores it."""
_numbers = itertools.count()


def _server(tmp_path_factory: pytest.TempPathFactory, name: str, variable: str) -> Iterator[str]:
    """One server for all processes of pytest-xdist: their folders are next to each other."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"services-{name}"
    with shared(folder, [name]) as variables:
        yield variables[variable]


@pytest.fixture(scope="session")
def postgresql_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a database of a real PostgreSQL; its host is the same for every other database."""
    yield from _server(tmp_path_factory, "postgresql", "POLYREME_DATABASE_URL")


@pytest.fixture(scope="session")
def pulsar_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the topics of a real Pulsar."""
    yield from _server(tmp_path_factory, "pulsar", "POLYREME_TOPICS_URL")


@pytest.fixture
def database(postgresql_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new database; its password is in this process's environment."""
    monkeypatch.setenv("PGPASSWORD", DATABASE_PASSWORD)
    host = parse_qs(urlsplit(postgresql_server).query)["host"][0]
    server = f"postgresql+psycopg2://postgres@/{{}}?host={host}"
    name = f"test_{os.getpid()}_{next(_numbers)}"
    engine = create_engine(server.format("postgres"), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return server.format(name)
