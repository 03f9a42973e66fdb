"""A checkpoint without a marker is torn: it is reported, never loaded, and removed."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from polyreme_api.checkpoint_inventory import State, survey
from polyreme_api.errors import NotFoundError, RefusedError
from polyreme_api.history import attempt_key, checkpoint_name
from polyreme_api.progress import CheckpointRef
from polyreme_api.store import Data, ObjectStore, StoreFailedError
from polyreme_datahub.objects import open_store
from polyreme_launcher.resume import fix_resume
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.checkpoint import block_io
from polyreme_trainer.checkpoint.load import load_checkpoint, name_unusable, open_checkpoint
from polyreme_trainer.checkpoint.retention import Rule
from polyreme_trainer.checkpoint.save import AfterStep, CheckpointWriter, Identity, _Written
from tests.roots import at, list_checkpoints, store_at
from tests.unit.datahub.stores import PassingStore
from tests.unit.trainer.checkpoint.conftest import equal, make_content, save

OLD, NEW = "a000001-s00000005", "a000001-s00000010"
WRITES_MAX = 60


class Died(BaseException):
    """The process is gone: nothing of it runs any more."""


class DyingStore(PassingStore):
    """Lets a process die at its n-th write, from 0; dead it stays."""

    def __init__(self, store: ObjectStore, *, at: int, behind: bool) -> None:
        super().__init__(store)
        self._left, self._behind = at, behind
        self.died = False

    def put(self, key: str, data: Data) -> None:
        self._before()
        super().put(key, data)
        self._after()

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._before()
        super().put_if_absent(key, data)
        self._after()

    def delete(self, key: str) -> None:
        self._before()
        super().delete(key)
        self._after()

    def _before(self) -> None:
        if self.died or (self._left == 0 and not self._behind):
            self.died = True
            raise Died

    def _after(self) -> None:
        self.died = self._left == 0
        self._left -= 1
        if self.died:
            raise Died


@pytest.mark.slow
@pytest.mark.parametrize("behind", [False, True])
def test_whatever_write_a_save_dies_at_the_next_attempt_goes_on_from_a_whole_checkpoint(
    url: str, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, behind: bool
) -> None:
    monkeypatch.setattr(block_io, "FILE_BYTES_MAX", 4000)
    contents = {OLD: make_content(1), NEW: make_content(2)}
    seen: list[tuple[str, int]] = []
    for number in range(WRITES_MAX):
        store = open_store(f"{url}/{number}", sleep=lambda _: None)
        fix_resume(store, attempt=1, by="one", now_s=0.0)
        save(store, group, contents[OLD])
        dying = DyingStore(store, at=number, behind=behind)
        try:
            save(dying, group, contents[NEW], step=10)
        except Died:
            pass
        else:
            break
        found = survey(store)
        assert found.of(State.DAMAGED, State.FOREIGN) == []
        point = fix_resume(store, attempt=2, by="two", now_s=0.0)
        assert point is not None
        assert point.resume_from in contents
        torn = [stored.name for stored in found.of(State.TORN)]
        assert torn in ([], [NEW] if point.resume_from == OLD else [OLD]), "what is torn has a name"
        loaded = make_content(9)
        marker = open_checkpoint(store, point.resume_from, KIMI_VL_NANO)
        load_checkpoint(loaded, marker, store, point.resume_from, group=group)
        assert equal(loaded, contents[point.resume_from]), number
        seen.append((point.resume_from, len(torn)))
        save(store, group, make_content(3), step=12, attempt=2)
        assert [stored.name for stored in survey(store).checkpoints] == ["a000002-s00000012"], "nothing is left behind"
    files = 4  # of 2.4 KB tensors, at most 4 KB a file: more than one
    assert len(seen) > files + len(["index", "marker"]), "every write was tried"
    assert [name for name, _ in itertools.groupby(name for name, _ in seen)] == [OLD, NEW]
    assert {torn for _, torn in seen} == {0, 1}


def test_torn_and_missing_checkpoints_are_named_and_never_opened(root: ObjectStore) -> None:
    name = "a000001-s00000005"
    root.put(f"{name}/00000-000.bin", b"half")
    assert name_unusable(root) == [name]
    with pytest.raises(RefusedError, match=f"checkpoint is torn: {name}"):
        open_checkpoint(root, name, KIMI_VL_NANO)
    with pytest.raises(NotFoundError, match="no checkpoint a000001-s00000009"):
        open_checkpoint(root, "a000001-s00000009", KIMI_VL_NANO)


GOOD = [_Written(), _Written()]


def end_save(root: Path, step: int, told: list[CheckpointRef], reports: list[_Written] = GOOD) -> Any:
    """End a save of attempt 1 as rank 0 does when all ranks have reported."""
    store = store_at(root)
    store.put(f"{checkpoint_name(at(1, step))}/00000-000.bin", b"half")
    identity = Identity(store=store, attempt=1, shape=KIMI_VL_NANO, plan_hash="p", rule=Rule(kept=1))
    group: Any = None  # no rank is asked
    with CheckpointWriter(identity, group=group, now_s=lambda: 1.0, committed=told.append) as writer:
        return writer._commit(at(1, step), reports, AfterStep(loader={}))


def test_an_old_checkpoint_that_can_not_be_deleted_does_not_undo_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_store: object, name: str) -> None:
        raise StoreFailedError(f"input/output error at {name}")

    told: list[CheckpointRef] = []
    end_save(tmp_path, 4, told)
    monkeypatch.setattr("polyreme_trainer.checkpoint.retention.remove", refuse)
    with caplog.at_level(logging.WARNING):
        outcome = end_save(tmp_path, 8, told)
    assert (outcome.committed.reference, outcome.failed) == (at(1, 8), "")
    assert "can't delete old checkpoints" in caplog.text
    assert list_checkpoints(tmp_path) == ([at(1, 4), at(1, 8)], [])
    monkeypatch.undo()
    end_save(tmp_path, 12, told)
    assert list_checkpoints(tmp_path) == ([at(1, 12)], [])
    assert told == [at(1, 4), at(1, 8), at(1, 12)]


def test_a_failed_save_leaves_nothing_and_what_was_good_stays(tmp_path: Path) -> None:
    told: list[CheckpointRef] = []
    end_save(tmp_path, 4, told)
    outcome = end_save(tmp_path, 8, told, [_Written(), _Written(failure="rank 1: no space left on device")])
    assert (outcome.committed, outcome.failed) == (None, "rank 1: no space left on device")
    assert list_checkpoints(tmp_path) == ([at(1, 4)], [])
    assert told == [at(1, 4)]


@pytest.mark.parametrize("reports", [GOOD, [_Written(failure="rank 0: gone")]])
def test_once_a_newer_attempt_has_begun_every_end_of_a_save_is_a_fence(tmp_path: Path, reports: list[_Written]) -> None:
    told: list[CheckpointRef] = []
    end_save(tmp_path, 4, told)
    store_at(tmp_path).put(attempt_key(2), b'{"attempt": 2, "resumeFrom": "a000001-s00000004"}')
    outcome = end_save(tmp_path, 8, told, reports)
    assert outcome.fenced.startswith("attempt is fenced: 1")
    assert list_checkpoints(tmp_path)[0] == [at(1, 4)]
