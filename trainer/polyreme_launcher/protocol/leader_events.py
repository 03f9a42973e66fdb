"""Events and effects of the leader's state machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TypeAlias

from polyreme_api.exit_codes import ExitCode
from polyreme_api.progress import ProgressRecord
from polyreme_api.rank_state import ExchangeKind
from polyreme_launcher.protocol.check_rounds import CheckOrder
from polyreme_launcher.protocol.follower import ExitProcess, Tick
from polyreme_launcher.protocol.hang_evidence import HangLimits
from polyreme_launcher.protocol.messages import Directive, Message, Release


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """The job as the leader reads it."""

    number: int
    run: bool
    checkpoint_requested: bool
    replicas: int
    devices: int
    replacements: Mapping[int, int]
    """Replacement number by index, for those that are not 0."""
    job_json: str
    plan_json: str
    checks: CheckOrder | None = None
    """Checks before the ranks start; None: there are none."""
    hang_limits: HangLimits = dataclasses.field(default_factory=HangLimits)
    pp: int = 1
    """Ranks of a pipeline."""
    blocks: Mapping[ExchangeKind, int] = dataclasses.field(default_factory=dict)
    """Ranks of a group, by kind of exchange."""

    def replacement(self, index: int) -> int:
        """Return the replacement number of the pod that may fill an index's place."""
        return self.replacements.get(index, 0)

    def directive(self, index: int) -> Directive:
        """Return what a worker's launcher is asked to run."""
        return Directive(
            attempt=self.number,
            run=self.run,
            checkpoint_requested=self.checkpoint_requested,
            replacement=self.replacement(index),
            job_json=self.job_json,
            plan_json=self.plan_json,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobChanged:
    """``status.attempt`` was read."""

    attempt: AttemptView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerConnected:
    """A launcher authenticated itself (the leader's own follower, at once)."""

    index: int
    replacement: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """Its connection broke."""

    index: int
    replacement: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FromPeer:
    """A message of a follower."""

    index: int
    replacement: int
    message: Message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResumeFixed:
    """The attempt's resume point is in the checkpoint root, and rank 0's rendezvous has its socket."""

    attempt: int
    resume_from: str | None
    step: int
    """Last step of history before the attempt's first."""
    master_address: str
    master_port: int

    def release(self) -> Release:
        """Return the message that lets the ranks start."""
        return Release(
            attempt=self.attempt,
            master_address=self.master_address,
            master_port=self.master_port,
            resume_from=self.resume_from,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRefused:
    """The attempt can't begin here: its plan differs, or a damaged checkpoint can't be skipped."""

    attempt: int
    message: str
    code: int = ExitCode.USAGE
    """Exit code that reports it; ``ENVIRONMENT`` if another try may help."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProgressFromRank:
    """A progress record of rank 0."""

    record: ProgressRecord


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaseWritten:
    """The Lease holds this record."""

    record: ProgressRecord


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fenced:
    """Another leader had or has this place: a newer one wrote the Lease, or another process fixed the resume point."""

    attempt: int | None = None
    """Attempt of the resume point: its process may have released that attempt, so no other ever does. None: it was the
    Lease."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChecksMeet:
    """Where the pairs of a check's round meet; port 0: no port is free."""

    attempt: int
    serial: int
    address: str
    port: int


LeaderEvent: TypeAlias = (
    JobChanged
    | PeerConnected
    | PeerLost
    | FromPeer
    | ResumeFixed
    | AttemptRefused
    | ProgressFromRank
    | LeaseWritten
    | Fenced
    | ChecksMeet
    | Tick
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendTo:
    """Send this to one peer."""

    index: int
    message: Message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """Send this to every connected peer."""

    message: Message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DropPeer:
    """Close the connection of a pod whose place has another pod now."""

    index: int
    replacement: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FixResume:
    """Fix the attempt's resume point by create-if-absent; ``ResumeFixed`` answers, or ``Fenced``."""

    attempt: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeetForChecks:
    """Open a place where the pairs of a check's round meet; ``ChecksMeet`` answers."""

    attempt: int
    serial: int
    seconds: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RenewLease:
    """Write the record to the job's Lease; a newer one replaces one that is not yet written."""

    record: ProgressRecord


LeaderEffect: TypeAlias = SendTo | Broadcast | DropPeer | FixResume | MeetForChecks | RenewLease | ExitProcess
