"""Processes a home's data, and is killed before or after a certain effect: ``python crashing.py FOLDER EFFECT URL``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection

from polyreme_datahub.objects import open_store
from polyreme_datahub.processing import Processing
from polyreme_datahub.registry.engine import Database, open_database
from tests.unit.datahub.jobs import Home, make_spec

Result = TypeVar("Result")
DATASETS = ("two", "files")


class Doom:
    """Counts effects, and kills this process at one of them: before it, after it, or inside a transaction."""

    def __init__(self, effect: int) -> None:
        self._left = effect
        self._lock = threading.Lock()

    def around(self, call: Callable[[], Result]) -> Result:
        self.count()
        result = call()
        self.count()
        return result

    def count(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


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


def main(folder: Path, effect: int, url: str) -> None:
    home = Home(folder, url)
    doom = Doom(effect)
    database = open_database(home.registry)
    database.__class__ = DoomedDatabase
    assert isinstance(database, DoomedDatabase)
    database.doom = doom
    store: Any = DoomedStore(open_store(home.objects), doom)
    report = Processing(database, store).process(make_spec(DATASETS), job="")
    print(*(f"{part.samples}:{part.tokens}:{len(part.dead_letters)}:{part.manifest}" for part in report.datasets))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
