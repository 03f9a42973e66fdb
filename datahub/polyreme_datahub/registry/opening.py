"""The registry, open for as long as a caller uses it. SQLAlchemy is imported with the first use: it takes long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyreme_datahub.registry.engine import Database


@contextmanager
def opened_database(registry_url: str) -> Iterator[Database]:
    """Open the registry at a URL, and close it at the end.

    Raises:
        InvalidConfigError: If the URL is not one of a registry.
        RegistryFailedError: If the database can't be reached.
    """
    from polyreme_datahub.registry.engine import open_database

    with closing(open_database(registry_url)) as database:
        yield database
