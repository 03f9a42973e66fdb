"""A save dies at every one of its writes in turn, before it or behind it: in a folder, and in a bucket."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

from polyreme.launcher.resume import fix_resume
from polyreme_api.plan.shapes import KIMI_VL_NANO
from polyreme_api.root import State, survey
from polyreme_api.store import Data, ObjectStore
from polyreme_datahub.objects import open_store
from polyreme_trainer.checkpoint import pieces
from polyreme_trainer.checkpoint.load import load_checkpoint, open_checkpoint
from tests.unit.datahub.stores import PassingStore
from tests.unit.trainer.checkpoint.conftest import equal, make_content, save, writer_of

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
    monkeypatch.setattr(pieces, "FILE_BYTES_MAX", 4000)
    contents = {OLD: make_content(1), NEW: make_content(2)}
    seen: list[tuple[str, int]] = []
    for at in range(WRITES_MAX):
        store = open_store(f"{url}/{at}", sleep=lambda _: None)
        fix_resume(store, attempt=1, by="one", now_s=0.0)
        save(store, group, contents[OLD])
        dying = DyingStore(store, at=at, behind=behind)
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
        assert equal(loaded, contents[point.resume_from]), at
        seen.append((point.resume_from, len(torn)))
        save(store, group, make_content(3), step=12, attempt=2)
        assert [stored.name for stored in survey(store).checkpoints] == ["a000002-s00000012"], "nothing is left behind"
    files = 4  # of 2.4 KB tensors, at most 4 KB a file: more than one
    assert len(seen) > files + len(["index", "marker"]), "every write was tried"
    assert [name for name, _ in itertools.groupby(name for name, _ in seen)] == [OLD, NEW]
    assert {torn for _, torn in seen} == {0, 1}


def test_an_outcome_that_nobody_heard_is_found_by_the_next_leader(root: ObjectStore, group: dist.ProcessGroup) -> None:
    """The marker was written, and its writer died before it could say so."""
    fix_resume(root, attempt=1, by="one", now_s=0.0)
    save(root, group, make_content(1))
    writes = len(list(root.list(f"{OLD}/")))
    root.delete(f"{OLD}/COMMIT.json")
    with pytest.raises(Died):
        save(DyingStore(root, at=writes - 1, behind=True), group, make_content(1))
    point = fix_resume(root, attempt=2, by="two", now_s=0.0)
    assert point is not None
    assert point.resume_from == OLD


def test_a_save_of_other_sizes_in_one_attempt_is_no_silent_mixture(root: ObjectStore, group: dist.ProcessGroup) -> None:
    with writer_of(root, group) as writer:
        writer.start(make_content(1), step=5, loader={})
        writer.wait()
        with pytest.raises(RuntimeError, match="size"):
            writer.start(make_content(1, rows=12), step=10, loader={})
