"""Processes a home's data, and is killed before or after a certain effect: ``python crashing.py FOLDER EFFECT``."""

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
    """Counts effects, twice each (before and after), and kills this process at one of them."""

    def __init__(self, effect: int) -> None:
        self._left = effect
        self._lock = threading.Lock()

    def around(self, call: Callable[[], Result]) -> Result:
        self._count()
        result = call()
        self._count()
        return result

    def _count(self) -> None:
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
        return self.doom.around(lambda: write(work))


def main(folder: Path, effect: int) -> None:
    home = Home(folder)
    doom = Doom(effect)
    database = open_database(home.registry)
    database.__class__ = DoomedDatabase
    assert isinstance(database, DoomedDatabase)
    database.doom = doom
    store: Any = DoomedStore(open_store(home.objects), doom)
    report = Processing(database, store).process(make_spec(DATASETS), job="")
    print(*(f"{part.samples}:{part.tokens}:{len(part.dead_letters)}:{part.manifest}" for part in report.datasets))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
