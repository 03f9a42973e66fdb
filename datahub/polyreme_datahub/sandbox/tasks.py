"""Input and output of a sandbox: steps and limits, samples and their outcomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyreme_datahub.operations.values import Value

MEMORY, TIME, CRASH, OPERATION, TYPE, OUTPUT = "memory", "time", "crash", "operation", "type", "output"
"""Rules of the verdicts that a sandbox gives by itself; an operation's BadRecordError has rules of its own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStep:
    """A step of a chain, as a child runs it."""

    name: str
    operation: str
    """Name of a shipped operation, or ``package.module:function``."""
    inputs: tuple[str, ...]
    """Names of the steps, of ``record``, or of shared values, in the order of the operation's inputs."""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The operation's parameters, checked already."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one sample may use. Beyond it, the sample gets a verdict."""

    memory_bytes: int | None = 2 * 2**30
    """Address space beyond what the child has mapped before its first sample; None: unlimited, which GPUs need."""
    wall_s: float = 120.0
    cpu_s: int = 60
    output_bytes: int = 512 * 2**20
    """Bytes of all new blobs and JSON of a sample."""
    files: int = 64
    """Open files of the child."""
    confine: bool = True
    """Refuse to write files, start processes and reach a network, where the kernel allows it; GPUs need False."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleTask:
    """A sample that enters a chain."""

    key: str
    values: Mapping[str, Value]
    """What is known already: ``record`` and outputs of steps. A step of the chain whose value is here is not run."""
    steps: tuple[str, ...] | None = None
    """The steps to run, in order; None: every step whose value is not here."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMade:
    """A step made a value. All blobs of ``value.new`` are here; the others are those of the task, by digest."""

    step: str
    value: Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """A step refused the sample, or the sandbox ended it in that step."""

    step: str
    rule: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepDropped:
    """A filter dropped the sample."""

    step: str
    reason: str


StepEnd = StepMade | StepVerdict | StepDropped


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleOutcome:
    """What the steps of a chain made of a sample, in order; a verdict or a drop is the last."""

    key: str
    steps: tuple[StepEnd, ...]
