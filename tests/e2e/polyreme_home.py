"""``polyreme`` as its user has it: commands on a home of the test's own, and a hand that hurts what they start."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import yaml

from polyreme.main import invoke
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.run_files.records import RunRecords, read_records
from polyreme_api.history import COMMIT_MARKER, steps_key
from tests.processes import is_asked_to_end, is_stopped

STEPS = 40
CHECKPOINT_EVERY = 8
RANKS = range(4)
WAIT_S_MAX = 280.0
POLL_S = 0.002
STARTING = ("run", "sweep", "profile")
"""Commands that start processes."""
SIGNAL_LIMIT_S = 10.0
"""Longest that anything may live on after a killed ``polyreme run``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that has ended."""

    code: int
    output: str
    said: str

    @property
    def item(self) -> Any:
        """The data of ``-o json``."""
        value = json.loads(self.output)
        return value["item"] if "item" in value else value["items"]


def called_here(arguments: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Call ``polyreme`` in this process."""
    output, said = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(said),
    ):
        code = invoke(arguments)
    return Ended(code=code, output=output.getvalue(), said=said.getvalue())


class PolyremeHome:
    """A home, and the commands called on it; what they say lies in the home by default."""

    def __init__(self, path: Path, *, outputs: Path | None = None, variables: Mapping[str, str] | None = None) -> None:
        self.path = path
        self._outputs = outputs or path
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("POLYREME_")},
            "POLYREME_HOME": str(path),
            "OMP_NUM_THREADS": "1",
            **(variables or {}),
        }
        self._serving: list[Serving] = []

    def write_job(self, name: str, **spec: Any) -> Path:
        """Write the small job under a name; keys of ``spec`` replace parts of its spec."""
        manifest = {
            "apiVersion": "polyreme.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": {
                "model": {"preset": "kimi-vl-nano"},
                "data": {"sequenceTokens": 160, "seed": 17, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
                "training": {"steps": STEPS, "packsPerStep": 4, "seed": 1},
                "parallelism": {"mode": "Explicit", "dp": 4, "ep": 2},
                "workers": {"replicas": 2, "devices": 2},
                "checkpoint": {"everySteps": CHECKPOINT_EVERY, "keep": 3},
                **spec,
            },
        }
        path = self.path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(manifest))
        return path

    def call(self, *arguments: str, wait_s: float = WAIT_S_MAX) -> Ended:
        """Run a command to its end: what starts processes in one of its own, all else in this one, which is faster."""
        if arguments[0] not in STARTING:
            return called_here(arguments, self._environment)
        done = subprocess.run(
            self._command(arguments),
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=wait_s,
        )
        return Ended(code=done.returncode, output=done.stdout, said=done.stderr)

    def start(
        self, job: Path, *arguments: str, command: str = "run", background: bool = False, **environment: str
    ) -> Serving:
        """Start ``polyreme run``, from a terminal or as a script starts it in the background, with nohup."""
        handling = signal.SIG_IGN if background else signal.SIG_DFL

        def prepare() -> None:
            signal.signal(signal.SIGINT, handling)
            signal.signal(signal.SIGHUP, handling)

        output = self._outputs / f"{job.stem}.out"
        with output.open("w") as out, output.with_suffix(".err").open("w") as said:
            process = psutil.Popen(
                self._command((command, str(job), "-o", "json", *arguments)),
                env={**self._environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=said,
                preexec_fn=prepare,
            )
        serving = Serving(process, Home(path=self.path).run("default", job.stem), output)
        self._serving.append(serving)
        return serving

    def records(self, name: str) -> RunRecords:
        """What a run's ranks left."""
        return read_records(Home(path=self.path).run("default", name).checkpoints)

    def losses(self, name: str) -> dict[int, str]:
        """Losses of a run's committed history, exact to the bit; every step must be there once, in order."""
        history = self.records(name).history
        assert [record.step for record in history] == list(range(1, len(history) + 1))
        return {record.step: record.loss.hex() for record in history}

    def newest_point(self, name: str) -> str | None:
        """The checkpoint at which a run's newest attempt began."""
        return self.records(name).points[-1].resume_from

    def close(self) -> None:
        """End what still runs."""
        for serving in self._serving:
            serving.kill_all()

    @staticmethod
    def _command(arguments: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "polyreme.main", *arguments]


class Serving:
    """A ``polyreme run`` that serves."""

    def __init__(self, process: psutil.Popen, run: RunDirectory, output: Path) -> None:
        self.process = process
        self.run = run
        self._output = output
        self._seen: set[psutil.Process] = set()

    def end(self) -> Ended:
        """Wait for its end."""
        try:
            code = self.process.wait(WAIT_S_MAX)
        except psutil.TimeoutExpired:
            raise AssertionError(f"the run has not ended within {WAIT_S_MAX} s\n{self.said}") from None
        return Ended(code=code, output=self._output.read_text(), said=self.said)

    @property
    def said(self) -> str:
        """Its output for the person so far."""
        return self._output.with_suffix(".err").read_text()

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Wait for something that the run does; return what ``holds`` returned."""
        limit_s = time.monotonic() + WAIT_S_MAX
        while not (found := holds()):
            assert self.process.poll() is None, f"the run ended before: {what}\n{self.said}"
            assert time.monotonic() < limit_s, f"waited {WAIT_S_MAX} s: {what}\n{self.said}"
            time.sleep(POLL_S)
        return found

    @property
    def attempts(self) -> list[int]:
        """Attempts whose resume point is fixed."""
        return sorted(int(path.stem) for path in (self.run.checkpoints / "attempts").glob("*.json"))

    def step(self, attempt: int) -> int:
        """Newest step of an attempt that is on disk."""
        path = self.run.checkpoints / steps_key(attempt)
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def trained(self, *, attempt: int, steps: int) -> None:
        """Wait until an attempt has itself trained so many steps."""
        self.until(lambda: self.step(attempt) >= steps, f"attempt {attempt} trained {steps} steps")

    @contextlib.contextmanager
    def held(self, *, attempt: int, steps: int, of: int = STEPS) -> Iterator[None]:
        """Stop all ranks once an attempt has trained so many steps; let them continue at the end of the block.

        Steps are fast and the machine may be busy: a run that is not held can finish before a test has looked at it.
        """
        self.trained(attempt=attempt, steps=steps)
        ranks = [psutil.Process(pid) for pid in self._all_ranks]
        for rank in ranks:
            rank.suspend()
        try:
            self.until(lambda: all(is_stopped(rank.pid) for rank in ranks), "all ranks are stopped")
            assert self.step(attempt) < of, "the last step is trained, nothing is left to hold"
            yield
        finally:
            for rank in ranks:
                unless_gone(rank.resume)

    @contextlib.contextmanager
    def stopped(self, *, attempt: int, steps: int) -> Iterator[None]:
        """Wait until rank 0 has stopped itself (``hanging_rank``) after this step; let it continue after the block.

        For a test that needs this very step: a run that is ``held`` may have trained more.
        """
        self.trained(attempt=attempt, steps=steps)
        rank = psutil.Process(self.pids(0)["0"])
        self.until(lambda: rank.status() == psutil.STATUS_STOPPED, f"rank 0 stops after step {steps}")
        try:
            assert self.step(attempt) == steps
            yield
        finally:
            unless_gone(rank.resume)

    def is_asked_to_end(self) -> bool:
        """Whether a rank that is stopped has been asked to end: when it continues, it trains no further step."""
        return any(map(is_asked_to_end, self._all_ranks))

    def torn(self, attempt: int) -> list[Path]:
        """Checkpoints of an attempt that bear no marker at this moment."""
        found = self.run.checkpoints.glob(f"a{attempt:06d}-s*")
        return [path for path in found if not (path / COMMIT_MARKER).exists()]

    def committed(self, attempt: int) -> list[Path]:
        """Checkpoints of an attempt that bear their marker."""
        return sorted(path.parent for path in self.run.checkpoints.glob(f"a{attempt:06d}-s*/{COMMIT_MARKER}"))

    @property
    def indexes(self) -> set[int]:
        """Indexes of the workers."""
        return {int(path.name.split("-")[-2]) for path in self.run.pods.iterdir()}

    def pod_directory(self, index: int) -> Path:
        """Folder of the newest pod that fills a worker's place."""
        folders = self.run.pods.glob(f"{self.run.name}-*-{index}-*")
        return max(folders, key=lambda path: int(path.name.rpartition("-")[2]))

    def pids(self, index: int) -> dict[str, int]:
        """Processes of a worker: launcher, fork server, and each rank by its number."""
        known = json.loads((self.pod_directory(index) / "processes.json").read_text())
        return {"launcher": known["launcher"], "fork_server": known["fork_server"], **known["ranks"]}

    @property
    def _all_ranks(self) -> list[int]:
        return [pid for index in self.indexes for name, pid in self.pids(index).items() if name.isdecimal()]

    def kill_rank(self, rank: int) -> None:
        """Kill a rank with SIGKILL."""
        os.kill(self.pids(rank // 2)[str(rank)], signal.SIGKILL)

    def kill_data_engine(self) -> None:
        """Kill one pod's data engine with SIGKILL."""
        self.until(lambda: self.running("polyreme_datahub.loader.engine.server"), "a data engine runs")[0].kill()

    def running(self, module: str) -> list[psutil.Process]:
        """Processes of this tree that run a module; the others may end meanwhile."""
        return [each for each in self.tree() if module in (unless_gone(each.cmdline) or ())]

    def tree(self) -> list[psutil.Process]:
        """The process and everything below it."""
        found = [self.process, *self.process.children(recursive=True)]
        self._seen |= set(found)
        return found

    def kill_all(self) -> None:
        """End it and everything below it, also what it failed to take with it."""
        unless_gone(self.tree)
        for process in (self.process, *self._seen):
            unless_gone(process.kill)
        self.process.wait()


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; a zombie has."""
    return [process for process in processes if _lives(process)]


def all_end(processes: list[psutil.Process]) -> bool:
    """Wait until all have ended, for so long as anything may live on."""
    limit_s = time.monotonic() + SIGNAL_LIMIT_S
    while living(processes):
        if time.monotonic() > limit_s:
            return False
        time.sleep(POLL_S)
    return True


def proportional_bytes(tree: list[psutil.Process]) -> int:
    """Memory of processes, shared pages counted once."""
    return sum(unless_gone(lambda: process.memory_full_info().pss) or 0 for process in tree)  # noqa: B023


def unless_gone(action: Callable[[], Any]) -> Any:
    """Do something to a process that may be gone."""
    try:
        return action()
    except psutil.Error:
        return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
