"""Limits by quotas, computed from the queues' specs: the oracle for the operator's ledger.

It shares no code with the operator. Semantics are Kueue's: a queue takes its own nominal quota, what its children lend
it, and what it may borrow of its parent's tree; of what is its own it lends at most its lending limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyreme_cluster.port import Manifest

DEFAULT = "default"


class Queues:
    """The queues at one moment.

    Args:
        specs: Their specifications by name.
    """

    def __init__(self, specs: Mapping[str, dict[str, Any]]) -> None:
        self.specs = dict(specs)
        self._children: dict[str, list[str]] = {}
        for name in sorted(specs):
            self._children.setdefault(specs[name].get("parent") or "", []).append(name)

    def chain(self, name: str) -> list[str] | None:
        """Return a queue and all its parents; None if one of them is missing, or they turn in a circle."""
        found: list[str] = []
        while name:
            if name in found or name not in self.specs:
                return None
            found.append(name)
            name = self.specs[name].get("parent") or ""
        return found

    def in_order(self, name: str) -> bool:
        """Tell whether a queue may admit."""
        return self.chain(name) is not None or (name == DEFAULT and name not in self.specs)

    def held(self, name: str) -> bool:
        """Tell whether a queue or any of its parents has a stopPolicy that admits nothing."""
        return any(self.specs[above].get("stopPolicy", "None") != "None" for above in self.chain(name) or ())

    def excess(self, used: Mapping[str, int], queue: str, before: Mapping[str, int], resource: str) -> str | None:
        """Return the first rule that an admission breaks, in words; None if it breaks none.

        A quota that was lowered beneath what runs is no matter of an admission that takes nothing of it.

        Args:
            used: Pieces that each queue's own jobs hold.
            queue: Of the job.
            before: The same without that job.
            resource: Of this resource.
        """
        chain = self.chain(queue)
        if chain is None or not self._limited(queue, resource):
            return None
        after, without = self._counted(used, resource), self._counted(before, resource)
        for name in chain:
            grows = self._sums(name, after, resource)[0] > self._sums(name, without, resource)[0]
            if grows and (problem := self._broken(name, after, resource, root=name == chain[-1])):
                return problem
        return None

    def admits(self, used: Mapping[str, int], queue: str, resource: str, amount: int) -> bool:
        """Tell whether a queue may take so much more."""
        if self.chain(queue) is None:
            return self.in_order(queue)
        return self.excess({**used, queue: used.get(queue, 0) + amount}, queue, used, resource) is None

    def _counted(self, used: Mapping[str, int], resource: str) -> dict[str, int]:
        """Return the use that counts: a queue is unlimited if no queue on its chain has a quota for the resource."""
        return {queue: count for queue, count in used.items() if count and self._limited(queue, resource)}

    def _limited(self, queue: str, resource: str) -> bool:
        return any(_quota(self.specs[above], resource) is not None for above in self.chain(queue) or ())

    def _broken(self, name: str, used: Mapping[str, int], resource: str, *, root: bool) -> str | None:
        demand, quota = self._sums(name, used, resource)
        limit = 0 if root else (_quota(self.specs[name], resource) or {}).get("borrowingLimit")
        if limit is None or demand - quota <= limit or demand == 0:
            return None
        return f"queue {name} takes {demand} of {quota} and may borrow {limit}"

    def _sums(self, name: str, used: Mapping[str, int], resource: str) -> tuple[int, int]:
        """Return what a subtree takes beside what those below keep to themselves, and what it may count on."""
        demand, quota = used.get(name, 0), int((_quota(self.specs[name], resource) or {}).get("nominal", 0))
        for child in self._children.get(name, ()):
            taken, counted = self._sums(child, used, resource)
            lent = (_quota(self.specs[child], resource) or {}).get("lendingLimit")
            kept = 0 if lent is None else max(0, counted - lent)
            demand += max(0, taken - kept)
            quota += counted - kept
        return demand, quota


def queue_manifest(name: str, spec: dict[str, Any], api_version: str) -> Manifest:
    """Return a TrainingQueue."""
    return {"apiVersion": api_version, "kind": "TrainingQueue", "metadata": {"name": name}, "spec": spec}


def _quota(spec: Mapping[str, Any], resource: str) -> dict[str, Any] | None:
    return next((entry for entry in spec.get("quotas") or () if entry["resource"] == resource), None)
