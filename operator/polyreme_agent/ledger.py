"""The faults of a node: what every collector found, merged into one condition for each detector."""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from polyreme_agent.findings import Finding, Look, State
from polyreme_api.faults.table import FaultRow
from polyreme_api.node_report import (
    CONDITION_AGENT,
    CONDITION_PREFIX,
    COUNT_MAX,
    REASON_ABSENT,
    RECOVERY_ACTION,
    STATES,
    NodeEvent,
    encode,
)

HOLD_S: Final = 300.0
"""How long a fault is shown that asks for no repair; others are shown until the node boots or the driver is content."""
ENTRIES_MAX: Final = 256
TIMES_MAX: Final = 64
"""Occurrences whose times are kept, for counts within a window."""
BEYOND_DRIVER: Final = frozenset({"Replace", "Support"})
"""Actions that no driver asks for: its ``None`` means neither a reset nor a reboot, and says nothing about these."""
REPAIRED: Final = frozenset({"Reset", "Reboot", "Replace", "Support"})
"""Actions without which a fault does not end."""
GRAVITY: Final = ("None", "Watch", "RestartApplication", "Reset", "Reboot", "Support", "Replace")
_DETECTORS: Final = {
    "gpu-link": "GPULink",
    "pcie": "PCIe",
    "nic": "Network",
    "network-link": "Network",
    "disk": "Storage",
    "kernel": "Kernel",
}
"""Detector by class; all others are the GPU's."""
SOURCES: Final = {
    "GPU": ("nvml", "dcgm"),
    "GPULink": ("nvml", "dcgm"),
    "Network": ("infiniband",),
    "PCIe": ("pcie",),
    "Kernel": ("kernel-log",),
    "Storage": ("kernel-log",),
}
"""Collectors by detector; at least one of them must work before the detector can say that there is no fault."""
_DEVICE = re.compile(r"[A-Za-z0-9_.:/-]{0,64}", re.ASCII)
_CODE = re.compile(r"[A-Z][A-Za-z0-9]{0,62}", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A condition as it is to be written."""

    type: str
    status: str
    reason: str
    message: str


@dataclasses.dataclass(slots=True, kw_only=True)
class _Entry:
    """One fault of one device."""

    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """By collector: two that report the same fault count it once."""
    times: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=TIMES_MAX))
    last_s: float = 0.0
    seen_s: float = 0.0
    """When the agent learned of it last."""
    sequence: int = 0
    action: str = ""
    text: str = ""
    present: set[str] = dataclasses.field(default_factory=set)
    """Collectors for which it is there now."""


class Ledger:
    """Faults of this boot.

    Args:
        table: The fault table.
        boot: This boot's id.
    """

    def __init__(self, table: Mapping[str, FaultRow], *, boot: str) -> None:
        self._table, self._boot = table, boot
        self._entries: dict[tuple[str, str], _Entry] = {}
        self._verdicts: dict[str, str] = {}
        self._collectors: dict[str, Look] = {}
        self.dropped = 0
        """Faults that did not fit."""

    def put(self, collector: str, look: Look, now_s: float) -> None:
        """Take in one look."""
        self._collectors[collector] = dataclasses.replace(look, present=(), occurred=(), verdicts=())
        if look.state is State.WORKS:
            for each in self._entries.values():
                each.present.discard(collector)
        for finding in look.present:
            self._present(collector, finding, now_s)
        for finding in look.verdicts:
            self._asked(collector, finding, now_s)
        for finding in look.occurred:
            self._occurred(collector, finding, now_s)

    def restore(self, events: Iterable[NodeEvent]) -> None:
        """Take in what the conditions said before the agent started again; faults of other boots have ended."""
        for event in events:
            if event.boot != self._boot or event.code in STATES:
                continue
            restored = self._entry(Finding(code=event.code, device=event.device))
            if restored is not None:
                entry, source = restored, "kernel-log" if event.sequence else "before"
                before = max(entry.counts.values(), default=0)
                entry.counts[source] = max(entry.counts.get(source, 0), event.count)
                entry.last_s, entry.sequence = (
                    max(entry.last_s, float(event.last_s)),
                    max(entry.sequence, event.sequence),
                )
                entry.times.extend([entry.last_s] * min(max(0, event.count - before), TIMES_MAX))
                entry.action = entry.action or event.action

    def conditions(self, now_s: float) -> tuple[Condition, ...]:
        """Return every condition, as it is now."""
        self._forget(now_s)
        events: dict[str, list[NodeEvent]] = {name: [] for name in SOURCES}
        for key in sorted(key for key in self._entries if self._is_shown(key, now_s)):
            events[self._detector(key[0])].append(self._event(key, now_s))
        return (*(self._condition(name, each) for name, each in events.items()), self._heartbeat())

    # ------------------------------------------------------------------------------------------------------- entries

    def _present(self, collector: str, finding: Finding, now_s: float) -> None:
        entry = self._entry(finding)
        if entry is None:
            return
        if collector not in entry.counts:
            entry.times.append(now_s)
        entry.present.add(collector)
        entry.counts[collector] = max(1, finding.count)
        entry.last_s, entry.text = now_s, finding.text

    def _asked(self, collector: str, finding: Finding, now_s: float) -> None:
        """Take in the recovery action that a driver answered with; an answer from before a fault does not cover it."""
        others = [
            entry
            for (code, device), entry in self._entries.items()
            if device == finding.device and code != RECOVERY_ACTION
        ]
        if finding.action == "None" and any(entry.seen_s > (finding.at_s or now_s) for entry in others):
            return
        self._verdicts[finding.device] = finding.action
        if finding.action != "None" and not others:
            self._present(collector, finding, now_s)

    def _occurred(self, collector: str, finding: Finding, now_s: float) -> None:
        if finding.verdict:
            self._verdicts[finding.device] = finding.action
            if finding.action == "None":
                return
        entry = self._entry(finding)
        if entry is None or (finding.sequence and finding.sequence <= entry.sequence):
            return
        # A clock in the future would keep the fault forever.
        at_s = min(finding.at_s or now_s, now_s)
        before = max(entry.counts.values(), default=0)
        entry.counts[collector] = min(COUNT_MAX, entry.counts.get(collector, 0) + max(1, finding.count))
        entry.last_s, entry.seen_s = max(entry.last_s, at_s), now_s
        entry.times.extend([at_s] * min(max(0, entry.counts[collector] - before), TIMES_MAX))
        if self._verdicts.get(finding.device) == "None" and not finding.verdict:
            del self._verdicts[finding.device]
        entry.sequence = max(entry.sequence, finding.sequence)
        entry.action, entry.text = finding.action or entry.action, finding.text

    def _entry(self, finding: Finding) -> _Entry | None:
        key = (finding.code, finding.device)
        if key not in self._entries:
            if (
                len(self._entries) >= ENTRIES_MAX
                or _CODE.fullmatch(finding.code) is None
                or _DEVICE.fullmatch(finding.device) is None
            ):
                self.dropped += 1
                return None
            self._entries[key] = _Entry()
        return self._entries[key]

    def _action(self, key: tuple[str, str]) -> str:
        """Return what a fault asks for: the driver's verdict outranks the table; an unknown code asks for nothing."""
        row = self._table.get(key[0])
        return self._said(key) or (row.action if row is not None else "None")

    def _said(self, key: tuple[str, str]) -> str:
        """Return what the driver asks for; empty: nothing that outranks the table."""
        code, device = key
        verdict, row = self._verdicts.get(device, "") if device else "", self._table.get(code)
        if verdict == "None" and row is not None and row.action in BEYOND_DRIVER:
            verdict = ""
        return verdict or self._entries[key].action

    def _is_shown(self, key: tuple[str, str], now_s: float) -> bool:
        entry = self._entries[key]
        held = self._action(key) in REPAIRED or now_s - entry.last_s < HOLD_S
        return bool(entry.present) or (held and key[0] not in STATES)

    def _forget(self, now_s: float) -> None:
        """Drop faults that have ended; those that count within a window are kept unseen until it has passed."""
        for key, entry in list(self._entries.items()):
            row = self._table.get(key[0])
            counts = row is not None and now_s - entry.last_s < row.window_s and key[0] not in STATES
            if not counts and not self._is_shown(key, now_s):
                del self._entries[key]

    # ---------------------------------------------------------------------------------------------------- conditions

    def _detector(self, code: str) -> str:
        row = self._table.get(code)
        return _DETECTORS.get(row.fault_class, "GPU") if row is not None else "GPU"

    def _event(self, key: tuple[str, str], now_s: float) -> NodeEvent:
        entry, row = self._entries[key], self._table.get(key[0])
        count = max(entry.counts.values(), default=1)
        if row is not None and row.window_s:
            count = max(1, sum(now_s - at_s <= row.window_s for at_s in entry.times))
        return NodeEvent(
            code=key[0],
            device=key[1],
            count=min(count, COUNT_MAX),
            last_s=int(entry.last_s),
            boot=self._boot,
            sequence=entry.sequence,
            action=self._said(key),
        )

    def _condition(self, name: str, events: list[NodeEvent]) -> Condition:
        kind = CONDITION_PREFIX + name
        if events:
            events.sort(key=lambda event: (-GRAVITY.index(self._action((event.code, event.device))), -event.last_s))
            first = events[0]
            return Condition(
                type=kind, status="True", reason=first.code, message=encode(self._sentence(first, len(events)), events)
            )
        states = [self._collectors[each] for each in SOURCES[name] if each in self._collectors]
        if any(look.state is State.WORKS for look in states):
            return Condition(type=kind, status="False", reason="NoFault", message="Examined; no fault was found.")
        failed = [look for look in states if look.state is State.FAILED]
        why = "; ".join(look.why for look in failed or states) or "no collector has looked yet"
        reason = "Failed" if failed else REASON_ABSENT
        return Condition(type=kind, status="Unknown", reason=reason, message=f"Not examined: {why}"[:512])

    def _sentence(self, event: NodeEvent, number: int) -> str:
        row = self._table.get(event.code)
        meaning = row.meaning if row is not None else "a code that the fault table lacks; no action follows"
        text = self._entries[event.code, event.device].text
        where = f"{event.device}: " if event.device else ""
        more = f"; {number - 1} more faults" if number > 1 else ""
        return f"{where}{meaning} ({event.code}{', ' + text if text else ''}){more}"

    def _heartbeat(self) -> Condition:
        states = {name: look.state for name, look in sorted(self._collectors.items())}
        failed = [name for name, state in states.items() if state is State.FAILED]
        listed = ", ".join(f"{name} {state}" for name, state in states.items())
        more = "".join(f"; {name}: {look.why}" for name, look in sorted(self._collectors.items()) if look.why)
        more += f"; {self.dropped} faults did not fit" if self.dropped else ""
        return Condition(
            type=CONDITION_AGENT,
            status="True" if failed else "False",
            reason="CollectorFailed" if failed else "Works",
            message=f"Collectors: {listed}{more}"[:512],
        )
