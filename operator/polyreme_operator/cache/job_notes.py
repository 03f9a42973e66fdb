"""The operator's notes on jobs, beyond what the cluster shows of them."""

from __future__ import annotations

from polyreme_operator.cache.children import ChildIndex
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.refusals import RefusalIndex
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.reasons import Scope
from polyreme_operator.types.views import JobView


class JobNotes:
    """Confirmed children, refused objects, and requests to the scheduler."""

    def __init__(self, jobs: JobIndex) -> None:
        self.children = ChildIndex()
        self.refusals = RefusalIndex()
        self.asking: set[str] = set()
        """Jobs that need another place, which only the scheduler assigns."""
        for forget in (self.children.forget, self.refusals.forget, self.asking.discard):
            jobs.when_removed(forget)

    def ask(self, uid: str, *, asks: bool) -> Changes:
        """Note whether a job needs another place."""
        if not asks:
            self.asking.discard(uid)
            return Changes()
        self.asking.add(uid)
        return Changes(asks=True)

    def saw(self, before: JobView | None, after: JobView) -> None:
        """Note a state of a job: an attempt that starts pods has everything confirmed and tried again."""
        if after.attempt is None:
            self.refusals.saw_before_first_attempt(after.uid)
        elif before is not None and after.attempt.scope != Scope.PROCESS and begins(before, after):
            self.children.begin(after.uid)
            self.refusals.begin(after.uid)


def begins(before: JobView, after: JobView) -> bool:
    """Tell whether another attempt has begun."""
    number = 0 if before.attempt is None else before.attempt.number
    return after.attempt is not None and after.attempt.number != number
