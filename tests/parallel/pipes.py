"""Pipelines in which the gradient of one process is looked for again: every schedule, alone and folded with the others.

``ALWAYS`` runs with the tests, and so does one of ``IN_TURN`` by the commit; ``make soak-pipes`` runs all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_planner.schedules import V_SHAPED
from tests.parallel.grid import Degrees, name

LAYERS = 8
"""Decoder layers of the model: eight stages can be filled."""


@dataclasses.dataclass(frozen=True)
class Pipe:
    """A layout with a schedule and a split."""

    degrees: Degrees
    schedule: str
    layers: tuple[int, ...]
    microbatches: int = 4

    @property
    def request(self) -> dict[str, Any]:
        """What a gang is asked for in addition to its layout; a data-parallel rank has one pack per microbatch."""
        pipeline = {"schedule": self.schedule, "layers": self.layers, "microbatches": self.microbatches}
        recompute = "selective" if self.schedule in V_SHAPED else "full"
        return {"pipeline": pipeline, "decoder": {"layers": LAYERS}, "packs": self.packs, "recompute": recompute}

    @property
    def packs(self) -> int:
        """Packs of a step."""
        return self.microbatches * self.degrees.get("dp", 1)

    def __str__(self) -> str:
        """Name it, ``DualPipeV pp2 ep2``."""
        return f"{self.schedule} {name(self.degrees)}"


TWO = {"1F1B": (3, 5), "Interleaved1F1B": (1, 2, 3, 2), "ZBVZeroBubble": (0, 2, 3, 3), "DualPipeV": (2, 2, 4, 0)}
FOUR = {
    "1F1B": (1, 2, 3, 2),
    "Interleaved1F1B": (1, 1, 1, 1, 1, 1, 1, 1),
    "ZBVZeroBubble": (0, 1, 1, 2, 1, 1, 1, 1),
    "DualPipeV": (1, 1, 1, 2, 1, 1, 1, 0),
}
FOLDED: tuple[Degrees, ...] = (
    {"pp": 2},
    {"pp": 2, "dp": 2, "ep": 2},
    {"pp": 2, "cp": 2, "ep": 2},
    {"pp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "cp": 2, "ulysses": 2, "ep": 4},
    {"pp": 2, "dp": 2, "tp": 2, "ep": 4},
    {"pp": 2, "cp": 2, "tp": 2, "ep": 2},
)
DEEP: tuple[Degrees, ...] = ({"pp": 4}, {"pp": 4, "dp": 2, "ep": 2}, {"pp": 4, "cp": 2}, {"pp": 4, "tp": 2, "ep": 2})

ALL = tuple(Pipe(degrees, schedule, TWO[schedule]) for degrees in FOLDED for schedule in TWO) + tuple(
    Pipe(degrees, schedule, FOUR[schedule], microbatches=8) for degrees in DEEP for schedule in FOUR
)
ALL += (Pipe({"pp": 2}, "Interleaved1F1B", (1, 1, 2, 1, 1, 2)),)
"""And one with three stages a rank."""
ALWAYS = (
    Pipe({"pp": 2, "dp": 2, "ep": 2}, "ZBVZeroBubble", TWO["ZBVZeroBubble"]),
    Pipe({"pp": 2, "cp": 2, "ep": 2}, "DualPipeV", TWO["DualPipeV"]),
)
IN_TURN = tuple(pipe for pipe in ALL if pipe not in ALWAYS and sum(pipe.degrees.values()) < 8)


def turn(number: int) -> Pipe:
    """The pipeline whose turn it is."""
    return IN_TURN[number % len(IN_TURN)]
