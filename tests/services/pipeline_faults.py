"""A pipeline of several processes on real servers: all are killed again and again, or servers stay away for a while."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self
from unittest import mock
from urllib.parse import urlsplit

import psutil
import psycopg2

from polyreme_api.environment import DATABASE_URL, OBJECTS_URL
from polyreme_datahub import hub
from tests.services.cut_proxy import CutProxy
from tests.services.pipeline_waiter import AWAY
from tests.unit.datahub.jobs import picture, record, write_jsonl
from tools.cluster.servers import ServerError, Servers
from tools.s3.server import Buckets
from tools.services.guard import held
from tools.services.postgresql import Postgresql
from tools.services.pulsar import Pulsar

ROOT = Path(__file__).parents[2]
DATASET, BUCKET = "planted", "soak"
SOCKET = ".s.PGSQL.5432"
SERVERS = ("postgresql", "pulsar", "s3")
KINDS = ("worker", "publisher", *SERVERS)
"""What is killed. The publisher is the process that waits for the data: it publishes, and works as well."""
WORKERS = 2
STEPS = 3
"""Actions of a sample: decode, compose, tokenize."""
REFUSED_S = 1.0
STARTS_MAX = 20
POLL_S = 0.05

BAD: tuple[tuple[str, Callable[[int], bytes | None], Callable[[int], Any]], ...] = (
    ("cut", lambda at: picture(200, 150, kind="JPEG", seed=at)[:900], lambda at: None),
    ("empty", lambda at: b"", lambda at: None),
    ("text", lambda at: f"no image {at}".encode(), lambda at: None),
    ("heic", lambda at: b"\0\0\0\x18ftypheic" + bytes([at % 250]) * 40, lambda at: None),
    ("missing", lambda at: None, lambda at: None),
    ("json", lambda at: None, lambda at: f"{{not json {at}"),
    ("turns", lambda at: None, lambda at: record(f"turns-{at}", []) | {"conversations": []}),
    ("outside", lambda at: None, lambda at: record(f"outside-{at}", [f"../../{at}.jpg"])),
)
"""Name, bytes of the image, and line of each kind of bad sample; no line: one that names the image."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """What came of a run."""

    facts: dict[str, Any]
    again: dict[str, Any]
    kills: dict[str, int]
    cuts: int
    refusals: int
    starts: int
    pss_bytes: list[tuple[float, int]]
    """Seconds since the start, and memory of all of our processes."""
    wall_s: float


def plant(folder: Path, samples: int, bad: int) -> tuple[Path, list[str]]:
    """Write a dataset with bad samples evenly spread; return its file and the ids of the bad ones."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any] | str] = []
    ids: list[str] = []
    every = samples // bad if bad else samples + 1
    for at in range(samples):
        if at % every != every - 1 or len(ids) == bad:
            (folder / f"{at}.jpg").write_bytes(picture(60 + at % 40, 50, kind="JPEG", seed=at))
            lines.append(record(f"r{at}", [f"{at}.jpg"]))
            continue
        name, image, line = BAD[len(ids) % len(BAD)]
        data = image(at)
        if data is not None:
            (folder / f"{at}.jpg").write_bytes(data)
        lines.append(line(at) or record(f"{name}-{at}", [f"{at}.jpg"]))
        ids.append(f"line-{at + 1}" if name == "json" else f"{name}-{at}")
    return write_jsonl(folder, lines), sorted(ids)


def undisturbed(folder: Path, source: Path) -> dict[str, Any]:
    """Process the dataset in one process on the embedded parts."""
    folder.mkdir(parents=True)
    variables = {DATABASE_URL: f"sqlite:///{folder}/registry.sqlite", OBJECTS_URL: f"file://{folder}/objects"}
    hub.register(variables[DATABASE_URL], variables[OBJECTS_URL], DATASET, source)
    done = subprocess.run(_waiter(1), env={**os.environ, **variables}, stdout=subprocess.PIPE, cwd=ROOT, check=True)
    return dict(json.loads(done.stdout))


class Faults:
    """Servers, proxies and processes, and their kills.

    Args:
        folder: For the servers and what the processes write.
        kills: How many of each kind.
        seed: Of the order.
        away_s: How long a killed server stays away [s]; then no process may end because of it, and nothing else fails.
        workers: Processes that only work, beside the one that waits for the data and works as well.
        threads: Of each process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kills: Mapping[str, int],
        seed: int,
        away_s: float = 0.0,
        workers: int = WORKERS,
        threads: int = 1,
    ) -> None:
        self._folder, self._random = folder, random.Random(seed)
        self._away_s, self._workers, self._threads = away_s, workers, threads
        self._plan = [kind for kind, count in kills.items() for _ in range(count)]
        self._random.shuffle(self._plan)
        self._wanted = len(self._plan)
        self._kills = dict.fromkeys(KINDS, 0)
        self._stack = ExitStack()
        self._servers: dict[str, tuple[Servers, Postgresql | Pulsar | Buckets]] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._variables: dict[str, str] = {}
        self._starts = 0
        self._pss: list[tuple[float, int]] = []

    def __enter__(self) -> Self:
        with self._stack as stack:
            self._start_servers(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *args: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._stack.close()

    def run(self, source: Path, samples: int, *, limit_s: float) -> Outcome:
        """Process the dataset to its end under kills; then once more without.

        Raises:
            TimeoutError: If it did not end within ``limit_s``.
        """
        began_s = time.monotonic()
        with mock.patch.dict(os.environ, self._variables):
            hub.register(self._variables[DATABASE_URL], self._variables[OBJECTS_URL], DATASET, source)
        known = self._sql.taken
        self._processes = [self._start(self._command(at)) for at in range(self._workers)]
        while self._away_s and self._sql.taken < known + self._workers and time.monotonic() - began_s < limit_s:
            time.sleep(POLL_S)  # a process that has never reached its registry ends without it
        self._processes.append(self._start(self._command(self._workers)))
        while (code := self._processes[-1].poll()) != 0 or self._plan:
            if time.monotonic() - began_s > limit_s:
                raise TimeoutError(f"the pipeline did not end within {limit_s:g} s; left to kill: {self._plan}")
            if code == 0:
                raise TimeoutError(f"the pipeline ended before these were killed: {self._plan}")
            self._tend()
            due = self._wanted - len(self._plan)
            if self._plan and self._done() >= samples * STEPS * (due + 0.5) / (self._wanted + 1):
                if not self._away_s:
                    self._disturb(due)
                self._kill(self._plan.pop())
            self._note_memory(time.monotonic() - began_s)
            time.sleep(POLL_S)
        facts = json.loads(self._output().splitlines()[-1])
        wall_s = time.monotonic() - began_s
        for _, server in self._servers.values():
            server.wait()
        again = subprocess.run(
            _waiter(1), env={**os.environ, **self._variables}, stdout=subprocess.PIPE, cwd=ROOT, check=True
        )
        return Outcome(
            facts=facts,
            again=json.loads(again.stdout),
            kills=self._kills,
            cuts=self._s3.cuts + self._sql.cuts,
            refusals=self._s3.refusals,
            starts=self._starts,
            pss_bytes=self._pss,
            wall_s=wall_s,
        )

    def _start_servers(self, stack: ExitStack) -> None:
        for name in SERVERS:
            servers = stack.enter_context(held(self._folder / name))
            place = self._folder / name
            server: Postgresql | Pulsar | Buckets = (
                Buckets(place / "buckets", servers, (BUCKET,))
                if name == "s3"
                else (Pulsar if name == "pulsar" else Postgresql)(place, servers)
            )
            server.start()
            self._servers[name] = servers, server
        for _, server in self._servers.values():
            self._variables |= server.wait()
        where = urlsplit(self._variables["AWS_ENDPOINT_URL"])
        self._s3 = stack.enter_context(CutProxy(("127.0.0.1", 0), (str(where.hostname), int(where.port or 0))))
        self._variables["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{self._s3.address[1]}"
        self._variables["AWS_ALLOW_HTTP"] = "true"
        self._variables[OBJECTS_URL] = f"s3://{BUCKET}/objects"
        self._sockets = (self._folder / "postgresql/postgresql").resolve()
        proxied = self._sockets.with_name(f"{self._sockets.name}-proxied")
        proxied.mkdir(mode=0o700)
        stack.callback(proxied.rmdir)
        stack.callback((proxied / SOCKET).unlink)
        self._sql = stack.enter_context(CutProxy(str(proxied / SOCKET), str(self._sockets / SOCKET)))
        url = self._variables[DATABASE_URL]
        self._variables[DATABASE_URL] = url.replace(str(self._sockets), str(proxied))

    def _command(self, at: int) -> list[str]:
        """How process ``at`` is started: the last one waits for the data."""
        return _waiter(self._threads) if at == self._workers else _worker(self._folder / f"w{at}", self._threads)

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        self._starts += 1
        out = (self._folder / f"out-{self._starts}").open("wb")
        with out, (self._folder / f"errors-{self._starts}").open("wb") as errors:
            return subprocess.Popen(command, env={**os.environ, **self._variables}, stdout=out, stderr=errors, cwd=ROOT)

    def _output(self) -> str:
        return max(self._folder.glob("out-*"), key=lambda path: (path.stat().st_size > 0, path.name)).read_text()

    def _tend(self) -> None:
        """Start again what has ended: killed, or because a server stayed away."""
        for at, process in enumerate(self._processes):
            if (code := process.poll()) is None or (code == 0 and at == self._workers):
                continue
            allowed = {-signal.SIGKILL} if self._away_s else {AWAY, -signal.SIGKILL}
            if code not in allowed or self._starts > STARTS_MAX + 10 * self._wanted:
                texts = [path.read_text()[-1500:] for path in self._folder.glob("errors-*")]
                raise AssertionError(f"process {at} ended with {code}: {[text for text in texts if text][-2:]}")
            self._processes[at] = self._start(self._command(at))

    def _disturb(self, number: int) -> None:
        """Cut connections, and answer 503 for a while."""
        (self._sql if number % 2 else self._s3).cut()
        if number % 2:
            self._s3.refusing = True
            self._s3.cut()
            time.sleep(REFUSED_S)
            self._s3.refusing = False

    def _kill(self, kind: str) -> None:
        if kind in self._servers:
            self._kill_server(kind)
        else:
            at = self._workers if kind == "publisher" else self._random.randrange(self._workers)
            self._processes[at].kill()
            self._processes[at].wait()
        self._kills[kind] += 1

    def _kill_server(self, kind: str) -> None:
        servers, server = self._servers[kind]
        with self._halted():  # else a busy machine ends the work before a server that still starts can be killed
            server.wait()
        (found,) = servers.all
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(found.pid).kill()
        servers.stop()
        time.sleep(self._away_s)
        for left in reversed(range(STARTS_MAX)):
            server.start()
            if kind == "pulsar":
                return  # half a minute on a busy machine: work continues without it
            try:
                server.wait()
            except ServerError:
                if not left:
                    raise
                servers.stop()
            else:
                return

    @contextlib.contextmanager
    def _halted(self) -> Iterator[None]:
        halted = [psutil.Process(process.pid) for process in self._processes if process.poll() is None]
        for process in halted:
            process.suspend()
        yield
        for process in halted:
            process.resume()

    def _done(self) -> int:
        """Count the actions in the registry, by a connection of its own."""
        try:
            connection = psycopg2.connect(host=str(self._sockets), user="postgres", dbname="polyreme")
        except psycopg2.OperationalError:
            return 0
        with contextlib.closing(connection), connection.cursor() as cursor:
            try:
                cursor.execute("SELECT count(*) FROM actions")
                row = cursor.fetchone()
            except psycopg2.Error:
                return 0
            return int(row[0]) if row else 0

    def _note_memory(self, at_s: float) -> None:
        if self._pss and at_s - self._pss[-1][0] < 5:
            return
        total = 0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(process.pid)
                total += sum(one.memory_full_info().pss for one in [parent, *parent.children(recursive=True)])
        self._pss.append((at_s, total))


def _waiter(threads: int) -> list[str]:
    return [sys.executable, "-m", "tests.services.pipeline_waiter", DATASET, str(threads)]


def _worker(home: Path, threads: int) -> list[str]:
    command = [sys.executable, "-m", "polyreme.main", "--home", str(home)]
    return [*command, "data", "worker", "--workers", str(threads)]
