"""Saving in the background, at most one checkpoint in flight, committed only when every rank's files are durable.

The step waits for one copy of the flat buffers. The rest runs in a thread: distributed save over a group of its
own, digests, then rank 0 looks for a newer attempt and writes the marker. The outcome is broadcast, so that all ranks
agree on what happened. Not ``async_save``: its future ends before digests and marker, which must follow in the same
order on the same group.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from polyreme_api.errors import EnvironmentFailedError, FencedError, PolyremeError, RefusedError
from polyreme_api.history import checkpoint_name
from polyreme_api.marker import CommitMarker, SavedFile
from polyreme_api.plan.plan import shape_digest
from polyreme_api.plan.shapes import ModelShape
from polyreme_api.progress import CheckpointRef
from polyreme_trainer.checkpoint.content import Content
from polyreme_trainer.checkpoint.directory import check_not_fenced, commit, digest_file
from polyreme_trainer.checkpoint.retention import retain
from polyreme_trainer.parallel import collectives

SAVE_TRIES_MAX = 2
"""Tries of one save before it counts as failed."""
FAILED_SAVES_MAX = 2
"""Failed saves in a row that end the attempt: training goes on over the first, on the previous checkpoint."""

_METADATA = ".metadata"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose checkpoints these are: the same for all of an attempt."""

    root: Path
    attempt: int
    shape: ModelShape
    plan_hash: str
    kept: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    committed: CheckpointRef | None = None
    failed: str = ""
    fenced: str = ""


class CheckpointWriter:
    """Saves of one attempt on one rank; every rank calls the same methods at the same steps."""

    def __init__(
        self,
        identity: Identity,
        *,
        group: dist.ProcessGroup,
        now_s: Callable[[], float],
        committed: Callable[[CheckpointRef], None],
    ) -> None:
        """Open the writer.

        Args:
            identity: Whose checkpoints these are.
            group: Process group of checkpoints alone.
            now_s: Wall time for the marker.
            committed: Called when a checkpoint is durable, from the saving thread.
        """
        self._identity = identity
        self._group = group
        self._now_s = now_s
        self._committed = committed
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: concurrent.futures.Future[_Outcome] | None = None
        self._failures = 0

    def start(self, content: Content, *, step: int, loader: Mapping[str, Any]) -> None:
        """Copy the content and save it in the background, after waiting for the save before.

        Raises:
            FencedError: If the save before found a newer attempt.
            EnvironmentFailedError: If that was the last failure allowed.
        """
        self.wait(failures_max=FAILED_SAVES_MAX)
        staged = content.staged()
        self._in_flight = self._executor.submit(self._save, staged, step, dict(loader))

    def wait(self, *, failures_max: int = 1) -> None:
        """Wait for the save in flight.

        Raises:
            FencedError: If it found a newer attempt.
            EnvironmentFailedError: If it failed, and so did the saves before it, ``failures_max`` in a row.
        """
        if self._in_flight is None:
            return
        outcome, self._in_flight = self._in_flight.result(), None
        if outcome.fenced:
            raise FencedError(outcome.fenced)
        if not outcome.failed:
            self._failures = 0
            return
        self._failures += 1
        _log.warning(
            "checkpoint failed (%d in a row, %d end the attempt): %s", self._failures, failures_max, outcome.failed
        )
        if self._failures >= failures_max:
            raise EnvironmentFailedError(f"checkpoints failed: {self._failures} in a row, the last by {outcome.failed}")

    def __enter__(self) -> Self:
        """Stay open until the block ends."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """End the thread; a save in flight is waited for, its outcome not judged.

        Not after an error that the ranks did not agree on: a rank that hangs has ended the step by its timeout, and
        would hold up the save for much longer.
        """
        self._executor.shutdown(wait=kind is None or issubclass(kind, PolyremeError))

    def _save(self, staged: Content, step: int, loader: dict[str, Any]) -> _Outcome:
        reference = CheckpointRef(attempt=self._identity.attempt, step=step)
        directory = self._identity.root / checkpoint_name(reference)
        files, failure = self._write(staged, directory)
        reports = collectives.gather_to_first((files, failure), self._group)
        outcome = None if reports is None else self._commit(reference, reports, loader)
        return collectives.from_first(outcome, self._group)

    def _write(self, staged: Content, directory: Path) -> tuple[dict[str, SavedFile], str]:
        """Write this rank's files; all ranks fail or succeed together in each try: the save itself agrees on it."""
        failure = ""
        for _ in range(SAVE_TRIES_MAX):
            try:
                dcp.save(
                    staged.state_dict(),
                    storage_writer=dcp.FileSystemWriter(directory),
                    process_group=self._group,
                )
            except CheckpointException as error:
                failure = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items()))
                continue
            return self._digest(directory)
        return {}, failure

    def _digest(self, directory: Path) -> tuple[dict[str, SavedFile], str]:
        rank = dist.get_rank(self._group)
        try:
            paths = sorted(directory.glob(f"__{rank}_*")) + ([directory / _METADATA] if rank == 0 else [])
            return {path.name: digest_file(path) for path in paths}, ""
        except OSError as error:
            return {}, f"rank {rank}: {error}"

    def _commit(
        self, reference: CheckpointRef, reports: list[tuple[dict[str, SavedFile], str]], loader: dict[str, Any]
    ) -> _Outcome:
        """Write the marker, on rank 0; of an attempt that is over, every failure is a fence (its files may be gone)."""
        identity = self._identity
        name = checkpoint_name(reference)
        failure = next((failure for _, failure in reports if failure), "")
        try:
            if failure:
                # What was half-written would only fill the disk; every rank has ended its writes.
                shutil.rmtree(identity.root / name, ignore_errors=True)
                check_not_fenced(identity.root, identity.attempt)
                return _Outcome(failed=failure)
            commit(identity.root, name, self._marker(reference, reports, loader))
            self._committed(reference)
            self._retain()
        except FencedError as error:
            return _Outcome(fenced=str(error))
        except OSError as error:
            return _Outcome(failed=str(error))
        return _Outcome(committed=reference)

    def _retain(self) -> None:
        """Delete what may go; a checkpoint that could not be deleted does not undo the one just committed."""
        identity = self._identity
        try:
            retain(identity.root, attempt=identity.attempt, kept=identity.kept)
        except FencedError:
            raise
        except (OSError, RefusedError) as error:
            _log.warning("old checkpoints are not deleted: %s", error)

    def _marker(
        self, reference: CheckpointRef, reports: list[tuple[dict[str, SavedFile], str]], loader: dict[str, Any]
    ) -> CommitMarker:
        return CommitMarker(
            attempt=reference.attempt,
            step=reference.step,
            world=len(reports),
            model_digest=shape_digest(self._identity.shape),
            model_shape=dataclasses.asdict(self._identity.shape),
            plan_hash=self._identity.plan_hash,
            files={name: file for files, _ in reports for name, file in files.items()},
            loader=loader,
            committed_at_s=self._now_s(),
        )
