"""Why a job does not run: a sentence, what would let it run, its place, who stands before it, who makes way."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from polyreme.formatting import duration
from polyreme.plugin.notes import notes_of
from polyreme.plugin.printing import columns, facts
from polyreme.plugin.rows import message_of, state_of
from polyreme.plugin.snapshot import Snapshot
from polyreme.plugin.waiting import Standing, is_waiting, standing
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

BEFORE_MAX = 10
"""Jobs that are named before the one asked about."""
VICTIMS_MAX = 20
_HELP: dict[str, str] = {
    Reason.MISCONFIGURED: "it can never run as it is: change the spec and apply it again",
    Reason.WAITING_FOR_DATA: "it is queued for devices when its data is processed",
    Reason.DATA_REFUSED: "it is queued for devices once its dataset is repaired or registered, or its data changed",
    Reason.EXCEEDS_QUOTA: "it runs when jobs of the queue or its cohort end, or when the queue's quota is raised",
    Reason.QUEUE_MISSING: "it runs once its queue is Ready: create the TrainingQueue, or set another spec.queueName",
    Reason.QUEUE_STOPPED: "it runs once spec.stopPolicy of its queue and of the cohorts above it is None",
    Reason.WAITING_FOR_PREEMPTION: "it runs when the preempted jobs have saved their checkpoints and stopped",
    Reason.WAITING_FOR_TOPOLOGY: "it runs when one domain has enough free nodes; spec.topology may name a wider level",
    Reason.WAITING_FOR_NODES: "it runs when nodes that its pod template accepts are free or join the cluster",
    Reason.WAITING_FOR_CAPACITY: "it runs when jobs end or nodes join the cluster",
    Reason.BEHIND_OTHERS: "it runs when the jobs ahead of it have been admitted",
    Reason.SUSPENDED: "it runs again after `kubectl polyreme resume`",
    Reason.PREEMPTED: "it keeps its place in the queue and continues from its checkpoint",
    Reason.RECLAIMED: "it keeps its place in the queue and continues from its checkpoint",
    Reason.EVICTED: "it keeps its place in the queue and continues from its checkpoint",
    Reason.CREATE_REFUSED: "it is retried automatically: fix the quota, the admission plugin or the pod template",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A job that was asked to make way."""

    name: str
    """Namespace and name."""
    deadline: str
    left_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything that ``why`` says."""

    job: str
    state: str
    reason: str
    sentence: str
    remedy: str = ""
    notes: tuple[str, ...] = ()
    """What its other conditions say."""
    queue: str = ""
    position: int | None = None
    waiting: int = 0
    """Jobs that wait in the queue."""
    ahead: int = 0
    """Jobs that the operator looks at first, of all queues."""
    before: tuple[tuple[str, str, int, str], ...] = ()
    """Those nearest before it: name, queue, priority, reason."""
    victims: tuple[Victim, ...] = ()
    makes_way_for: str = ""
    """Job for which this one was asked to stop."""
    makes_way_left_s: float | None = None

    def to_object(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "job": self.job,
            "state": self.state,
            "reason": self.reason,
            "message": self.sentence,
            "remedy": self.remedy,
            "notes": list(self.notes),
            "queue": self.queue,
            "position": self.position,
            "waiting": self.waiting,
            "ahead": self.ahead,
            "before": [
                {"job": name, "queue": queue, "priority": priority, "reason": reason}
                for name, queue, priority, reason in self.before
            ],
            "victims": [{"job": victim.name, "deadline": victim.deadline} for victim in self.victims],
            "makesWayFor": self.makes_way_for or None,
        }


def why(seen: Snapshot, job: JobView) -> Answer:
    """Work out why a job stands as it does."""
    state, condition = state_of(job)
    reason = Reason.MISCONFIGURED if state == "Misconfigured" else condition.reason if condition is not None else ""
    sentence = message_of(job) or _unsaid(job, state)
    name = f"{job.namespace}/{job.name}"
    asked = job.status.preemption
    answer = Answer(
        job=name,
        state=state,
        reason=str(reason),
        sentence=sentence,
        remedy=_HELP.get(reason, ""),
        notes=notes_of(job),
        queue=job.spec.queue_name if job.spec is not None else "",
        victims=_victims(seen, job),
        makes_way_for=(asked.by_name or asked.by) if asked is not None and job.admitted else "",
        makes_way_left_s=parse_time_or(asked.deadline, seen.now_s) - seen.now_s if asked is not None else None,
    )
    return _placed(answer, standing(seen), job) if is_waiting(job) else answer


def render(answer: Answer) -> RenderableType:
    """Draw an answer."""
    head = Text(answer.job, style="bold").append(f" is {answer.state}", style="default")
    if answer.reason and answer.reason != answer.state:
        head.append(f" ({answer.reason})")
    if answer.sentence:
        head.append(f": {answer.sentence}")
    parts: list[RenderableType] = [head]
    place = f"{answer.position} of {answer.waiting} in queue {answer.queue}" if answer.position else None
    if place and answer.ahead >= (answer.position or 0):
        place += f", {answer.ahead} ahead of it in all queues"
    way = None
    if answer.makes_way_for:
        way = f"{answer.makes_way_for}, within {duration(max(0.0, answer.makes_way_left_s or 0.0))}"
    also = "\n".join(answer.notes)
    pairs = [("then", answer.remedy), ("also", also), ("place", place), ("preempted by", way)]
    if any(value for _, value in pairs):
        parts += [facts(pairs)]
    if answer.before:
        rows = [(name, queue, priority, reason) for name, queue, priority, reason in answer.before]
        parts += [Text(), columns(("AHEAD", "QUEUE", "PRIORITY", "REASON"), rows)]
        if answer.ahead > len(answer.before):
            parts.append(Text(f"and {answer.ahead - len(answer.before)} more ahead of these"))
    if answer.victims:
        rows_ = [(victim.name, duration(max(0.0, victim.left_s))) for victim in answer.victims]
        parts += [Text(), columns(("PREEMPTED", "WITHIN"), rows_)]
    return Group(*parts)


def _placed(answer: Answer, stands: Standing, job: JobView) -> Answer:
    place = stands.place(job.uid)
    ahead = stands.before(job.uid)
    shown = ahead[-BEFORE_MAX:]
    problem = stands.tree.problems.get(answer.queue)
    return dataclasses.replace(
        answer,
        sentence=answer.sentence if problem is None else problem.message,
        position=place[0] if place else None,
        waiting=place[1] if place else 0,
        ahead=len(ahead),
        before=tuple(
            (
                f"{other.namespace}/{other.name}",
                other.spec.queue_name if other.spec is not None else "",
                other.priority,
                condition.reason if (condition := state_of(other)[1]) is not None else "-",
            )
            for other in shown
        ),
    )


def _victims(seen: Snapshot, job: JobView) -> tuple[Victim, ...]:
    found = [
        Victim(
            name=f"{other.namespace}/{other.name}",
            deadline=asked.deadline,
            left_s=parse_time_or(asked.deadline, seen.now_s) - seen.now_s,
        )
        for other in seen.jobs
        if (asked := other.status.preemption) is not None and asked.by == job.uid and other.admitted
    ]
    return tuple(sorted(found, key=lambda victim: (victim.left_s, victim.name))[:VICTIMS_MAX])


def _unsaid(job: JobView, state: str) -> str:
    """Say what no condition says."""
    if job.spec is not None and job.spec.suspend:
        return "spec.suspend is true"
    if state == "New":
        return "the operator has not reported on it yet; check that the operator runs and manages this job"
    if state == "Starting":
        return f"{job.status.ready_replicas} of its workers have joined"
    return ""
