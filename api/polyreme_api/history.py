"""Names in a checkpoint root, and which of them are history: pure functions.

Several attempts write under one root. Attempt ``n`` fixes, once, by create-if-absent, the checkpoint it resumes from.
That choice cuts all earlier history there: whatever an older attempt writes later is no part of it. So a writer that
was stopped and wakes late can write, and harms no other attempt.
"""

from __future__ import annotations

import bisect
import itertools
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from polyreme_api.errors import InvalidConfigError
from polyreme_api.mixture import MixtureRecord, Rejection
from polyreme_api.progress import CheckpointRef, StepRecord
from polyreme_api.step_columns import StepTable

COMMIT_MARKER = "COMMIT.json"
DAMAGE_RECORD = "DAMAGED.json"
"""Beside a marker: what ranks found when they read the checkpoint. No later attempt begins there."""
REJECTIONS = "rejected/"
"""Records of spikes, by attempt: no later attempt begins at a checkpoint after the step that they name."""
CHECKPOINT_FORMAT = 2
"""Version of the layout inside a checkpoint directory; a reader refuses any other."""
START_KEY = "start.json"
"""What a run took over from the checkpoint of another one that it began with."""

_CHECKPOINT_NAME = re.compile(r"a([0-9]{6,7})-s([0-9]{8,9})")


class ResumePoint(BaseModel):
    """``attempts/<n>.json``: where attempt ``n`` begins, fixed once."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    attempt: int = Field(ge=1)
    resume_from: Annotated[str, Field(max_length=64)] | None = None
    """Name of a checkpoint, or None: from the beginning."""
    fixed_at_s: float = 0.0
    fixed_by: Annotated[str, Field(max_length=64)] = ""
    """Which leader's process fixed it; no other one ever releases the attempt."""
    mixture: MixtureRecord | None = None
    """Changes of the mixture that the attempt trains by; None: all of ``spec.data.schedule``, each at its step.

    As it is stored, those that the attempt began with. What reads a point puts those in that were fixed since."""

    @property
    def checkpoint(self) -> CheckpointRef | None:
        """The checkpoint it names."""
        return None if self.resume_from is None else parse_checkpoint_name(self.resume_from)

    @property
    def step(self) -> int:
        """Last step of history before this attempt's first."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def checkpoint_name(reference: CheckpointRef) -> str:
    """Return the directory name, ``a000001-s00000050``."""
    return f"a{reference.attempt:06d}-s{reference.step:08d}"


def parse_checkpoint_name(name: str) -> CheckpointRef:
    """Read a directory name back.

    Raises:
        InvalidConfigError: If it is none.
    """
    match = _CHECKPOINT_NAME.fullmatch(name)
    if match is not None and int(match[1]) >= 1:
        reference = CheckpointRef(attempt=int(match[1]), step=int(match[2]))
        if checkpoint_name(reference) == name:
            return reference
    raise InvalidConfigError(f"not a checkpoint name: {name!r}, expected a<attempt, 6 digits>-s<step, 8 digits>")


def checkpoint_at(url: str) -> tuple[str, str]:
    """Split the URL of a checkpoint into that of its root, and its name."""
    root, _, name = url.rstrip("/").rpartition("/")
    return root, name


def attempt_key(attempt: int) -> str:
    """Key of an attempt's resume point."""
    return f"attempts/{attempt:06d}.json"


def mixture_key(attempt: int, number: int) -> str:
    """Key of a change of the mixture that was fixed while an attempt ran; they count from 1."""
    return f"{mixture_prefix(attempt)}{number:04d}.json"


def mixture_prefix(attempt: int) -> str:
    """Return with what the keys of an attempt's changes of the mixture begin."""
    return f"mixture/a{attempt:06d}-"


def rejection_key(attempt: int) -> str:
    """Key of the rejection of an attempt that a spike of the loss ended."""
    return f"{REJECTIONS}a{attempt:06d}.json"


def rejected_by(reference: CheckpointRef, rejections: Iterable[Rejection]) -> Rejection | None:
    """Return the spike that came so soon after a checkpoint that no later attempt may resume from it, if one did."""
    found = (of for of in rejections if reference.attempt <= of.attempt and reference.step > of.after_step)
    return next(found, None)


def claim_key(attempt: int) -> str:
    """Key of an attempt's claim: its leader is about to choose a resume point, or has.

    It is there **before** the leader lists checkpoints. A writer of an older attempt that finds none after its own
    commit therefore knows that every later choice sees that commit, and may delete what is older.
    """
    return f"attempts/{attempt:06d}.claim"


def steps_key(attempt: int, part: int = 0) -> str:
    """Key of an attempt's step records; where nothing can be appended they come in parts."""
    return f"steps/a{attempt:06d}{f'-{part:05d}' if part else ''}.jsonl"


def columns_key(attempt: int, number: int) -> str:
    """Key of a closed segment of an attempt's step records, as columns (``step_columns``)."""
    return f"steps/a{attempt:06d}-c{number:05d}.columns"


def routing_key(attempt: int) -> str:
    """Key of where tokens went in the last steps of an attempt, by layer and expert."""
    return f"routing/a{attempt:06d}.json"


def evaluation_key(attempt: int) -> str:
    """Key of the held-out result that an attempt wrote."""
    return f"evaluation/a{attempt:06d}.json"


def attempt_spans(points: Iterable[ResumePoint]) -> Mapping[int, tuple[int, int | None]]:
    """Steps of each attempt that are history: ``attempt -> (after, until)``, until None for the newest.

    Attempt ``n`` owns the steps ``after < step <= until``. An attempt whose whole span was cut away by a later one that
    resumed earlier is absent.

    The chain is walked back from the newest attempt through the checkpoints that were resumed from, as in a version
    history: only attempts on that path count.
    """
    by_attempt = {point.attempt: point for point in points}
    spans: dict[int, tuple[int, int | None]] = {}
    if not by_attempt:
        return spans
    attempt, until = max(by_attempt), None
    while attempt in by_attempt and attempt not in spans:
        point = by_attempt[attempt]
        spans[attempt] = (point.step, until)
        if point.checkpoint is None:
            break
        attempt, until = point.checkpoint.attempt, point.checkpoint.step
    return dict(sorted(spans.items()))


def is_history(reference: CheckpointRef, spans: Mapping[int, tuple[int, int | None]]) -> bool:
    """Tell whether a committed checkpoint lies on the committed history."""
    if reference.attempt not in spans:
        return False
    after, until = spans[reference.attempt]
    return reference.step >= after and (until is None or reference.step <= until)


def choose_resume(committed: Iterable[CheckpointRef], points: Sequence[ResumePoint]) -> CheckpointRef | None:
    """Choose where the next attempt begins: the newest committed checkpoint on history, or None for the beginning.

    With no resume point yet there was no attempt, so nothing under the root is ours to resume from.
    """
    spans = attempt_spans(points)
    usable = [reference for reference in committed if is_history(reference, spans)]
    return max(usable, key=lambda reference: (reference.step, reference.attempt), default=None)


def is_kept(step: int, span: tuple[int, int | None] | None) -> bool:
    """Tell whether a step lies in an attempt's span of history; None: the attempt has none."""
    return span is not None and step > span[0] and (span[1] is None or step <= span[1])


def committed_steps(points: Sequence[ResumePoint], records: Mapping[int, Sequence[StepRecord]]) -> Sequence[StepRecord]:
    """Join the attempts' step records to one history that holds each step once, in order."""
    joined: dict[int, StepRecord] = {}
    spans = attempt_spans(points)
    tables = [_within(records[attempt], span) for attempt, span in spans.items() if attempt in records]
    if tables and None not in tables:
        return StepTable.join([table for table in tables if table is not None])
    for attempt, span in spans.items():
        for record in records.get(attempt, ()):
            if is_kept(record.step, span):
                joined[record.step] = record
    return [joined[step] for step in sorted(joined)]


def _within(records: Sequence[StepRecord], span: tuple[int, int | None]) -> StepTable | None:
    """Return the part of a table that lies in a span; None unless it is a table whose steps rise."""
    if not isinstance(records, StepTable):
        return None
    steps, (after, until) = records.column("step"), span
    if not all(map(operator.lt, steps, itertools.islice(steps, 1, None))):
        return None
    last = len(steps) if until is None else bisect.bisect_right(steps, until)
    return records[bisect.bisect_right(steps, after) : last]
