"""Runs of a sweep: a ``polyreme run`` for each job, some at a time, until all have ended or a signal stops them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

import yaml

from polyreme.local_run.signals import cancel_on_signals, let_go, stop_signals
from polyreme.local_run.sweep_jobs import SweepJob
from polyreme.run_files.paths import Home
from polyreme.views.output import note
from polyreme.views.sweep_table import SweepRow, SweepView
from polyreme_api.exit_codes import ExitCode
from polyreme_system.files import read_json
from polyreme_system.parent_death import end_with_parent

POLL_S = 0.25
SAID_BYTES_MAX = 4096
"""End of a run's messages in which the reason is looked for."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Running:
    of: SweepJob
    process: subprocess.Popen[bytes]
    said: IO[bytes]
    """What the command says to its user."""


class Sweep:
    """Runs the jobs of a sweep."""

    def __init__(self, home: Home, *, at_once: int) -> None:
        self._home = home
        self._at_once = at_once
        self._running: list[_Running] = []
        self._codes: dict[str, int] = {}
        self._signals = 0

    def run(self, jobs: Sequence[SweepJob], *, done: int) -> ExitCode:
        """Run jobs to their end, and choose the exit code.

        The first signal has all runs save a checkpoint and stop, the second stops them at once. A job that fails stops
        no other; a machine that refuses (exit code 7) lets no further one start.

        Args:
            jobs: The jobs that are not done.
            done: How many are.
        """
        waiting = list(jobs)
        with self._forwarding(), SweepView() as view:
            while self._running or (waiting and self._may_start):
                while waiting and self._may_start and len(self._running) < self._at_once:
                    self._running.append(self._start(waiting.pop(0)))
                time.sleep(POLL_S)
                self._collect()
                view.show([self._row(each) for each in self._running], self._summary(len(waiting), done))
        return self._exit_code(len(waiting))

    @property
    def _may_start(self) -> bool:
        return not self._signals and ExitCode.ENVIRONMENT not in self._codes.values()

    def _start(self, each: SweepJob) -> _Running:
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the run has ended
        parent = os.getpid()
        process = subprocess.Popen(
            [sys.executable, "-m", "polyreme.main", "--home", str(self._home.path), "run", "-", "-o", "json"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            # Ctrl-C reaches this process alone, which passes it on.
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM),  # noqa: PLW1509 - there is one thread
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stream:
            stream.write(yaml.safe_dump(each.manifest, sort_keys=False).encode())
        note(f"{each.name} starts")
        return _Running(each, process, said)

    def _collect(self) -> None:
        for each in [running for running in self._running if running.process.poll() is not None]:
            self._running.remove(each)
            code = each.process.returncode
            self._codes[each.of.name] = code
            with each.said:
                note(f"{each.of.name} {_ended(code, each.said)}")

    def _row(self, each: _Running) -> SweepRow:
        state = read_json(each.of.run(self._home).state_file) or {}
        return SweepRow(
            name=each.of.name,
            state=str(state.get("state") or "Starting"),
            step=state.get("step") or 0,
            steps=state.get("steps") or each.of.job.spec.training.steps or 0,
            loss=state.get("loss"),
            held_out_loss=state.get("heldOutLoss"),
        )

    def _summary(self, waiting: int, done: int) -> str:
        failed = sum(code not in {ExitCode.OK, ExitCode.CANCELLED} for code in self._codes.values())
        ended = sum(code == ExitCode.OK for code in self._codes.values()) + done
        words = f"{ended} succeeded, {failed} failed, {len(self._running)} running, {waiting} waiting"
        return f"stopping: runs save a checkpoint and exit; {words}" if self._signals else words

    def _exit_code(self, waiting: int) -> ExitCode:
        """All succeeded: 0; stopped: 6; else the code that all failed jobs share, or 100."""
        failed = {code for code in self._codes.values() if code}
        if self._signals and (waiting or failed):
            return ExitCode.CANCELLED
        if not failed:
            return ExitCode.OK
        return next((known for known in ExitCode if failed == {known}), ExitCode.RUN_FAILED)

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Pass each signal to all runs, which know what a second and a third one mean."""
        terminals = [stream.fileno() for stream in (sys.stdout, sys.stderr) if stream.isatty()]

        def forward(number: int, _: FrameType | None) -> None:
            if number == signal.SIGHUP:
                let_go(terminals)
            self._signals += 1
            for each in self._running:
                each.process.send_signal(signal.SIGTERM)

        for number in stop_signals():
            signal.signal(number, forward)
        try:
            yield
        finally:
            cancel_on_signals()


def _ended(code: int, said: IO[bytes]) -> str:
    """Say how a run ended; a failed one, by the last thing that it said."""
    if code in {ExitCode.OK, ExitCode.CANCELLED}:
        return "succeeded" if code == ExitCode.OK else "stopped"
    said.seek(0, os.SEEK_END)
    said.seek(max(0, said.tell() - SAID_BYTES_MAX))
    lines = [line.strip() for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("polyreme: ")), lines[-1] if lines else "")
    return f"failed with exit code {code}: {reason.removeprefix('polyreme: ')}"
