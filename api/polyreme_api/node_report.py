"""The node agent's report in a Node's conditions, written and read back.

A condition's ``message`` is one sentence for people, then one line for each event:

    GPU-5f0c: GPU has fallen off the bus (XID 79)
    code=Xid79 device=GPU-5f0c count=1 last=1763863200 boot=0b7e... sequence=4711 action=Reboot

Messages are written by others, too, and by anything that may write a Node's status: reading is strict and bounded, and
never raises.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from polyreme_api import labels

CONDITION_PREFIX = f"{labels.GROUP}/"
CONDITION_AGENT = f"{CONDITION_PREFIX}Agent"
"""The agent's heartbeat: which detectors work, and which have nothing to examine."""
REASON_ABSENT = "Absent"
"""Reason of a condition whose detectors have nothing to examine, such as the network of a node without an adapter."""
CONDITION_PRE_CHECK = f"{CONDITION_PREFIX}PreCheck"
"""Checks before training, written by the operator; ``True``: the node failed one."""
CONDITION_POD_START = f"{CONDITION_PREFIX}PodStart"
"""Starts of pods, written by the operator; ``True``: the node rejected pods, or did not start or end them."""
CONDITION_SLOW_RANK = f"{CONDITION_PREFIX}SlowRank"
"""Slow ranks of jobs that report them, written by the operator; ``True``: one ran on the node."""
CONDITIONS = tuple(CONDITION_PREFIX + name for name in ("GPU", "GPULink", "Network", "PCIe", "Kernel", "Storage"))
"""Types of the detectors' conditions; ``True``: a fault is there."""
RECOVERY_ACTION = "GPURecoveryAction"
STATES = frozenset(
    {
        "GPUMissing",
        "GPURowRemapPending",
        "GPURowRemapFailed",
        "GPUDoubleBitError",
        "GPUUnknownAnswer",
        RECOVERY_ACTION,
        "PCIeWidth",
        "PCIeSpeed",
        "PortDown",
        "HcaLost",
    }
)
"""Codes of states, which end when they are gone; all others are events."""
MESSAGE_CHARACTERS_MAX = 1_024
SENTENCE_CHARACTERS_MAX = 256
EVENTS_MAX = 16
COUNT_MAX = 1_000_000_000
TIME_MAX_S = 10_000_000_000
_WORD = re.compile(r"[A-Za-z0-9_.:/-]{1,64}")
_CODE = re.compile(r"[A-Z][A-Za-z0-9]{0,62}")
_NUMBER = re.compile(r"[0-9]{1,16}")
_ACTIONS = frozenset({"None", "Watch", "RestartApplication", "Reset", "Reboot", "Replace", "Support"})
_KEYS = ("code", "device", "count", "last", "boot", "sequence", "action")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent:
    """Occurrences of one fault on one device."""

    code: str
    device: str = ""
    count: int = 1
    last_s: int = 0
    """When it occurred last [s since 1970, by the node's clock]; 0: unknown."""
    boot: str = ""
    """Boot in which it occurred."""
    sequence: int = 0
    """Its number in the kernel's log; 0: it does not come from there."""
    action: str = ""
    """The driver's own recovery action, which outranks the fault table's; empty: none."""


def encode(sentence: str, events: Sequence[NodeEvent]) -> str:
    """Return the message of a condition; events that don't fit are left out, the first ones stay.

    Raises:
        ValueError: If an event can't be written.
    """
    message = " ".join(sentence.split())[:SENTENCE_CHARACTERS_MAX]
    for event in events[:EVENTS_MAX]:
        line = _line(event)
        if len(message) + 1 + len(line) > MESSAGE_CHARACTERS_MAX:
            break
        message += f"\n{line}"
    return message


def decode(message: str) -> tuple[tuple[NodeEvent, ...], str]:
    """Return the events that can be read, and why others can't; empty if all could."""
    if len(message) > MESSAGE_CHARACTERS_MAX:
        return (), f"its message has more than {MESSAGE_CHARACTERS_MAX} characters, so no event of it is read"
    events: list[NodeEvent] = []
    problem = ""
    for number, line in enumerate(message.split("\n")[1:], start=2):
        event = _event(line)
        if event is not None and len(events) < EVENTS_MAX:
            events.append(event)
        elif not problem:
            problem = f"line {number} of its message is no event: {line[:64]!r}"
    return tuple(events), problem


def _line(event: NodeEvent) -> str:
    cells = {
        "code": event.code,
        "device": event.device,
        "count": str(max(1, min(event.count, COUNT_MAX))),
        "last": str(max(0, min(event.last_s, TIME_MAX_S))) if event.last_s > 0 else "",
        "boot": event.boot,
        "sequence": str(event.sequence) if event.sequence else "",
        "action": event.action,
    }
    line = " ".join(f"{key}={value}" for key, value in cells.items() if value)
    if _event(line) is None:
        raise ValueError(f"not an event that a condition can hold: {line[:200]!r}")
    return line


def _event(line: str) -> NodeEvent | None:
    cells: dict[str, str] = {}
    for cell in line.split(" ", len(_KEYS)):
        key, _, value = cell.partition("=")
        if key not in _KEYS or key in cells or _WORD.fullmatch(value) is None:
            return None
        cells[key] = value
    numbers = {key: cells.get(key, "0") for key in ("count", "last", "sequence")}
    if _CODE.fullmatch(cells.get("code", "")) is None or cells.get("action", "None") not in _ACTIONS:
        return None
    if not all(_NUMBER.fullmatch(number) for number in numbers.values()):
        return None
    count, last_s = int(cells.get("count", "1")), int(numbers["last"])
    if not 1 <= count <= COUNT_MAX or last_s > TIME_MAX_S:
        return None
    return NodeEvent(
        code=cells["code"],
        device=cells.get("device", ""),
        count=count,
        last_s=last_s,
        boot=cells.get("boot", ""),
        sequence=int(numbers["sequence"]),
        action=cells.get("action", ""),
    )
