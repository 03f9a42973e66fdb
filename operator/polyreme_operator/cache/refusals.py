"""Objects that the API server refuses to create for jobs, by kind.

A refusal is forgotten when an object of its kind is created, and never because something else was.
"""

from __future__ import annotations

import dataclasses

from polyreme_operator.types.snapshot import Refusal
from polyreme_operator.types.views import JobView


class RefusalIndex:
    """Refusals by job and kind."""

    def __init__(self) -> None:
        self._by_job: dict[str, dict[str, Refusal]] = {}
        self._created: dict[str, set[str]] = {}
        """Kinds that may have been created, of jobs that were seen before their first attempt."""

    def saw_before_first_attempt(self, uid: str) -> None:
        """Note that nothing of a job exists yet, so that only what this operator writes can create it."""
        self._created.setdefault(uid, set())

    def may_exist(self, uid: str, kind: str) -> None:
        """Note that an object was created, or that it is unknown whether it was."""
        if uid in self._created:
            self._created[uid].add(kind)

    def note(self, job: JobView | None, kind: str, message: str, *, now_s: float) -> bool:
        """Remember that an object of a job's current attempt was refused; tell whether that is news."""
        if job is None or job.attempt is None:
            return False
        number, kinds = job.attempt.number, self._by_job.setdefault(job.uid, {})
        known = kinds.get(kind)
        if known is not None and known.ends_attempt and known.attempt != number:
            known = None
        kinds[kind] = Refusal(
            kind=kind,
            attempt=number,
            message=message,
            since_s=now_s if known is None else known.since_s,
            tried_s=now_s,
            tries=1 if known is None else known.tries + 1,
            missing=kind not in self._created.get(job.uid, {kind}),
        )
        return known is None or not known.ends_attempt

    def accept(self, uid: str, kind: str) -> None:
        """Forget a refusal, since an object of this kind was created or exists."""
        self.may_exist(uid, kind)
        kinds = self._by_job.get(uid, {})
        kinds.pop(kind, None)
        if not kinds:
            self._by_job.pop(uid, None)

    def of(self, job: JobView) -> tuple[Refusal, ...]:
        """Return what is refused now; of what ends an attempt, only that of the current one."""
        number = None if job.attempt is None else job.attempt.number
        found = self._by_job.get(job.uid, {}).values()
        return tuple(each for each in found if not each.ends_attempt or each.attempt == number)

    def begin(self, uid: str) -> None:
        """Try everything again at once, since an attempt starts pods."""
        kinds = self._by_job.get(uid, {})
        for kind, known in kinds.items():
            kinds[kind] = dataclasses.replace(known, tries=0)

    def forget(self, uid: str) -> None:
        """Forget a job."""
        self._by_job.pop(uid, None)
        self._created.pop(uid, None)
