"""Tracker: TensorBoard, by one event file in a folder for each run."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from polyreme.tracking import event_file
from polyreme.tracking.port import ATTEMPT, Point, TrackedRun
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, RefusedError

FIELD = "the folder of TensorBoard's files"
FILES = "events.out.tfevents.*"
STATE = "run/state"


class TensorBoard:
    """Appends to the file of a run; a record that a crash tore is cut off first."""

    def __init__(self, where: str) -> None:
        """Name the folder.

        Raises:
            InvalidConfigError: If it is a file.
        """
        self._root = Path(where).absolute()
        taken = next((path for path in (self._root, *self._root.parents) if path.exists()), self._root)
        if taken.exists() and not taken.is_dir():
            raise InvalidConfigError(f"not a folder: {taken} is a file, expected a folder or a new name", field=FIELD)
        self._folder = self._root
        self._stream: BinaryIO | None = None
        self._last = Point(step=0, attempt=0, at_s=0.0, values={})
        self._state = ""

    def open(self, run: TrackedRun) -> Mapping[str, int]:
        """Open the file of the run and read what it holds."""
        self.close()
        self._folder = _folder_of(self._root / run.title, run)
        with _explained(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stream = (self._folder / _name(run)).open("a+b")
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise RefusedError(
                f"run {run.name!r} is being written into {self._folder} by another process, expected one at a time: "
                "wait for its end",
                field=FIELD,
            ) from error
        known = self._read()
        if not known:
            self._append(event_file.event(run.created_s, 0, version="brain.Event:2"))
            values = (
                event_file.session(run.title, run.created_s, run.parameters),
                event_file.text("run/spec", _table_of(run.parameters)),
            )
            self._append(event_file.event(run.created_s, 0, values=values))
        return known

    def write(self, points: Sequence[Point]) -> None:
        """Append an event for each point, with a mark before the first one of a later attempt."""
        for point in points:
            if self._last.attempt not in {0, point.attempt}:
                self._append(event_file.event(point.at_s, point.step, restarts=True), flush=False)
            values = tuple(event_file.scalar(name, value) for name, value in point.values.items())
            self._append(event_file.event(point.at_s, point.step, values=values), flush=False)
            self._last = point
        self._flush()

    def describe(self, run: TrackedRun) -> None:
        """Append state and tags as text, when they have changed."""
        words = _table_of({"state": run.state, **run.tags})
        if words != self._state:
            at_s = self._last.at_s or run.created_s
            self._append(event_file.event(at_s, self._last.step, values=(event_file.text(STATE, words),)))
            self._state = words

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def shown_at(self) -> str:
        """Folder of the run's file."""
        return str(self._folder)

    def _read(self) -> dict[str, int]:
        assert self._stream is not None
        self._stream.seek(0)
        known: dict[str, int] = {}
        whole = attempt = 0
        with _explained(self._folder):
            for end, data in event_file.records(self._stream.read()):
                whole = end
                for step, name, value in event_file.read_values(data):
                    known[name] = step
                    self._state = str(value) if name == STATE else self._state
                    attempt = int(value) if name == ATTEMPT else attempt
            self._stream.truncate(whole)
        self._last = Point(step=max(known.values(), default=0), attempt=attempt, at_s=0.0, values={})
        return known

    def _append(self, data: bytes, *, flush: bool = True) -> None:
        assert self._stream is not None
        with _explained(self._folder):
            self._stream.write(event_file.record(data))
        if flush:
            self._flush()

    def _flush(self) -> None:
        assert self._stream is not None
        with _explained(self._folder):
            self._stream.flush()


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EnvironmentFailedError(
            f"event file not written: {folder}, {error.strerror or error}", field=FIELD
        ) from error


def _name(run: TrackedRun) -> str:
    return f"events.out.tfevents.{run.created_s:010.0f}.polyreme.{run.uid}"


def _folder_of(folder: Path, run: TrackedRun) -> Path:
    """Choose the folder; where another run of the same name lies, the run gets one of its own beside it."""
    taken = any(path.name != _name(run) for path in folder.glob(FILES))
    return folder.with_name(f"{folder.name}-{run.uid[:8]}") if taken else folder


def _table_of(values: Mapping[str, object]) -> str:
    lines = [f"| {name} | {str(value).replace('|', '&#124;')} |" for name, value in values.items()]
    return "\n".join(["| field | value |", "|---|---|", *lines])
