"""The tree of queues and cohorts, and the problems of invalid queues.

A queue that others name as their parent is a cohort. Quota flows along the edges of the tree: a queue lends what it
does not use, at most its lending limit, and borrows at most its borrowing limit. The quota that a queue never lends
(``kept``) and the quota of its subtree (``quota``) depend on the specs alone, so they are computed here, once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType

from polyreme_operator.types.queues import QueueView, StopPolicy

DEFAULT_QUEUE = "default"
"""Queue of jobs that name none; the installation says whether it is unlimited or missing if it does not exist."""
DEPTH_MAX = 32
"""Queues between a root and its farthest descendant, both included."""


class QueueReason(StrEnum):
    """Reasons of the condition ``Ready`` of an invalid queue."""

    CYCLE = "Cycle"
    PARENT_MISSING = "ParentMissing"
    DUPLICATE = "Duplicate"
    TOO_DEEP = "TooDeep"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueProblem:
    """Why a queue admits nothing, and what to change."""

    reason: QueueReason
    message: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What the specs say of one resource at one queue, cohorts included."""

    nominal: int
    """Its own."""
    quota: int
    """Its own and what its children lend: what its subtree may take without borrowing."""
    kept: int
    """The part of it that is never lent."""
    borrowing_limit: int | None
    """None: all that is lent. A root can't borrow."""


class QueueTree:
    """Queues by name, with their places in the tree; never changes."""

    def __init__(
        self,
        views: Mapping[str, QueueView],
        paths: Mapping[str, tuple[str, ...]],
        problems: Mapping[str, QueueProblem],
        *,
        default_unlimited: bool = True,
    ) -> None:
        self.views = MappingProxyType(views)
        self._default_unlimited = default_unlimited
        self.problems = MappingProxyType(problems)
        self._paths = paths
        children: dict[str, list[str]] = defaultdict(list)
        for name, path in sorted(paths.items()):
            children[path[1] if len(path) > 1 else ""].append(name)
        self._children = {name: tuple(below) for name, below in children.items()}
        self._bounds: dict[str, dict[str, Bound]] = {}
        for path in sorted(paths.values(), key=len, reverse=True):
            self._bounds[path[0]] = self._bounds_of(views[path[0]])
        self._named = {
            name: frozenset(quota.resource for above in path for quota in views[above].quotas)
            for name, path in paths.items()
        }
        self._bound_paths = {
            (name, resource): tuple(((at, resource), self.bound(at, resource)) for at in path)
            for name, path in paths.items()
            for resource in self._named[name]
        }

    @classmethod
    def of(cls, queues: Sequence[QueueView], *, default_unlimited: bool = True) -> QueueTree:
        """Return the tree of these queues; those that are not in order have a problem instead of a path.

        Args:
            queues: The queues.
            default_unlimited: Whether the queue ``default`` admits jobs without limit while it does not exist.
        """
        views = {queue.name: queue for queue in queues}
        counts = Counter(queue.name for queue in queues)
        problems: dict[str, QueueProblem] = {}
        paths: dict[str, tuple[str, ...]] = {}
        for name, view in views.items():
            problem = _doubled(view, counts[name]) or _walk(name, views, counts)
            if isinstance(problem, QueueProblem):
                problems[name] = problem
            else:
                paths[name] = problem
        return cls(views, paths, problems, default_unlimited=default_unlimited)

    def in_order(self, name: str) -> bool:
        """Tell whether jobs of this queue may be admitted; those of ``default`` perhaps even if it does not exist."""
        return name in self._paths or (name == DEFAULT_QUEUE and self._default_unlimited and name not in self.problems)

    def path(self, name: str) -> tuple[str, ...]:
        """Return the queue, its parent, and so on up to the root; empty for a queue that has no place in the tree."""
        return self._paths.get(name, ())

    def root(self, name: str) -> str:
        """Return the root of the queue's tree; the queue itself when it has no place in one."""
        return self.path(name)[-1] if name in self._paths else name

    def children(self, name: str) -> tuple[str, ...]:
        """Return the queues in order whose parent this is, by name; of the empty name, the roots."""
        return self._children.get(name, ())

    def view(self, name: str) -> QueueView:
        """Return a queue's spec; the defaults for one that does not exist."""
        return self.views.get(name) or QueueView(name=name)

    def stop_policy(self, name: str) -> StopPolicy:
        """Return the strictest policy of a queue and the cohorts above it."""
        stricter = (StopPolicy.HOLD_AND_DRAIN, StopPolicy.HOLD)
        policies = {self.views[above].stop_policy for above in self.path(name)}
        return next((policy for policy in stricter if policy in policies), StopPolicy.NONE)

    def set_aside_s(self, name: str) -> float:
        """Return how long pods of a queue's jobs may take to start: the least of the queue and the cohorts above it."""
        return min((self.views[above].set_aside_s for above in self.path(name)), default=self.view(name).set_aside_s)

    def limited(self, name: str) -> frozenset[str]:
        """Return the resources that the queue or any cohort above it names: all others are unlimited."""
        return self._named.get(name, frozenset())

    def bound(self, name: str, resource: str) -> Bound:
        """Return what the specs say of a resource at a queue; nothing for a queue that has no place in the tree."""
        return self._bounds.get(name, {}).get(resource, NOTHING)

    def bound_path(self, name: str, resource: str) -> Sequence[tuple[tuple[str, str], Bound]]:
        """Return each place at which a resource of a queue is counted, from the queue to the root, and its bound.

        Places are pairs of queue and resource; there is none where the resource is unlimited.
        """
        return self._bound_paths.get((name, resource), ())

    def _bounds_of(self, view: QueueView) -> dict[str, Bound]:
        """Sum up a queue; its children are done already."""
        below = [self._bounds[child] for child in self.children(view.name)]
        resources = {quota.resource for quota in view.quotas}.union(*below)
        bounds = {}
        for resource in resources:
            own = view.quota(resource)
            nominal = own.nominal if own else 0
            lent = [bounds[resource] for bounds in below if resource in bounds]
            quota = nominal + sum(bound.quota - bound.kept for bound in lent)
            limit = own.lending_limit if own else None
            bounds[resource] = Bound(
                nominal=nominal,
                quota=quota,
                kept=0 if limit is None else max(0, quota - limit),
                borrowing_limit=own.borrowing_limit if own else None,
            )
        return bounds


NOTHING = Bound(nominal=0, quota=0, kept=0, borrowing_limit=None)
"""Of a resource that a queue and those below it do not name: it lives on what others lend."""


def _doubled(view: QueueView, count: int) -> QueueProblem | None:
    """Reject duplicates, since it would be ambiguous which of them counts."""
    if count > 1:
        message = f"{count} queues are called {view.name}; rename all but one"
        return QueueProblem(reason=QueueReason.DUPLICATE, message=message)
    twice = [resource for resource, n in Counter(quota.resource for quota in view.quotas).items() if n > 1]
    if twice:
        message = f"spec.quotas of {view.name} names {min(twice)} more than once; keep one entry for each resource"
        return QueueProblem(reason=QueueReason.DUPLICATE, message=message)
    return None


def _walk(name: str, views: Mapping[str, QueueView], counts: Mapping[str, int]) -> tuple[str, ...] | QueueProblem:
    """Follow the parents to the root; a queue below an invalid one is invalid too."""
    path = [name]
    while parent := views[path[-1]].parent:
        last = path[-1]
        if parent in path:
            ring = " -> ".join([*path[path.index(parent) :], parent])
            message = f"the parents of {name} form a cycle: {ring}; change spec.parent of one of them"
            return QueueProblem(reason=QueueReason.CYCLE, message=message)
        if parent not in views:
            message = f"spec.parent of {last} is {parent}, and there is no such queue; create it or change spec.parent"
            return QueueProblem(reason=QueueReason.PARENT_MISSING, message=message)
        if above := _doubled(views[parent], counts[parent]):
            return dataclasses.replace(above, message=f"its ancestor {parent} is not ready: {above.message}")
        if len(path) == DEPTH_MAX:
            message = f"{name} is nested deeper than {DEPTH_MAX} queues; change spec.parent"
            return QueueProblem(reason=QueueReason.TOO_DEEP, message=message)
        path.append(parent)
    return tuple(path)
