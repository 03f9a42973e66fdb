"""The data pipeline of a run, as a child process: its work must not hold up the operator's loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyreme.home import Home
from polyreme_api.errors import (
    EnvironmentFailedError,
    ExitCode,
    InvalidConfigError,
    NotFoundError,
    PolyremeError,
    RefusedError,
)

END_WAIT_S = 5.0
LINE_BYTES_MAX = 1 << 20


class DataWork:
    """Processes the job's datasets and prepares what its ranks load; done is done, so it can be run again at any time.

    Args:
        home: Registry and object store.
        job_file: The job as YAML; what was done is written beside it.
        log_file: Where the child's words go.
        uid: UID of the job, by which its data versions are pinned.
        progress: Called with each progress line.
    """

    def __init__(
        self, home: Home, *, job_file: Path, log_file: Path, uid: str, progress: Callable[[Mapping[str, Any]], None]
    ) -> None:
        self._home = home
        self._job_file = job_file
        self._log_file = log_file
        self._uid = uid
        self._progress = progress
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Process everything.

        Raises:
            InvalidConfigError: If the data can't be what the job says.
            EnvironmentFailedError: If a store stays away.
            PolyremeError: If the child ends otherwise.
        """
        with self._log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "polyreme.data_worker",
                str(self._home.path),
                str(self._job_file),
                self._uid,
                str(os.getpid()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=LINE_BYTES_MAX,
            )
        last: Mapping[str, Any] = {}
        stream = self._process.stdout
        assert stream is not None
        async for line in stream:
            last = json.loads(line)
            self._progress(last)
        code = await self._process.wait()
        if code != ExitCode.OK:
            raise _error(code, str(last.get("error", f"see {self._log_file}")))

    async def close(self) -> None:
        """End the child, if it still runs; what it committed stays."""
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


def _error(code: int, message: str) -> PolyremeError:
    kinds: dict[int, type[PolyremeError]] = {
        ExitCode.USAGE: InvalidConfigError,
        ExitCode.NOT_FOUND: NotFoundError,
        ExitCode.REFUSED: RefusedError,
        ExitCode.ENVIRONMENT: EnvironmentFailedError,
    }
    return kinds.get(code, PolyremeError)(f"data can't be processed: {message}")
