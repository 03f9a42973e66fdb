"""Checks of nodes with real processes: forked as ranks are, summing over gloo, with injected faults."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from polyreme_api import environment as names
from polyreme_api.environment import PodEnvironment
from polyreme_launcher.check_children import CheckProcesses
from polyreme_launcher.pod_logs import PodLogs
from polyreme_launcher.protocol import check_rounds as rounds
from polyreme_launcher.protocol.check_rounds import CheckOrder, Rounds
from polyreme_launcher.protocol.check_verdict import Limits
from polyreme_launcher.protocol.messages import Check
from polyreme_launcher.rank_processes import RankParent
from polyreme_system.clock import SystemClock

pytestmark = pytest.mark.parallel

WORKERS = 3
ORDER = CheckOrder(timeout_s=240.0, limits=Limits(percent_of_median=10))
WAIT_S = 100.0


class Worker:
    """One worker's parent of processes, with the fault of its node."""

    def __init__(self, index: int, fault: str, folder: Path, take: Callable[[int, Check, str], None]) -> None:
        pod = PodEnvironment(
            pod=f"w{index}",
            job="job",
            namespace="default",
            job_uid="1",
            index=index,
            replacement=0,
            replicas=WORKERS,
            devices=1,
            leader_address="127.0.0.1:1",
            api_url="",
            token_file="",
            secret_file="",
            pod_directory=str(folder),
            checkpoint_url="",
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", names.CHECK_FAULT: fault}
        self.ranks = RankParent(
            environment=environment, on_exit=self._on_exit, on_forked=lambda: None, on_fail=lambda error: None
        )
        self.checks = CheckProcesses(
            self.ranks,
            PodLogs(pod=pod, environment={names.PRINT_RANK_LOGS: "off"}, clock=SystemClock()),
            pod=pod,
            environment=environment,
            folder=folder,
            on_checked=lambda check, report: take(index, check, report),
        )
        self.ranks.start()

    def _on_exit(self, attempt: int, rank: int, code: int | None, number: int | None, message: str) -> None:
        self.checks.on_exit(attempt, rank, code, number, message)


async def verdict(faults: dict[int, str], folder: Path) -> Rounds:
    """Run all rounds with real processes; return their end."""
    state = rounds.begin(ORDER, replicas=WORKERS, serial=1)
    reports: asyncio.Queue[tuple[int, int, str]] = asyncio.Queue()
    workers = []

    def take(at: int, check: Check, report: str) -> None:
        reports.put_nowait((at, check.serial, report))

    for index in range(WORKERS):
        own = folder / str(index)
        own.mkdir()
        workers.append(
            Worker(
                index,
                faults.get(index, ""),
                own,
                lambda at, check, report: reports.put_nowait((at, check.serial, report)),
            )
        )
    try:
        async with asyncio.timeout(WAIT_S):
            while not state.done:
                if state.needs_address:
                    with socket.create_server(("127.0.0.1", 0)) as listener:
                        workers[0].checks.serve(
                            listener, attempt=1, serial=state.serial, seconds=60, address="127.0.0.1"
                        )
                        state = rounds.met(state, state.serial, "127.0.0.1", listener.getsockname()[1])
                serial = state.serial
                for index in state.members:
                    check = rounds.message(state, ORDER, 1, index)
                    assert check is not None
                    workers[index].checks.run(check)
                while state.serial == serial and not state.done:
                    state = rounds.advance(rounds.take(state, *await reports.get()), ORDER)
    finally:
        # Together: each reaps every child of this process, and one that is not closing yet starts another fork server.
        await asyncio.gather(*(worker.ranks.close() for worker in workers))
    return state


def run_verdict(faults: dict[int, str], folder: Path) -> Rounds:
    return asyncio.run(verdict(faults, folder))


def test_a_slow_network_is_found_by_pairs(tmp_path: Path) -> None:
    # A process of its own: a parent of ranks reaps every child it finds, which here would be those of other tests.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
        state = own.submit(run_verdict, {2: "slow-network"}, tmp_path).result()
    assert [result.pair for result in state.results] == [(0, 1), (2, 0), (2, 1)]
    assert {index: found.reason for index, found in state.bad.items()} == {2: "PreCheckAllReduce"}
    assert rounds.report_of(state).passed == ((0, 2),)
    assert set(state.alone[0].rates) == {"Compute", "Memory", "Disk"}
    assert not list(tmp_path.glob("*/.pre-check-*"))
