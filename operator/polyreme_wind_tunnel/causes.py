"""Causes of unexpected interruptions: their weights, which nodes each takes down, and how long its repair takes.

Source: The Llama 3 Herd of Models (arXiv:2407.21783), table 5: 419 unexpected interruptions in 54 days on 16,384 GPUs.
The paper names no repair times; those here are rounded from ``polyreme_api.faults`` (a reset takes minutes, a
replacement days), and ``repair_hours`` of a scenario overrides them.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum

HOUR_MS = 3_600_000

LLAMA3_DEVICES = 16_384
LLAMA3_DAYS = 54
LLAMA3_INTERRUPTIONS = 419
DEVICE_MTTF_HOURS = LLAMA3_DEVICES * LLAMA3_DAYS * 24 / LLAMA3_INTERRUPTIONS
"""Hours between two interruptions of one device: 50,675."""


class Reach(StrEnum):
    """What an interruption takes out of service."""

    NONE = "None"
    """Nothing: a rank ended, its node is good."""
    NODE = "Node"
    RACK = "Rack"


@dataclasses.dataclass(frozen=True, slots=True)
class FaultCause:
    """One row of the table."""

    name: str
    weight: float
    reach: Reach
    repair_ms: int = 0
    """Mean time until the nodes that it takes down are back."""
    silent: bool = False
    """Whether no process ends, so that it is found as a hang."""


_RESET_MS, REPLACE_MS = HOUR_MS // 2, 48 * HOUR_MS

LLAMA3: tuple[FaultCause, ...] = (
    FaultCause("faulty GPU", 148, Reach.NODE, REPLACE_MS),
    FaultCause("GPU HBM3 memory", 72, Reach.NODE, _RESET_MS),
    FaultCause("software bug", 54, Reach.NONE),
    FaultCause("network switch or cable", 35, Reach.RACK, 4 * HOUR_MS),
    FaultCause("host maintenance", 32, Reach.NODE, 4 * HOUR_MS),
    FaultCause("GPU SRAM memory", 19, Reach.NODE, _RESET_MS),
    FaultCause("GPU system processor", 17, Reach.NODE, _RESET_MS),
    FaultCause("NIC", 7, Reach.NODE, REPLACE_MS),
    FaultCause("NCCL watchdog timeout", 7, Reach.NONE, silent=True),
    FaultCause("silent data corruption", 6, Reach.NODE, REPLACE_MS, silent=True),
    FaultCause("GPU thermal interface or sensor", 6, Reach.NODE, REPLACE_MS),
    FaultCause("SSD", 3, Reach.NODE, REPLACE_MS),
    FaultCause("power supply", 3, Reach.NODE, REPLACE_MS),
    FaultCause("server chassis", 2, Reach.NODE, REPLACE_MS),
    FaultCause("IO expansion board", 2, Reach.NODE, REPLACE_MS),
    FaultCause("dependency", 2, Reach.NONE),
    FaultCause("CPU", 2, Reach.NODE, REPLACE_MS),
    FaultCause("system memory", 2, Reach.NODE, REPLACE_MS),
)
