"""Inventory of a checkpoint root, read through the object store alone: the same for a folder and for a bucket.

One listing and the markers say everything: resume points, checkpoints, and in what state each of them is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from polyreme_api.commit_marker import CommitMarker, ForeignFormatError, parse_marker
from polyreme_api.errors import EnvironmentFailedError, FencedError, InvalidConfigError, RefusedError
from polyreme_api.history import (
    COMMIT_MARKER,
    DAMAGE_RECORD,
    REJECTIONS,
    ResumePoint,
    attempt_key,
    checkpoint_name,
    claim_key,
    mixture_prefix,
    parse_checkpoint_name,
    rejected_by,
    steps_key,
)
from polyreme_api.mixture import MixtureRecord, Rejection
from polyreme_api.progress import CheckpointRef
from polyreme_api.store import ObjectNotFoundError, ObjectStore

NAMED_MAX = 3
"""Files that a sentence about a damaged checkpoint names."""
_ATTEMPTS = "attempts/"
_STEPS = re.compile(r"steps/a([0-9]{6,7})\.jsonl")


class State(enum.Enum):
    """What a checkpoint is good for."""

    WHOLE = "committed"
    """Its marker is sound, and the files that it names are there in full."""
    TORN = "torn"
    """Without a marker: begun and not committed, or half deleted. It is no checkpoint."""
    DAMAGED = "damaged"
    """It was committed, and something of it is gone or changed since."""
    REJECTED = "rejected"
    """As good as a whole one, but a spike of the loss came soon after: no attempt resumes from it."""
    FOREIGN = "foreign"
    """Committed, in a format that this version does not read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """One checkpoint of a root."""

    reference: CheckpointRef
    state: State
    why: str = ""
    """What is wrong with it."""
    size_bytes: int = 0
    marker: CommitMarker | None = None
    """The marker of one that is whole or rejected."""

    @property
    def name(self) -> str:
        """Its name under the root."""
        return checkpoint_name(self.reference)

    @property
    def held_out_loss(self) -> float | None:
        """Held-out loss after its step; None where none was measured."""
        return None if self.marker is None else self.marker.held_out_loss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """A checkpoint root as one listing showed it."""

    points: Sequence[ResumePoint]
    checkpoints: Sequence[StoredCheckpoint]
    """By name."""
    rebuilt: frozenset[int] = frozenset()
    """Attempts whose resume point is damaged or gone. ``points`` has it where step records show where they began."""
    rejections: Sequence[Rejection] = ()
    """By attempt."""

    def of(self, *states: State) -> list[StoredCheckpoint]:
        """The checkpoints in one of these states."""
        return [stored for stored in self.checkpoints if stored.state in states]

    @property
    def committed(self) -> list[CheckpointRef]:
        """The checkpoints that are whole."""
        return [stored.reference for stored in self.of(State.WHOLE)]


def survey(store: ObjectStore) -> Survey:
    """Look at a checkpoint root.

    A resume point that is damaged or gone is rebuilt from the step records of its attempt, which begin where it did.

    Raises:
        RefusedError: If a rejection is damaged: without it, a run would resume after a spike.
        StoreFailedError: If the store stays away.
    """
    sizes = {info.key: info.size_bytes for info in store.list("")}
    points: dict[int, ResumePoint] = {}
    lost = {number for key in sizes if (match := _STEPS.fullmatch(key)) and (number := int(match[1]))}
    for key in sizes:
        if (fixed := _attempt_of(key, ".json")) is not None:
            lost.add(fixed)
            with contextlib.suppress(RefusedError):
                points[fixed] = _amended(store, _point(store, key), sizes)
    lost -= points.keys()
    for attempt in sorted(lost):
        if (point := _rebuilt(store, attempt, known=points)) is not None:
            with contextlib.suppress(RefusedError):
                points[attempt] = _amended(store, point, sizes)
    rejections = [_rejection(store, key) for key in sorted(sizes) if key.startswith(REJECTIONS)]
    return Survey(
        points=sorted(points.values(), key=lambda point: point.attempt),
        checkpoints=[_unless_rejected(stored, rejections) for stored in _checkpoints(store, sizes)],
        rebuilt=frozenset(lost),
        rejections=rejections,
    )


def read_point(store: ObjectStore, attempt: int) -> ResumePoint:
    """Read where an attempt begins, and the newest mixture that was fixed for it.

    Raises:
        ObjectNotFoundError: If that is not fixed.
        RefusedError: If the point is damaged.
    """
    point = _point(store, attempt_key(attempt))
    return _amended(store, point, [info.key for info in store.list(mixture_prefix(attempt))])


def read_mixture(store: ObjectStore, attempt: int) -> MixtureRecord | None:
    """Read the changes of the mixture that an attempt trains by: every rank of it, and what reads for them.

    Raises:
        EnvironmentFailedError: If the attempt's resume point is gone or damaged; the next attempt has one of its own.
        StoreFailedError: If the store stays away.
    """
    try:
        return read_point(store, attempt).mixture
    except (ObjectNotFoundError, RefusedError) as error:
        raise EnvironmentFailedError(f"resume point of attempt {attempt} can't be read: {error}") from error


def check_not_fenced(store: ObjectStore, attempt: int) -> None:
    """Refuse to write for an attempt that is no longer the newest: a newer one has chosen, or is about to choose.

    Raises:
        FencedError: Naming the newer attempt.
        StoreFailedError: If the store stays away.
    """
    newest, key = _newest({info.key: info.size_bytes for info in store.list(_ATTEMPTS)})
    if newest > attempt:
        raise FencedError(f"attempt is fenced: {attempt}, a newer one has started ({key} exists)")


def _newest(keys: Mapping[str, int]) -> tuple[int, str]:
    found = [(number, key) for key in keys for end in (".json", ".claim") if (number := _attempt_of(key, end))]
    return max(found, default=(0, ""))


def _attempt_of(key: str, end: str) -> int | None:
    stem = key.removeprefix(_ATTEMPTS).removesuffix(end)
    if not stem.isdigit() or key not in {attempt_key(int(stem)), claim_key(int(stem))} or not key.endswith(end):
        return None
    return int(stem)


def _point(store: ObjectStore, key: str) -> ResumePoint:
    try:
        return ResumePoint.model_validate_json(store.get(key))
    except ValueError as error:
        raise RefusedError(f"resume point is damaged: {key} can't be read, or was not written by polyreme") from error


def _amended(store: ObjectStore, point: ResumePoint, keys: Iterable[str]) -> ResumePoint:
    """Return a point with the newest mixture of its attempt, if some keys of the root have one."""
    prefix = mixture_prefix(point.attempt)
    newest = max((key for key in keys if key.startswith(prefix)), default=None)
    if newest is None:
        return point
    try:
        mixture = MixtureRecord.model_validate_json(store.get(newest))
    except ValueError as error:
        raise RefusedError(f"mixture is damaged: {newest} can't be read, or was not written by polyreme") from error
    return point.model_copy(update={"mixture": mixture})


def _rebuilt(store: ObjectStore, attempt: int, *, known: Mapping[int, ResumePoint]) -> ResumePoint | None:
    """Work out where an attempt began: at the step before its first one, of the newest attempt that trained that."""
    steps = _steps_of(store, attempt)
    if not steps:
        return None
    first = min(steps)
    if first == 1:
        return ResumePoint(attempt=attempt)
    before = [number for number in known if number < attempt and first - 1 in _steps_of(store, number)]
    if not before:
        return None
    return ResumePoint(attempt=attempt, resume_from=checkpoint_name(CheckpointRef(attempt=max(before), step=first - 1)))


def _steps_of(store: ObjectStore, attempt: int) -> set[int]:
    """Steps for which an attempt left a readable record."""
    try:
        lines = store.get(steps_key(attempt)).splitlines()
    except ObjectNotFoundError:
        return set()
    steps = set()
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            steps.add(int(json.loads(line)["step"]))
    return steps


def _checkpoints(store: ObjectStore, sizes: Mapping[str, int]) -> list[StoredCheckpoint]:
    files: dict[str, dict[str, int]] = {}
    for key, size_bytes in sizes.items():
        name, _, file = key.partition("/")
        if file:
            files.setdefault(name, {})[file] = size_bytes
    found = []
    for name in sorted(files):
        with contextlib.suppress(InvalidConfigError):
            found.append(_judge(store, name, parse_checkpoint_name(name), files[name]))
    return found


def _judge(store: ObjectStore, name: str, reference: CheckpointRef, files: Mapping[str, int]) -> StoredCheckpoint:
    size_bytes = sum(files.values())

    def as_it_is(state: State, why: str = "", marker: CommitMarker | None = None) -> StoredCheckpoint:
        return StoredCheckpoint(reference=reference, state=state, why=why, size_bytes=size_bytes, marker=marker)

    if COMMIT_MARKER not in files:
        return as_it_is(State.TORN, f"no {COMMIT_MARKER}")
    try:
        marker = parse_marker(store.get(f"{name}/{COMMIT_MARKER}"), name=name)
        if DAMAGE_RECORD in files:
            return as_it_is(State.DAMAGED, _recorded(store.get(f"{name}/{DAMAGE_RECORD}")))
    except ObjectNotFoundError:
        return as_it_is(State.TORN, "deleted since it was listed")
    except ForeignFormatError as error:
        return as_it_is(State.FOREIGN, error.message)
    except RefusedError as error:
        return as_it_is(State.DAMAGED, error.message)
    wrong = [
        f"{file} has {seen} bytes, expected {saved.size_bytes}" if seen is not None else f"{file} is missing"
        for file, saved in sorted(marker.files.items())
        if (seen := files.get(file)) != saved.size_bytes
    ]
    if wrong:
        more = f", and {len(wrong) - NAMED_MAX} more" if len(wrong) > NAMED_MAX else ""
        return as_it_is(State.DAMAGED, ", ".join(wrong[:NAMED_MAX]) + more)
    return as_it_is(State.WHOLE, marker=marker)


def _rejection(store: ObjectStore, key: str) -> Rejection:
    try:
        return Rejection.model_validate_json(store.get(key))
    except ValueError as error:
        raise RefusedError(
            f"rejection is damaged: {key} can't be read, or was not written by polyreme; restore it, or delete it to "
            "resume from the newest checkpoint"
        ) from error


def _unless_rejected(stored: StoredCheckpoint, rejections: Sequence[Rejection]) -> StoredCheckpoint:
    found = rejected_by(stored.reference, rejections)
    if stored.state is not State.WHOLE or found is None:
        return stored
    return dataclasses.replace(stored, state=State.REJECTED, why=found.why)


def _recorded(text: bytes) -> str:
    try:
        return "; ".join(str(line) for line in json.loads(text)["damage"][:NAMED_MAX])
    except (ValueError, KeyError, TypeError):
        return f"{DAMAGE_RECORD} exists but can't be read"
