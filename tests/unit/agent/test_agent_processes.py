"""Reader and reporter together: frames over a real socket, bounded writes, silence, restarts."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyreme_agent.frames import FRAME_BYTES_MAX, Lines, read_known, read_report, report_frame
from polyreme_agent.kernel_log import KernelLog
from polyreme_agent.ledger import Condition, Ledger
from polyreme_agent.node_status import WriteError
from polyreme_agent.publisher import BACKOFF_MAX_S, BURST, HEARTBEAT_S, SILENT_S, Publisher
from polyreme_agent.reader import CONNECT_S, Reader
from polyreme_agent.reporter import Reporter
from polyreme_api.faults.table import fault_table
from polyreme_api.node_report import CONDITION_AGENT, CONDITION_PREFIX, CONDITIONS
from tests.unit.agent.host_tree import XID_79, kernel_log, record

GPU = f"{CONDITION_PREFIX}GPU"


class _Server:
    """The status of a node, merged as the API server merges it."""

    def __init__(self) -> None:
        self.conditions: dict[str, dict[str, str]] = {}
        self.writes = 0
        self.away = False

    def patch(self, body: dict[str, Any]) -> dict[str, tuple[str, str]]:
        if self.away:
            raise WriteError("away")
        self.writes += 1
        for each in body["status"]["conditions"]:
            self.conditions.setdefault(each["type"], {}).update(each)
        return {kind: (each["status"], each["message"]) for kind, each in self.conditions.items()}


class _Node:
    """Both processes in one, on one clock."""

    def __init__(self, root: Path) -> None:
        self.root, self.server, self.now_s = root, _Server(), 1_000.0
        self.reporter = self._reporter()
        self.reader = self._reader()

    def _reporter(self) -> Reporter:
        clock = self.clock
        return Reporter(self.root / "socket", self.server, uptime_s=clock, wall_s=clock, random=lambda: 1.0)

    def _reader(self) -> Reader:
        log = KernelLog(self.root, now_s=self.clock, uptime_s=self.clock)
        ledger = Ledger(fault_table(), boot="boot-1")
        return Reader(
            log, (), ledger, self.root / "socket", now_s=self.clock, uptime_s=self.clock, sleep=lambda _seconds: None
        )

    def clock(self) -> float:
        return self.now_s

    def turns(self, *, reader: bool = True, number: int = 6, step_s: float = CONNECT_S) -> None:
        for _ in range(number):
            if reader:
                self.reader.turn()
            self.reporter.turn(0.0)
            self.now_s += step_s

    def shown(self, kind: str) -> tuple[str, str]:
        found = self.server.conditions[kind]
        return found["status"], found["reason"]

    def restart_reader(self) -> None:
        self.reader.close()
        self.reader = self._reader()

    def restart_reporter(self) -> None:
        self.reporter.close()
        self.reporter = self._reporter()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[_Node]:
    kernel_log(tmp_path, record(1, "usb 1-1: new device"))
    node = _Node(tmp_path)
    yield node
    node.reader.close()
    node.reporter.close()


def test_a_line_of_the_kernel_log_becomes_a_condition_of_the_node(node: _Node) -> None:
    node.turns()
    assert node.shown(f"{CONDITION_PREFIX}Kernel") == ("False", "NoFault")
    _append(node.root, record(2, XID_79))
    node.turns(number=2, step_s=0.01)
    assert node.shown(GPU) == ("True", "Xid79")
    assert node.server.conditions[GPU]["lastTransitionTime"]


def _append(root: Path, text: str) -> None:
    with (root / "dev/kmsg").open("a") as file:
        file.write(text)


def test_a_silent_reader_makes_every_condition_unknown_until_it_speaks(node: _Node) -> None:
    node.turns()
    node.turns(reader=False, number=3, step_s=SILENT_S / 2 + 1)
    for kind in (*CONDITIONS, CONDITION_AGENT):
        assert node.shown(kind) == ("Unknown", "ReaderSilent")
    node.turns()
    assert node.shown(CONDITION_AGENT) == ("False", "Works")


def test_faults_outlive_both_processes_and_a_ring_that_no_longer_has_them(node: _Node) -> None:
    kernel_log(node.root, record(2, XID_79))
    node.turns()
    before = node.server.conditions[GPU]["message"]
    kernel_log(node.root, record(900, "usb 1-1: new device"))
    node.restart_reader()
    node.turns()
    assert node.server.conditions[GPU]["message"] == before
    node.restart_reader()
    node.restart_reporter()
    node.turns()
    assert node.shown(GPU) == ("True", "Xid79")
    assert node.server.conditions[GPU]["message"] == before


def test_writes_are_bounded_and_an_absent_api_server_is_asked_ever_less(node: _Node) -> None:
    node.turns()
    start = node.server.writes
    node.turns(number=200, step_s=0.01)
    assert node.server.writes == start
    node.turns(number=int(HEARTBEAT_S * 3), step_s=1.0)
    assert node.server.writes - start == 3
    publisher = Publisher(0.0)
    changing = [Condition(type=GPU, status="True", reason=f"Xid{number}", message="m") for number in range(500)]
    writes = 0
    for number, condition in enumerate(changing):
        publisher.report([condition], number / 100)
        due = publisher.next(number / 100)
        writes += bool(due)
        publisher.succeeded(due, {}, number / 100) if due else None
    assert writes <= BURST + 2
    waits = [publisher.failed(10.0, 1.0) for _ in range(12)]
    assert waits[:3] == [1.0, 2.0, 4.0]
    assert waits[-1] == BACKOFF_MAX_S


def test_an_absent_api_server_is_caught_up_with(node: _Node) -> None:
    node.server.away = True
    node.turns()
    assert not node.server.conditions
    node.server.away = False
    _append(node.root, record(2, XID_79))
    node.turns(number=90)
    assert node.shown(GPU) == ("True", "Xid79")


@pytest.mark.parametrize(
    "frame",
    [
        b"{",
        b"[]",
        b'{"version":2}',
        b'{"version":1,"conditions":[{"type":"Ready","status":"False","reason":"R","message":""}]}',
        b'{"version":1,"conditions":[{"type":"polyreme.dev/GPU","status":"No","reason":"R","message":""}]}',
        b'{"version":1,"conditions":[{"type":"polyreme.dev/GPU","status":"True","reason":"a b","message":""}]}',
        b'{"version":1,"conditions":[{"type":"polyreme.dev/GPU","status":"True","reason":"R","message":"%s"}]}'
        % (b"x" * 1025),
        b"[" * 50_000,
        b"x" * (FRAME_BYTES_MAX + 1),
    ],
)
def test_a_foreign_frame_ends_the_connection_and_nothing_else(node: _Node, frame: bytes) -> None:
    node.turns()
    before = dict(node.server.conditions)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(str(node.root / "socket"))
        node.reporter.turn(0.0)
        stranger.sendall(frame + b"\n")
        for _ in range(4):
            node.reporter.turn(0.0)
    assert node.server.conditions == before
    node.turns()
    assert node.shown(CONDITION_AGENT) == ("False", "Works")


def test_frames_come_back_as_they_were_written() -> None:
    conditions = [Condition(type=kind, status="True", reason="Xid79", message='a "sentence"\n') for kind in CONDITIONS]
    frame = report_frame(conditions)
    lines = Lines()
    assert lines.feed(frame[:10]) == []
    assert [read_report(line) for line in lines.feed(frame[10:])] == [tuple(conditions)]
    with pytest.raises(ValueError, match="known is a list"):
        read_known(b'{"version":1,"known":[1]}')
