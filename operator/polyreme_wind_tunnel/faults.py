"""The failure process: faults of all nodes in the order of their times, the same for every policy of one seed."""

from __future__ import annotations

import dataclasses
import math
import random

from polyreme_wind_tunnel.causes import HOUR_MS, FaultCause, Reach
from polyreme_wind_tunnel.scenario import Scenario

FALSE_ALARM = FaultCause("false prediction", 0.0, Reach.NONE)


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One fault. It hits nothing if its node is away."""

    at_ms: int
    cause: FaultCause
    node: int
    repair_ms: int
    planned: bool
    """Whether it was predicted, so that the job leaves in time; or predicted although it does not happen."""


class FaultProcess:
    """Faults and false predictions; what is drawn depends on the machines and the seed, never on what the job does."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        faults, machines = scenario.faults, scenario.machines
        self._faults, self._nodes = faults, machines.nodes + machines.spares
        self._rate = self._nodes * machines.devices / (faults.device_mttf_hours * HOUR_MS)
        self._weights = [cause.weight for cause in faults.causes]
        of_nodes = sum(cause.weight for cause in faults.causes if cause.reach is Reach.NODE) / sum(self._weights)
        self._false_rate = self._rate * of_nodes * faults.recall * (1.0 - faults.precision) / (faults.precision or 1.0)
        self._random, self._false_random = random.Random(seed), random.Random(f"false {seed}")
        self._next = self._draw(0)
        self._false_ms = self._draw_false(0)

    @property
    def next_ms(self) -> float:
        """Time of the next one; infinite if there is none."""
        return min(self._next.at_ms, self._false_ms)

    def pop(self) -> Fault:
        """Take the next one."""
        if self._false_ms < self._next.at_ms:
            at_ms = int(self._false_ms)
            self._false_ms = self._draw_false(at_ms)
            return Fault(at_ms, FALSE_ALARM, self._false_random.randrange(self._nodes), 0, planned=True)
        taken, self._next = self._next, self._draw(self._next.at_ms)
        return taken

    def _draw(self, after_ms: int) -> Fault:
        at_ms = after_ms + max(1, round(self._random.expovariate(self._rate)))
        (cause,) = self._random.choices(self._faults.causes, self._weights)
        node = self._random.randrange(self._nodes)
        hours = self._faults.repair_hours
        mean_ms = cause.repair_ms if hours is None else hours * HOUR_MS
        repair_ms = round(mean_ms * self._random.expovariate(1.0))
        predicted = self._random.random() < self._faults.recall
        return Fault(at_ms, cause, node, repair_ms, planned=predicted and cause.reach is Reach.NODE)

    def _draw_false(self, after_ms: int) -> float:
        if not self._false_rate:
            return math.inf
        return after_ms + max(1, round(self._false_random.expovariate(self._false_rate)))
