"""State of the GPUs by NVIDIA's management library: count, memory, recovery action, XIDs.

A call about a sick GPU may block for minutes. So the library is asked in a thread of its own, and a look that takes too
long is a failed one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from polyreme_agent.findings import FINDINGS_MAX, Finding, Look, State, pci_name

GPUS_MAX: Final = 64
EVERY_S: Final = 5.0
STUCK_S: Final = 60.0
EVENTS_MAX: Final = 64
"""XIDs of one look."""
_RECOVERY_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"
_RECOVERY: Final = {0: "None", 1: "Reset", 2: "Reboot", 3: "Watch", 4: "Reset", 5: "Watch", 6: "Reset", 7: "Reboot"}
"""``nvmlDeviceGpuRecoveryAction_t`` of driver 580: none, reset, reboot, drain P2P, drain and reset, recover the
IMEX domain, reset of the bus, reboot of the system."""
_NO_DRIVER: Final = frozenset({9, 12})
"""NVML_ERROR_DRIVER_NOT_LOADED and NVML_ERROR_LIBRARY_NOT_FOUND."""
_LOST: Final = frozenset({15, 16})
"""NVML_ERROR_GPU_IS_LOST and NVML_ERROR_RESET_REQUIRED."""
_UNSUPPORTED: Final = frozenset({2, 3, 6, 13})
"""Invalid argument, not supported, not found, function not found: an older driver or another GPU."""


class Nvml:
    """NVML, by nvidia-ml-py.

    Args:
        load: Imports the library; it raises ImportError where it is not installed.
        expected: Returns how many GPUs the bus has.
        now_s: Time of day.
    """

    name = "nvml"

    def __init__(self, load: Callable[[], Any], *, expected: Callable[[], int], now_s: Callable[[], float]) -> None:
        self._load, self._expected, self._now_s = load, expected, now_s
        self._library: Any = None
        self._events: Any = None

    def look(self) -> Look:
        """Ask once; it may block."""
        try:
            if self._library is None:
                self._start()
            return self._ask(self._library)
        except ImportError:
            return self._absent("nvidia-ml-py is not installed")
        except Exception as error:  # noqa: BLE001 - NVMLError has no name before the library is there
            self._library = None
            if getattr(error, "value", None) in _NO_DRIVER:
                return self._absent("NVIDIA's driver is not loaded")
            return Look(state=State.FAILED, why=f"NVML: {str(error)[:120]}")

    def _absent(self, why: str) -> Look:
        gpus = self._expected()
        if gpus:
            return Look(state=State.FAILED, why=f"{why}, though the bus has {gpus} GPUs")
        return Look(state=State.ABSENT, why=why)

    def _start(self) -> None:
        library = self._load()
        library.nvmlInit()
        self._library, self._events = library, None
        try:
            events = library.nvmlEventSetCreate()
            for index in range(min(library.nvmlDeviceGetCount(), GPUS_MAX)):
                device = library.nvmlDeviceGetHandleByIndex(index)
                library.nvmlDeviceRegisterEvents(device, library.nvmlEventTypeXidCriticalError, events)
            self._events = events
        except library.NVMLError:
            self._events = None  # the kernel log has the XIDs, too

    def _ask(self, library: Any) -> Look:
        gpus = min(library.nvmlDeviceGetCount(), GPUS_MAX)
        present: list[Finding] = []
        verdicts: list[Finding] = []
        answered, asked_s = 0, self._now_s()
        for index in range(gpus):
            try:
                device = library.nvmlDeviceGetHandleByIndex(index)
                bus = library.nvmlDeviceGetPciInfo(device).busId
                name = pci_name(bus.decode() if isinstance(bus, bytes) else bus)
                present += self._memory(library, device, name)
                action = self._recovery(library, device)
                answered += 1
            except library.NVMLError as error:
                if error.value in _LOST:
                    continue
                present.append(Finding(code="GPUUnknownAnswer", device=str(index), text=f"NVML error {error.value}"))
                answered += 1
                continue
            if action:
                verdicts.append(
                    Finding(code="GPURecoveryAction", device=name, at_s=asked_s, action=action, verdict=True)
                )
        expected = max(self._expected(), gpus)
        if answered < expected:
            present.append(Finding(code="GPUMissing", text=f"{answered} of {expected} GPUs answer"))
        if not expected:
            return Look(state=State.ABSENT, why="the node has no GPU")
        return Look(
            state=State.WORKS,
            present=tuple(present[:FINDINGS_MAX]),
            occurred=tuple(self._xids(library)),
            verdicts=tuple(verdicts),
        )

    def _memory(self, library: Any, device: Any, name: str) -> list[Finding]:
        found = []
        remapped = _try(library, lambda: library.nvmlDeviceGetRemappedRows(device))
        if remapped is not None:
            _, _, pending, failed = remapped
            found += [Finding(code="GPURowRemapPending", device=name)] if pending else []
            found += [Finding(code="GPURowRemapFailed", device=name)] if failed else []
        errors = _try(
            library,
            lambda: library.nvmlDeviceGetTotalEccErrors(
                device, library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
            ),
        )
        if errors:
            found.append(Finding(code="GPUDoubleBitError", device=name, count=int(errors)))
        return found

    def _recovery(self, library: Any, device: Any) -> str:
        field = getattr(library, _RECOVERY_FIELD, None)
        if field is None:
            return ""
        values = _try(library, lambda: library.nvmlDeviceGetFieldValues(device, [field]))
        if not values or values[0].nvmlReturn:
            return ""
        return _RECOVERY.get(int(values[0].value.uiVal), "Watch")

    def _xids(self, library: Any) -> list[Finding]:
        found: list[Finding] = []
        while self._events is not None and len(found) < EVENTS_MAX:
            try:
                event = library.nvmlEventSetWait(self._events, 0)
                bus = library.nvmlDeviceGetPciInfo(event.device).busId
            except library.NVMLError:
                break  # a timeout: there is no other
            device = pci_name(bus.decode() if isinstance(bus, bytes) else bus)
            found.append(Finding(code=f"Xid{int(event.eventData)}", device=device, at_s=self._now_s()))
        return found


def _try(library: Any, ask: Callable[[], Any]) -> Any:
    """Ask what not every GPU has; None if this one has not."""
    try:
        return ask()
    except library.NVMLError as error:
        if error.value in _UNSUPPORTED:
            return None
        raise


class InThread:
    """Asks a collector that may block from a thread of its own.

    Args:
        collector: The collector.
        every_s: Time between two looks.
        uptime_s: A clock that never goes back.
    """

    def __init__(self, collector: Nvml, *, uptime_s: Callable[[], float], every_s: float = EVERY_S) -> None:
        self.name = collector.name
        self._collector, self._uptime_s, self._every_s = collector, uptime_s, every_s
        self._lock = threading.Lock()
        self._latest = Look(state=State.FAILED, why="not asked yet")
        self._occurred: list[Finding] = []
        self._asked_s = uptime_s()
        self._stop = threading.Event()
        threading.Thread(target=self._run, name=self.name, daemon=True).start()

    def look(self) -> Look:
        """Return the latest answer, and every fault that occurred since the look before."""
        with self._lock:
            late_s = self._uptime_s() - self._asked_s
            if late_s > STUCK_S:
                return Look(state=State.FAILED, why=f"no answer for {late_s:.0f} s: a call into the driver hangs")
            occurred, self._occurred = tuple(self._occurred), []
            latest = self._latest
        return Look(
            state=latest.state, why=latest.why, present=latest.present, occurred=occurred, verdicts=latest.verdicts
        )

    def close(self) -> None:
        """Ask no more."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            answer = self._collector.look()
            with self._lock:
                self._latest, self._asked_s = answer, self._uptime_s()
                self._occurred = [*self._occurred, *answer.occurred][-FINDINGS_MAX:]
            self._stop.wait(self._every_s)
