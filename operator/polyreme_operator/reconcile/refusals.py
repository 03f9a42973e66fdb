"""Consequences of a job's objects that the API server refuses to create (400, 403, 422).

A pod or a Lease that stays refused ends the attempt, which gives its nodes to others. Without its other objects an
attempt can't start, but such an object may exist although it is refused, since a quota is checked first: the attempt
waits for it until its start times out, the object is tried again with a growing delay, and the condition ``PodsReady``
reports the refusal until the object is created. Once the ranks run, what they need exists: then only an object that is
known to be missing is reported, and others are tried as rarely as those that exist.
"""

from __future__ import annotations

from polyreme_api.progress import ProgressRecord
from polyreme_operator.types.snapshot import JobSnapshot, Refusal

RETRY_INITIAL_S = 1.0
RETRY_MAX_S = 30.0
"""Delay of the next try: doubled with each refusal, up to this."""
RUNNING_RETRY_S = 300.0
"""Delay while the ranks run, so that the object probably exists."""
SENTENCE_CHARACTERS_MAX = 300
_NEEDED_FOR = {
    "Service": "without it the workers can't find each other",
    "Secret": "without it no pod can start",
    "ServiceAccount": "without it no pod can be created",
    "Role": "without it the pods may not read the job",
    "RoleBinding": "without it the pods may not read the job",
}
_NEEDED = "the job can't start without it"


def ending(snapshot: JobSnapshot) -> Refusal | None:
    """Return the oldest refusal with which the attempt can't continue."""
    return min((each for each in snapshot.refusals if each.ends_attempt), key=lambda each: each.since_s, default=None)


def retry_s(refusal: Refusal, *, released: bool) -> float:
    """Return when a refused object is tried again."""
    if not refusal.tries:
        return refusal.tried_s
    growing_s = RETRY_INITIAL_S * 2.0 ** min(refusal.tries - 1, 30)
    return refusal.tried_s + (RUNNING_RETRY_S if released and not refusal.missing else min(RETRY_MAX_S, growing_s))


def waiting_kinds(snapshot: JobSnapshot, record: ProgressRecord | None, now_s: float) -> frozenset[str]:
    """Return the kinds of refused objects whose next try is not due yet."""
    released = record is not None and record.released
    return frozenset(
        each.kind for each in snapshot.refusals if not each.ends_attempt and retry_s(each, released=released) > now_s
    )


def next_try_s(snapshot: JobSnapshot, record: ProgressRecord | None) -> float | None:
    """Return when the first refused object is tried again; None if none is refused."""
    released = record is not None and record.released
    return min((retry_s(each, released=released) for each in snapshot.refusals if not each.ends_attempt), default=None)


def explain_children(snapshot: JobSnapshot, record: ProgressRecord | None) -> str:
    """Return a sentence about each refused object that is missing, or may be; empty if there is none."""
    released = record is not None and record.released
    children = (each for each in snapshot.refusals if not each.ends_attempt)
    refused = [each for each in children if each.missing or not released]
    return "; ".join(map(_sentence, sorted(refused, key=lambda each: each.kind)))


def _sentence(refusal: Refusal) -> str:
    answer = " ".join(refusal.message.split())
    answer = answer if len(answer) <= SENTENCE_CHARACTERS_MAX else f"{answer[: SENTENCE_CHARACTERS_MAX - 1]}…"
    needed = _NEEDED_FOR.get(refusal.kind, _NEEDED)
    return f"the API server refuses the job's {refusal.kind}, and {needed}: {answer}"
