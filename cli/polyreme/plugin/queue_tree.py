"""The cohort tree: what each queue may take, takes, borrows, and who waits there."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from polyreme.plugin.printing import bar, columns
from polyreme.plugin.rows import reason_of
from polyreme.plugin.snapshot import Snapshot, queue_status
from polyreme.plugin.waiting import QueuePositions, holds, queue_positions
from polyreme_api.queue import ResourceUsage
from polyreme_operator.queueing.tree import DEFAULT_QUEUE
from polyreme_operator.types.queues import QueueView, StopPolicy
from polyreme_operator.types.reasons import Reason

BAR_CELLS = 20
HEAD_MAX = 10
"""Waiting jobs that are listed for one queue."""
_MISSING = "jobs wait here, but there is no such queue; create it, or set another spec.queueName in them"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """One resource of one queue."""

    resource: str
    quota: int
    """What its subtree may take without borrowing."""
    used: int
    """What its subtree takes."""
    borrowed: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """One queue, in the order of the tree."""

    name: str
    depth: int
    pieces: tuple[Pieces, ...] = ()
    waiting: int = 0
    admitted: int = 0
    weight: int = 1
    stopped: str = ""
    problem: str = ""
    """Why the queue is not in order: one of a finite set."""
    message: str = ""
    """The same for people."""
    head: tuple[tuple[int, str, int, str], ...] = ()
    """Who waits first: place, job, priority, reason."""

    def to_object(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "name": self.name,
            "depth": self.depth,
            "resources": [dataclasses.asdict(piece) for piece in self.pieces],
            "pending": self.waiting,
            "admitted": self.admitted,
            "weight": self.weight,
            "stopPolicy": self.stopped or StopPolicy.NONE.value,
            "problem": self.problem or None,
            "message": self.message or None,
            "head": [
                {"position": place, "job": name, "priority": priority, "reason": reason}
                for place, name, priority, reason in self.head
            ],
        }


def queue_rows(seen: Snapshot, *, only: str | None = None, whole: bool = True, heads: bool = False) -> list[QueueRow]:
    """Work out the rows of the tree.

    Args:
        seen: Queues and jobs.
        only: Keep one queue and those below it, with the jobs that wait there.
        whole: Whether the jobs are those of all namespaces; if not, what the queues' statuses say is shown.
        heads: Whether the first waiting jobs of each queue are listed; of one queue they always are.
    """
    positions = queue_positions(seen)
    order = [(name, depth) for root in positions.tree.children("") for name, depth in _walk(positions, root, 0)]
    names = {name for name, _ in order}
    named = {job.spec.queue_name for job in seen.jobs if job.spec is not None and not job.status.finished}
    loose = sorted((set(positions.tree.views) | named | {DEFAULT_QUEUE}) - names)
    order += [(name, 0) for name in loose]
    if only is not None:
        kept = set(_below(positions, only))
        order = [(name, depth) for name, depth in order if name in kept]
    draw = _row if whole else _row_of_status
    return [draw(seen, positions, name, depth, head=heads or only is not None) for name, depth in order]


def render(rows: list[QueueRow]) -> RenderableType:
    """Draw the tree."""
    table = columns(("QUEUE", "RESOURCE", "USED", "QUOTA", "", "BORROWED", "PENDING", "RUNNING", "NOTE"), ())
    shallowest = min((row.depth for row in rows), default=0)
    for row in rows:
        _add(table, row, indent="  " * (row.depth - shallowest))
    parts: list[RenderableType] = [table]
    parts += [Text(f"{row.name}: {row.message}", style="yellow") for row in rows if row.message]
    for row in rows:
        if row.head:
            parts += [Text(), Text(f"waiting in {row.name}", style="bold")]
            parts.append(columns(("PLACE", "JOB", "PRIORITY", "REASON"), row.head))
            if row.waiting > len(row.head):
                parts.append(Text(f"and {row.waiting - len(row.head)} more"))
    return Group(*parts)


def _add(table: Table, row: QueueRow, *, indent: str) -> None:
    note = "; ".join(part for part in (row.problem, f"stopPolicy {row.stopped}" if row.stopped else "") if part)
    first = [Text(f"{indent}{row.name}"), Text(str(row.waiting)), Text(str(row.admitted)), Text(note or "-")]
    if not row.pieces:
        table.add_row(first[0], "-", "-", "unlimited" if not row.problem else "-", "", "-", *first[1:])
        return
    for at, piece in enumerate(row.pieces):
        name, *rest = first if at == 0 else [Text()] * 4
        cells = (piece.resource, str(piece.used), str(piece.quota), bar(piece.used, piece.quota, width=BAR_CELLS))
        table.add_row(name, *cells, str(piece.borrowed or "-"), *rest)


def _row_of_status(seen: Snapshot, positions: QueuePositions, name: str, depth: int, *, head: bool) -> QueueRow:
    """Return the row that the operator's status of a queue says."""
    row = _row(seen, positions, name, depth, head=head)
    if name not in positions.tree.views:
        return dataclasses.replace(row, message=row.message or "only jobs that you may list are counted")
    status = queue_status(positions.tree.view(name))
    usage = {entry.resource: entry for entry in status.usage}
    nothing = ResourceUsage(resource="")
    pieces = [
        dataclasses.replace(
            piece,
            used=usage.get(piece.resource, nothing).used,
            borrowed=usage.get(piece.resource, nothing).borrowed,
        )
        for piece in row.pieces
    ]
    first = status.head[:HEAD_MAX] if head else ()
    return dataclasses.replace(
        row,
        pieces=tuple(pieces),
        waiting=status.pending,
        admitted=status.admitted,
        head=tuple((job.position, f"{job.namespace}/{job.name}", job.priority, job.reason or "-") for job in first),
    )


def _row(seen: Snapshot, positions: QueuePositions, name: str, depth: int, *, head: bool) -> QueueRow:
    tree, ledger = positions.tree, positions.ledger
    missing = name not in tree.views and not tree.in_order(name)
    problem = tree.problems.get(name)
    pieces = [
        Pieces(
            resource=resource,
            quota=tree.bound(name, resource).quota,
            used=sum(ledger.used(below, resource) for below in _below(positions, name)),
            borrowed=ledger.borrowed(name, resource),
        )
        for resource in sorted(_named(positions, name))
    ]
    waiting = positions.by_queue.get(name, ())
    policy = tree.stop_policy(name)
    return QueueRow(
        name=name,
        depth=depth,
        pieces=tuple(pieces),
        waiting=len(waiting),
        admitted=sum(holds(job) and job.spec is not None and job.spec.queue_name == name for job in seen.jobs),
        weight=tree.view(name).weight,
        stopped="" if policy is StopPolicy.NONE else policy.value,
        problem=Reason.QUEUE_MISSING.value if missing else problem.reason.value if problem is not None else "",
        message=_MISSING if missing else problem.message if problem is not None else "",
        head=tuple(
            (place, f"{job.namespace}/{job.name}", job.priority, reason_of(job))
            for place, job in enumerate((positions.jobs[uid] for uid in waiting[:HEAD_MAX]), start=1)
        )
        if head
        else (),
    )


def _named(positions: QueuePositions, name: str) -> set[str]:
    """Resources for which a queue or one below it has a quota."""
    views: list[QueueView] = [positions.tree.view(below) for below in _below(positions, name)]
    return {quota.resource for view in views for quota in view.quotas} | set(positions.tree.limited(name))


def _walk(positions: QueuePositions, name: str, depth: int) -> list[tuple[str, int]]:
    return [
        (name, depth),
        *(row for child in positions.tree.children(name) for row in _walk(positions, child, depth + 1)),
    ]


def _below(positions: QueuePositions, name: str) -> list[str]:
    """Return a queue and all below it."""
    return [found for found, _ in _walk(positions, name, 0)]
