"""The embedded cluster's journal: a change a line, synced by group commit, compacted by rename, of one process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fcntl
import json
import logging
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme_api.clock import Clock
from polyreme_api.errors import EnvironmentFailedError, RefusedError
from polyreme_cluster.port import KINDS, Manifest, ServerError
from polyreme_local.api_server.journal_file import (
    JournalContent,
    change_line,
    entry_line,
    header_line,
    read_journal,
)
from polyreme_local.api_server.record import Change, Record
from polyreme_local.api_server.rules import Validator
from polyreme_local.api_server.schema import SCHEMAS
from polyreme_local.api_server.store import HISTORY_CHANGES, Store

COMPACT_LINES_MIN = 2_000
"""Lines under which a journal is never compacted."""
COMPACT_RATIO = 4
"""Lines for each object above which it is."""
LOCK_SUFFIX = ".lock"
DAMAGED_SUFFIX = ".damaged"
"""A journal that lost lines is kept under this suffix, for people."""

Recover = Callable[[JournalContent], Sequence[Manifest]]
"""Returns the objects to begin with, from what could be read of a journal that is damaged or gone."""

_log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open_store(
    path: Path,
    *,
    clock: Clock,
    run_token: str,
    new_uid: Callable[[], str] = lambda: str(uuid.uuid4()),
    validators: Mapping[str, Validator] | None = None,
    history_changes: int = HISTORY_CHANGES,
    on_failure: Callable[[EnvironmentFailedError], None] | None = None,
    recover: Recover | None = None,
) -> AsyncIterator[tuple[Store, Callable[[], Awaitable[None]]]]:
    """Open a store with its journal; what was appended before ``durable()`` was called is on disk when it returns.

    Args:
        path: The journal.
        clock: Wall time.
        run_token: Random text of this host's life.
        new_uid: Makes UIDs.
        validators: Schema checks by kind; the default checks our own kinds.
        history_changes: Least number of changes kept for watches, by kind.
        on_failure: Called once when the disk refuses; from then on every write raises ServerError.
        recover: Called where the journal is damaged or empty; None: an empty one starts fresh, a damaged one is
            refused.

    Raises:
        RefusedError: If another process serves the journal.
        EnvironmentFailedError: If it is damaged and not recovered, or can't be opened.
    """
    holder = {"pid": os.getpid(), "openedAtS": clock.now_s(), "runToken": run_token}
    journal = Journal(path, holder=holder, on_failure=on_failure, recover=recover)
    store = Store(
        new_uid=new_uid,
        now_s=clock.now_s,
        validators=SCHEMAS if validators is None else validators,
        history_changes=history_changes,
        on_change=journal.append,
    )
    store.restore(journal.content.manifests, version=journal.content.version)
    journal.compact_from(lambda: (record for kind in KINDS for record in store.records(kind)))
    try:
        yield store, journal.durable
    finally:
        await journal.close()


class Journal:
    """An open journal; owns the lock beside the file.

    Args:
        path: The file; made when it does not exist.
        holder: Who opens it, for the message to the next who tries: pid, time, run token.
        on_failure: Called once when the disk refuses.
        recover: As in ``open_store``.

    Raises:
        RefusedError: If another process serves it.
        EnvironmentFailedError: If it is damaged and not recovered, or can't be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        holder: dict[str, Any],
        on_failure: Callable[[EnvironmentFailedError], None] | None = None,
        recover: Recover | None = None,
    ) -> None:
        self._path = path
        self._on_failure = on_failure
        self._lock = _lock(path.with_name(path.name + LOCK_SUFFIX), holder)
        try:
            self.content = read_journal(path)
            if self.content.torn_bytes:
                _log.warning("journal %s: %d bytes of a torn last line cut off", path, self.content.torn_bytes)
            self.content = _recovered(path, self.content, recover)
            self._file = _open_for_append(path, self.content)
        except BaseException:
            os.close(self._lock)
            raise
        self._lines = self.content.lines
        self._buffer: list[Change] = []
        self._appended = 0
        self._synced = 0
        self._records: Callable[[], Iterable[Record]] | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._flushing: asyncio.Task[None] | None = None
        self.failure: EnvironmentFailedError | None = None
        """Why nothing more is written; set once."""

    def compact_from(self, records: Callable[[], Iterable[Record]]) -> None:
        """Say where a compaction takes the live objects from."""
        self._records = records

    def append(self, change: Change) -> None:
        """Take a change; ``durable`` waits until it is on disk.

        Raises:
            ServerError: If an earlier write failed.
        """
        self._check()
        self._buffer.append(change)
        self._appended += 1

    async def durable(self) -> None:
        """Wait until all that was appended so far is on disk; callers at one time share one sync.

        Raises:
            ServerError: If the disk refused it.
        """
        target = self._appended
        while self._synced < target:
            self._check()
            if self._flushing is None:
                self._flushing = asyncio.get_running_loop().create_task(self._flush())
            await asyncio.shield(self._flushing)
        self._check()

    async def close(self) -> None:
        """Sync what is left and give up the lock."""
        try:
            if self.failure is None:
                await self.durable()
        finally:
            self._executor.shutdown()
            os.close(self._file)
            os.close(self._lock)

    def _check(self) -> None:
        if self.failure is not None:
            raise ServerError(str(self.failure))

    async def _flush(self) -> None:
        batch, self._buffer = self._buffer, []
        until = self._appended
        version = batch[-1].version if batch else 0
        records = self._due_for_compaction(len(batch))
        loop = asyncio.get_running_loop()
        try:
            if records is None:
                await loop.run_in_executor(self._executor, self._write, batch)
                self._lines += len(batch)
            else:
                await loop.run_in_executor(self._executor, self._compact, records, version)
                self._lines = len(records) + 2
            self._synced = until
        except BaseException as error:
            # Whether the batch is on disk is unknown: nothing may be acknowledged after it, whatever went wrong.
            words = error.strerror if isinstance(error, OSError) else type(error).__name__
            self.failure = EnvironmentFailedError(f"journal {self._path} can't be written: {words}")
            if not isinstance(error, Exception):
                raise
            if self._on_failure is not None:
                self._on_failure(self.failure)
        finally:
            self._flushing = None

    def _due_for_compaction(self, more: int) -> list[Record] | None:
        """Return the live objects when the journal holds mostly the past; they include the batch at hand."""
        if self._records is None or self._lines + more < COMPACT_LINES_MIN:
            return None
        records = list(self._records())
        return records if self._lines + more > COMPACT_RATIO * len(records) else None

    def _write(self, batch: Sequence[Change]) -> None:
        _write_all(self._file, b"".join(change_line(change) for change in batch))
        os.fdatasync(self._file)

    def _compact(self, records: Sequence[Record], version: int) -> None:
        file = _rewrite(self._path, [record.manifest for record in records], version)
        os.close(self._file)
        self._file = file


def _recovered(path: Path, content: JournalContent, recover: Recover | None) -> JournalContent:
    """Have what is missing rebuilt, and rewrite the journal; the damaged one is kept beside it.

    Raises:
        EnvironmentFailedError: If it is damaged and not recovered, or the disk refuses.
    """
    if not content.damaged and content.lines:
        return content
    if recover is None:
        if content.damaged:
            raise EnvironmentFailedError(
                f"journal {path} is damaged, bad lines: {content.damaged_lines}; restore it or start over"
            )
        return content
    manifests = recover(content)
    if not manifests:
        return content
    try:
        if path.exists():
            path.replace(path.with_name(path.name + DAMAGED_SUFFIX))
        os.close(_rewrite(path, manifests, content.version + 1))
    except OSError as error:
        raise EnvironmentFailedError(f"journal {path} can't be written: {error.strerror}") from error
    return read_journal(path)


def _rewrite(path: Path, manifests: Sequence[Manifest], version: int) -> int:
    """Replace the journal by one that holds these objects; return its descriptor, open for appending.

    Raises:
        OSError: If the disk refuses; the journal is as it was.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    try:
        lines = [header_line(), *(entry_line({"put": manifest}) for manifest in manifests)]
        _write_all(file, b"".join([*lines, entry_line({"version": version})]))
        os.fsync(file)
        temporary.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        os.close(file)
        # Room for those who need it now; after the rename there is nothing of this name.
        temporary.unlink(missing_ok=True)
        raise
    return file


def _open_for_append(path: Path, content: JournalContent) -> int:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(file, content.size_bytes)
        if content.lines == 0:
            _write_all(file, header_line())
        os.fsync(file)
        _sync_folder(path.parent)
    except OSError as error:
        raise EnvironmentFailedError(f"journal {path} can't be opened: {error.strerror}") from error
    return file


def _lock(path: Path, holder: dict[str, Any]) -> int:
    """Take the lock, which ends with the process however that ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise EnvironmentFailedError(f"lock {path} can't be opened: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        who = os.pread(file, 4096, 0).decode(errors="replace").strip() or "unknown"
        os.close(file)
        raise RefusedError(f"journal is being served by another process: {who}") from error
    # Only for the message to the next process that tries: the journal itself reports a full disk.
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(holder).encode(), 0)
    return file


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
