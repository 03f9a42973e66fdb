"""Closed segments of a step log: readers see each step once, whatever a kill left of the segments."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest

from polyreme.run_files.records import RunRecords, StepBytes, read_steps
from polyreme_api.errors import RefusedError
from polyreme_api.history import ResumePoint, columns_key, steps_key
from polyreme_api.progress import StepRecord
from polyreme_api.step_columns import Segment, StepTable, decode, encode, parse_steps
from polyreme_api.store import Data, ObjectStore, StoreFailedError
from polyreme_datahub.objects import open_store
from polyreme_trainer.train import records as log
from tests.unit.datahub.stores import PassingStore

STEPS = 23


def record(step: int, *, attempt: int = 1) -> StepRecord:
    """A step; each seventh has fields that are rare."""
    few = {"held_out": {"": 1.5}, "spike_limit": 2.0, "skipped": True} if step % 7 == 0 else {}
    stage = "align" if step < 9 else "instruct"
    return StepRecord.model_validate(
        {"attempt": attempt, "step": step, "loss": 1 / step, "stage": stage, "tokens": 640, "step_s": 0.1 * step, **few}
    )


@pytest.fixture(params=["folder", "bucket"])
def written(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A log with a save after each fourth step, and segments of at least eight; the attempt was killed."""
    monkeypatch.setattr(log, "SEGMENT_STEPS", 8)
    monkeypatch.setattr(log, "PART_STEPS_MAX", 4)
    store = open_store(tmp_path.as_uri())
    folder = tmp_path if request.param == "folder" else None
    with contextlib.ExitStack() as stack:
        steps = stack.enter_context(log.open_step_log(store, folder, 1, rank=0))
        for step in range(1, STEPS + 1):
            steps.write(record(step))
            if step % 4 == 0:
                steps.flush()
    return store


def segments(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list("steps/") if info.key.endswith(".columns")]


def test_saves_close_segments_and_readers_see_each_step_once(written: ObjectStore) -> None:
    assert segments(written) == [columns_key(1, 0), columns_key(1, 1)]
    read = read_steps(written)[1]
    assert list(read) == [record(step) for step in range(1, STEPS + 1)]
    assert list(read[5:9]) == [record(step) for step in range(6, 10)]
    assert read[-1] == record(STEPS)


def test_lines_of_closed_segments_are_not_parsed(written: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = 0

    def count(data: bytes) -> list[StepRecord]:
        nonlocal lines
        lines += data.count(b"\n")
        return parse_steps(data)

    monkeypatch.setattr("polyreme.run_files.records.parse_steps", count)
    assert len(read_steps(written)[1]) == STEPS
    assert lines == STEPS - 16


@pytest.mark.parametrize("fails", ["get", "put"])
def test_a_store_that_fails_a_segment_does_not_end_the_run_and_the_next_one_contains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(log, "SEGMENT_STEPS", 8)
    monkeypatch.setattr(log, "PART_STEPS_MAX", 4)

    class Away(PassingStore):
        """Fails at the first segment."""

        def get(self, key: str) -> bytes:
            self._check("get", key)
            return super().get(key)

        def put(self, key: str, data: Data) -> None:
            if key == columns_key(1, 0):
                self._check("put", key)
            super().put(key, data)

        def _check(self, what: str, key: str) -> None:
            if what == fails and not self.exists(steps_key(1, 2)):
                raise StoreFailedError(f"away: {key}")

    store = open_store(tmp_path.as_uri())
    steps = log.ObjectStepLog(Away(store), 1)
    for step in range(1, 17):
        steps.write(record(step))
        if step % 4 == 0:
            steps.flush()
        if step == 8:
            assert segments(store) == []
    assert segments(store) == [columns_key(1, 0)]
    assert list(read_steps(store)[1]) == [record(step) for step in range(1, 17)]


def test_what_segments_cover_is_not_counted_as_lines(written: ObjectStore) -> None:
    def checked(store: ObjectStore, most: StepBytes) -> None:
        assert len(read_steps(store, most=most)[1]) == STEPS

    logs = {info.key: info.size_bytes for info in written.list("steps/")}
    sizes = [logs[key] for key in sorted(logs, key=lambda key: (len(key), key)) if key.endswith(".jsonl")]
    every = sum(sizes)
    columns = sum(logs.values()) - every
    ends: list[tuple[int, str]] = [(0, "bytes")]
    for key in segments(written):
        segment = decode(written.get(key))
        assert segment is not None
        ends.append((segment.end, segment.unit))
    covered = [sum(sizes[:end]) if unit == "parts" else end for end, unit in ends]
    checked(written, StepBytes(lines=every - covered[-1], columns=columns))
    with pytest.raises(RefusedError, match="in columns"):
        checked(written, StepBytes(lines=every, columns=columns - 1))
    for left, key in zip(covered[::-1], ["", *segments(written)[::-1]], strict=True):
        if key:
            written.put(key, b"{}")
        with pytest.raises(RefusedError, match="in lines"):
            checked(written, StepBytes(lines=every - left - 1, columns=columns))
    checked(written, StepBytes(lines=every, columns=columns))


@pytest.mark.parametrize("fault", ["first gone", "last gone", "last torn", "last flipped", "of another format"])
def test_a_segment_that_is_gone_or_damaged_loses_and_doubles_nothing(written: ObjectStore, fault: str) -> None:
    key = columns_key(1, 0 if fault == "first gone" else 1)
    data = written.get(key)
    written.delete(key)
    if fault == "last torn":
        written.put(key, data[:-9])
    elif fault == "last flipped":
        written.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    elif fault == "of another format":
        written.put(key, data.replace(b'"format": 1', b'"format": 9'))
    assert list(read_steps(written)[1]) == [record(step) for step in range(1, STEPS + 1)]


def test_a_torn_last_line_is_no_record_and_old_logs_are_read(written: ObjectStore) -> None:
    logs = [info.key for info in written.list("steps/a") if info.key.endswith(".jsonl")]
    last = max(logs, key=lambda key: (len(key), key))
    written.put(last, written.get(last)[:-5])
    read = read_steps(written)[1]
    assert [each.step for each in read] == [*range(1, STEPS)]
    old = written.get(last)
    for info in list(written.list("steps/")):
        written.delete(info.key)
    written.put(steps_key(1), old)
    assert read_steps(written)[1][-1].step == STEPS - 1


def test_history_over_attempts_is_cut_where_each_resumed() -> None:
    steps = {1: StepTable.of([record(step) for step in range(1, 11)])}
    steps[2] = StepTable.of([record(step, attempt=2) for step in range(9, 13)])
    points = [ResumePoint(attempt=1), ResumePoint(attempt=2, resume_from="a000001-s00000008")]
    read = RunRecords(points=points, steps=steps, checkpoints=(), evaluation=None)
    lists = RunRecords(
        points=points, steps={key: list(table) for key, table in steps.items()}, checkpoints=(), evaluation=None
    )
    assert isinstance(read.history, StepTable)
    assert list(read.history) == list(lists.history)
    assert [(each.attempt, each.step) for each in read.history][7:9] == [(1, 8), (2, 9)]
    assert list(read.discarded) == list(lists.discarded) == [record(9), record(10)]


def test_numbers_are_kept_bit_for_bit_and_fields_of_later_versions_are_ignored() -> None:
    losses = [math.nan, math.inf, -0.0, 5e-324, 0.1]
    table = StepTable.of([StepRecord(attempt=1, step=step, loss=loss) for step, loss in enumerate(losses, 1)])
    stored = encode(Segment(table=table, unit="bytes", start=0, end=9)).replace(b'"routerEntropy"', b'"later"')
    found = decode(stored.replace(b'"router_entropy"', b'"later_entropy_"'))
    assert found is not None
    assert found.table.column("loss").tobytes() == table.column("loss").tobytes()  # type: ignore[attr-defined]
    assert set(found.table.column("router_entropy")) == {0.0}
