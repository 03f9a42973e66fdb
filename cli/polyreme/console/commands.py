"""Commands that the console runs for its user: each is one that a person could type, and is shown as that."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from polyreme.console.run_source import Verdict
from polyreme_api.clock import Clock
from polyreme_api.errors import RefusedError, WaitTimeoutError
from polyreme_api.exit_codes import ExitCode

CHECK_S = 60
CHECKS_MAX = 2
"""Checks at once; more wait for their turn."""
CHECKS_WAITING_MAX = 16
"""Checks that wait or are under way; more are refused."""
KEPT = 50
"""Commands that are remembered."""
LINES_MAX = 40
"""Last lines of its output that are shown."""
OUTPUT_BYTES_MAX = 64 * 1024


@dataclasses.dataclass(slots=True, kw_only=True)
class Started:
    """A command that was started."""

    words: str
    """As a person types it."""
    subject: str
    """What it is about: ``namespace/name`` of a run."""
    started_s: float
    code: int | None = None
    """Exit code; None while it runs."""
    output: str = ""
    """Its last lines, once it has ended."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a command printed that only looks."""

    code: int
    output: str
    errors: str


class Commands:
    """Starts commands, and remembers how they ended."""

    def __init__(self, home: Path, clock: Clock, on_end: Callable[[], object] = lambda: None) -> None:
        self._home, self._clock, self._on_end = home, clock, on_end
        self._started: collections.deque[Started] = collections.deque(maxlen=KEPT)
        self._tasks: set[asyncio.Task[None]] = set()
        self._checks, self._checking = asyncio.Semaphore(CHECKS_MAX), 0

    def of(self, subject: str) -> list[Started]:
        """Return what was started about something, newest first."""
        return [each for each in reversed(self._started) if each.subject == subject]

    def start(self, arguments: Sequence[str], *, subject: str, log: Path | None = None) -> Started:
        """Start ``polyreme`` with arguments.

        Args:
            arguments: Without the program.
            subject: What the command is about.
            log: File of its output; such a command outlives the console, as one that was typed in another terminal.
        """
        started = Started(words=as_typed(arguments), subject=subject, started_s=self._clock.now_s())
        self._started.append(started)
        task = asyncio.create_task(self._run(started, arguments, log))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return started

    async def ended(self) -> None:
        """Wait for the commands that run."""
        await asyncio.gather(*self._tasks)

    async def verdict(self, text: str, *options: str) -> Verdict:
        """Have ``polyreme validate`` say what it thinks of a job.

        Args:
            text: The job, as YAML.
            options: More options of the command.

        Raises:
            RefusedError: If too many wait.
            WaitTimeoutError: If it takes too long.
        """
        if self._checking >= CHECKS_WAITING_MAX:
            raise RefusedError(
                f"{self._checking} checks of jobs wait already, at most {CHECKS_WAITING_MAX} may; try later"
            )
        self._checking += 1
        try:
            async with self._checks:
                checked = await self._check(["validate", "-", *options], text.encode())
        finally:
            self._checking -= 1
        good = checked.code == ExitCode.OK
        notes = [checked.errors] if good and checked.errors else []
        return Verdict(good=good, said=checked.errors, notes=notes, plan=checked.output if good else "")

    async def _check(self, arguments: Sequence[str], given: bytes) -> Checked:
        process = await asyncio.create_subprocess_exec(
            *self._words(arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(CHECK_S):
                output, errors = await process.communicate(given)
        except TimeoutError:
            process.kill()
            await process.wait()
            raise WaitTimeoutError(f"{as_typed(arguments)} took longer than {CHECK_S} s") from None
        code = -1 if process.returncode is None else process.returncode
        return Checked(code=code, output=output.decode(errors="replace"), errors=errors.decode(errors="replace"))

    def _words(self, arguments: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "polyreme.main", "--home", str(self._home), *arguments]

    async def _run(self, started: Started, arguments: Sequence[str], log: Path | None) -> None:
        words = self._words(arguments)
        if log is None:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            output, _ = await process.communicate()
        else:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as file:
                process = await asyncio.create_subprocess_exec(
                    *words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
                )
            await process.wait()
            output = await asyncio.to_thread(_end_of, log)
        started.output = "\n".join(output.decode(errors="replace").splitlines()[-LINES_MAX:])
        started.code = process.returncode
        self._on_end()


def as_typed(arguments: Sequence[str]) -> str:
    """Write a command as a person types it."""
    return " ".join(["polyreme", *map(shlex.quote, arguments)])


def _end_of(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - OUTPUT_BYTES_MAX))
        return file.read()
