"""Status of a TrainingJob: conditions, the attempt record, restarts. Small: no per-step data."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field, computed_field

from polyreme_api.fields import MESSAGE_CHARACTERS_MAX, Condition, Message, StatusPart, Time
from polyreme_api.job.accounting import Accounting
from polyreme_api.job.placement import Placement
from polyreme_api.progress import CheckpointRef
from polyreme_api.signed_progress import KEY_ID_CHARACTERS

RESTART_RECORDS_MAX = 50
COUNTED_RESTARTS_MAX = 1000
"""Most restarts that a window's budget can allow: so many times are kept."""
PREEMPTION_RECORDS_MAX = 16
FAILED_NODES_MAX = 128
"""Remembered failures of nodes; of more, the oldest are forgotten."""
OVERRIDING_CONDITIONS = ("Failed", "Succeeded", "Degraded", "Suspended", "Queued", "Preempted")
"""Conditions that are shown before the ranks' phase; the first that is True wins."""

Run = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=2, max_length=2)]
"""A replacement number, and how many indices in a row have it."""


def replacement_runs(numbers: Mapping[int, int]) -> list[list[int]]:
    """Encode replacement numbers by worker index; an index that is not named has 0."""
    runs: list[list[int]] = []
    for index in range(max((index for index, number in numbers.items() if number), default=-1) + 1):
        number = numbers.get(index, 0)
        if runs and runs[-1][0] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def replacements_by_index(runs: Sequence[Sequence[int]]) -> dict[int, int]:
    """Decode to the replacement numbers that are not 0, by worker index."""
    numbers: dict[int, int] = {}
    index = 0
    for number, count in runs:
        if number:
            numbers.update(dict.fromkeys(range(index, index + count), number))
        index += count
    return numbers


class PreCheckOrder(StatusPart):
    """Which nodes the launchers check before they release an attempt."""

    passed: Annotated[list[Run], Field(max_length=15_000)] = Field(default_factory=list)
    """Workers whose node has passed recently: pairs of 1 (passed) or 0 and count of consecutive indices, from index 0;
    0 after the last pair. They are checked only as partners of others."""
    warn_only: bool = False
    """Whether the attempt trains even if a worker fails, since workers were moved as often as allowed."""

    @property
    def passed_indices(self) -> frozenset[int]:
        """Workers whose node has passed recently."""
        return frozenset(replacements_by_index(self.passed))


class AttemptStatus(StatusPart):
    """The attempt: all ranks of one rendezvous. An in-place restart is a new attempt."""

    number: Annotated[int, Field(ge=1)]
    """Number of the attempt, from 1, strictly increasing."""
    plan_hash: Annotated[str, Field(max_length=64)]
    """Hash of the plan that every rank must hold."""
    plan: Annotated[str, Field(max_length=16_384)] = ""
    """The plan, as JSON: made once, by the operator. Empty in the status of an older operator."""
    replicas: Annotated[int, Field(ge=1)]
    """Worker pods of this attempt."""
    devices: Annotated[int, Field(ge=1)]
    """Ranks of each pod."""
    desired: Literal["Run", "Stop"] = "Run"
    """What the launchers should do."""
    checkpoint_requested: bool = False
    """Whether the ranks should save a checkpoint before they stop."""
    replacements: Annotated[list[Run], Field(max_length=15_000)] = Field(default_factory=list)
    """Which pod fills each worker's place: pairs of replacement number (pods that filled it before) and count of
    consecutive indices, from index 0; 0 after the last pair."""
    placement: Placement = Field(default_factory=Placement)
    """Where the workers sit."""
    started_at: Time = ""
    """When the attempt was recorded."""
    scope: Annotated[str, Field(max_length=32)] = "Start"
    """How it came about: Start, RestartProcess, RestartPod, RestartGang, Resize, Resume."""
    pre_checks: PreCheckOrder | None = None
    """Checks before its ranks start; none: the job asks for none."""
    key_id: Annotated[str, Field(max_length=KEY_ID_CHARACTERS)] = ""
    """Which key of the installation its pods' key is derived from: only records that are signed with it count. Empty:
    its pods are those of an operator of 0.1.0, and can't sign."""
    secret_name: Annotated[str, Field(max_length=253)] = ""
    """Name of the Secret with that key and of the leader's RoleBinding, if an earlier attempt had another key, or none.
    Empty: they are named as the job's other objects."""

    def replacement(self, index: int) -> int:
        """Return the replacement number of a worker index."""
        for number, count in self.replacements:
            if index < count:
                return number
            index -= count
        return 0

    @property
    def replacement_by_index(self) -> dict[int, int]:
        """Replacement numbers that are not 0, by worker index."""
        return replacements_by_index(self.replacements)


class RestartRecord(StatusPart):
    """One restart, for the record and for the budgets."""

    attempt: int
    """Attempt that ended."""
    at: Time
    """When."""
    cause: Annotated[str, Field(max_length=63)]
    """Cause, one of a finite set (docs/reference/reasons.md)."""
    scope: Annotated[str, Field(max_length=32)]
    """Scope of the restart."""
    index: int | None = None
    """Worker index at fault, where one is."""
    step: int = 0
    """Newest step that the ended attempt had reported."""
    checkpoint_step: int = 0
    """Step of the newest durable checkpoint when the attempt ended."""
    counts: bool = True
    """Whether it counts towards ``maxRestarts``."""
    message: Annotated[Message, Field(max_length=MESSAGE_CHARACTERS_MAX)] = ""
    """What happened, for people."""


class EarlierRestarts(StatusPart):
    """Restarts older than the records, as far as budgets need them."""

    idle: Annotated[int, Field(ge=0)] = 0
    """How many of the last ones in a row reached neither a later step nor a newer durable checkpoint."""
    step: Annotated[int, Field(ge=0)] = 0
    """Newest step of all of them."""
    checkpoint_step: Annotated[int, Field(ge=0)] = 0
    """Step of the newest durable checkpoint."""
    hung: Annotated[int, Field(ge=0)] = 0
    """Restarts for hangs since the last later step."""
    counted_at: Annotated[list[int], Field(max_length=COUNTED_RESTARTS_MAX)] = Field(default_factory=list)
    """When those happened that count towards `maxRestarts` [s since the epoch]."""


class FailedNode(StatusPart):
    """A node on which a worker's pod could not start, or did not end. The job avoids it for a while."""

    node: Annotated[str, Field(max_length=253)]
    """Name of the node."""
    index: Annotated[int, Field(ge=0)]
    """Worker index."""
    cause: Annotated[str, Field(max_length=63)]
    """Cause of the restart, one of a finite set (docs/reference/reasons.md)."""
    at: Time
    """When it failed last."""
    failures: Annotated[int, Field(ge=1)] = 1
    """How often this worker failed there, since the node was last forgotten."""


class SetAside(StatusPart):
    """The job gave up its place because its pods did not all start; it stays until all of them have started."""

    times: Annotated[int, Field(ge=1)] = 1
    """How often in a row. A job that was set aside preempts no others."""
    until: Time
    """When it may be admitted again."""


class Preemption(StatusPart):
    """Request to stop for another job; it stays until the job is admitted again."""

    by: Annotated[str, Field(max_length=64)]
    """UID of the job that preempts it."""
    by_name: Annotated[str, Field(max_length=317)] = ""
    """Namespace and name of that job, such as ``team/big``."""
    requested_at: Time
    """When it was asked to checkpoint and stop."""
    deadline: Time
    """When it is killed if it has not stopped by then."""
    reclaim: bool = False
    """Whether it is preempted because another queue reclaims quota that its queue had borrowed."""


class PreemptionRecord(StatusPart):
    """One past preemption: no job is preempted twice for the same one."""

    by: Annotated[str, Field(max_length=64)]
    """UID of the job that preempted it."""
    at: Time
    """When it was asked to stop."""


class LastCheckpoint(CheckpointRef):
    """The newest durable checkpoint that is history."""

    at: Time = Field(default="", description="When it was seen.")


class TrainingJobStatus(StatusPart):
    """State of the job as the operator sees it."""

    observed_generation: int = 0
    """Generation of the spec that this status describes."""
    arrival: Annotated[int, Field(ge=0)] = 0
    """Resource version at which the operator first saw the job: of jobs created in the same second, the smaller one
    goes first."""
    conditions: Annotated[list[Condition], Field(max_length=20)] = Field(default_factory=list)
    """State and why, by type."""
    attempt: AttemptStatus | None = None
    """The current or last attempt."""
    replicas: int = 0
    """Pods that exist, for the scale subresource."""
    replicas_in_force: Annotated[int, Field(ge=0)] = 0
    """Workers with which the job trained last; before it has, those of its last spec that has a layout. A refused
    `spec.workers.replicas` does not change it, and the job is admitted again with it. 0: none yet."""
    ready_replicas: int = 0
    """Pods whose launcher has joined the attempt."""
    selector: Annotated[str, Field(max_length=1024)] = ""
    """Label selector of the pods, for the scale subresource."""
    restarts: int = 0
    """Restarts so far."""
    restart_records: Annotated[list[RestartRecord], Field(max_length=RESTART_RECORDS_MAX)] = Field(default_factory=list)
    """The newest restarts."""
    earlier_restarts: EarlierRestarts = Field(default_factory=EarlierRestarts)
    """Older restarts, summed up."""
    cancelled_admissions: int = 0
    """Admissions cancelled before they were written; a late write of one then fails, since the resource version has
    changed."""
    retry_at: Time | None = None
    """When the next attempt starts, while the job waits out a backoff."""
    failed_nodes: Annotated[list[FailedNode], Field(max_length=FAILED_NODES_MAX)] = Field(default_factory=list)
    """Nodes that the job avoids since its pods failed there, oldest first."""
    set_aside: SetAside | None = None
    """Whether the job was set aside; none once all of its pods have started."""
    last_checkpoint: LastCheckpoint | None = None
    """The newest durable checkpoint."""
    checkpoint_location: Annotated[str, Field(max_length=2048)] = ""
    """URL of the checkpoint root: checkpoints, and under `logs/` the last lines of attempts that did not succeed."""
    step: int = 0
    """Newest step, written only when other fields change."""
    progress_sequence: Annotated[int, Field(ge=0)] = 0
    """Sequence number of the attempt's newest progress record that is part of this status, written with the step. No
    operator believes an older record, not even one that has just started."""
    layout: Annotated[str, Field(max_length=128)] = ""
    """The parallel layout, such as ``dp4 ep2``."""
    recompute: Annotated[str, Field(max_length=16)] = ""
    """What layers recompute in the backward pass, such as ``Selective``; empty: nothing."""
    priority: int | None = None
    """Priority by which the job waits and is preempted: of its PriorityClass, else ``spec.priority``, else of the
    PriorityClass with ``globalDefault``."""
    preemption: Preemption | None = None
    """Request to stop for another job; none once the job is admitted again."""
    preemptions: Annotated[list[PreemptionRecord], Field(max_length=PREEMPTION_RECORDS_MAX)] = Field(
        default_factory=list
    )
    """The newest preemptions, oldest first."""
    preemption_count: int = 0
    """Preemptions so far."""
    accounting: Accounting = Field(default_factory=Accounting)
    """Where the time went."""
    first_admitted_at: Time | None = None
    """When the job was first admitted."""
    completed_at: Time | None = None
    """When the job succeeded or failed."""

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ready(self) -> Annotated[str, Field(max_length=16)]:
        """Pods that have joined the attempt, out of all its pods, as ``12/12``; for people. All after a success."""
        if self.attempt is None:
            return f"{self.ready_replicas}"
        joined = self.attempt.replicas if self.is_true("Succeeded") else self.ready_replicas
        return f"{joined}/{self.attempt.replicas}"

    @computed_field  # type: ignore[prop-decorator]
    @property
    def reason(self) -> Annotated[str, Field(max_length=1024)]:
        """Reason of the condition that describes the job best now; for people."""
        shown = next((kind for kind in OVERRIDING_CONDITIONS if self.is_true(kind)), "Running")
        found = self.condition(shown)
        return "" if found is None else found.reason

    def condition(self, kind: str) -> Condition | None:
        """Return the condition of a type."""
        for condition in self.conditions:
            if condition.type == kind:
                return condition
        return None

    def is_true(self, kind: str) -> bool:
        """Tell whether a condition is present and True."""
        found = self.condition(kind)
        return found is not None and found.status == "True"

    @property
    def finished(self) -> bool:
        """Whether a terminal condition holds."""
        return self.is_true("Succeeded") or self.is_true("Failed")
