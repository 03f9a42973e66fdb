"""The one procedure by which a leader fixes where its attempt begins, over whatever holds the checkpoint root.

The launcher runs it on an object store, the simulator on its model of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from polyreme_api.history import ResumePoint, checkpoint_name, choose_resume
from polyreme_api.mixture import MixtureRecord
from polyreme_api.progress import CheckpointRef

MixtureOf = Callable[[Sequence[ResumePoint], CheckpointRef | None], MixtureRecord | None]
"""Returns the mixture of an attempt by the points of all earlier ones and the checkpoint that it resumes from."""


class ResumeRoot(Protocol):
    """A checkpoint root, as far as resume points go. Every call may fail, with an unknown outcome."""

    def claim(self, attempt: int) -> None:
        """Create the attempt's claim, if it is absent."""
        ...

    def look(self) -> tuple[Sequence[ResumePoint], Sequence[CheckpointRef]]:
        """Return the points that are fixed, and the checkpoints that are committed and whole."""
        ...

    def put_if_absent(self, point: ResumePoint) -> ResumePoint:
        """Create the point of its attempt, and return the one that is stored then."""
        ...


def fix_resume_point(
    root: ResumeRoot, *, attempt: int, by: str, now_s: float, mixture_of: MixtureOf | None = None
) -> ResumePoint | None:
    """Fix the attempt's resume point and return it: once an attempt, however often its leader asks.

    Two answers for one attempt would have ranks of one gang begin at different steps. The first choice is final, even
    when its writer never learned that it was written. And it belongs to its writer alone: another leader of the same
    attempt, whose pod was recreated under the old number, can't know whether the first has released it. The Lease may
    be gone with the pod; this record stays.

    Args:
        root: The checkpoint root.
        attempt: The attempt.
        by: Name of the leader's process; no two have the same.
        now_s: The present.
        mixture_of: Returns the mixture of the attempt, which is fixed with the point.

    Returns:
        The point; None where another process has fixed it, so that this one must never release the attempt.
    """
    # Before the look: a late writer of an older attempt that sees it deletes nothing that may be chosen here.
    root.claim(attempt)
    points, committed = root.look()
    fixed = next((point for point in points if point.attempt == attempt), None)
    if fixed is None:
        earlier = [point for point in points if point.attempt < attempt]
        chosen = choose_resume(committed, earlier)
        fixed = root.put_if_absent(
            ResumePoint(
                attempt=attempt,
                resume_from=None if chosen is None else checkpoint_name(chosen),
                fixed_at_s=now_s,
                fixed_by=by,
                mixture=None if mixture_of is None else mixture_of(earlier, chosen),
            )
        )
    return fixed if fixed.fixed_by == by else None
