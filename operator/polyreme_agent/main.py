"""Command line of the node agent: ``reader`` or ``reporter``."""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from polyreme_agent.dcgm import Dcgm, fetch
from polyreme_agent.infiniband import InfiniBand
from polyreme_agent.kernel_log import KernelLog
from polyreme_agent.ledger import Ledger
from polyreme_agent.nvml import InThread, Nvml
from polyreme_agent.pci import PcieLinks
from polyreme_agent.reader import Collector, Reader
from polyreme_api.exit_codes import ExitCode
from polyreme_api.faults.table import fault_table
from polyreme_system.addresses import split_address

SOCKET = Path("/run/polyreme-agent/reader.sock")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two processes until it is asked to end."""
    parser = argparse.ArgumentParser(prog="polyreme_agent", description="Reports faults of this node as conditions.")
    commands = parser.add_subparsers(dest="command", required=True)
    reader = commands.add_parser("reader", help="read kernel log, NVML and sysfs of the host; needs no token")
    reader.add_argument("--root", type=Path, default=Path("/host"), help="the host's root directory, read-only")
    reader.add_argument("--dcgm", default="", help="HOST:PORT of a DCGM exporter on this node")
    reader.add_argument("--gpus", type=int, default=0, help="GPUs that the node must have; 0: as many as its bus has")
    reporter = commands.add_parser("reporter", help="write the reader's findings to the node's conditions")
    reporter.add_argument("--node", default=os.environ.get("NODE_NAME", ""), help="name of this node")
    for each in (reader, reporter):
        each.add_argument("--socket", type=Path, default=SOCKET, help="path of the socket between the two")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    if options.command == "reader":
        _read(options)
    elif not options.node:
        parser.error("--node is empty: name the node, or set NODE_NAME from spec.nodeName")
    else:
        _report(options)
    return ExitCode.OK


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(ExitCode.OK)


def _now_s() -> float:
    return time.time()  # noqa: TID251 - the processes' own clock


def _uptime_s() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


def _sleep(seconds: float) -> None:
    time.sleep(seconds)  # noqa: TID251 - the processes' own clock


def _read(options: argparse.Namespace) -> None:
    boot = (options.root / "proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    links = PcieLinks(options.root)
    nvml = Nvml(
        functools.partial(importlib.import_module, "pynvml"),
        expected=lambda: max(options.gpus, links.gpus()),
        now_s=_now_s,
    )
    collectors: list[Collector] = [
        links,
        InfiniBand(options.root, now_s=_now_s, uptime_s=_uptime_s),
        InThread(nvml, uptime_s=_uptime_s),
    ]
    if options.dcgm:
        host, port = split_address(options.dcgm)
        collectors.append(Dcgm(functools.partial(fetch, host, port), now_s=_now_s))
    Reader(
        KernelLog(options.root, now_s=_now_s, uptime_s=_uptime_s),
        collectors,
        Ledger(fault_table(), boot=boot),
        options.socket,
        now_s=_now_s,
        uptime_s=_uptime_s,
        sleep=_sleep,
    ).run()


def _report(options: argparse.Namespace) -> None:
    # The client of HTTPS takes a third of a process's memory, and the reader needs none.
    from polyreme_agent import node_status, reporter

    status = node_status.NodeStatus(node_status.Server.in_cluster(os.environ), options.node)
    reporter.Reporter(options.socket, status, uptime_s=_uptime_s, wall_s=_now_s, random=random.Random().random).run()
