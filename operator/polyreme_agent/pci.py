"""State of PCIe links in sysfs, of NVIDIA's GPUs and of network adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from polyreme_agent.findings import Finding, Look, State, counter, pci_name

DEVICES_MAX: Final = 256
NVIDIA: Final = "0x10de"
_DISPLAY, _NETWORK = "0x03", "0x02"
_LOST: Final = frozenset({630, 2550})


class PcieLinks:
    """Links below ``/sys/bus/pci/devices``."""

    name = "pcie"

    def __init__(self, root: Path) -> None:
        self._folder = root / "sys" / "bus" / "pci" / "devices"

    def gpus(self) -> int:
        """Return how many of NVIDIA's GPUs the bus has."""
        return sum(_read(path / "vendor") == NVIDIA and _kind(path) == _DISPLAY for path in self._devices())

    def look(self) -> Look:
        """Compare each link with what both of its ends can do.

        The speed of GPUs is left out: they lower it while they idle.
        """
        present: list[Finding] = []
        examined = 0
        for path in self._devices():
            kind = _kind(path)
            if kind not in {_DISPLAY, _NETWORK} or (kind == _DISPLAY and _read(path / "vendor") != NVIDIA):
                continue
            width = _slower(path, "width")
            speed = _slower(path, "speed") if kind == _NETWORK else None
            examined += width is not None
            device = pci_name(path.name)
            if width:
                present.append(Finding(code="PCIeWidth", device=device))
            if speed:
                present.append(Finding(code="PCIeSpeed", device=device))
        if not examined:
            return Look(state=State.ABSENT, why="the node has no GPU and no network adapter with a PCIe link")
        return Look(state=State.WORKS, present=tuple(present))

    def _devices(self) -> list[Path]:
        try:
            return sorted(self._folder.iterdir())[:DEVICES_MAX]
        except OSError:
            return []


def _kind(path: Path) -> str:
    return (_read(path / "class") or "")[:4]


def _slower(path: Path, what: str) -> bool | None:
    """Tell whether a link is narrower or slower than both of its ends; None: it says nothing."""
    now, own = _amount(path / f"current_link_{what}"), _amount(path / f"max_link_{what}")
    if not now or not own:
        return None
    other = _amount(path.resolve().parent / f"max_link_{what}")
    return now < (min(own, other) if other else own)


def _amount(path: Path) -> int | None:
    """Read ``16``, or ``32.0 GT/s PCIe``, in tenths; None if it is neither."""
    whole, _, tenths = (_read(path) or "").split(" ", 1)[0].partition(".")
    value = counter(whole + (tenths[:1] or "0"))
    # A lost device answers with ones, which the kernel shows as a width of 255 or 63.
    return None if value is None or value in _LOST else value


def _read(path: Path) -> str | None:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(128).strip()
    except OSError:
        return None
