"""The identity of a run: the same YAML continues it, an edited one is refused with what changed.

Only ``spec.workers.replicas``, ``spec.data.onDamage``, ``spec.checkpoint.keep`` and ``spec.suspend`` may change under a
run, its end may move (``polyreme_planner.extension``), and ``spec.data.schedule`` may get more entries, as under a
TrainingJob in a cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from typing import Any

from polyreme.run_files.paths import RunDirectory
from polyreme_api.differences import differences
from polyreme_api.errors import RefusedError
from polyreme_api.job import TrainingJob
from polyreme_planner.extension import END
from polyreme_system.files import read_json, write_json

MUTABLE_FIELDS = frozenset({"spec.workers.replicas", "spec.data.onDamage", "spec.checkpoint.keep", "spec.suspend"})
APPEND_ONLY_FIELDS = frozenset({"spec.data.schedule"})
CHANGES_SHOWN_MAX = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A field whose value differs between the run and the file."""

    field: str
    before: Any
    after: Any

    @property
    def allowed(self) -> bool:
        """Whether a run may take it on."""
        if self.field in APPEND_ONLY_FIELDS:
            return bool(self.after[: len(self.before)] == self.before)
        return self.field in MUTABLE_FIELDS or self.moves_end

    @property
    def moves_end(self) -> bool:
        """Whether it says how the run ends; whether it may change then depends on the trained steps."""
        return END.fullmatch(self.field.removeprefix("spec.")) is not None

    def __str__(self) -> str:
        """Write ``spec.training.steps: 600 -> 800``."""
        return f"{self.field}: {json.dumps(self.before)} -> {json.dumps(self.after)}"


def changes(before: TrainingJob, after: TrainingJob) -> list[Change]:
    """List the fields of the spec that differ, defaults written out."""
    both = differences("spec", _plain(before), _plain(after))
    return [Change(field=field, before=old, after=new) for field, old, new in both]


def check_same_run(before: TrainingJob, after: TrainingJob) -> list[Change]:
    """Return the changes that a run may take on.

    Raises:
        RefusedError: If another field changed, naming the fields and the two ways out.
    """
    found = changes(before, after)
    fixed = [change for change in found if not change.allowed]
    if fixed:
        shown = "; ".join(map(str, fixed[:CHANGES_SHOWN_MAX]))
        more = f"; and {len(fixed) - CHANGES_SHOWN_MAX} more" if len(fixed) > CHANGES_SHOWN_MAX else ""
        raise RefusedError(
            f"run {before.metadata.name!r} exists with another spec: {shown}{more}; give the job a new metadata.name, "
            "or start over with --fresh (the old run is kept next to it as .previous)"
        )
    return found


@contextlib.contextmanager
def serving(run: RunDirectory) -> Iterator[None]:
    """Be the one process that serves a run, until the block or the process ends.

    The lock lies outside the run's folder, which ``--fresh`` moves away.

    Raises:
        RefusedError: If another process serves it.
    """
    run.lock_file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run.lock_file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = (read_identity(run) or {}).get("host", {}).get("pid", "unknown")
            raise RefusedError(
                f"run {run.name!r} is already running in process {pid}; show it with polyreme runs show {run.name}, "
                f"stop it with polyreme runs stop {run.name}"
            ) from error
        yield
    finally:
        os.close(descriptor)


def is_served(run: RunDirectory) -> bool:
    """Tell whether another process serves a run."""
    try:
        with serving(run):
            return False
    except RefusedError:
        return True


def read_identity(run: RunDirectory) -> dict[str, Any] | None:
    """Read who serves a run; None when there is no run."""
    return read_json(run.identity_file)


def write_identity(run: RunDirectory, *, created_s: float, pid: int, process_started_s: float) -> str:
    """Record this process as the one that serves the run; return its run token."""
    known = read_identity(run) or {}
    token = secrets.token_hex(16)
    write_json(
        run.identity_file,
        {
            "namespace": run.namespace,
            "name": run.name,
            "createdAt": known.get("createdAt", created_s),
            "uid": known.get("uid", ""),
            "host": {"pid": pid, "processStartedAt": process_started_s, "token": token},
        },
        mode=0o600,
    )
    return token


def remember_uid(run: RunDirectory, uid: str) -> None:
    """Record the UID of the run's job, by which its data is pinned: it must outlive the journal."""
    known = read_identity(run) or {}
    if known.get("uid") != uid:
        write_json(run.identity_file, {**known, "uid": uid}, mode=0o600)


def _plain(job: TrainingJob) -> Any:
    return job.spec.model_dump(mode="json", by_alias=True)
