"""The finite set of words by which the status answers "why" (docs/reference/reasons.md)."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Types of a job's conditions, in the order in which they are written."""

    QUEUED = "Queued"
    ADMITTED = "Admitted"
    PODS_READY = "PodsReady"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    RESIZE_REFUSED = "ResizeRefused"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Reason(StrEnum):
    """Reasons of conditions. Of several that hold, the first of Misconfigured .. Starting is told."""

    MISCONFIGURED = "Misconfigured"
    EXCEEDS_QUOTA = "ExceedsQuota"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    WAITING_FOR_DATA = "WaitingForData"
    STARTING = "Starting"
    WAITING_FOR_PODS = "WaitingForPods"
    ADMITTED = "Admitted"
    JOINED = "Joined"
    LOADING = "Loading"
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    EXPORTING = "Exporting"
    STALLED = "Stalled"
    RECOVERED = "Recovered"
    RESIZED = "Resized"
    NO_FIT = "NoFit"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    EVICTED = "Evicted"
    COMPLETED = "Completed"
    FINISHED = "Finished"
    MAX_RESTARTS_EXCEEDED = "MaxRestartsExceeded"
    NO_PROGRESS = "NoProgress"
    ENVIRONMENT_FAILED = "EnvironmentFailed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    FAILURE_POLICY = "FailurePolicy"
    RUN_FAILED = "RunFailed"


class Cause(StrEnum):
    """Causes of restarts and of lost time."""

    STARTING = "Starting"
    """Lost time only: an attempt that no failure called for gets ready."""
    RANK_EXITED = "RankExited"
    RANK_KILLED = "RankKilled"
    ENVIRONMENT_FAILED = "EnvironmentFailed"
    LEADER_SILENT = "LeaderSilent"
    POD_LOST = "PodLost"
    POD_FAILED = "PodFailed"
    HOST_RESTARTED = "HostRestarted"
    """The process that ran the pods began anew; nothing about the job failed, so no budget pays for it."""
    NODE_LOST = "NodeLost"
    START_TIMED_OUT = "StartTimedOut"
    HUNG = "Hung"
    STOPPED = "Stopped"
    RESIZE = "Resize"
    SUSPEND = "Suspend"


class Scope(StrEnum):
    """Rungs of the ladder: how an attempt came about."""

    START = "Start"
    RESUME = "Resume"
    RESIZE = "Resize"
    PROCESS = "RestartProcess"
    POD = "RestartPod"
    GANG = "RestartGang"
