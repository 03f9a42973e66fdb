"""Brings a registry to this release's schema, once, safely beside others that do the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, Engine, inspect, text

from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.errors import DatahubError

if TYPE_CHECKING:
    from alembic.config import Config

HEAD = "0002"
_LOCK = 0x706F6C79
"""Key of the advisory lock under which PostgreSQL migrates; SQLite's write lock does it there."""


class RegistryNewerError(DatahubError, EnvironmentFailedError):
    """The registry was made by a newer release."""


def migrate(engine: Engine) -> None:
    """Bring the schema to ``HEAD``; nothing is imported or written when it is there already.

    Raises:
        RegistryNewerError: If a newer release made the registry.
    """
    with engine.connect() as connection:
        if _revision(connection) == HEAD:
            return
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        seen = _revision(connection)
        if seen == HEAD:
            return
        if seen is not None and seen > HEAD:
            raise RegistryNewerError(
                f"registry was written by a newer release: schema {seen}, this release supports up to {HEAD}"
            )
        _upgrade(connection)


def alembic_config(connection: Connection) -> Config:
    """Return the configuration with which Alembic's commands run over a connection."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    return config


def _upgrade(connection: Connection) -> None:
    from alembic import command

    command.upgrade(alembic_config(connection), HEAD)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    row = connection.execute(text("SELECT version_num FROM alembic_version")).first()
    return None if row is None else str(row[0])
