"""Metrics of a DCGM exporter on the node (dcgm-exporter 3.3 to 4.2), where one runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from polyreme_agent.findings import Finding, Look, State, counter, pci_name

RESPONSE_BYTES_MAX: Final = 4 << 20
LINES_MAX: Final = 20_000
TIMEOUT_S: Final = 2.0
_LINE = re.compile(r"(DCGM_FI_DEV_[A-Z_]{1,48})\{([^}]{0,2000})\} (\d{1,20})(?:\.0+)?(?:e\+00)?\s*", re.ASCII)
_BUS = re.compile(r'(?:^|,)pci_bus_id="([0-9A-Fa-f:.]{7,16})"', re.ASCII)
_UUID = re.compile(r'(?:^|,)UUID="([A-Za-z0-9-]{1,64})"', re.ASCII)
_FLAGS: Final = {
    "DCGM_FI_DEV_ROW_REMAP_PENDING": "GPURowRemapPending",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "GPURowRemapFailed",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "GPUDoubleBitError",
}
_THERMAL: Final = "DCGM_FI_DEV_THERMAL_VIOLATION"
_XID: Final = "DCGM_FI_DEV_XID_ERRORS"
_REPLAY: Final = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"
_RISING: Final = {_THERMAL: "GPUThermalViolation", _REPLAY: "PCIeReplay"}


class Dcgm:
    """A DCGM exporter.

    Args:
        fetch: Returns the page of metrics, or None where no exporter listens.
        now_s: Time of day.
    """

    name = "dcgm"

    def __init__(self, fetch: Callable[[], str | None], *, now_s: Callable[[], float]) -> None:
        self._fetch, self._now_s = fetch, now_s
        self._before: dict[tuple[str, str], int] = {}

    def look(self) -> Look:
        """Read the page once."""
        try:
            page = self._fetch()
        except (OSError, ValueError) as error:
            return Look(state=State.FAILED, why=f"the DCGM exporter can't be read: {str(error)[:100]}")
        if page is None:
            return Look(state=State.ABSENT, why="no DCGM exporter is named")
        present: list[Finding] = []
        occurred: list[Finding] = []
        lines = 0
        for line in page.splitlines()[:LINES_MAX]:
            found = _LINE.fullmatch(line)
            value = counter(found[3]) if found is not None else None
            if found is None or value is None:
                continue
            lines += 1
            device = _device(found[2])
            if found[1] in _FLAGS and value:
                present.append(Finding(code=_FLAGS[found[1]], device=device))
            elif found[1] in _RISING or found[1] == _XID:
                before = self._before.get((found[1], device))
                self._before[found[1], device] = value
                code = _RISING.get(found[1]) or f"Xid{value}"
                rose = before is not None and value > before
                if rose if found[1] in _RISING else bool(value) and 0 < value < 10_000 and value != before:
                    occurred.append(Finding(code=code, device=device, at_s=self._now_s()))
        if not lines:
            return Look(state=State.FAILED, why="the DCGM exporter's page has no metric of a GPU")
        return Look(state=State.WORKS, present=tuple(present), occurred=tuple(occurred))


def _device(labels: str) -> str:
    if (bus := _BUS.search(labels)) is not None:
        return pci_name(bus[1])
    uuid = _UUID.search(labels)
    return uuid[1] if uuid is not None else ""


def fetch(host: str, port: int) -> str:
    """Read an exporter's page.

    Raises:
        OSError: If it does not answer.
    """
    import http.client

    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read(RESPONSE_BYTES_MAX).decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise OSError(f"not HTTP: {error!r}") from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise OSError(f"status {response.status}")
    return text
