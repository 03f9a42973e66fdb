"""The launcher's side of checks: forks one process for each device, and puts their reports together."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from polyreme_api import environment as names
from polyreme_api.environment import PodEnvironment
from polyreme_launcher.check_settings import CheckSettings
from polyreme_launcher.pod_logs import PodLogs
from polyreme_launcher.protocol.check_rounds import TIMED_OUT, parse_report, render_report
from polyreme_launcher.protocol.check_verdict import ALL_REDUCE, LOCAL_CHECKS, Measured
from polyreme_launcher.protocol.messages import Check
from polyreme_launcher.rank_processes import RankParent

KEYS_A_ROUND = 100
"""Numbers of a round's processes: below every rank, so that their ends are distinguished; more than a pod has
devices."""
_STORE = KEYS_A_ROUND - 1


class CheckProcesses:
    """Processes of the newest check.

    Args:
        ranks: Forks them.
        logs: Takes what they write.
        pod: The pod.
        environment: Variables of the processes.
        folder: Where the disk is checked.
        on_checked: Called with the check and its report when all have ended.
    """

    def __init__(
        self,
        ranks: RankParent,
        logs: PodLogs,
        *,
        pod: PodEnvironment,
        environment: Mapping[str, str],
        folder: Path,
        on_checked: Callable[[Check, str], None],
    ) -> None:
        self._ranks, self._logs, self._pod, self._environment = ranks, logs, pod, dict(environment)
        self._folder, self._on_checked = folder, on_checked
        self._check: Check | None = None
        self._reports: dict[int, Measured] = {}
        self._served = 0

    def run(self, check: Check) -> None:
        """Start a check; processes of an older one are killed."""
        if self._served != check.serial:
            self._ranks.kill()
        self._check, self._reports = check, {}
        for local_rank in range(self._pod.devices):
            self._fork(check, local_rank, {})

    def serve(self, listener: socket.socket, *, attempt: int, serial: int, seconds: int, address: str) -> None:
        """Start the process where the pairs of a round meet, after killing those of an older one."""
        self._ranks.kill()
        self._served = serial
        port = listener.getsockname()[1]
        check = Check(attempt=attempt, serial=serial, partners=(), address=address, port=port, seconds=seconds)
        self._fork(check, _STORE, {names.MASTER_FD: listener.fileno()})

    def stop(self) -> None:
        """Kill all processes of checks."""
        self._check = None
        self._ranks.kill()

    def on_exit(self, attempt: int, key: int, code: int | None, number: int | None, message: str) -> None:
        """Take the end of a process, by the number that ``fork`` was given."""
        serial, local_rank = divmod(-key - 1, KEYS_A_ROUND)
        check = self._check
        if check is None or (attempt, serial) != (check.attempt, check.serial) or local_rank >= self._pod.devices:
            return
        self._reports[local_rank] = _report(check, code, number, message)
        if len(self._reports) == self._pod.devices:
            self._on_checked(check, render_report(_together(list(self._reports.values()))))

    def _fork(self, check: Check, local_rank: int, descriptors: Mapping[str, int]) -> None:
        settings = CheckSettings(
            index=self._pod.index,
            local_rank=local_rank,
            devices=self._pod.devices,
            partners=check.partners,
            address=check.address,
            port=check.port,
            serial=check.serial,
            seconds=check.seconds,
            folder=str(self._folder),
            serves=local_rank == _STORE,
        )
        variables = {**self._environment, names.CHECK: settings.render(), "OMP_NUM_THREADS": "1"}
        if check.address.startswith("127."):
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        number = -1 - (check.serial * KEYS_A_ROUND + local_rank)
        with self._logs.open_check(check.attempt, number, local_rank) as output:
            self._ranks.fork(
                attempt=check.attempt, rank=number, environment=variables, output=output, descriptors=descriptors
            )


def _report(check: Check, code: int | None, number: int | None, message: str) -> Measured:
    if message.startswith("{"):
        return parse_report(message)
    checks = (ALL_REDUCE,) if check.partners else LOCAL_CHECKS
    why = message.partition("\n")[0] or (f"ended by signal {number}" if code is None else f"ended with code {code}")
    return Measured(failed=dict.fromkeys(checks, TIMED_OUT if number == signal.SIGALRM else why))


def _together(parts: list[Measured]) -> Measured:
    """Return the slowest rate and the first failure of a worker's devices."""
    rates: dict[str, float] = {}
    failed: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for part in parts:
        rates |= {check: min(rate, rates.get(check, rate)) for check, rate in part.rates.items()}
        failed = {**part.failed, **failed}
        wrong = {**part.wrong, **wrong}
    return Measured(rates=rates, failed=failed, wrong=wrong)
