"""The embedded cluster's journal: a change a line, synced by group commit, compacted by rename, served by one process.

A line is the CRC-32 of its JSON in 8 hexadecimal digits, a space, the JSON. What a crash leaves half written at the end
is cut off and named; a bad line with good ones behind it is damage, and refused: nothing is guessed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import fcntl
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from polyreme_api.errors import EnvironmentFailedError, RefusedError
from polyreme_operator.adapters.embedded.record import Change, Record
from polyreme_operator.port import Manifest, ServerError, WatchEventType

FORMAT = 1
COMPACT_LINES_MIN = 2_000
"""Lines under which a journal is never compacted."""
COMPACT_RATIO = 4
"""Lines for each object above which it is."""
LOCK_SUFFIX = ".lock"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JournalContent:
    """What a journal holds."""

    manifests: Sequence[Manifest]
    version: int
    lines: int
    size_bytes: int
    """Bytes up to the end of the last good line."""
    torn_bytes: int
    """Bytes behind it, that a crash left."""


class Journal:
    """An open journal; owns the lock beside the file.

    Args:
        path: The file; made when it does not exist.
        holder: Who opens it, for the message to the next who tries: pid, start time, run token.

    Raises:
        RefusedError: If another process serves it.
        EnvironmentFailedError: If it is damaged, or can't be opened.
    """

    def __init__(self, path: Path, *, holder: dict[str, Any]) -> None:
        self._path = path
        self._lock = _lock(path.with_name(path.name + LOCK_SUFFIX), holder)
        try:
            self.content = read_journal(path)
            if self.content.torn_bytes:
                _log.warning("journal %s: %d bytes of a torn last line cut off", path, self.content.torn_bytes)
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
        except OSError as error:
            self.failure = EnvironmentFailedError(f"journal {self._path} can't be written: {error.strerror}")
        finally:
            self._flushing = None

    def _due_for_compaction(self, more: int) -> list[Record] | None:
        """Return the live objects when the journal holds mostly the past; they include the batch at hand."""
        if self._records is None or self._lines + more < COMPACT_LINES_MIN:
            return None
        records = list(self._records())
        return records if self._lines + more > COMPACT_RATIO * len(records) else None

    def _write(self, batch: Sequence[Change]) -> None:
        _write_all(self._file, b"".join(_change_line(change) for change in batch))
        os.fdatasync(self._file)

    def _compact(self, records: Sequence[Record], version: int) -> None:
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            lines = [_header(), *(_line({"put": record.manifest}) for record in records), _line({"version": version})]
            _write_all(file, b"".join(lines))
            os.fsync(file)
            temporary.replace(self._path)
            _sync_folder(self._path.parent)
        except BaseException:
            os.close(file)
            raise
        os.close(self._file)
        self._file = file


def read_journal(path: Path) -> JournalContent:
    """Read a journal: live objects and the newest version.

    Raises:
        EnvironmentFailedError: If a line that is not the last is bad, or the format is another.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return JournalContent(manifests=(), version=0, lines=0, size_bytes=0, torn_bytes=0)
    objects: dict[tuple[str, str, str], Manifest] = {}
    version = lines = good = start = 0
    while start < len(data):
        end = data.find(b"\n", start)
        entry = None if end < 0 else _parse(data[start:end])
        if entry is None:
            if end >= 0 and _any_good_line(data[end + 1 :]):
                raise EnvironmentFailedError(
                    f"journal {path} is damaged at line {lines + 1}: restore it or start afresh"
                )
            break
        if lines == 0 and entry.get("format") != FORMAT:
            raise EnvironmentFailedError(f"journal {path} has format {entry.get('format')}, rule {FORMAT}")
        version = max(version, _apply(entry, objects))
        lines += 1
        start = good = end + 1
    return JournalContent(
        manifests=list(objects.values()), version=version, lines=lines, size_bytes=good, torn_bytes=len(data) - good
    )


def _apply(entry: dict[str, Any], objects: dict[tuple[str, str, str], Manifest]) -> int:
    """Take one entry; return its version."""
    manifest = entry.get("put") or entry.get("delete")
    if manifest is None:
        return int(entry.get("version", 0))
    metadata = manifest["metadata"]
    key = (manifest["kind"], metadata.get("namespace", ""), metadata["name"])
    if "put" in entry:
        objects[key] = manifest
    else:
        objects.pop(key, None)
    return int(metadata["resourceVersion"])


def _change_line(change: Change) -> bytes:
    if change.type is not WatchEventType.DELETED:
        return _line({"put": change.record.manifest})
    metadata = change.record.manifest["metadata"]
    kept = {key: metadata[key] for key in ("name", "namespace", "resourceVersion") if key in metadata}
    return _line({"delete": {"kind": change.record.kind, "metadata": kept}})


def _header() -> bytes:
    return _line({"format": FORMAT})


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse(line: bytes) -> dict[str, Any] | None:
    digits, _, text = line.partition(b" ")
    try:
        if int(digits, 16) != zlib.crc32(text):
            return None
        entry: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return entry


def _any_good_line(data: bytes) -> bool:
    return any(_parse(line) is not None for line in data.split(b"\n")[:-1])


def _open_for_append(path: Path, content: JournalContent) -> int:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(file, content.size_bytes)
        if content.lines == 0:
            _write_all(file, _header())
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
