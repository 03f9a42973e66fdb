"""``polyreme data worker``: a process that does work of data flows, beside those that wait for it."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable
from typing import Annotated

import typer

from polyreme.output import note
from polyreme.paths import Home
from polyreme_api.environment import TOPICS_URL
from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode

STAGES = "compose,tokenize"
"""Stages of a job's data: each is named after the last operation of its chain."""
TOLD_EVERY_S = 10.0
WORKERS_MAX = 256


def worker(
    context: typer.Context,
    operations: Annotated[
        str, typer.Option(help="Chains to work on, by the names of their last operations, with commas between.")
    ] = STAGES,
    workers: Annotated[int, typer.Option(help="Samples that are worked on at once.", min=1, max=WORKERS_MAX)] = 2,
) -> int:
    """Work on data flows until stopped: several workers, on any machines, share the work of each flow.

    Database, topics and object store are named by POLYREME_DATABASE_URL, POLYREME_TOPICS_URL and POLYREME_OBJECTS_URL.

    Examples:

      polyreme data worker

      polyreme data worker --operations embed --workers 1
    """
    from polyreme_datahub.hub import work

    home: Home = context.obj
    home.prepare_data()
    if not home.topics_url:
        raise InvalidConfigError(
            "a worker needs topics that other processes share, and none are named", field=TOPICS_URL
        )
    stages = [name.strip() for name in operations.split(",") if name.strip()]
    if not stages:
        raise InvalidConfigError("no operation is named", field="--operations")
    stopped = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda _number, _frame: stopped.set())
    done: Counter[str] = Counter()

    def tell() -> None:
        if not stopped.is_set() and done:
            note(", ".join(f"{name} {count:,} samples" for name, count in sorted(done.items())))

    def count(name: str, samples: int) -> None:
        done[name] += samples

    note(f"working on {', '.join(stages)}; Ctrl-C stops after what is in hand")
    clock = _Repeating(TOLD_EVERY_S, tell)
    try:
        work(
            stages,
            registry_url=home.registry_url,
            objects_url=home.objects_url,
            topics_url=home.topics_url,
            stopped=stopped.is_set,
            progress=count,
            workers=workers,
        )
    finally:
        clock.cancel()
    return int(ExitCode.OK)


class _Repeating:
    """Calls a function every so often, until cancelled."""

    def __init__(self, every_s: float, call: Callable[[], None]) -> None:
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(every_s, call), daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Call no more."""
        self._cancelled.set()
        self._thread.join()

    def _run(self, every_s: float, call: Callable[[], None]) -> None:
        while not self._cancelled.wait(every_s):
            call()
