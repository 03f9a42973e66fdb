"""Rollbacks: recorded once by rank 0, taken over once by the next leader, whatever dies between."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from polyreme.run_files.records import read_records
from polyreme_api.checkpoint_inventory import State, survey
from polyreme_api.errors import (
    EnvironmentFailedError,
    FencedError,
    PolyremeError,
    RefusedError,
    RolledBackError,
    SpikesPersistError,
    StepFailedError,
)
from polyreme_api.history import START_KEY, ResumePoint, rejection_key
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.store import ObjectStore
from polyreme_launcher.resume import fix_resume
from polyreme_launcher.rollback_leader import RollbackLeader
from polyreme_trainer.train.loss_health import Spike
from tests.roots import commit_empty, store_at
from tests.unit.datahub.jobs import make_spec
from tests.unit.datahub.stores import PassingStore

LOSS_WINDOW = 32
"""Windows of the order have 64 steps: 4 packs a step."""


def rolling(**changed: Any) -> TrainingJobSpec:
    given = make_spec(["a", "b"]).model_dump(mode="json", by_alias=True, exclude_none=True)
    given["training"]["steps"] = 1000
    given["checkpoint"] = {"everySteps": 20, "keep": 3}
    given["health"] = {"loss": {"action": "Rollback", "windowSteps": LOSS_WINDOW}}
    given["data"] |= changed
    return TrainingJobSpec.model_validate(given)


def begin(store: ObjectStore, attempt: int, spec: TrainingJobSpec) -> ResumePoint:
    point = fix_resume(store, attempt=attempt, by="one", now_s=1.0, spec=spec)
    assert point is not None
    return point


def spike(step: int) -> Spike:
    return Spike(step=step, what="loss", seen=9.0, limit=2.5)


def entries(point: ResumePoint) -> list[tuple[int, int]]:
    assert point.mixture is not None
    return [(change.step, change.skip_steps) for change in point.mixture.changes]


class Killed(BaseException):
    """The process dies."""


class Mortal(PassingStore):
    """A store whose user dies at one of its writes, before or after it takes effect."""

    def __init__(self, store: ObjectStore, *, at: int, after: bool) -> None:
        super().__init__(store)
        self._left, self._after = at, after

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._left -= 1
        if not self._left and not self._after:
            raise Killed
        self._store.put_if_absent(key, data)
        if not self._left:
            raise Killed


def saved(store: ObjectStore, attempt: int, *steps: int) -> None:
    for step in steps:
        commit_empty(store, attempt, step)


def test_the_next_attempt_resumes_before_the_spike_by_a_window_and_skips_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, spec = store_at(tmp_path), rolling()
    begin(store, 1, spec)
    saved(store, 1, 80, 100, 120, 140)
    ended = RollbackLeader(store, attempt=1, spec=spec)(spike(150))
    assert isinstance(ended, RolledBackError)
    assert "spike in step 150: loss 9, limit 2.5; the next attempt resumes before step 118" in str(ended)
    assert "skips the data of steps 129 to 192" in str(ended)
    assert {of.name for of in survey(store).of(State.REJECTED)} == {"a000001-s00000120", "a000001-s00000140"}
    held = {of.name: (of.committed, of.history) for of in read_records(tmp_path).checkpoints}
    assert held["a000001-s00000140"] == (True, False), "it can be exported by its name, and is never the newest"
    assert held["a000001-s00000100"] == (True, True)
    point = begin(store, 2, spec)
    assert point.resume_from == "a000001-s00000100"
    assert entries(point) == [(129, 64)]
    assert "a000001-s00000140 is rejected and is not used: spike in step 150" in capsys.readouterr().err
    saved(store, 2, 110)
    assert entries(begin(store, 3, spec)) == [(129, 64)], "once, whatever attempts follow"
    assert begin(store, 3, spec).resume_from == "a000002-s00000110"


def test_a_spike_before_the_first_checkpoint_starts_over(tmp_path: Path) -> None:
    store, spec = store_at(tmp_path), rolling()
    begin(store, 1, spec)
    assert isinstance(RollbackLeader(store, attempt=1, spec=spec)(spike(70)), RolledBackError)
    point = begin(store, 2, spec)
    assert (point.resume_from, entries(point)) == (None, [(65, 64)])


def test_a_spike_where_no_data_can_be_skipped_fails_the_step(tmp_path: Path) -> None:
    """In the first window, and in the first one with other weights: an entry skips what the weights before draw."""
    spec = rolling(schedule=[{"fromStep": 101, "weights": [{"source": "s1", "weight": 1}]}])
    for attempt, step in ((1, 40), (2, 130)):
        store = store_at(tmp_path / f"{step}")
        begin(store, attempt, spec)
        ended = RollbackLeader(store, attempt=attempt, spec=spec)(spike(step))
        assert isinstance(ended, StepFailedError)
        assert not survey(store).rejections


def test_a_run_that_continues_another_ones_data_skips_none_of_a_window_that_the_other_began(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    given = rolling().model_dump(mode="json", by_alias=True, exclude_none=True)
    spec = TrainingJobSpec.model_validate({**given, "startFrom": {"checkpoint": "file:///other/a000001-s00000100"}})
    begin(store, 1, spec)
    store.put(START_KEY, b'{"step": 100}')
    leader = RollbackLeader(store, attempt=1, spec=spec)
    assert isinstance(leader(spike(120)), StepFailedError), "its window began with step 65"
    assert isinstance(leader(spike(140)), RolledBackError)


def test_a_run_is_paused_when_three_rollbacks_in_a_row_did_not_help(tmp_path: Path) -> None:
    store, spec = store_at(tmp_path), rolling()
    for attempt in (1, 2, 3):
        begin(store, attempt, spec)
        assert isinstance(RollbackLeader(store, attempt=attempt, spec=spec)(spike(150 + attempt)), RolledBackError)
    point = begin(store, 4, spec)
    assert entries(point) == [(129, 64), (129, 65), (129, 65)], "each skips more"
    paused = RollbackLeader(store, attempt=4, spec=spec)(spike(153 + LOSS_WINDOW))
    assert isinstance(paused, SpikesPersistError)
    assert "after 3 rollbacks in a row" in str(paused)
    later = RollbackLeader(store, attempt=4, spec=spec)(spike(154 + LOSS_WINDOW))
    assert isinstance(later, RolledBackError), "training had passed the spikes before by a window"


@pytest.mark.parametrize("after", [False, True])
def test_a_death_at_any_write_loses_and_doubles_nothing(tmp_path: Path, after: bool) -> None:
    spec = rolling()
    for at in itertools.count(1):
        store = store_at(tmp_path / f"{at}-{after}")
        begin(store, 1, spec)
        saved(store, 1, 80, 100, 120, 140)
        attempt, dead = 1, 0
        mortal = Mortal(store, at=at, after=after)
        while True:
            try:
                if attempt > 1:
                    begin(mortal, attempt, spec)
                if survey(store).rejections:
                    break
                # Training repeats the spike: its data and its weights are the same.
                RollbackLeader(mortal, attempt=attempt, spec=spec)(spike(150))
            except Killed:
                dead += 1
            attempt += 1
        point = begin(store, attempt + 1, spec)
        assert entries(point) == [(129, 64)]
        assert point.resume_from == "a000001-s00000100"
        if not dead:
            break
    assert at > 3, "at the record, the claim and the point"


def test_an_attempt_that_was_replaced_rejects_nothing(tmp_path: Path) -> None:
    store, spec = store_at(tmp_path), rolling()
    begin(store, 1, spec)
    begin(store, 2, spec)
    with pytest.raises(FencedError):
        RollbackLeader(store, attempt=1, spec=spec)(spike(150))
    assert not survey(store).rejections


def test_a_rejection_that_cannot_be_read_or_written_starts_nothing(tmp_path: Path) -> None:
    store, spec = store_at(tmp_path), rolling()
    begin(store, 1, spec)
    store.put(rejection_key(1), b"{")
    with pytest.raises(RefusedError, match=r"rejection is damaged: rejected/a000001\.json"):
        begin(store, 2, spec)

    class Full(PassingStore):
        def put_if_absent(self, key: str, data: bytes) -> None:
            raise EnvironmentFailedError(f"no space for {key}: {len(data)} bytes")

    full = store_at(tmp_path / "full")
    begin(full, 1, spec)
    with pytest.raises(PolyremeError, match="no space for rejected/"):
        RollbackLeader(Full(full), attempt=1, spec=spec)(spike(150))
