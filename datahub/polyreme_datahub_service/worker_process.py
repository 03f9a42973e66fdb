"""The data pipeline of a run, as a child process: its work must not hold up the operator's loop.

A child that was ended by a signal, as by the kernel when memory is short, is started again, a bounded number of times:
what it committed is reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from polyreme_api.errors import (
    DataDamagedError,
    EnvironmentFailedError,
    InvalidConfigError,
    NotFoundError,
    PolyremeError,
    RefusedError,
)
from polyreme_api.exit_codes import ExitCode
from polyreme_datahub_service.home import DataHome
from polyreme_datahub_service.worker import SEALS

END_WAIT_S = 5.0
LINE_BYTES_MAX = 1 << 20
TRIES_MAX = 4
"""Children that may be ended by signals before the run gives up."""
LOOK_EVERY_S = 2.0
STOPPED_MAX_S = 10.0
"""Longest time that a child may be stopped."""
RETRY_S = 1.0
"""Wait before the second child; doubled with each one after it."""

_log = logging.getLogger(__name__)


class DataWork:
    """Processes the job's datasets and prepares what its ranks load; done is done, so it can be run again at any time.

    Args:
        home: Registry and object store.
        job_file: The job as YAML; what was done is written beside it.
        log_file: Where the child's words go.
        uid: UID of the job, by which its data versions are pinned.
        progress: Called with each progress line.
        say: Called with a sentence for the person who watches.
        only_seals: Whether the flows are left to workers of other processes.
    """

    def __init__(
        self,
        home: DataHome,
        *,
        job_file: Path,
        log_file: Path,
        uid: str,
        progress: Callable[[Mapping[str, Any]], None],
        say: Callable[[str], None],
        only_seals: bool = False,
    ) -> None:
        self._home = home
        self._job_file = job_file
        self._log_file = log_file
        self._uid = uid
        self._progress = progress
        self._say = say
        self._mode = (SEALS,) if only_seals else ()
        self._closed = False
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Process everything.

        Raises:
            InvalidConfigError: If the data can't be what the job says.
            DataDamagedError: If stored data is damaged and can't be reprocessed.
            EnvironmentFailedError: If a store stays away, or children keep being killed.
            PolyremeError: If the child ends otherwise.
        """
        name = ""
        for tried in range(TRIES_MAX):
            if tried:
                self._tell(f"the data worker was killed by {name}; started again ({tried} of {TRIES_MAX - 1})")
                await asyncio.sleep(RETRY_S * 2.0 ** (tried - 1))
            code, error = await self._run_child()
            if code == ExitCode.OK or self._closed:
                return
            if code > ExitCode.OK:
                raise _error(code, error or f"see {self._log_file}")
            name = signal.Signals(-code).name
        raise _error(
            int(ExitCode.ENVIRONMENT),
            f"its worker was killed by signals {TRIES_MAX} times, last {name}; the machine may be short of memory",
        )

    def _tell(self, words: str) -> None:
        _log.warning("%s", words)
        self._say(words)

    async def _run_child(self) -> tuple[int, str]:
        """Run one child to its end; return its exit code, negative for a signal, and the error that it reported."""
        with self._log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "polyreme_datahub_service.worker",
                str(self._home.path),
                str(self._job_file),
                self._uid,
                str(os.getpid()),
                *self._mode,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_BYTES_MAX,
                # Ctrl-C and the end of a terminal go to the whole foreground group: only the run decides what they
                # mean.
                process_group=0,
            )
        watchdog = asyncio.create_task(self._end_if_stopped(self._process))
        last: Mapping[str, Any] = {}
        stream = self._process.stdout
        assert stream is not None
        try:
            async for line in stream:
                last = json.loads(line)
                self._progress(last)
            return await self._process.wait(), str(last.get("error", ""))
        finally:
            watchdog.cancel()

    async def _end_if_stopped(self, process: asyncio.subprocess.Process) -> None:
        """Kill a child that is stopped (state T): nothing else continues it, and ranks wait for what it makes."""
        stopped_s = 0.0
        while process.returncode is None:
            await asyncio.sleep(LOOK_EVERY_S)
            stopped_s = stopped_s + LOOK_EVERY_S if _is_stopped(process.pid) else 0.0
            if stopped_s >= STOPPED_MAX_S:
                self._tell(f"the data worker was stopped for {stopped_s:g} s (SIGSTOP); it is killed")
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                return

    async def close(self) -> None:
        """End the child, if it still runs; what it committed stays."""
        self._closed = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), END_WAIT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def _is_stopped(pid: int) -> bool:
    """Tell whether a process is stopped (state T), as by SIGSTOP."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _error(code: int, message: str) -> PolyremeError:
    kinds: dict[int, type[PolyremeError]] = {
        ExitCode.USAGE: InvalidConfigError,
        ExitCode.NOT_FOUND: NotFoundError,
        ExitCode.REFUSED: RefusedError,
        ExitCode.ENVIRONMENT: EnvironmentFailedError,
        ExitCode.DATA_DAMAGED: DataDamagedError,
    }
    return kinds.get(code, PolyremeError)(f"data can't be processed: {message}")
