"""What rank 0 makes of a save when all ranks have written: committed, failed, fenced."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.history import attempt_key, checkpoint_name
from polyreme_api.plan.shapes import KIMI_VL_NANO
from polyreme_api.progress import CheckpointRef
from polyreme_api.store import StoreFailedError
from polyreme_trainer.checkpoint.retention import Rule
from polyreme_trainer.checkpoint.save import CheckpointWriter, Identity, _Written
from tests.roots import at, list_checkpoints, store_at

GOOD = [_Written(), _Written()]


def save(root: Path, step: int, told: list[CheckpointRef], reports: list[_Written] = GOOD) -> Any:
    store = store_at(root)
    store.put(f"{checkpoint_name(at(1, step))}/00000-000.bin", b"half")
    identity = Identity(store=store, attempt=1, shape=KIMI_VL_NANO, plan_hash="p", rule=Rule(kept=1))
    group: Any = None  # no rank is asked
    with CheckpointWriter(identity, group=group, now_s=lambda: 1.0, committed=told.append) as writer:
        return writer._commit(at(1, step), reports, {})


def test_an_old_checkpoint_that_can_not_be_deleted_does_not_undo_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_store: object, name: str) -> None:
        raise StoreFailedError(f"input/output error at {name}")

    told: list[CheckpointRef] = []
    save(tmp_path, 4, told)
    monkeypatch.setattr("polyreme_trainer.checkpoint.retention.remove", refuse)
    with caplog.at_level(logging.WARNING):
        outcome = save(tmp_path, 8, told)
    assert (outcome.committed.reference, outcome.failed) == (at(1, 8), "")
    assert "old checkpoints are not deleted" in caplog.text
    assert list_checkpoints(tmp_path) == ([at(1, 4), at(1, 8)], [])
    monkeypatch.undo()
    save(tmp_path, 12, told)
    assert list_checkpoints(tmp_path) == ([at(1, 12)], [])
    assert told == [at(1, 4), at(1, 8), at(1, 12)]


def test_a_failed_save_leaves_nothing_and_what_was_good_stays(tmp_path: Path) -> None:
    told: list[CheckpointRef] = []
    save(tmp_path, 4, told)
    outcome = save(tmp_path, 8, told, [_Written(), _Written(failure="rank 1: no space left on device")])
    assert (outcome.committed, outcome.failed) == (None, "rank 1: no space left on device")
    assert list_checkpoints(tmp_path) == ([at(1, 4)], [])
    assert told == [at(1, 4)]


@pytest.mark.parametrize("reports", [GOOD, [_Written(failure="rank 0: gone")]])
def test_once_a_newer_attempt_has_begun_every_end_of_a_save_is_a_fence(tmp_path: Path, reports: list[_Written]) -> None:
    told: list[CheckpointRef] = []
    save(tmp_path, 4, told)
    store_at(tmp_path).put(attempt_key(2), b'{"attempt": 2, "resumeFrom": "a000001-s00000004"}')
    outcome = save(tmp_path, 8, told, reports)
    assert outcome.fenced.startswith("attempt is fenced: 1")
    assert list_checkpoints(tmp_path)[0] == [at(1, 4)]
