"""Fair share of queues: present and decayed past usage relative to capacity, divided by the queue's weight.

Past usage is stored as amount x seconds that decays with the queue's half-life. Divided by the mean lifetime it is an
amount, so present and past can be added: a queue that has always held ten devices counts twenty, one that just took its
first ten counts ten and goes first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.inventory import Requests
from polyreme_operator.types.queues import QueueView

NEGLIGIBLE_S = 1e-3
"""Amount x seconds below which past usage is dropped, so that the status does not keep a resource forever."""


def decayed(view: QueueView, used: Mapping[str, int], now_s: float) -> tuple[tuple[str, float], ...]:
    """Return the queue's decayed use at ``now_s``, had it used this much since its status was written.

    Args:
        view: The queue with the memory that its status holds, and when that was worked out (0: never).
        used: Pieces by resource that its own jobs hold.
        now_s: The present.

    Returns:
        Pairs of resource and pieces x seconds, by name.
    """
    if view.half_life_s <= 0:
        return ()
    elapsed_s = max(0.0, now_s - view.used_at_s) if view.used_at_s else 0.0
    left = 2.0 ** (-elapsed_s / view.half_life_s)
    # The integral of a memory that fades while it is added to.
    gained_s = mean_life_s(view) * (1.0 - left)
    before = dict(view.used_seconds)
    after = {name: before.get(name, 0.0) * left + used.get(name, 0) * gained_s for name in before.keys() | used.keys()}
    return tuple((name, seconds) for name, seconds in sorted(after.items()) if seconds > NEGLIGIBLE_S)


def mean_life_s(view: QueueView) -> float:
    """Return the mean lifetime of past usage."""
    return view.half_life_s / math.log(2.0)


class Shares:
    """Dominant share of every queue, updated by the admissions of a cycle."""

    def __init__(
        self, tree: QueueTree, used: Mapping[tuple[str, str], int], capacity: Mapping[str, int], now_s: float
    ) -> None:
        """Sum up present and past.

        Args:
            tree: The queues.
            used: Pieces by queue and resource that its own jobs hold.
            capacity: Pieces of each resource in the cluster: the whole where a tree has no quota of it.
            now_s: The present.
        """
        self._tree = tree
        self._capacity = capacity
        self._known: dict[tuple[str, bool], float] = {}
        """Computed shares, by queue and whether of its own jobs alone."""
        self._own: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._below: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (queue, resource), count in used.items():
            self._add(queue, resource, count)
        for name, view in tree.views.items():
            if view.half_life_s <= 0:
                continue
            held = {resource: used.get((name, resource), 0) for resource, _ in view.used_seconds}
            for resource, seconds in decayed(view, held, now_s):
                self._add(name, resource, seconds / mean_life_s(view))

    def charge(self, queue: str, requests: Requests, workers: int) -> None:
        """Add an admitted job."""
        for resource, amount in requests:
            self._add(queue, resource, amount * workers)

    def of(self, queue: str) -> float:
        """Return the share of a queue's subtree over its weight: the smallest is served first."""
        return self._dominant(queue, own=False)

    def own(self, queue: str) -> float:
        """Return the share of the queue's own jobs, without its children."""
        return self._dominant(queue, own=True)

    def _add(self, queue: str, resource: str, pieces: float) -> None:
        self._own[queue][resource] += pieces
        self._known.pop((queue, True), None)
        for at in self._tree.path(queue) or (queue,):
            self._below[at][resource] += pieces
            self._known.pop((at, False), None)

    def _dominant(self, queue: str, *, own: bool) -> float:
        known = self._known.get((queue, own))
        if known is None:
            known = self._known[queue, own] = self._worked_out(queue, (self._own if own else self._below).get(queue))
        return known

    def _worked_out(self, queue: str, pieces: Mapping[str, float] | None) -> float:
        if not pieces:
            return 0.0
        root = self._tree.root(queue)
        dominant = 0.0
        for resource, held in pieces.items():
            whole = self._tree.bound(root, resource).quota or self._capacity.get(resource, 0)
            if whole > 0:
                dominant = max(dominant, held / whole)
        return dominant / self._tree.view(queue).weight
