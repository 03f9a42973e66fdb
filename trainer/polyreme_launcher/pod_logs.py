"""The output of one pod's processes, from their pipes to where people find it.

All of it is kept in files of the pod's folder, of bounded size. On Kubernetes each line is also printed to the pod's
standard output, with its rank and attempt. The last lines of an attempt that did not succeed are stored in the job's
checkpoint root.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from polyreme_api import environment as names
from polyreme_api.clock import Clock
from polyreme_api.environment import PodEnvironment
from polyreme_api.rank_logs import RankAttempt, check_file_name
from polyreme_datahub.objects import Patience, open_store
from polyreme_launcher.line_printer import LinePrinter
from polyreme_launcher.rank_output import RankOutput
from polyreme_launcher.stored_logs import StoredLogs

PRINT_WAIT_S = 2.0
"""How long the end of a pod waits for its last lines to be printed."""
STORE_WAIT_S = 5.0
"""How long it waits for them to be stored: less than what its grace leaves after the ranks have stopped."""
PATIENCE = Patience(request_s=30, retries_s=10, tries_s=20, tries_max=4)
"""For a bucket's server; nothing waits for it but other logs."""


class PodLogs:
    """One pod's.

    Args:
        pod: The pod.
        environment: All its variables.
        clock: Clock.

    Raises:
        InvalidConfigError: If a variable has a value that is not allowed.
    """

    def __init__(self, *, pod: PodEnvironment, environment: Mapping[str, str], clock: Clock) -> None:
        self._folder = Path(pod.pod_directory)
        printed = names.is_on(environment, names.PRINT_RANK_LOGS, default=True)
        self._printer = LinePrinter(sys.stdout.fileno(), clock) if printed else None
        self._output = RankOutput(on_data=self._on_data, on_end=self._on_end, on_trouble=self._on_trouble)
        self._stored = StoredLogs(
            folder=self._folder,
            url=pod.checkpoint_url,
            open_store=functools.partial(open_store, pod.checkpoint_url, patience=PATIENCE),
            removes=pod.index == 0,
            say=functools.partial(print, file=sys.stderr),
        )
        self._attempt = 0
        self._ranks: set[int] = set()
        self._live: set[int] = set()
        self._failed = False

    def open(self, attempt: int, rank: int) -> AbstractContextManager[int]:
        """Give a descriptor for what a rank writes; it is valid until the block ends.

        Raises:
            OSError: If there can't be another pipe.
        """
        if attempt != self._attempt:
            # What another attempt follows did not succeed, however the ranks here ended.
            self._store()
            self._attempt, self._failed = attempt, False
        log = RankAttempt(attempt, rank)
        self._ranks.add(rank)
        self._live.add(rank)
        return self._output.open((attempt, rank), path=self._folder / log.file_name, prefix=log.prefix)

    def open_check(self, attempt: int, number: int, local_rank: int) -> AbstractContextManager[int]:
        """Give a descriptor for what the check of a device writes; it is valid until the block ends.

        Raises:
            OSError: If there can't be another pipe.
        """
        path = self._folder / check_file_name(local_rank, attempt)
        return self._output.open((attempt, number), path=path, prefix=f"[check {local_rank} attempt {attempt}] ")

    def ended(self, attempt: int, number: int, *, failed: bool) -> None:
        """Take the end of a rank, or of a check: what it wrote is in its file when this returns."""
        self._output.finish((attempt, number))
        if attempt == self._attempt and number in self._live:
            self._live.discard(number)
            self._failed |= failed
            if self._failed and not self._live:
                self._store()

    def close(self, *, succeeded: bool, wait: bool) -> None:
        """Print and store what is left.

        Args:
            succeeded: Whether the attempt has.
            wait: Whether this may take some seconds.
        """
        self._output.close()
        if not succeeded:
            self._store()
        if self._printer is not None:
            self._printer.close(PRINT_WAIT_S if wait else 0.0)
        self._stored.close(STORE_WAIT_S if wait else 0.0)

    def _store(self) -> None:
        """Have the last lines of the present attempt stored, once."""
        if self._ranks:
            self._stored.store(self._attempt, sorted(self._ranks))
        self._ranks, self._live = set(), set()

    def _on_data(self, prefix: str, data: bytes) -> None:
        if self._printer is not None:
            self._printer.take(prefix, data)

    def _on_end(self, prefix: str) -> None:
        if self._printer is not None:
            self._printer.end(prefix)

    def _on_trouble(self, prefix: str, sentence: str) -> None:
        if self._printer is not None:
            self._printer.take(prefix, f"{sentence}\n".encode())
        else:
            print(f"{prefix}{sentence}", file=sys.stderr)
