"""Why a job is in its state: a sentence, what would let it run, its place, the jobs ahead of it, those it preempts."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from polyreme.plugin.notes import notes_of
from polyreme.plugin.printing import columns, facts
from polyreme.plugin.rows import message_of, reason_of, refusal_of, state_of
from polyreme.plugin.snapshot import Snapshot, queue_status
from polyreme.plugin.waiting import QueuePositions, is_waiting, queue_positions
from polyreme.views.formatting import duration
from polyreme_api.labels import MANAGER
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

BEFORE_MAX = 10
"""Jobs that are named before the one asked about."""
VICTIMS_MAX = 20
REMEDIES: dict[str, str] = {
    Reason.MISCONFIGURED: "add nodes that fit, or delete it and apply it again with a smaller request",
    Reason.PLANNING: "wait; this takes seconds for a large elastic job",
    Reason.WAITING_FOR_DATA: "it is queued for devices when its data is processed",
    Reason.DATA_REFUSED: "it is queued for devices once its dataset is repaired or registered",
    Reason.EXCEEDS_QUOTA: "it runs when jobs of the queue or its cohort end, or when the queue's quota is raised",
    Reason.QUEUE_REFUSED: "it runs once its queue accepts it, or with another spec.queueName",
    Reason.QUEUE_MISSING: "it runs once its queue is Ready: create the TrainingQueue, or set another spec.queueName",
    Reason.QUEUE_STOPPED: "it runs once spec.stopPolicy of its queue and of the cohorts above it is None",
    Reason.WAITING_FOR_PREEMPTION: "it runs when the preempted jobs have saved their checkpoints and stopped",
    Reason.WAITING_FOR_TOPOLOGY: "it runs when one domain has enough free nodes; a new job may name a wider level",
    Reason.WAITING_FOR_NODES: "it runs when nodes that its pod template accepts are free or join the cluster",
    Reason.WAITING_FOR_CAPACITY: "it runs when jobs end or nodes join the cluster",
    Reason.BEHIND_OTHERS: "it runs when the jobs ahead of it have been admitted",
    Reason.SUSPENDED: "it runs again after `kubectl polyreme resume {name}`",
    Reason.PREEMPTED: "it keeps its place in the queue and continues from its checkpoint",
    Reason.RECLAIMED: "it keeps its place in the queue and continues from its checkpoint",
    Reason.EVICTED: "it keeps its place in the queue and continues from its checkpoint",
    Reason.UNSCHEDULABLE: "it is placed again by itself; look for pods that the operator does not see",
    Reason.SET_ASIDE: "it is tried again at that time by itself: fix the image, the Secret or the node meanwhile",
    Reason.CREATE_REFUSED: "it is retried automatically: fix the quota or the admission plugin that refuses its pods",
}
_WAITS = frozenset({"Queued", "Suspended", "Preempting"})
_STARTING = "it trains when its pods run and their launchers have joined: see `kubectl polyreme describe {name}`"
_FAILED = "it is not retried: delete it, repair what the message names, and apply it again; its checkpoints stay"
_UNREADABLE = "change the field that the message names, or delete it and apply it again"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Victim:
    """A job that was asked to stop for this one."""

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
    resize: str = ""
    """Why the number of workers that its spec asks for is refused."""
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
            "resizeRefused": self.resize or None,
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


def why(seen: Snapshot, job: JobView, *, doubt: str = "", whole: bool = True) -> Answer:
    """Work out why a job is in its state.

    Args:
        seen: What could be read of the jobs, queues and nodes.
        job: The job.
        doubt: Why its state may be old.
        whole: Whether that is all jobs, queues and nodes; if not, the place is the one in the status of its queue.
    """
    state, _ = state_of(job)
    reason = reason_of(job).removeprefix("-")
    asked = job.status.preemption
    sentence = "; ".join(filter(None, (message_of(job) or ("" if doubt else _unsaid(job, state)), doubt)))
    answer = Answer(
        job=f"{job.namespace}/{job.name}",
        state=state,
        reason=reason,
        sentence=sentence,
        remedy=_remedy(job, state, reason),
        notes=tuple(note for note in notes_of(job) if note not in sentence),
        queue=job.spec.queue_name if job.spec is not None else "",
        victims=_victims(seen, job),
        makes_way_for=(asked.by_name or asked.by) if asked is not None and job.admitted else "",
        makes_way_left_s=parse_time_or(asked.deadline, seen.now_s) - seen.now_s if asked is not None else None,
        resize=refusal_of(job),
    )
    if not is_waiting(job):
        return answer
    return _placed(answer, queue_positions(seen), job) if whole else _placed_by_status(answer, seen, job)


def _remedy(job: JobView, state: str, reason: str) -> str:
    if state == "Failed":
        text = _FAILED
    elif state == "Misconfigured":
        text = _UNREADABLE
    elif state == "Starting":
        text = "" if job.status.is_true("PodsReady") else _STARTING
    else:
        text = REMEDIES.get(reason, "") if state in _WAITS else ""
    return text.format(name=job.name)


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
    pairs = [("size", answer.resize), ("then", answer.remedy), ("also", also), ("place", place), ("preempted by", way)]
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


def _placed(answer: Answer, positions: QueuePositions, job: JobView) -> Answer:
    place = positions.place(job.uid)
    ahead = positions.before(job.uid)
    shown = ahead[-BEFORE_MAX:]
    problem = positions.tree.problems.get(answer.queue)
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


def _placed_by_status(answer: Answer, seen: Snapshot, job: JobView) -> Answer:
    """Return the place that the operator has written into the status of the queue; it names the first jobs only."""
    status = queue_status(next((queue for queue in seen.queues if queue.name == answer.queue), None))
    own = next((entry for entry in status.head if (entry.namespace, entry.name) == (job.namespace, job.name)), None)
    if own is None:
        return answer
    ahead = [entry for entry in status.head if entry.position < own.position]
    return dataclasses.replace(
        answer,
        position=own.position,
        waiting=status.pending,
        ahead=len(ahead),
        before=tuple(
            (f"{entry.namespace}/{entry.name}", answer.queue, entry.priority, entry.reason or "-")
            for entry in ahead[-BEFORE_MAX:]
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
    if job.spec is not None and job.spec.managed_by != MANAGER:
        return f"spec.managedBy is {job.spec.managed_by}: polyreme's operator leaves it alone"
    if state == "New":
        return "the operator has not looked at it yet"
    if state == "Starting":
        return f"{job.status.ready} of its workers have joined"
    return ""
