"""``polyreme data worker``: a process that does work of data flows, beside those that wait for it."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from polyreme.run_files.paths import Home
from polyreme.views.output import note
from polyreme_api.environment import TOPICS_URL
from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode
from polyreme_datahub.hub import work
from polyreme_datahub.recipes.files import job_operations
from polyreme_datahub.registry.rows import OperationCount

REPORT_EVERY_S = 10.0
WORKERS_MAX = 256


def worker(
    context: typer.Context,
    operations: Annotated[
        str, typer.Option(help="Chains to work on, by the names of their last operations, comma-separated.")
    ] = ",".join(job_operations()),
    workers: Annotated[int, typer.Option(help="Samples that are worked on at once.", min=1, max=WORKERS_MAX)] = 2,
    metrics_address: Annotated[
        str | None,
        typer.Option(
            envvar="POLYREME_DATA_WORKER_METRICS_ADDRESS",
            metavar="HOST:PORT",
            help="Run as a service: /metrics, /healthz and /readyz are served here, the log is JSON, and the process "
            "waits for servers that are away instead of ending.",
        ),
    ] = None,
) -> int:
    """Work on data flows until stopped: several workers, on any machines, share the work of each flow.

    Database, topics and object store are named by POLYREME_DATABASE_URL, POLYREME_TOPICS_URL and POLYREME_OBJECTS_URL.

    Examples:

      polyreme data worker

      polyreme data worker --operations embed --workers 1
    """
    home: Home = context.obj
    names = [name.strip() for name in operations.split(",") if name.strip()]
    if not names:
        raise InvalidConfigError("no operation is named", field="--operations")
    stopped = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda _number, _frame: stopped.set())
    if metrics_address is not None:
        # Needs the libraries of the service, which a worker in the foreground does not.
        from polyreme_datahub_service.worker_service import WorkerService

        WorkerService(home, names, workers=workers, address=metrics_address).run(stopped)
        return int(ExitCode.OK)
    _work(home, names, workers, stopped)
    return int(ExitCode.OK)


def _work(home: Home, operations: list[str], workers: int, stopped: threading.Event) -> None:
    """Work in the foreground; a server that stays away ends it."""
    home.prepare_data()
    if not home.topics_url:
        raise InvalidConfigError(
            "a worker needs topics that other processes share, and none are named", field=TOPICS_URL
        )
    done: Counter[str] = Counter()

    def tell() -> None:
        if not stopped.is_set() and done:
            note(", ".join(f"{name} {count:,} samples" for name, count in sorted(done.items())))

    def counted(counts: Sequence[OperationCount]) -> None:
        for count in counts:
            if worked := count.misses + count.dead + count.dropped:
                done[count.operation] += worked

    note(f"working on {', '.join(operations)}; Ctrl-C stops after the current items")
    clock = _Repeating(REPORT_EVERY_S, tell)
    try:
        work(
            operations,
            registry_url=home.registry_url,
            objects_url=home.objects_url,
            topics_url=home.topics_url,
            stopped=stopped.is_set,
            on_counts=counted,
            workers=workers,
        )
    finally:
        clock.cancel()


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
