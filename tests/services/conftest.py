"""Real servers for these tests, of this checkout's own. One that can't be started fails them: nothing is skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tools.services.services import shared


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
