"""Findings of collectors, and what they can say about their hardware."""

from __future__ import annotations

import dataclasses
import re
from enum import StrEnum
from typing import Final

FINDINGS_MAX: Final = 256
"""Findings of one look of a collector; more are counted and dropped."""
NUMBER_MAX: Final = 2**64 - 1
"""Largest value of a counter in sysfs."""
_PCI = re.compile(r"(?:(?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2}):(?P<device>[0-9a-f]{2})(?:\.[0-7])?")


class State(StrEnum):
    """What a collector can say."""

    WORKS = "works"
    ABSENT = "absent"
    """There is no such hardware or driver, which is never the same as healthy."""
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault that a collector found."""

    code: str
    device: str = ""
    at_s: float = 0.0
    sequence: int = 0
    """Number of the kernel log's record; 0: it is none."""
    count: int = 1
    action: str = ""
    """The driver's own recovery action; empty: it gave none."""
    verdict: bool = False
    """Whether ``action`` holds for all faults of the device, as XID 154 and NVML say it."""
    text: str = ""
    """A sentence about it, free of text that tenants can write."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look of a collector gave."""

    state: State
    why: str = ""
    """Why it is absent or failed."""
    present: tuple[Finding, ...] = ()
    """Faults that are there now; they end when a later look does not have them."""
    occurred: tuple[Finding, ...] = ()
    """Faults that occurred since the look before."""
    verdicts: tuple[Finding, ...] = ()
    """Recovery actions of devices, as the driver gives them now; ``None`` included."""


def pci_name(text: str) -> str:
    """Return a PCI address in one form, ``0000:3b:00``, or an empty text if it is none.

    The kernel log has no function, sysfs has one, and NVML writes eight digits of domain and capitals.
    """
    found = _PCI.fullmatch(text.strip().lower())
    if found is None:
        return ""
    domain = int(found["domain"] or "0", 16)
    return f"{domain:04x}:{found['bus']}:{found['device']}"


def counter(text: str) -> int | None:
    """Read a counter; None if it is none that hardware can have."""
    text = text.strip()
    if not (text.isascii() and text.isdigit()) or len(text) > 20:
        return None
    value = int(text)
    return value if value <= NUMBER_MAX else None
