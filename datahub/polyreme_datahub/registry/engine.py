"""A registry by URL: SQLite in a file (write-ahead log) or PostgreSQL, with bounded retries and translated errors."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as NoFreeConnectionError

from polyreme_api.environment import DATABASE_URL
from polyreme_api.errors import InvalidConfigError
from polyreme_api.urls import has_password, masked
from polyreme_datahub.errors import RegistryDamagedError, RegistryFailedError
from polyreme_datahub.registry.migrate import migrate

TRIES_MAX = 20
"""Tries of a transaction: over 31 s, so that a server may restart."""
TRIES_PROMPT = 6
"""Tries of one that waits for no server, over 3 s: of opening, whose URL may be wrong, and of a file's errors."""
RETRY_DELAY_S = 0.1
RETRY_DELAY_S_MAX = 2.0
PATIENCE_S = 60.0
"""Time after which there is no further try beyond ``TRIES_PROMPT``: one may take long to fail."""
LOCK_WAIT_S = 30.0
CONNECT_S_MAX = 10
DRIVERS = frozenset({"sqlite", "sqlite+pysqlite", "postgresql", "postgresql+psycopg2"})
REFUSED_STATES = frozenset({"28000", "28P01", "3D000", "42501"})
"""States of PostgreSQL: credentials, password, no such database, no permission."""
_REFUSED = re.compile(r"authentication failed|does not exist|no pg_hba.conf entry|not permitted|permission denied")
_HOST = re.compile(r"[\w.-]+(:\d{1,5})?", re.ASCII)
ROWS_MAX = 500
"""Most values in one IN list."""

_known: set[str] = set()
"""URLs of registries that this process has reached: one of them is waited for when it is opened again."""

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class Database:
    """Transactions against the registry's database."""

    def __init__(
        self,
        engine: Engine,
        *,
        sleep: Callable[[float], None],
        steady_s: Callable[[], float] = time.monotonic,  # noqa: TID251 - the shell's default
    ) -> None:
        self._engine = engine
        self._sleep, self._steady_s = sleep, steady_s
        self._tries_max = TRIES_PROMPT
        driver = engine.dialect.loaded_dbapi
        self._driver_errors = (driver.OperationalError, driver.InterfaceError)

    def write(self, work: Callable[[Connection], _Result]) -> _Result:
        """Run ``work`` in one transaction; it may run again, so it must be idempotent.

        Raises:
            RegistryFailedError: If the database fails in each of its tries.
        """

        def transact() -> _Result:
            with self._engine.begin() as connection:
                return work(connection)

        return self._try(transact)

    def read(self, work: Callable[[Connection], _Result]) -> _Result:
        """Run ``work``, which only reads; no write lock is taken.

        Raises:
            RegistryFailedError: If the database fails in each of its tries.
        """

        def look() -> _Result:
            with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
                return work(connection)

        return self._try(look)

    def migrate(self, *, waits: bool) -> None:
        """Bring the database to this release's schema; from then on it is one that was there, and is waited for.

        Args:
            waits: Whether it was there before.

        Raises:
            RegistryFailedError: If the database can't be reached.
        """
        self._tries_max = TRIES_MAX if waits else TRIES_PROMPT
        self._try(lambda: migrate(self._engine))
        self._tries_max = TRIES_MAX

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def _try(self, call: Callable[[], _Result]) -> _Result:
        began_s = self._steady_s()
        for tried in range(1, TRIES_MAX + 1):
            try:
                return call()
            except DBAPIError as error:
                if isinstance(error.orig, sqlite3.DatabaseError) and _is_damage(error.orig):
                    raise RegistryDamagedError(
                        f"registry is damaged: {self._engine.url.database}: {error.orig}; restore it from a copy, or "
                        "move it away and register your datasets again (processed data is reused)"
                    ) from error
                reason = _first_line(error.orig)
                if _is_refusal(error, reason):
                    raise RegistryFailedError(f"registry refused: {reason}", field=DATABASE_URL) from error
                transient = isinstance(error, OperationalError) or error.connection_invalidated
                if not transient:
                    raise
                self._wait(tried, began_s, reason, error)
            except self._driver_errors as error:
                # SQLAlchemy passes on, as it is, what goes wrong on a connection's way back into the pool, and counts
                # the connection as in use from then on.
                self._engine.dispose()
                self._wait(tried, began_s, _first_line(error), error)
            except NoFreeConnectionError as error:
                # All of the pool's connections are with threads that wait for a server which does not answer.
                self._wait(tried, began_s, _first_line(error), error)
        raise AssertionError("the last try returns or raises")

    def _wait(self, tried: int, began_s: float, reason: str, error: Exception) -> None:
        """Wait for the next try; the last one's error is raised."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        prompt = isinstance(cause, sqlite3.Error) or self._steady_s() - began_s >= PATIENCE_S
        if tried >= (TRIES_PROMPT if prompt else self._tries_max):
            raise RegistryFailedError(f"registry failed after {tried} tries: {reason}") from error
        self._sleep(min(RETRY_DELAY_S_MAX, RETRY_DELAY_S * 2 ** (tried - 1)))


def open_database(url: str) -> Database:
    """Open the registry at ``url`` and bring it to this release's schema.

    Raises:
        InvalidConfigError: If the URL is not one of SQLite's file or PostgreSQL's, or holds a password.
        RegistryFailedError: If the database can't be reached.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise _unknown(url) from error
    if parsed.drivername not in DRIVERS:
        raise _unknown(url)
    if parsed.password or has_password(url):
        raise InvalidConfigError(
            "the registry's URL holds a password, which process lists and pod specs would show; remove it, and set "
            "PGPASSWORD",
            field=DATABASE_URL,
        )
    engine = _sqlite(parsed) if parsed.get_backend_name() == "sqlite" else _postgresql(parsed)
    database = Database(engine, sleep=time.sleep)  # noqa: TID251 - the shell
    database.migrate(waits=url in _known)
    _known.add(url)
    return database


def _first_line(error: object) -> str:
    return " ".join(str(error).partition("\n")[0].split())


def _is_refusal(error: DBAPIError, reason: str) -> bool:
    """Tell whether PostgreSQL would say the same to the next try: wrong credentials, database or rights."""
    return getattr(error.orig, "pgcode", None) in REFUSED_STATES or (
        "FATAL" in reason and bool(_REFUSED.search(reason))
    )


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Tell whether SQLite says that the file is damaged, or no database."""
    return getattr(error, "sqlite_errorcode", None) in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}


def pages(items: Collection[_Item]) -> Iterator[list[_Item]]:
    """Cut items into lists of at most ``ROWS_MAX``."""
    ordered = list(items)
    for start in range(0, len(ordered), ROWS_MAX):
        yield ordered[start : start + ROWS_MAX]


def _sqlite(url: URL) -> Engine:
    if not url.database or url.database == ":memory:":
        raise InvalidConfigError(
            "registry needs a file: sqlite without a path stores nothing; use sqlite:////absolute/path",
            field="registry URL",
        )
    Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, connect_args={"timeout": LOCK_WAIT_S, "check_same_thread": False})

    @event.listens_for(engine, "connect")
    def _connected(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "cache_size=-16384"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        if connection.get_execution_options().get("isolation_level") != "AUTOCOMMIT":
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _postgresql(url: URL) -> Engine:
    wait = {} if "connect_timeout" in url.query else {"connect_timeout": CONNECT_S_MAX}
    return create_engine(with_hosts_apart(url), pool_pre_ping=True, pool_size=4, connect_args=wait)


def with_hosts_apart(url: URL) -> URL:
    """Write ``host=a:5433,b`` as ``host=a:5433&host=b``: libpq takes no ports in a list of hosts."""
    hosts = url.query.get("host")
    listed = hosts.split(",") if isinstance(hosts, str) else []
    if len(listed) < 2 or "port" in url.query or not all(_HOST.fullmatch(host) for host in listed):
        return url
    return url.update_query_dict({"host": listed}) if any(":" in host for host in listed) else url


def _unknown(url: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"no registry for {masked(url)!r}: expected sqlite:////absolute/path or postgresql+psycopg2://host/database",
        field="registry URL",
    )
