"""Counters and states of InfiniBand and RoCE ports in sysfs, as mlx5_core of Linux 5.15 to 6.8 has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from polyreme_agent.findings import Finding, Look, State, counter

PORTS_MAX: Final = 64
_ANY: Final = 0.0
COUNTERS: Final = (
    ("counters/link_downed", "LinkDowned", _ANY),
    ("counters/local_link_integrity_errors", "LinkIntegrity", _ANY),
    ("counters/excessive_buffer_overrun_errors", "BufferOverrun", _ANY),
    ("hw_counters/rnr_nak_retry_err", "RnrNakRetry", _ANY),
    ("counters/link_error_recovery", "LinkFlap", 5.0 / 60.0),
    ("counters/symbol_error", "SymbolErrors", 10.0),
    ("counters/port_rcv_errors", "ReceiveErrors", 10.0),
    ("counters/port_xmit_discards", "TransmitDiscards", 100.0),
    ("hw_counters/roce_slow_restart", "RoceSlowRestart", 10.0),
    ("hw_counters/local_ack_timeout_err", "AckTimeout", 1.0),
)
"""File of a port, code, and the rate [1/s] above which it is a fault; 0: any rise is one. After NVSentinel."""
_ACTIVE: Final = "4: ACTIVE"


class InfiniBand:
    """Ports below ``/sys/class/infiniband``."""

    name = "infiniband"

    def __init__(self, root: Path, *, now_s: Callable[[], float], uptime_s: Callable[[], float]) -> None:
        self._folder, self._now_s, self._uptime_s = root / "sys" / "class" / "infiniband", now_s, uptime_s
        self._before: dict[tuple[str, str], tuple[int, float]] = {}
        self._were_up: set[str] = set()
        self._adapters: set[str] = set()

    def look(self) -> Look:
        """Compare every port's counters with those of the look before; the first look only takes them down."""
        try:
            adapters = sorted(path.name for path in self._folder.iterdir())
        except OSError:
            adapters = []
        lost = [Finding(code="HcaLost", device=name) for name in sorted(self._adapters - set(adapters))]
        self._adapters |= set(adapters[:PORTS_MAX])
        if not self._adapters:
            return Look(state=State.ABSENT, why="the node has no InfiniBand or RoCE adapter")
        present, occurred, wrong = lost, [], ""
        ports = [port for name in adapters for port in sorted((self._folder / name / "ports").glob("*"))][:PORTS_MAX]
        for port in ports:
            device = f"{port.parent.parent.name}/{port.name}"
            if _read(port / "state") == _ACTIVE:
                self._were_up.add(device)
            elif device in self._were_up:
                present.append(Finding(code="PortDown", device=device))
            for file, code, rate in COUNTERS:
                rise, problem = self._rise(port, device, file)
                wrong = wrong or problem
                if rise is not None and rise[0] > 0 and rise[0] / rise[1] > rate:
                    occurred.append(
                        Finding(code=code, device=device, at_s=self._now_s(), count=rise[0] if not rate else 1)
                    )
        return Look(
            state=State.FAILED if wrong else State.WORKS, why=wrong, present=tuple(present), occurred=tuple(occurred)
        )

    def _rise(self, port: Path, device: str, file: str) -> tuple[tuple[int, float] | None, str]:
        text = _read(port / file)
        if text is None:
            return None, ""
        value, at_s = counter(text), self._uptime_s()
        if value is None:
            return None, f"{port / file} has the impossible value {text[:40]!r}"
        before = self._before.get((device, file))
        self._before[device, file] = (value, at_s)
        # A counter that fell was reset.
        if before is None or value < before[0] or at_s <= before[1]:
            return None, ""
        return (value - before[0], at_s - before[1]), ""


def _read(path: Path) -> str | None:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(128).strip()
    except OSError:
        return None
