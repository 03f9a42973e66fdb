"""Data of a report: values only, which the caller gathers from the run's folder, registry and store."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from polyreme_api.job.accounting import Accounting
from polyreme_api.mixture import Rejection
from polyreme_api.progress import StepRecord
from polyreme_planner.plan import Plan

if TYPE_CHECKING:
    from polyreme_datahub.loader.inspect.preview import PreviewPack


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures at the head of the page; None where the run did not get that far."""

    wall_s: float
    """From the first admission to the end, or to now."""
    attempts: int
    restart_s: float | None = None
    """Longest time from a failure to the next trained step."""
    tokens_per_second: float | None = None
    """Committed tokens over the time in which they were trained."""
    held_out_ratio: float | None = None
    """Held-out answers that are exactly right, over all sets, 0 to 1."""
    goodput: float | None = None
    """Time of steps that are history over wall time without that in which the run was stopped, 0 to 1."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt; times are seconds since the epoch, by a clock that was not set after the first attempt began."""

    number: int
    scope: str
    """How it came about: ``Start``, ``RestartProcess``, ``RestartPod``, …"""
    started_s: float
    first_step: int | None = None
    last_step: int | None = None
    ended_s: float | None = None
    """None while it runs."""
    succeeded: bool = False
    stopped: bool = False
    """Whether it ended on request and not by a failure."""
    cause: str = ""
    """Why it ended, one of the operator's causes; empty for success."""
    message: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimeShare:
    """Part of the wall time that was spent on one thing."""

    name: str
    seconds: float
    counts: bool = False
    """Whether it is the time of steps that are history."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixtureWeights:
    """Weights of the sources from a step on."""

    step: int
    weights: Mapping[str, int]
    skip_steps: int = 0
    """Steps whose data are passed over there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStage:
    """A curriculum stage."""

    name: str
    first_step: int
    last_step: int
    trains: Sequence[str]
    """Parts that learn; empty for all."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """Where the tokens of some steps went in one layer."""

    layer: int
    load: Sequence[int]
    """Rows of each expert."""
    dropped: int
    """Rows beyond the capacity of experts."""
    entropy: float
    """Of a token's scores [nats]."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads:
    """Where the tokens of the last steps went."""

    first_step: int
    last_step: int
    layers: Sequence[LayerLoad]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourceVisits:
    """How often the steps that count visited the samples of a source."""

    source: str
    epochs: float
    least: int
    most: int
    unseen: int
    """Samples that were never visited."""
    exact: bool
    """False: to some percent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """What one processing stage did for one dataset."""

    dataset: str
    stage: str
    processed: int
    reused: int
    """Results that an earlier run had left in the lakehouse."""
    dead_letters: int = 0
    dropped: int = 0
    """Samples that a filter or a barrier left out on purpose."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterRow:
    """A record that could not be processed."""

    dataset: str
    stage: str
    record: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSet:
    """Result on one held-out set."""

    name: str
    samples: int
    right: int
    """Samples whose answer is exactly the expected one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredPage:
    """A held-out page with the model's answer."""

    png: bytes
    """Empty for a sample of text alone, or where the picture is gone."""
    question: str
    expected: str
    answer: str
    right: bool
    set_name: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """A checkpoint's directory."""

    name: str
    size_bytes: int
    committed: bool
    """False: torn, never loaded."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPacks:
    """What a step trained on: its first packs."""

    attempt: int
    step: int
    packs: Sequence[PreviewPack]
    of_packs: int
    """Packs of the whole step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything on the page."""

    title: str
    """Name of the job, with its namespace where that is not the default one."""
    outcome: str
    """``Succeeded``, ``Failed``, ``Stopped`` or ``Running``."""
    reason: str
    """One sentence: why it ended so, or what it waits for."""
    written_s: float
    """When this report was written [s since the epoch]."""
    figures: Figures
    job_yaml: str = ""
    plan: Plan | None = None
    steps_planned: int = 0
    steps: Sequence[StepRecord] = ()
    """Committed history, each step once."""
    thrown_away: Sequence[StepRecord] = ()
    """Steps that were trained, and trained again by a later attempt."""
    attempts: Sequence[AttemptRow] = ()
    course: Sequence[str] = ()
    """Sentences on the checkpoint that the run started from, and on how its end was moved."""
    time_shares: Sequence[TimeShare] = ()
    """What the wall time was spent on, all of it."""
    accounting: Accounting = dataclasses.field(default_factory=Accounting)
    """Device time, as the operator has charged it."""
    training_stages: Sequence[TrainedStage] = ()
    """Empty where the job names none."""
    experts: ExpertLoads | None = None
    """Between the last two saves; None before the first."""
    mixture: Sequence[MixtureWeights] = ()
    """Weights at the start (step 1) and every change."""
    rejections: Sequence[Rejection] = ()
    """Spikes of the loss for which the run went back."""
    spike_packs: Sequence[StepPacks] = ()
    """Of the last spikes whose data can be read."""
    weights_are: str = ""
    """What the weights are shares of, where it is not samples alone."""
    visits: Sequence[SourceVisits] = ()
    """Of each source with a weight; empty where they are not known."""
    stages: Sequence[StageRow] = ()
    damage: Sequence[str] = ()
    """Sentences about stored data that was found damaged or missing."""
    dead_letters: Sequence[DeadLetterRow] = ()
    held_out: Sequence[HeldOutSet] = ()
    pages: Sequence[AnsweredPage] = ()
    checkpoints: Sequence[CheckpointRow] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Versions, cores, and whatever else a reader needs to judge the figures."""
