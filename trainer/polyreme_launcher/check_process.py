"""A process that checks one device of a worker, forked like a rank; its report goes to the pipe for last messages."""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from polyreme_api import environment as names
from polyreme_api.exit_codes import ExitCode
from polyreme_launcher.check_settings import CheckSettings
from polyreme_launcher.protocol.check_rounds import render_report
from polyreme_launcher.protocol.check_verdict import ALL_REDUCE, Measured
from polyreme_system.clock import SystemClock
from polyreme_trainer.node_checks import (
    WrongResultError,
    all_reduce_rate,
    compute_rate,
    device_of,
    disk_rate,
    memory_rate,
)

WHY_CHARACTERS_MAX = 160
FAULT_SLOWER = 50.0
"""How many times slower an injected fault makes a node."""
_STORE_MARGIN_S = 1.0


def main(environment: Mapping[str, str]) -> int:
    """Check, report, end. The kernel ends a check that hangs."""
    settings = CheckSettings.parse(environment[names.CHECK])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(settings.seconds)
    if settings.serves:
        _serve(settings, int(environment[names.MASTER_FD]))
        return ExitCode.OK
    fault = environment.get(names.CHECK_FAULT, "")
    if fault == "hangs":
        time.sleep(settings.seconds + 1.0)
    measured = _sum(settings, fault) if settings.partners else _alone(settings, fault)
    os.write(int(environment[names.ERROR_FD]), render_report(measured).encode())
    return ExitCode.OK


def _serve(settings: CheckSettings, descriptor: int) -> None:
    """Be the place where pairs meet, until the launcher kills this process."""
    store = dist.TCPStore(
        settings.address,
        settings.port,
        None,
        is_master=True,
        timeout=datetime.timedelta(seconds=settings.seconds),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
    while store is not None:
        signal.pause()


def _alone(settings: CheckSettings, fault: str) -> Measured:
    device, clock = device_of(settings.local_rank), SystemClock()
    slower = FAULT_SLOWER if fault == "slow" else 1.0
    checks: dict[str, Callable[[], float]] = {
        "Compute": lambda: compute_rate(device, clock, disturb=_falsify if fault == "wrong" else None) / slower,
        "Memory": lambda: memory_rate(device, clock),
    }
    if settings.local_rank == 0:
        checks["Disk"] = lambda: disk_rate(Path(settings.folder), clock)
    return _measure(checks)


def _sum(settings: CheckSettings, fault: str) -> Measured:
    timeout_s = max(1.0, settings.seconds - _STORE_MARGIN_S)

    def rate() -> float:
        store = dist.TCPStore(
            settings.address,
            settings.port,
            None,
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        pair = "-".join(map(str, settings.partners))
        measured = all_reduce_rate(
            device_of(settings.local_rank),
            SystemClock(),
            dist.PrefixStore(f"{settings.serial}/{pair}", store),
            rank=settings.partners.index(settings.index) * settings.devices + settings.local_rank,
            world=len(settings.partners) * settings.devices,
            timeout_s=timeout_s,
        )
        return measured / FAULT_SLOWER if fault == "slow-network" else measured

    return _measure({ALL_REDUCE: rate})


def _measure(checks: Mapping[str, Callable[[], float]]) -> Measured:
    rates: dict[str, float] = {}
    failed: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for check, measure in checks.items():
        try:
            rates[check] = measure()
        except WrongResultError as error:
            wrong[check] = str(error)[:WHY_CHARACTERS_MAX]
        except (RuntimeError, OSError, MemoryError) as error:
            sentence = str(error).partition("\n")[0] or type(error).__name__
            failed[check] = sentence[:WHY_CHARACTERS_MAX]
    return Measured(rates=rates, failed=failed, wrong=wrong)


def _falsify(product: torch.Tensor) -> None:
    """Do to a matrix product what an injected fault does."""
    product[0, 0] += 1.0
