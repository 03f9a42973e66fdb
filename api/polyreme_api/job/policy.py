"""Policy for failures: rules, budgets, heartbeat and loss health."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from polyreme_api.fields import SECONDS_MAX, Name, Part, Seconds
from polyreme_api.job.status import COUNTED_RESTARTS_MAX, RESTART_RECORDS_MAX

RESTARTS_DEFAULT = 10
"""Restarts within the window of a small job that names no number."""
DEVICES_PER_RESTART = 512
"""Devices for which such a job has one restart more: in a day, four times the faults of Llama 3's training."""
RestartScope = Literal["RestartProcess", "RestartPod", "RestartGang", "Fail", "Ignore"]


class OnExitCodes(Part):
    """Matches the exit code of the rank at fault, or of the container that ended; signal ``n`` is code ``128 + n``."""

    operator: Literal["In", "NotIn"]
    """Whether the code must be among the values."""
    values: Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(min_length=1, max_length=255)]
    """Exit codes."""


class OnPodCondition(Part):
    """Matches a condition of a worker pod, such as ``DisruptionTarget``."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Condition type."""
    status: Literal["True", "False", "Unknown"] = "True"
    """Condition status."""


class FailureRule(Part):
    """One rule; the first that matches decides."""

    name: Name | None = None
    """Name, shown in the status when the rule decides."""
    action: RestartScope
    """What to do."""
    count_towards_max: bool = True
    """Whether the restart counts towards ``maxRestarts``."""
    on_exit_codes: OnExitCodes | None = None
    """Matches exit codes of ranks and containers."""
    on_pod_conditions: Annotated[list[OnPodCondition], Field(max_length=20)] = Field(default_factory=list)
    """Matches if any worker pod has any of these conditions."""

    @model_validator(mode="after")
    def _matches_something(self) -> "FailureRule":
        if (self.on_exit_codes is None) == (not self.on_pod_conditions):
            raise ValueError("a rule has either onExitCodes or onPodConditions; set exactly one")
        return self


class Backoff(Part):
    """Wait before a restart: doubled with each restart without progress; the first restart is immediate."""

    initial_seconds: Seconds = 5
    """Wait before the second restart without progress."""
    max_seconds: Seconds = 300
    """Longest wait."""


class OnNodeFault(Part):
    """What the job does when a node that it runs on is taken out of service, and how long that may take.

    Its workers on that node get other nodes near those of the workers that stay, any number of them at once.
    """

    action: Literal["Now", "Checkpoint", "Finish"] = "Checkpoint"
    """``Now``: the workers move at once, and work since the newest checkpoint is lost. ``Checkpoint``: the ranks save a
    checkpoint first. ``Finish``: the job runs on and leaves the node when it ends, or as ``Checkpoint`` after the
    deadline."""
    deadline_seconds: Annotated[int, Field(ge=1, le=SECONDS_MAX)] | None = None
    """``Checkpoint``: how long saving may take, after which the workers move without; none:
    ``checkpoint.preemptionGraceSeconds``. ``Finish``: how long the job may stay on the node; none: until it ends."""


class FailurePolicy(Part):
    """Rules and budgets of recovery."""

    max_restarts: Annotated[int, Field(ge=0, le=COUNTED_RESTARTS_MAX)] | None = None
    """Restarts within the window before the job fails; none: 10, and one more for each 512 devices of the job."""
    window_seconds: Annotated[int, Field(ge=1, le=31_536_000)] = 86_400
    """Sliding window of ``maxRestarts``."""
    no_progress_max: Annotated[int, Field(ge=1, le=1000)] = 3
    """Restarts in a row without a newer durable checkpoint or a later step before the job fails."""
    in_place_max: Annotated[int, Field(ge=0, le=RESTART_RECORDS_MAX)] = 2
    """Restarts in place in a row, caused by the same worker, before that worker's pod is replaced."""
    backoff: Backoff = Field(default_factory=Backoff)
    """Wait between restarts."""
    rules: Annotated[list[FailureRule], Field(max_length=20)] = Field(default_factory=list)
    """Ordered rules; the first match decides. Without a match the default sequence of recovery applies."""
    on_node_fault: OnNodeFault = Field(default_factory=OnNodeFault)
    """What happens when a node is taken out of service."""

    def restarts_allowed(self, devices: int) -> int:
        """Return the restarts within the window that a job with so many devices may have."""
        if self.max_restarts is not None:
            return self.max_restarts
        return min(RESTARTS_DEFAULT + devices // DEVICES_PER_RESTART, COUNTED_RESTARTS_MAX)


class Hang(Part):
    """What to do when no rank advances."""

    action: Literal["Notify", "Restart"] = "Restart"
    """Restart the ranks if a second signal confirms it, or only report it."""
    stall_seconds: Annotated[int, Field(ge=5, le=31_536_000)] = 600
    """Longest time in a step in which no rank may advance; a shorter one is learned while ranks train."""


class Stragglers(Part):
    """What to do when a rank computes more slowly than the others of its pipeline stage."""

    action: Literal["Notify", "Report"] = "Notify"
    """Report it on the job, or on its node too (condition `polyreme.dev/SlowRank`), as evidence for its health."""


class LossSpike(Part):
    """What to do when loss or gradient norm jumps."""

    action: Literal["Notify", "Stop", "Skip", "Rollback"] = "Notify"
    """Report it, fail the step, train on without it, or resume before the window and skip the data."""
    window_steps: Annotated[int, Field(ge=8, le=10_000)] = 128
    """Steps that a step is compared with."""
    deviations: Annotated[int, Field(ge=4, le=1000)] = 12
    """Median deviations above the median that are a spike."""
    update_norm_steps: Annotated[int, Field(ge=0, le=1000)] = 0
    """Compare the norm of AdamW's update too, every so many steps, and train a step in which it jumps once more on the
    same and on another rank, to find a rank that computes wrongly; 0: never. At most an eighth of ``windowSteps``."""

    @model_validator(mode="after")
    def _measures_enough(self) -> "LossSpike":
        if self.update_norm_steps * 8 > self.window_steps:
            raise ValueError(
                f"updateNormSteps {self.update_norm_steps} is above an eighth of windowSteps {self.window_steps}: too "
                "few updates to compare with; lower updateNormSteps or raise windowSteps"
            )
        return self


class Health(Part):
    """Timeouts for heartbeats, nodes, starts and hangs."""

    heartbeat_timeout_seconds: Annotated[int, Field(ge=5, le=86_400)] = 30
    """Time without a renewal of the leader's Lease after which the attempt counts as lost."""
    node_lost_seconds: Annotated[int, Field(ge=1, le=86_400)] = 60
    """How long a node is NotReady before its pods count as lost."""
    start_timeout_seconds: Annotated[int, Field(ge=10, le=86_400)] = 600
    """How long an attempt may take from its record to its release."""
    first_step_timeout_seconds: Annotated[int, Field(ge=30, le=86_400)] = 600
    """Longest wait inside an exchange of ranks until the first step has ended."""
    collective_timeout_seconds: Annotated[int, Field(ge=10, le=86_400)] = 120
    """The same in later steps: a rank that hangs ends the attempt after it. ``data.startWhileProcessing`` adds
    ``data.waitSeconds`` to both."""
    hang: Hang = Field(default_factory=Hang)
    """Stalled steps."""
    stragglers: Stragglers = Field(default_factory=Stragglers)
    """Slow ranks."""
    parameter_hash_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Compare copies of parameters every so many steps, and before each checkpoint; 0: never."""
    loss: LossSpike = Field(default_factory=LossSpike)
    """Loss spikes."""
