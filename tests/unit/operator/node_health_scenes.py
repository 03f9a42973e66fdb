"""Parts of node-health scenes: policies, signs and the facts of one node."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_api.faults.table import FaultRow
from polyreme_operator.health.facts import NodeFacts, Step
from polyreme_operator.health.policy import PolicyView
from polyreme_operator.health.record import Record
from polyreme_operator.health.signs import Reading, Sign
from polyreme_operator.health.states import next_step

CLASSES = frozenset({"gpu-lost", "gpu-link", "kernel"})
POLICY = PolicyView(name="gpus", uid="p1", enforce=True, classes=CLASSES)
GPU = "polyreme.dev/GPU"
BUS = FaultRow(code="Xid79", fault_class="gpu-lost", action="Reboot", fatal=True)
FLAP = FaultRow(code="LinkFlap", fault_class="gpu-link", action="Watch")


def bus_sign(
    *, count: int = 1, at_s: float = 0.0, device: str = "GPU-0", boot: str = "b1", row: FaultRow = BUS
) -> Sign:
    """Return the sign of a GPU that fell off the bus."""
    return Sign(row=row, condition=GPU, device=device, count=count, last_s=at_s, boot=boot, message="fell off the bus")


def shown(*signs: Sign) -> Reading:
    """Return a reading that shows these signs and no others."""
    return Reading(signs=signs, clear=frozenset({GPU} - {sign.condition for sign in signs}))


BLIND = Reading(unknown=(GPU,))
NETWORK = "polyreme.dev/Network"


class Node:
    """One node whose steps are stored as the operator would store them."""

    def __init__(self, **facts: Any) -> None:
        self.facts = NodeFacts(**{"name": "n1", "policy": POLICY, "reading": shown(), **facts})

    @property
    def record(self) -> Record:
        """Its record."""
        return self.facts.record or Record()

    def now(self, **facts: Any) -> None:
        """Change what is known of it."""
        self.facts = dataclasses.replace(self.facts, **facts)

    def step(self, now_s: float, *, granted: bool = True) -> Step:
        """Decide and store."""
        step = next_step(self.facts, now_s)
        record = step.record if granted or not step.needs_charge else step.refusable
        out = record is not None and record.state.is_out
        self.now(record=record, tainted=out, broken="")
        return step
