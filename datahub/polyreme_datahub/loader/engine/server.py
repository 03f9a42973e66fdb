"""The data engine of a pod: a process that opens a job's data once and prepares packs for all ranks of the pod.

``python -m polyreme_datahub.loader.engine.server <listening socket> <launcher's pid>``. The launcher starts it,
replaces it and keeps its listening socket, so a rank that connects while there is no engine waits for the next one. It
ends with its launcher. Nothing that an engine holds is needed by the one after it: every answer is a function of job
and step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyreme_api import environment as names
from polyreme_api.checkpoint_inventory import read_mixture
from polyreme_api.errors import InvalidConfigError, PolyremeError, RefusedError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.fields import STEPS_MAX
from polyreme_api.job import parse_job
from polyreme_datahub.loader.engine.client import describe_error, receive, send
from polyreme_datahub.loader.engine.read_ahead import BYTES_MAX, READ_THREADS_MAX, LaidSource, ReadAhead, SharedArrays
from polyreme_datahub.loader.open import open_packs, sleep_really
from polyreme_datahub.loader.order.balance import StepSplit
from polyreme_datahub.loader.read.origin_budget import OriginBudget, Reader, origin_budget
from polyreme_datahub.loader.read.shard_files import ReadCounts
from polyreme_datahub.objects import open_store
from polyreme_system.parent_death import end_with_parent

CONNECTIONS_MAX = 256
"""Connections at once: one of each rank of the pod, and the launcher's."""
FIRST_SAID_S, SAID_EVERY_S = 60.0, 600.0
"""When the log says where samples were read: after a minute, then every ten."""

_log = logging.getLogger(__name__)

Answer = tuple[Mapping[str, Any], SharedArrays | None]


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedData:
    """The training data of a job."""

    source: LaidSource
    last_step: int
    budget: OriginBudget | None = None


Open = Callable[[str, int, StepSplit, bool], OpenedData]
"""Opens the data of a job by the path of its file, for an attempt whose trainer splits its steps like that, with or
without pixels."""


@dataclasses.dataclass(slots=True)
class ReadTeller:
    """Says now and then where a source's samples come from.

    Args:
        counts: Of the source.
        say: Takes the sentence.
        steady_s: A clock that never jumps [s].
    """

    counts: ReadCounts
    say: Callable[[str], None]
    steady_s: Callable[[], float]
    _due_s: float = dataclasses.field(init=False)
    _lock: threading.Lock = dataclasses.field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._due_s = self.steady_s() + FIRST_SAID_S

    def tell_if_due(self) -> None:
        """Say it if it is time to; many threads may call this often."""
        now_s = self.steady_s()
        with self._lock:
            if now_s < self._due_s:
                return
            self._due_s = now_s + SAID_EVERY_S
        self.say(self.counts.sentence())


@dataclasses.dataclass(frozen=True, slots=True)
class _Session:
    """The data as one attempt opened them."""

    attempt: int
    source: LaidSource
    budget: OriginBudget | None
    ahead: ReadAhead
    teller: ReadTeller


@dataclasses.dataclass(frozen=True, slots=True)
class _Failure:
    """Why an attempt's data could not be opened: all its ranks get the same answer, after one wait."""

    attempt: int
    error: Exception


class Engine:
    """Answers the ranks of a pod.

    Args:
        open_data: Opens the data of a job.
        bytes_max: Most bytes of prepared packs.
        steady_s: A clock that never jumps [s].
    """

    def __init__(
        self,
        open_data: Open,
        *,
        bytes_max: int = BYTES_MAX,
        steady_s: Callable[[], float] = time.monotonic,  # noqa: TID251 - the shell's default
    ) -> None:
        self._open_data, self._bytes_max, self._steady_s = open_data, bytes_max, steady_s
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._failure: _Failure | None = None
        self._count_lock = threading.Lock()
        self._waiting = self._answered = 0

    def serve(self, listener: socket.socket) -> None:
        """Answer connections until the listening socket is closed; each has a thread of its own."""
        slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        while True:
            slots.acquire()
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(connection, slots), daemon=True).start()

    def _talk(self, connection: socket.socket, slots: threading.BoundedSemaphore) -> None:
        session: _Session | None = None
        with connection, contextlib.suppress(OSError):
            while (received := receive(connection)) is not None:
                request = received.message
                try:
                    if request["call"] == "open":
                        session = self._open(request)
                    with self._counted(request):
                        message, arrays = self._answer(session, request)
                except Exception as error:  # noqa: BLE001 - every error is raised in the rank that asks
                    if not isinstance(error, PolyremeError | OSError):
                        _log.exception("the data engine failed")
                    message, arrays = describe_error(error), None
                send(connection, message, None if arrays is None else arrays.descriptor)
        slots.release()

    @contextlib.contextmanager
    def _counted(self, request: Mapping[str, Any]) -> Iterator[None]:
        """Count a request while it waits and when it is answered, for the launcher's watchdog."""
        if request["call"] in {"open", "ping"}:
            yield
            return
        with self._count_lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._count_lock:
                self._waiting -= 1
                self._answered += 1

    def _open(self, request: Mapping[str, Any]) -> _Session:
        """Open the data for an attempt, once; the data of an earlier one are closed."""
        with self._lock:
            session, attempt = self._session, request["attempt"]
            if session is not None and attempt == session.attempt:
                return session
            if session is not None:
                if attempt < session.attempt:
                    raise RefusedError(f"attempt {attempt} is over: this pod runs attempt {session.attempt}")
                session.ahead.__exit__()
                self._session = None
            if self._failure is not None and self._failure.attempt == attempt:
                raise self._failure.error
            try:
                opened = self._open_data(request["job"], attempt, StepSplit(**request["split"]), request["pixels"])
            except Exception as error:
                self._failure = _Failure(attempt, error)
                raise
            threads = min(READ_THREADS_MAX, len(os.sched_getaffinity(0)))
            ahead = ReadAhead(opened.source, last_step=opened.last_step, threads=threads, bytes_max=self._bytes_max)
            teller = ReadTeller(opened.source.reads, _log.info, self._steady_s)
            self._session = _Session(attempt, opened.source, opened.budget, ahead.__enter__(), teller)
            return self._session

    def _answer(self, session: _Session | None, request: Mapping[str, Any]) -> Answer:
        if request["call"] == "ping":
            return {"waiting": self._waiting, "answered": self._answered, "admitted": self._admitted()}, None
        if session is None:
            raise RefusedError(f"no data opened before the call: {request['call']}")
        source = session.source
        match request:
            case {"call": "open"}:
                return {
                    "token_ids": dataclasses.asdict(source.token_ids),
                    "preference_sets": [of and dataclasses.asdict(of) for of in source.preference_sets],
                }, None
            case {"call": "describe", "step": step}:
                return {"packs": source.packs_in(step), "tokens": source.pack_tokens_in(step)}, None
            case {"call": "packs", "step": step, "first": first, "count": count}:
                packs = session.ahead.get(step, first=first, count=count)
                session.teller.tell_if_due()
                return packs.message, packs
            case {"call": "grids", "step": step, "first": first, "count": count}:
                grids = [np.asarray(of) for of in source.grids(step, first=first, count=count)]
                arrays = SharedArrays([[np.zeros((0, 2), np.int32), *grids], [np.array([len(of) for of in grids])]], {})
                return arrays.message, arrays
            case {"call": "patches", "step": step, "pack": pack, "images": images}:
                arrays = SharedArrays([[np.asarray(source.patches(step, pack=pack, images=images))]], {})
                return arrays.message, arrays
            case {"call": "pairs", "step": step, "first": first, "count": count}:
                arrays = SharedArrays([[np.asarray(source.pairs(step, first=first, count=count))]], {})
                return arrays.message, arrays
            case {"call": "refresh"}:
                source.refresh()
                # The end of the run may have moved; what is read after it is dropped.
                session.ahead.last_step = STEPS_MAX
                return {}, None
            case {"call": "state", "step": step}:
                return {"state": source.state(step)}, None
            case {"call": "check_state", "state": state}:
                source.check_state(state)
                return {}, None
        raise RefusedError(f"no such call of the data engine: {request}")

    def _admitted(self) -> int:
        """Count the requests to the bucket that had their turn: an engine that waits for it is not stuck."""
        session = self._session
        if session is None or session.budget is None:
            return 0
        session.budget.tend()
        return session.budget.admitted_count


def open_job(environment: Mapping[str, str]) -> Open:
    """Return how the data of this pod's job are opened."""

    def open_data(path: str, attempt: int, split: StepSplit, pixels: bool) -> OpenedData:
        spec = parse_job(json.loads(Path(path).read_text(encoding="utf-8"))).spec
        url, job = environment[names.OBJECTS_URL], environment[names.JOB_UID]
        holder = f"engine of pod {environment[names.INDEX]}" if names.INDEX in environment else None
        budget = origin_budget(url, spec, job=job, reader=Reader.ENGINE, holder=holder)
        newest = functools.partial(read_mixture, open_store(environment[names.CHECKPOINT_URL]), attempt)
        source = open_packs(
            url,
            spec,
            job=job,
            wait_s=float(spec.data.wait_seconds),
            sleep=sleep_really,
            split=split,
            pixels=pixels,
            gate=budget,
            mixture=newest(),
            newest_mixture=newest,
        )
        return OpenedData(source, spec.training.steps or STEPS_MAX, budget)

    return open_data


def bytes_limit(environment: Mapping[str, str]) -> int:
    """Read the most bytes of prepared packs.

    Raises:
        InvalidConfigError: If it is no whole number.
    """
    value = environment.get(names.DATA_ENGINE_BYTES, "")
    if value and not (value.isascii() and value.isdigit()):
        raise InvalidConfigError(
            f"environment variable is no whole number: {names.DATA_ENGINE_BYTES}={value!r}",
            field=names.DATA_ENGINE_BYTES,
        )
    return int(value) if value else BYTES_MAX


def main(arguments: list[str]) -> int:
    """Serve the ranks of one pod until the launcher ends."""
    end_with_parent(int(arguments[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The launcher decides when its engine ends: ranks may still write a last checkpoint.
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s data engine: %(message)s")
    Engine(open_job(os.environ), bytes_max=bytes_limit(os.environ)).serve(socket.socket(fileno=int(arguments[0])))
    return int(ExitCode.OK)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
