"""Gangs of real ranks: forked from one warm parent a session, which has torch imported and no thread started."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import socket
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.plan.layout import Layout

END_TIMEOUT_S = 40.0
_BODY = Path(__file__).with_name("rank_body.py")


@dataclasses.dataclass
class Gang:
    """The ranks of one attempt."""

    root: Path
    processes: list[ForkServerProcess]

    def wait(self) -> list[int | None]:
        """Wait for all ranks; their exit codes, minus the signal that ended a rank."""
        for process in self.processes:
            process.join(END_TIMEOUT_S)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        assert None not in codes, f"ranks did not end: {codes}; {self.logs()}"
        return codes

    def kill(self) -> None:
        """End every rank that still runs, at once."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join(END_TIMEOUT_S)

    def logs(self) -> str:
        """What the ranks logged."""
        return "\n".join(path.read_text() for path in sorted(self.root.glob("rank-*.log")))


Start = Callable[..., Gang]


@pytest.fixture(scope="session")
def _warm() -> Any:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["polyreme_trainer.train.run", "polyreme_trainer.train.offline"])
    return context


@pytest.fixture
def start(_warm: Any, tmp_path: Path) -> Iterator[Start]:
    """Start a gang; all gangs of the test are ended with it."""
    gangs: list[Gang] = []

    def begin(body: str, *, layout: tuple[int, int] | dict[str, int], root: Path | None = None, **request: Any) -> Gang:
        place = root or tmp_path
        world = Layout(**layout).world if isinstance(layout, dict) else layout[0]
        place.mkdir(parents=True, exist_ok=True)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(128)
            request |= {"body": body, "layout": layout, "root": str(place), "port": listener.getsockname()[1]}
            gang = Gang(place, [_fork(_warm, request, rank, listener) for rank in range(world)])
        gangs.append(gang)
        return gang

    yield begin
    for gang in gangs:
        gang.kill()


def _fork(context: Any, request: dict[str, Any], rank: int, listener: socket.socket) -> ForkServerProcess:
    given = {"request": request, "rank": rank, "listener": listener if rank == 0 else None}
    process: ForkServerProcess = context.Process(target=runpy.run_path, args=(str(_BODY), given, "rank"))
    process.start()
    return process
