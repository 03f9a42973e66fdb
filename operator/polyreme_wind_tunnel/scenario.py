"""Scenario of a wind tunnel: the machines, how they fail, how the job saves and comes back. Times are milliseconds."""

from __future__ import annotations

import dataclasses

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec
from polyreme_operator.types.reasons import RUNGS, Scope
from polyreme_wind_tunnel.causes import DEVICE_MTTF_HOURS, HOUR_MS, LLAMA3, FaultCause

ANY_JOB = TrainingJobSpec.model_validate(
    {
        "model": {"preset": "kimi-vl-nano"},
        "data": {"sources": [{"name": "any", "dataset": "any"}], "sequenceTokens": 1024},
        "training": {"steps": 1, "packsPerStep": 1},
    }
)
"""The job of a scenario that names none: its failure policy has the defaults."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Nodes of the job, and those in reserve."""

    nodes: int
    devices: int = 8
    """Of each node."""
    nodes_per_rack: int = 8
    spares: int = 0
    """Nodes beyond those of the job."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The failure process: independent exponential times, so a job's MTTF is that of a device over its devices."""

    device_mttf_hours: float = DEVICE_MTTF_HOURS
    causes: tuple[FaultCause, ...] = LLAMA3
    repair_hours: float | None = None
    """Mean of all repairs; None: each cause its own."""
    recall: float = 0.0
    """Share of nodes' faults that are predicted: the job saves and leaves the node in time."""
    precision: float = 1.0
    """Share of predictions that come true."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Checkpoints: one after each interval of training."""

    interval_ms: int
    stall_ms: int = 1_000
    """How long each holds up the steps."""
    durable_ms: int = 0
    """How long after the stall it takes until it can be resumed from."""
    in_memory: bool = True
    """Whether a restart in place resumes from the copy in memory, which needs no storage."""

    def durable_after_ms(self, scope: Scope) -> int:
        """Return how long after its stall a restart of a scope can resume from a checkpoint."""
        return 0 if scope is Scope.PROCESS and self.in_memory else self.durable_ms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How long it takes to see a fault and to train again."""

    exit_seen_ms: int = 5_000
    """From the end of a rank to the decision."""
    hang_seen_ms: int = 120_000
    """From a silent fault to the decision."""
    process_ms: int = 20_000
    """From the decision to the first step, by rung: restart in place, new pods for what failed, a new gang."""
    pod_ms: int = 120_000
    gang_ms: int = 300_000

    def seen_ms(self, cause: FaultCause) -> int:
        """Return how long after a fault the failure policy decides about it."""
        return self.hang_seen_ms if cause.silent else self.exit_seen_ms

    def start_ms(self, scope: Scope) -> int:
        """Return how long an attempt of a scope takes to begin."""
        return {Scope.PROCESS: self.process_ms, Scope.POD: self.pod_ms}.get(scope, self.gang_ms)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that one run depends on, but for its seed."""

    machines: Machines
    saves: Saves
    faults: Faults = dataclasses.field(default_factory=Faults)
    recovery: Recovery = dataclasses.field(default_factory=Recovery)
    spec: TrainingJobSpec = ANY_JOB
    """The job: its failure policy decides what follows a fault."""
    lowest_rung: Scope = Scope.PROCESS
    """Lowest rung that is used, whatever the failure would need."""

    @property
    def mttf_ms(self) -> float:
        """Mean time to a fault of the whole job."""
        return self.faults.device_mttf_hours * HOUR_MS / (self.machines.nodes * self.machines.devices)

    def rung(self, needed: Scope) -> Scope:
        """Return the rung that is used where a failure needs at least one."""
        return max(needed, self.lowest_rung, key=RUNGS.index)


def check(scenario: Scenario) -> None:
    """Refuse a scenario that can't be simulated.

    Raises:
        InvalidConfigError: Naming the option and the rule.
    """
    machines, faults, saves = scenario.machines, scenario.faults, scenario.saves
    least_one = {"nodes": machines.nodes, "devices": machines.devices, "nodes-per-rack": machines.nodes_per_rack}
    for option, given in least_one.items():
        if given < 1:
            raise InvalidConfigError(f"{option} is {given}, expected at least 1", field=f"--{option}")
    shares = {"recall": faults.recall, "precision": faults.precision}
    for option, share in shares.items():
        if not 0.0 <= share <= 1.0:
            raise InvalidConfigError(f"{option} is {share:g}, expected 0 to 1", field=f"--{option}")
    if faults.recall and not faults.precision:
        raise InvalidConfigError("precision is 0 while faults are predicted, expected more", field="--precision")
    if saves.interval_ms < 1:
        raise InvalidConfigError(
            f"interval is {saves.interval_ms / 1000:g} s, expected more than 0", field="--interval"
        )
    if saves.durable_ms >= saves.interval_ms + saves.stall_ms:
        raise InvalidConfigError(
            f"a checkpoint takes {saves.durable_ms / 1000:g} s to become durable and the next is saved after "
            f"{(saves.interval_ms + saves.stall_ms) / 1000:g} s; expected less",
            field="--durable",
        )
