"""Progress of a running attempt: a record per step on disk, the newest one on the job's Lease.

Neither the API server nor a database carries per-step data: the Lease is renewed on a budget and holds only the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

MESSAGE_CHARACTERS_MAX = 1024
NOTICE_CHARACTERS_MAX = 320
LAYERS_MAX = 96
"""Most layers whose routing is reported on the Lease: more would not fit a line that is written whole."""
ALL_SETS = ""
"""Name of the held-out loss of all sets together."""
RANKS_NAMED_MAX = 8
"""Ranks that one sentence names."""
EXITS_MAX = 64
"""Rank exits that one record carries; the first ones tell the cause."""


STALL_CHARACTERS_MAX = 320
STRAGGLERS_MAX = 8
OBJECTIVE_MAX = 16
"""Numbers that an objective measures."""
PRE_CHECK_FINDINGS_MAX = 32
"""Workers that one report names as bad; the rest is found by the next attempt's checks."""
PRE_CHECK_RUNS_MAX = 512
PRE_CHECK_CHARACTERS_MAX = 256


class RankPhase(StrEnum):
    """What the ranks are doing."""

    STARTING = "Starting"
    WAITING_FOR_DATA = "WaitingForData"
    LOADING = "Loading"
    SCORING = "Scoring"
    """Scoring a stage's pairs under its reference, before the first step of the stage."""
    TRAINING = "Training"
    CHECKPOINTING = "Checkpointing"
    EVALUATING = "Evaluating"
    EXPORTING = "Exporting"
    DONE = "Done"


class Outcome(StrEnum):
    """How an attempt ended, once all of its ranks have ended."""

    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"
    """Stopped on request, after a checkpoint if one was asked for."""


class _Record(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="ignore",
        alias_generator=to_camel,
        populate_by_name=True,
        ser_json_inf_nan="strings",  # a loss that is no number must stay a record that can be read
    )


class CheckpointRef(_Record):
    """A durable (committed) checkpoint."""

    attempt: int = Field(ge=1, description="Attempt that wrote it.")
    step: int = Field(ge=0, description="Last step that it holds.")


class RankExit(_Record):
    """End of one rank's process: an exit code, or the signal that ended it."""

    rank: int = Field(ge=0)
    code: int | None = None
    signal: int | None = None


class StepRecord(_Record):
    """One trained step, a line of ``steps/a<attempt>.jsonl``."""

    attempt: int = Field(ge=1)
    step: int = Field(ge=1)
    stage: str = ""
    """Stage of training; empty where the job names none."""
    loss: float
    """Global mean over unmasked tokens; JSON text of the float round-trips bit for bit."""
    gradient_norm: float = 0.0
    learning_rate: float = 0.0
    tokens: int = 0
    """Tokens of the step, all ranks, padding included."""
    step_s: float = 0.0
    data_wait_s: float = 0.0
    """Part of it in which rank 0 could have begun and waited for its packs."""
    ended_at_s: float = 0.0
    """Wall time of the end [s since the epoch]."""
    ended_steady_s: float = 0.0
    """Steady clock of the machine at the end [s], for durations: a wall clock may be set. 0: not recorded."""
    expert_load_max: float = 0.0
    """Tokens of the fullest expert over the mean of its layer's, the largest of all layers; 1 is an even load."""
    router_entropy: float = 0.0
    """Of a token's scores, as shares [nats], the mean over tokens and layers; the logarithm of the experts is most."""
    objective: dict[str, float] = Field(default_factory=dict)
    """What the stage's objective measures beside its loss, by name: means over pairs."""
    held_out: dict[str, float] = Field(default_factory=dict)
    """Held-out loss after the step, by set, mean over unmasked tokens; empty where none was due."""
    held_out_pairs: dict[str, float] = Field(default_factory=dict)
    """Share of held-out pairs whose chosen answer the model prefers more than its reference does, by set."""
    update_norm: Annotated[float | None, Field(exclude_if=lambda norm: norm is None)] = None
    """Norm of the update by AdamW, without learning rate and weight decay; None where it was not measured."""
    spike_limit: Annotated[float | None, Field(exclude_if=lambda limit: limit is None)] = None
    """Of a step that is a spike: what its loss or one of its norms should have stayed below."""
    recomputed: Annotated[str, Field(exclude_if=lambda found: not found)] = ""
    """What was found when the step, a spike, was computed once more."""
    skipped: Annotated[bool, Field(exclude_if=lambda skipped: not skipped)] = False
    """Whether the step updated nothing, since it is a spike."""
    rows_dropped: int = 0
    """Rows beyond the capacity of an expert, of all layers and ranks; a token has as many rows a layer as experts."""


class RoutingByLayer(_Record):
    """How the tokens of a step were routed, by layer with experts; the figures are rounded: people look at them."""

    first_layer: int = Field(default=0, ge=0)
    """Number of the first such layer in the decoder; the others follow."""
    load_max: Annotated[tuple[float, ...], Field(max_length=LAYERS_MAX)] = ()
    """Tokens of the fullest expert over the mean of its layer's."""
    entropy: Annotated[tuple[float, ...], Field(max_length=LAYERS_MAX)] = ()
    """Of a token's scores, as shares [nats], the mean over tokens."""
    dropped: Annotated[tuple[int, ...], Field(max_length=LAYERS_MAX)] = ()
    """Rows beyond the capacity of an expert."""


class StallKind(StrEnum):
    """What the ranks of an attempt that makes no progress show."""

    STOPPED = "Stopped"
    """Processes are stopped (state T)."""
    OUTSIDE = "Outside"
    """Some ranks are in no exchange, and others wait for them in one."""
    BEHIND = "Behind"
    """All wait in exchanges, and some have entered fewer than the ranks of the same stage."""
    NOT_SENT = "NotSent"
    """All wait, one of them for what the named rank says it has sent."""
    ALL_WAIT = "AllWait"
    """All wait for each other, and nothing sets one apart: often the network."""
    IDLE = "Idle"
    """No rank uses CPU time, and none says that it waits."""
    BUSY = "Busy"
    """Ranks use CPU time, and none says that it waits: no second signal."""


class StallEvidence(_Record):
    """Why the leader's launcher holds that the ranks make no progress; the operator decides what follows."""

    kind: StallKind
    suspects: Annotated[tuple[int, ...], Field(max_length=EXITS_MAX)] = ()
    """Ranks that hold up the others; empty if nothing sets one apart."""
    step: int = Field(default=0, ge=0)
    """Step that the slowest rank works on."""
    quiet_seconds: float = Field(default=0.0, ge=0)
    """Time in which no rank has advanced, when this was first reported."""
    confirmed: bool = False
    """Whether the deadline is over and a second signal agrees."""
    message: str = Field(default="", max_length=STALL_CHARACTERS_MAX)


class Straggler(_Record):
    """A rank that computes more slowly than the others of its pipeline stage, or a group with slow exchanges."""

    ranks: Annotated[tuple[int, ...], Field(min_length=1, max_length=EXITS_MAX)]
    """The rank, or the first ranks of the group."""
    group: Annotated[str, Field(max_length=16)] = ""
    """What the group exchanges, such as ``experts``; empty: one rank that computes slowly."""
    since_step: int = Field(ge=0)
    """First step in which it was slow."""
    slowdown: float = Field(ge=1.0)
    """How many times as long as the others it took, when it was named."""


class PreCheckFinding(_Record):
    """A worker that failed a check."""

    index: int = Field(ge=0)
    reason: Annotated[str, Field(max_length=63)]
    """Code in the fault table, such as ``PreCheckComputeSlow``."""
    message: Annotated[str, Field(max_length=PRE_CHECK_CHARACTERS_MAX)] = ""


class PreCheckReport(_Record):
    """Checks of the nodes before the ranks start."""

    done: bool = False
    passed: Annotated[tuple[tuple[int, int], ...], Field(max_length=PRE_CHECK_RUNS_MAX)] = ()
    """Workers that were checked and passed: first index and count of consecutive ones."""
    failed: Annotated[tuple[PreCheckFinding, ...], Field(max_length=PRE_CHECK_FINDINGS_MAX)] = ()
    warning: Annotated[str, Field(max_length=PRE_CHECK_CHARACTERS_MAX)] = ""
    """What was found and names no worker."""
    waits: Annotated[str, Field(max_length=PRE_CHECK_CHARACTERS_MAX)] = ""
    """What the checks wait for, until they are done."""


class ProgressRecord(_Record):
    """The newest state of an attempt, as written on the job's Lease."""

    attempt: int = Field(ge=1)
    replacement: int = Field(default=0, ge=0)
    """Replacement number of index 0 whose launcher writes this."""
    phase: RankPhase = RankPhase.STARTING
    released: bool = False
    """Every index has joined with its old ranks dead, and the ranks may start."""
    joined: int = Field(default=0, ge=0)
    """Indices that have joined this attempt."""
    step: int = Field(default=0, ge=0)
    steps: int = Field(default=0, ge=0)
    loss: float | None = None
    stage: str = ""
    """Stage of training of that step; empty where the job names none."""
    held_out_loss: float | None = None
    """Newest held-out loss of all sets."""
    held_out_step: int | None = None
    """Step after which it was measured."""
    objective: Annotated[dict[str, float], Field(max_length=OBJECTIVE_MAX)] = Field(default_factory=dict)
    """What the stage's objective measured in that step, what matters most first."""
    routing: RoutingByLayer | None = None
    """Of that step; None for a model without experts, or with more layers than are reported."""
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    data_wait_seconds: float = Field(default=0.0, ge=0)
    """Time of this attempt's steps in which rank 0 waited for its packs."""
    trained_seconds: float = Field(default=0.0, ge=0)
    """Time of this attempt's steps; 0: a launcher of 0.1.0, or none yet."""
    checkpoint_seconds: float = Field(default=0.0, ge=0)
    """Time for which this attempt's ranks waited for saves."""
    evaluation_seconds: float = Field(default=0.0, ge=0)
    """Time that this attempt spent on held-out samples and its export."""
    checkpoint: CheckpointRef | None = None
    """Newest durable checkpoint that this attempt knows of."""
    resumed_from_step: int | None = None
    exits: Annotated[tuple[RankExit, ...], Field(max_length=EXITS_MAX)] = ()
    watched_ranks: int | None = None
    """Ranks, of all workers, whose state the leader's launcher knows: all of them, else no hang is found."""
    stall: StallEvidence | None = None
    """Why the ranks are held to make no progress; None while they do."""
    stragglers: Annotated[tuple[Straggler, ...], Field(max_length=STRAGGLERS_MAX)] = ()
    """Ranks and groups that slow the attempt down, the slowest first."""
    stopped: Annotated[tuple[int, ...], Field(max_length=EXITS_MAX)] = ()
    """Ranks, of all workers, whose process is stopped (state T)."""
    leaving: Annotated[tuple[int, ...], Field(max_length=EXITS_MAX)] = ()
    """Workers whose launcher was asked to end, or says nothing any more."""
    pre_check: PreCheckReport | None = None
    """Checks of the nodes before the ranks start; None: there are none."""
    outcome: Outcome | None = None
    message: str = Field(default="", max_length=MESSAGE_CHARACTERS_MAX)
    stopped_early: str = Field(default="", max_length=NOTICE_CHARACTERS_MAX)
    """Why the ranks trained no further than ``step``; empty where they train all steps."""
    notice: str = Field(default="", max_length=NOTICE_CHARACTERS_MAX)
    """What a user should know while the attempt trains: what became of a changed end, or what it started from."""
    updated_at_s: float = 0.0
    sequence: int = Field(default=0, ge=0)
    """Number of this record: it rises with each that the job's leaders sign."""

    @property
    def order(self) -> tuple[int, int, int]:
        """What rises from each record of a job's leaders to the next: attempt, replacement, sequence."""
        return self.attempt, self.replacement, self.sequence

    def outdates(self, record: ProgressRecord) -> bool:
        """Tell whether this record, read from a Lease, forbids its reader to write the other one.

        A later attempt or leader does. So does a release of the same attempt and place, when the reader has not
        released it: a pod that was created late, after the end of another of its name, would repeat trained steps.
        """
        known, own = (self.attempt, self.replacement), (record.attempt, record.replacement)
        return known > own or (known == own and self.released and not record.released)


def name_stopped(stopped: Sequence[int], *, devices: int) -> str:
    """Name ranks that are stopped; empty when there are none.

    Args:
        stopped: Their ranks.
        devices: Ranks of a worker.
    """
    if not stopped:
        return ""
    if len(stopped) == 1:
        return f"rank {stopped[0]} on worker {stopped[0] // devices} is stopped (state T)"
    shown = ", ".join(map(str, stopped[:RANKS_NAMED_MAX]))
    more = f" and {len(stopped) - RANKS_NAMED_MAX} more" if len(stopped) > RANKS_NAMED_MAX else ""
    return f"ranks {shown}{more} are stopped (state T)"


class ProgressSink(Protocol):
    """Where rank 0 says what it does; must never block or fail the step."""

    def report(self, record: ProgressRecord) -> None:
        """Take the newest record; an older one not yet read may be dropped."""
        ...
