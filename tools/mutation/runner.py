"""Runs tests against mutants inside one pytest session: collected once, forked for each mutant.

A child exchanges the code of one function, which everybody who holds the function then runs. It runs the tests that
come to the mutated lines, quickest first, until one fails. Which tests those are is traced beforehand, in a child as
well, so the parent runs nothing. A child's limit is processor time: a busy machine changes no verdict.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import os
import pickle
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tools.mutation.mutants import Mutant, planted

SEEN_CALLS_MAX = 100
"""Calls of one function by one test whose lines are traced; later ones seldom come to new lines."""
TEST_S = 15.0
"""Tests that take more processor time are run against no mutant."""
TESTS_S = 25.0
"""Processor time of the tests that are run against one mutant, as they take without it."""
SLOWER = 10.0
"""A mutant that takes this many times as long, beyond a start of ``START_S``, counts as an endless loop."""
START_S = 20.0
MEMORY_BYTES = 4 << 30
"""Address space of a child: an endless list ends as an error."""


_CachedFunction = type(functools.lru_cache(len))


class Verdict(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMEOUT = "timeout"
    UNPLANTED = "unplanted"
    """Its function's code could not be exchanged."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one mutant, and by which test."""

    mutant: Mutant
    verdict: Verdict
    test: str = ""
    tests: int = 0
    """Tests that come to it."""


@dataclasses.dataclass(slots=True)
class Trace:
    """What one test does without a mutant."""

    cpu_s: float
    lines: dict[str, set[int]]
    """By file."""


class MutationPlugin:
    """Takes over pytest's loop: traces the collected tests, then runs them against mutants.

    Args:
        root: Root of the repository.
        mutants: What to plant, and the lines on which each lies.
        extra: Further tests by name: functions that tell whether all is well.
        processes: Children at a time.
        on_done: Called with each outcome.
    """

    def __init__(
        self,
        root: Path,
        mutants: dict[Mutant, range],
        *,
        extra: dict[str, Callable[[], bool]],
        processes: int,
        on_done: Callable[[Outcome], None],
    ) -> None:
        self._root, self._mutants, self._extra = root, mutants, extra
        self._processes, self._on_done = processes, on_done
        self._tests: dict[str, Callable[[], bool]] = {}
        self._sources = {file: (root / file).read_text("utf-8") for file in {mutant.file for mutant in mutants}}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run instead of the tests themselves."""
        self._tests = {item.nodeid: functools.partial(_passes, session, item) for item in session.items} | self._extra
        for file in self._sources:
            # Some modules are imported by the functions that need them: a child can only plant what is loaded.
            importlib.import_module(".".join(Path(file).with_suffix("").parts[1:]).removesuffix(".__init__"))
        files = {str(self._root / file) for file in self._sources}
        traces: dict[str, Trace] = _in_child(lambda: self._trace(files))
        children: dict[int, tuple[Mutant, int, int]] = {}
        for mutant, lines in self._mutants.items():
            chosen = self._chosen(traces, str(self._root / mutant.file), lines)
            if len(children) >= self._processes:
                self._reap(children)
            reads, writes = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reads)
                self._child(mutant, chosen, sum(traces[name].cpu_s for name in chosen), writes)
            os.close(writes)
            children[pid] = mutant, reads, len(chosen)
        while children:
            self._reap(children)
        return True

    def _trace(self, files: set[str]) -> dict[str, Trace]:
        """Run every test once, and note time and lines."""
        traces = {}
        for name, passes in self._tests.items():
            began_s = time.process_time()
            tracer = Tracer(files)
            sys.settrace(tracer)
            try:
                passed = passes()
            finally:
                sys.settrace(None)
            if passed:
                traces[name] = Trace(cpu_s=time.process_time() - began_s, lines=dict(tracer.lines))
            else:
                sys.stderr.write(f"{name} fails without a mutant, and is left out\n")
        return traces

    def _chosen(self, traces: dict[str, Trace], file: str, lines: range) -> list[str]:
        """Return the tests that come to some lines, quickest first, within what may be spent."""
        meant = [name for name, trace in traces.items() if not trace.lines.get(file, set()).isdisjoint(lines)]
        chosen, spent_s = list[str](), 0.0
        for name in sorted(meant, key=lambda name: (name in self._extra, traces[name].cpu_s, name)):
            cpu_s = traces[name].cpu_s
            if cpu_s <= TEST_S and spent_s + cpu_s <= TESTS_S:
                chosen.append(name)
                spent_s += cpu_s
        return chosen

    def _child(self, mutant: Mutant, chosen: Sequence[str], cpu_s: float, writes: int) -> None:
        """Plant a mutant and run tests until one fails; never returns."""
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            most_s = int(START_S + SLOWER * cpu_s)
            resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 5))
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            verdict = self._verdict(mutant, chosen)
        except BaseException as error:  # noqa: BLE001 - its limits could not be set
            verdict = f"{Verdict.UNPLANTED} {error!r}"
        os.write(writes, verdict.encode())
        os._exit(0)

    def _verdict(self, mutant: Mutant, chosen: Sequence[str]) -> str:
        return verdict_of(
            lambda: exchange(self._root / mutant.file, self._sources[mutant.file], mutant),
            lambda: next((name for name in chosen if not self._tests[name]()), None),
        )

    def _reap(self, children: dict[int, tuple[Mutant, int, int]]) -> None:
        pid, _ = os.wait()
        mutant, reads, tests = children.pop(pid)
        with os.fdopen(reads, "rb") as answer:
            said = answer.read().decode()
        verdict, _, test = said.partition(" ")
        # Who was ended before it said anything has used up its time.
        self._on_done(Outcome(mutant=mutant, verdict=Verdict(verdict or "timeout"), test=test, tests=tests))


def verdict_of(plant: Callable[[], bool], first_failed: Callable[[], str | None]) -> str:
    """Return what became of a mutant, and by which test; an error kills it only once it is planted.

    Args:
        plant: Plants it, and tells whether it could.
        first_failed: Runs tests, and returns the first that fails.
    """
    try:
        if not plant():
            return f"{Verdict.UNPLANTED} "
    except BaseException as error:  # noqa: BLE001 - nothing of the mutant has run
        return f"{Verdict.UNPLANTED} {error!r}"
    try:
        failed = first_failed()
    except BaseException as error:  # noqa: BLE001 - a mutant may break whatever runs the tests
        return f"{Verdict.KILLED} {type(error).__name__}"
    return f"{Verdict.SURVIVED} " if failed is None else f"{Verdict.KILLED} {failed}"


class Tracer:
    """Notes the lines of some files that run."""

    def __init__(self, files: set[str]) -> None:
        self._files = files
        self.lines: dict[str, set[int]] = defaultdict(set)
        self._calls: Counter[CodeType] = Counter()

    def __call__(self, frame: FrameType, _event: str, _argument: object) -> Any:
        """Follow a frame of these files, unless its function was called often already."""
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        self._calls[code] += 1
        return None if self._calls[code] > SEEN_CALLS_MAX else self._line

    def _line(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            self.lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self._line


def exchange(path: Path, source: str, mutant: Mutant) -> bool:
    """Give a function that is loaded the mutant's code, and forget what it answered before."""
    codes = planted(path, source, mutant)
    if codes is None:
        return False
    old, new = codes
    wanted = str(path), old.co_qualname, old.co_firstlineno
    exchanged = False
    for found in gc.get_objects():
        # By type: isinstance asks the objects, and one that is deprecated answers with a warning.
        if type(found) is FunctionType:
            code = found.__code__
            if (code.co_filename, code.co_qualname, code.co_firstlineno) == wanted:
                found.__code__ = new
                exchanged = True
        elif type(found) is _CachedFunction:
            found.cache_clear()
    return exchanged


def _passes(session: pytest.Session, item: pytest.Item) -> bool:
    failed = session.testsfailed
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    return session.testsfailed == failed


def _in_child(act: Callable[[], Any]) -> Any:
    """Return what a function returns, that ran in a child."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        os.dup2(2, 1)
        with os.fdopen(writes, "wb") as answer:
            pickle.dump(act(), answer)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    return pickle.loads(found)  # noqa: S301 - from a child of our own
