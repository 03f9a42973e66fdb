"""Processes a home's data, and is killed at a certain effect: ``python crashing.py FOLDER EFFECT URL [lost]``.

With ``lost`` it lives, and the reply to that effect is lost: what was asked is done, and the caller gets an error.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection

from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.processing import Processing
from polyreme_datahub.registry.engine import Database, open_database
from polyreme_datahub.runner.context import RunContext
from tests.unit.datahub.jobs import Home, make_spec

Result = TypeVar("Result")
DATASETS = ("two", "files")
AWAY, NO_SUCH_EFFECT = 7, 3
"""Exit codes: the run gave up, as a user would see it; it ended before the effect."""


class Doom:
    """Counts effects, and kills this process at one of them: before it, after it, or inside a transaction.

    Args:
        effect: Number of the moment, from 1; 0: none.
        lost: Count whole effects instead, and lose the reply to one of them.
    """

    def __init__(self, effect: int, *, lost: bool = False) -> None:
        self._left = effect
        self._lost = lost
        self._lock = threading.Lock()

    def around(self, call: Callable[[], Result]) -> Result:
        self.count()
        result = call()
        if self._lost and self._is_due():
            raise EnvironmentFailedError("the reply was lost")
        self.count()
        return result

    def count(self) -> None:
        if not self._lost and self._is_due():
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_due(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0

    @property
    def reached(self) -> bool:
        """Whether there was such an effect."""
        return self._left <= 0


class DoomedStore:
    """A store whose writes count as effects."""

    def __init__(self, store: Any, doom: Doom) -> None:
        self._store = store
        self._doom = doom

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if not name.startswith("put"):
            return method
        return lambda *arguments: self._doom.around(lambda: method(*arguments))


class DoomedDatabase(Database):
    """A database whose transactions count as effects."""

    doom: Doom

    def write(self, work: Callable[[Connection], Result]) -> Result:
        write = super().write

        def inside(connection: Connection) -> Result:
            result = work(connection)
            self.doom.count()
            return result

        return self.doom.around(lambda: write(inside))


def main(folder: Path, effect: int, url: str, *, lost: bool = False) -> None:
    home = Home(folder, url)
    doom = Doom(effect, lost=lost)
    database = open_database(home.registry)
    database.__class__ = DoomedDatabase
    assert isinstance(database, DoomedDatabase)
    database.doom = doom
    store: Any = DoomedStore(open_store(home.objects), doom)
    context = RunContext(database=database, lakehouse=Lakehouse(store))
    report = Processing(context).process(make_spec(DATASETS), job="")
    print(*(f"{part.samples}:{part.tokens}:{len(part.dead_letters)}:{part.manifest}" for part in report.datasets))
    if effect and not doom.reached:
        sys.exit(NO_SUCH_EFFECT)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], lost="lost" in sys.argv[4:])
    except EnvironmentFailedError:
        sys.exit(AWAY)
