"""Save in the background, at most one checkpoint in flight, committed only when every rank's files are durable.

The step waits for one copy of the flat buffers. The rest runs in a thread over a separate process group: the ranks
agree who writes which tensor (torch's planner: what several hold is written once, evenly), write, and send rank 0 the
checksums; it writes index and marker. The outcome is broadcast, so that all ranks agree on what happened. Torch's own
``async_save`` is not used: its future ends before the marker, and its file writer knows neither checksums nor buckets.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from polyreme_api.checkpoint_inventory import check_not_fenced
from polyreme_api.commit_marker import CommitMarker, SavedAdapters, SavedFile, SavedLossHistory
from polyreme_api.errors import EnvironmentFailedError, FencedError, PolyremeError, RefusedError
from polyreme_api.history import checkpoint_name
from polyreme_api.progress import CheckpointRef
from polyreme_api.store import ObjectStore
from polyreme_planner.plan import shape_digest
from polyreme_planner.shapes import ModelShape, shape_content
from polyreme_trainer.checkpoint.block_io import write_pieces
from polyreme_trainer.checkpoint.commit import commit, remove
from polyreme_trainer.checkpoint.content import Content
from polyreme_trainer.checkpoint.host_copy import HostCopies
from polyreme_trainer.checkpoint.index import INDEX_NAME, Piece, write_index
from polyreme_trainer.checkpoint.retention import Rule, retain
from polyreme_trainer.checkpoint.staging import Staged, Staging
from polyreme_trainer.parallel import collectives
from polyreme_trainer.rank_page import exclude_thread

FAILED_SAVES_MAX = 2
"""Failed saves in a row that end the attempt: after the first one, training continues on the previous checkpoint."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Identity of an attempt's checkpoints."""

    store: ObjectStore
    attempt: int
    shape: ModelShape
    plan_hash: str
    rule: Rule
    adapters: SavedAdapters | None = None
    """The adapters that its checkpoints hold alone; None: they hold the whole model."""
    plan: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The plan, as plain data."""
    steps_before: int = 0
    """As in the marker."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AfterStep:
    """What a marker says of the state after its step, beside the content."""

    loader: Mapping[str, Any]
    losses: SavedLossHistory | None = None
    held_out_loss: float | None = None
    """None where none was measured after this step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """Files that one rank has made durable, or why it failed."""

    files: Mapping[str, SavedFile] = dataclasses.field(default_factory=dict)
    pieces: Sequence[Piece] = ()
    failure: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    committed: CommitMarker | None = None
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
        copies: HostCopies | None = None,
    ) -> None:
        """Open the writer.

        Args:
            identity: Identity of the attempt's checkpoints.
            group: Process group of checkpoints alone.
            now_s: Wall time for the marker.
            committed: Called when a checkpoint is durable, from the saving thread.
            copies: Where this rank keeps its newest committed copy in host memory; None: nowhere.
        """
        self._identity = identity
        self._group = group
        self._now_s = now_s
        self._committed = committed
        self._copies = copies
        self._staging = Staging()
        self._plan: SavePlan | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(
            1, thread_name_prefix="checkpoint", initializer=_saving_thread()
        )
        self._in_flight: concurrent.futures.Future[_Outcome] | None = None
        self._prepared: concurrent.futures.Future[None] | None = None
        self._failures = 0

    def prepare(self, content: Content) -> None:
        """Begin to allocate what saves are copied to, beside the first steps."""
        self._prepared = self._executor.submit(self._staging.prepare, content)

    def start(self, content: Content, *, step: int, after: AfterStep) -> None:
        """Copy the content and save it in the background, after waiting for the save before.

        Args:
            content: What is saved.
            step: The step after which it is.
            after: What the marker says beside it.

        Raises:
            FencedError: If the save before found a newer attempt.
            EnvironmentFailedError: If that was the last failure allowed.
        """
        self.wait(failures_max=FAILED_SAVES_MAX)
        if self._prepared is not None:
            self._prepared.result()
            self._prepared = None
        staged = self._staging.stage(content)
        self._in_flight = self._executor.submit(self._save, staged, step, after)

    def save_apart(self, store: ObjectStore, content: Content, *, step: int) -> None:
        """Save other content, the newest alone, under a root of its own, and wait; nothing else may be in flight.

        Raises:
            EnvironmentFailedError: If it fails.
        """
        identity = dataclasses.replace(self._identity, store=store, rule=Rule(kept=1))
        with CheckpointWriter(identity, group=self._group, now_s=self._now_s, committed=lambda _: None) as apart:
            apart.start(content, step=step, after=AfterStep(loader={}))
            apart.wait()

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
        """End the thread; wait for a save in flight, whatever its outcome.

        Not after an error that the ranks did not agree on: a rank that hangs has ended the step by its timeout, and
        would hold up the save for much longer.
        """
        self._executor.shutdown(wait=kind is None or issubclass(kind, PolyremeError))

    def _save(self, staged: Staged, step: int, after: AfterStep) -> _Outcome:
        reference = CheckpointRef(attempt=self._identity.attempt, step=step)
        content = staged.wait()
        written = self._write(content, checkpoint_name(reference))
        reports = collectives.gather_to_first(written, self._group)
        outcome = None if reports is None else self._commit(reference, reports, after)
        outcome = collectives.from_first(outcome, self._group)
        if outcome.committed is not None and self._copies is not None:
            self._copies.keep(content, outcome.committed)
        return outcome

    def _write(self, staged: Content, name: str) -> _Written:
        """Write this rank's files; the store retries each by its own rule."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(staged.state_dict())
        if self._plan is None:
            self._plan = _agree(planner, self._group)
        rank = dist.get_rank(self._group)
        try:
            files, pieces = write_pieces(self._identity.store, name, self._plan.items, planner, rank=rank)
        except (OSError, PolyremeError) as error:
            return _Written(failure=f"rank {rank}: {error}")
        return _Written(files=files, pieces=pieces)

    def _commit(self, reference: CheckpointRef, reports: Sequence[_Written], after: AfterStep) -> _Outcome:
        """Write index and marker, on rank 0; for an attempt that is over, every failure is a fence."""
        identity, name = self._identity, checkpoint_name(reference)
        failure = next((report.failure for report in reports if report.failure), "")
        try:
            if failure:
                # Half-written files would only fill the disk; every rank has ended its writes.
                with contextlib.suppress(OSError, EnvironmentFailedError):
                    remove(identity.store, name)
                check_not_fenced(identity.store, identity.attempt)
                return _Outcome(failed=failure)
            marker = self._marker(reference, reports, after)
            commit(identity.store, marker)
            self._committed(reference)
            self._retain()
        except FencedError as error:
            return _Outcome(fenced=str(error))
        except (OSError, EnvironmentFailedError) as error:
            return _Outcome(failed=str(error))
        return _Outcome(committed=marker)

    def _retain(self) -> None:
        """Delete expendable checkpoints; a failure to delete does not undo the commit."""
        identity = self._identity
        try:
            retain(identity.store, attempt=identity.attempt, rule=identity.rule, now_s=self._now_s())
        except FencedError:
            raise
        except (OSError, EnvironmentFailedError, RefusedError) as error:
            _log.warning("can't delete old checkpoints: %s", error)

    def _marker(self, reference: CheckpointRef, reports: Sequence[_Written], after: AfterStep) -> CommitMarker:
        index = write_index(piece for report in reports for piece in report.pieces)
        self._identity.store.put(f"{checkpoint_name(reference)}/{INDEX_NAME}", index)
        files = {name: file for report in reports for name, file in report.files.items()}
        return CommitMarker(
            attempt=reference.attempt,
            step=reference.step,
            world=len(reports),
            model_digest=shape_digest(self._identity.shape),
            model_shape=shape_content(self._identity.shape),
            plan_hash=self._identity.plan_hash,
            plan=dict(self._identity.plan),
            adapters=self._identity.adapters,
            steps_before=self._identity.steps_before,
            files={**files, INDEX_NAME: SavedFile.of(index)},
            loader=dict(after.loader),
            loss_history=after.losses,
            held_out_loss=after.held_out_loss,
            committed_at_s=self._now_s(),
        )


def _saving_thread() -> Callable[[], object]:
    """Return what begins the saving thread: it leaves the rank's page to the training, and has this thread's device.

    CUDA would open a context on device 0 for its waits.
    """
    if not torch.cuda.is_initialized():
        return exclude_thread
    device = torch.cuda.current_device()

    def begin() -> None:
        exclude_thread()
        torch.cuda.set_device(device)

    return begin


def _agree(planner: DefaultSavePlanner, group: dist.ProcessGroup) -> SavePlan:
    """Agree who writes what: once per attempt, since the names and sizes of its tensors do not change."""
    plans = collectives.gather_to_first(planner.create_local_plan(), group)
    agreed = None if plans is None else planner.create_global_plan(plans)[0]
    return collectives.from_first(agreed, group)[dist.get_rank(group)]
