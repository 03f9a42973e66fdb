"""Markers, commits and retention, on a real directory and without ranks."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from polyreme_api.blocks import BLOCK_BYTES
from polyreme_api.commit_marker import CommitMarker, SavedFile, parse_marker, seal
from polyreme_api.errors import FencedError, RefusedError
from polyreme_api.history import COMMIT_MARKER, ResumePoint, attempt_key, checkpoint_name, claim_key, steps_key
from polyreme_api.progress import CheckpointRef
from polyreme_api.store import ObjectStore
from polyreme_planner.adapters import Adapters, Target
from polyreme_planner.checkpoint_model import saved_adapters
from polyreme_planner.plan import shape_digest
from polyreme_planner.shapes import KIMI_VL_NANO, model_shape, shape_content
from polyreme_trainer.checkpoint import staging
from polyreme_trainer.checkpoint.block_io import DamagedError, verify_files
from polyreme_trainer.checkpoint.commit import commit, condemn
from polyreme_trainer.checkpoint.load import load_checkpoint, open_checkpoint
from polyreme_trainer.checkpoint.retention import Rule, expendable, retain
from polyreme_trainer.checkpoint.save import AfterStep
from polyreme_trainer.checkpoint.staging import host_buffers
from tests.roots import at, commit_empty, damaged, list_checkpoints, store_at
from tests.roots import marker as plain_marker
from tests.unit.trainer.checkpoint.conftest import equal, make_content, writer_of

KEEP_ONE = Rule(kept=1)


def marker(attempt: int = 1, step: int = 5, **changed: object) -> CommitMarker:
    shape = {"model_digest": shape_digest(KIMI_VL_NANO), "model_shape": shape_content(KIMI_VL_NANO)}
    return plain_marker(attempt, step, **{**shape, **changed})


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return store_at(tmp_path)


def begun(store: ObjectStore, attempt: int, step: int) -> str:
    name = checkpoint_name(at(attempt, step))
    store.put(f"{name}/00000-000.bin", b"half")
    return name


def fix(store: ObjectStore, attempt: int, resume_from: str | None) -> None:
    point = ResumePoint(attempt=attempt, resume_from=resume_from)
    store.put_if_absent(attempt_key(attempt), point.model_dump_json(by_alias=True).encode())


def test_a_commit_makes_a_checkpoint_that_reads_back(store: ObjectStore, tmp_path: Path) -> None:
    commit(store, marker())
    assert open_checkpoint(store, "a000001-s00000005", KIMI_VL_NANO) == marker()
    assert [path.name for path in (tmp_path / "a000001-s00000005").iterdir()] == [COMMIT_MARKER]


def test_a_checkpoint_is_committed_once(store: ObjectStore) -> None:
    commit(store, marker())
    with pytest.raises(FencedError, match="checkpoint exists: a000001-s00000005"):
        commit(store, marker(loader={"seed": 2}))


@pytest.mark.parametrize("version", [1, 99])
def test_another_format_is_refused_and_says_what_to_do(store: ObjectStore, version: int) -> None:
    store.put(f"a000001-s00000005/{COMMIT_MARKER}", json.dumps({"format": version}).encode())
    with pytest.raises(
        RefusedError, match=f"has format {version}, this version reads 2; continue with the version of polyreme that"
    ):
        open_checkpoint(store, "a000001-s00000005", KIMI_VL_NANO)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 3}', '{"format": 2, "attempt": 0}', "null"])
def test_a_damaged_marker_is_refused(store: ObjectStore, text: str) -> None:
    store.put(f"a000001-s00000005/{COMMIT_MARKER}", text.encode())
    with pytest.raises(RefusedError, match="checkpoint marker is damaged"):
        open_checkpoint(store, "a000001-s00000005", KIMI_VL_NANO)


def test_one_flipped_bit_of_a_marker_is_noticed_wherever_it_is() -> None:
    sound = marker(files={"00000-000.bin": SavedFile.of(b"content")})
    text = seal(sound)
    assert parse_marker(text, name="a000001-s00000005") == sound
    for place in range(0, len(text), 7):
        flipped = bytearray(text)
        flipped[place] ^= 1
        if text[place : place + 1].isspace() and bytes(flipped[place : place + 1]).isspace():
            continue
        with pytest.raises(RefusedError):
            parse_marker(bytes(flipped), name="a000001-s00000005")


def test_a_marker_is_valid_for_its_own_checkpoint_only() -> None:
    with pytest.raises(RefusedError, match="it belongs to a000001-s00000005"):
        parse_marker(seal(marker()), name="a000001-s00000006")


def test_a_checkpoint_of_another_model_is_refused_with_the_first_size_that_differs(store: ObjectStore) -> None:
    commit(store, marker())
    other = model_shape("kimi-vl-nano", {"decoder": {"experts": 16}, "vision": {"layers": 3}})
    with pytest.raises(RefusedError, match=r"decoder\.experts=8, this run has 16"):
        open_checkpoint(store, "a000001-s00000005", other)


ADAPTERS = Adapters(rank=8, alpha=16.0, targets=frozenset({Target.ATTENTION}))


@pytest.mark.parametrize(
    ("saved", "wanted", "words"),
    [
        (None, ADAPTERS, "a000001-s00000005 holds the whole model, this run trains adapters"),
        (ADAPTERS, None, "a000001-s00000005 holds adapters, this run trains the whole model"),
        (
            ADAPTERS,
            dataclasses.replace(ADAPTERS, rank=4),
            "other adapters: a000001-s00000005 has rank=8, this run has 4",
        ),
        (ADAPTERS, dataclasses.replace(ADAPTERS, alpha=8.0), "has alpha=16.0, this run has 8.0"),
        (
            ADAPTERS,
            dataclasses.replace(ADAPTERS, targets=frozenset({Target.DENSE, Target.EXPERTS})),
            "has targets=Attention, this run has Dense, Experts",
        ),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    store: ObjectStore, saved: Adapters | None, wanted: Adapters | None, words: str
) -> None:
    commit(store, marker(adapters=None if saved is None else saved_adapters(saved, base="00ff")))
    with pytest.raises(RefusedError, match=words):
        open_checkpoint(store, "a000001-s00000005", KIMI_VL_NANO, wanted)
    open_checkpoint(store, "a000001-s00000005", KIMI_VL_NANO, saved)


def test_damage_is_reported_by_file_with_expected_and_found(store: ObjectStore, tmp_path: Path) -> None:
    contents = {name: name.encode() * BLOCK_BYTES for name in ("good", "flip", "shrt", "gone")}
    name = "a000001-s00000005"
    for file, data in contents.items():
        store.put(f"{name}/{file}", data)
    sound = marker(files={file: SavedFile.of(data) for file, data in contents.items()})
    commit(store, sound)
    verify_files(store, name, sound)
    flipped = bytearray(contents["flip"])
    flipped[3 * BLOCK_BYTES + 9] ^= 4
    (tmp_path / name / "flip").write_bytes(flipped)
    (tmp_path / name / "shrt").write_bytes(contents["shrt"][:-1])
    (tmp_path / name / "gone").unlink()
    with pytest.raises(DamagedError) as caught:
        verify_files(store, name, sound)
    flip, gone, short = caught.value.damage
    expected, seen = (SavedFile.of(data).blocks[3] for data in (contents["flip"], flipped))
    assert flip == f"flip: bytes from {3 * BLOCK_BYTES}: expected crc32 {expected:08x}, seen {seen:08x}"
    assert gone == "gone: it is missing"
    assert short == f"shrt: it has {4 * BLOCK_BYTES - 1} bytes, expected {4 * BLOCK_BYTES}"
    (tmp_path / name / "gone").write_bytes(contents["gone"])
    (tmp_path / name / "shrt").write_bytes(contents["shrt"])
    assert damaged(tmp_path) == {}, "a listing shows sizes alone"
    condemn(store, caught.value)
    condemn(store, DamagedError(name, ["a later word"]))
    assert damaged(tmp_path) == {name: "; ".join([flip, gone, short])}
    assert list_checkpoints(tmp_path) == ([], [])


def choose(
    committed: list[CheckpointRef], torn: list[CheckpointRef], points: list[ResumePoint], **given: Any
) -> list[CheckpointRef]:
    """Let each checkpoint be as old as its step is far from 100 seconds."""
    rule = Rule(kept=given.get("kept", 1), best=given.get("best", 0), age_s_max=given.get("age_s_max"))
    times = {c: float(c.step) for c in committed}
    losses = given.get("losses", {})
    return expendable(times, torn, points, attempt=given["attempt"], rule=rule, now_s=100.0, losses=losses)


def test_retention_keeps_the_newest_of_history_and_clears_what_older_attempts_left() -> None:
    points = [
        ResumePoint(attempt=1, resume_from=None),
        ResumePoint(attempt=2, resume_from=checkpoint_name(at(1, 10))),
    ]
    committed = [at(1, 5), at(1, 10), at(1, 15), at(2, 15), at(2, 20)]
    torn = [at(1, 20), at(2, 25), at(3, 5)]
    gone = choose(committed, torn, points, attempt=2, kept=2)
    assert gone == [at(1, 5), at(1, 10), at(1, 15), at(1, 20), at(2, 25)]


def test_retention_never_deletes_the_only_checkpoint_of_history() -> None:
    points = [ResumePoint(attempt=1, resume_from=None)]
    assert choose([at(1, 5)], [], points, attempt=1, kept=0, age_s_max=0.0) == []
    assert choose([], [at(1, 5)], points, attempt=2, kept=1) == []


def test_a_late_commit_does_not_push_history_out() -> None:
    points = [ResumePoint(attempt=1), ResumePoint(attempt=2, resume_from=checkpoint_name(at(1, 5)))]
    gone = choose([at(1, 5), at(1, 10), at(1, 15)], [], points, attempt=2)
    assert gone == [at(1, 10), at(1, 15)]


def test_what_is_old_goes_though_it_is_among_those_kept_and_the_newest_never() -> None:
    points = [ResumePoint(attempt=1)]
    committed = [at(1, 20), at(1, 50), at(1, 80), at(1, 90)]
    assert choose(committed, [], points, attempt=1, kept=9, age_s_max=30.0) == [at(1, 20), at(1, 50)]
    assert choose(committed, [], points, attempt=1, kept=2, age_s_max=70.0) == [at(1, 20), at(1, 50)]
    assert choose(committed, [], points, attempt=1, kept=9, age_s_max=1.0) == committed[:3]


def test_the_best_stay_beside_the_newest_and_of_equal_ones_the_newer() -> None:
    points = [ResumePoint(attempt=1), ResumePoint(attempt=2, resume_from=checkpoint_name(at(1, 30)))]
    lost = at(1, 40)
    history = [at(1, 10), at(1, 20), at(1, 30), at(2, 40), at(2, 50)]
    losses = {lost: 0.0, at(1, 10): 2.0, at(1, 20): 1.0, at(1, 30): 1.0, at(2, 40): math.nan, at(2, 50): 3.0}

    def kept(**given: Any) -> list[CheckpointRef]:
        gone = choose([*history, lost], [], points, attempt=2, losses=losses, **given)
        assert lost in gone, "outside of history nothing is the best"
        return [c for c in history if c not in gone]

    assert kept(kept=1) == [at(2, 50)]
    assert kept(kept=1, best=1) == [at(1, 30), at(2, 50)]
    assert kept(kept=2, best=2) == [at(1, 20), at(1, 30), at(2, 40), at(2, 50)]
    assert kept(kept=1, best=9) == [at(1, 10), at(1, 20), at(1, 30), at(2, 50)], "a loss that is no number is none"
    assert kept(kept=1, best=1, age_s_max=5.0) == [at(1, 30), at(2, 50)], "age ends the newest, not the best"


def test_retention_reads_the_losses_of_whole_checkpoints(store: ObjectStore, tmp_path: Path) -> None:
    fix(store, 1, None)
    for step, loss in ((5, 1.0), (10, 3.0), (15, 2.0)):
        commit(store, marker(step=step, held_out_loss=loss))
    assert retain(store, attempt=1, rule=Rule(kept=1, best=1), now_s=0.0) == ["a000001-s00000010"]
    assert list_checkpoints(tmp_path) == ([at(1, 5), at(1, 15)], [])


def test_what_the_newest_attempt_begins_at_stays_until_it_has_one_of_its_own() -> None:
    begin = at(1, 10)
    points = [ResumePoint(attempt=1), ResumePoint(attempt=2, resume_from=checkpoint_name(begin))]
    # Its leader passed over 15, which ranks had found damaged, and which was repaired since.
    mended = at(1, 15)
    assert choose([at(1, 5), begin, mended], [], points, attempt=2) == [at(1, 5), mended]
    assert choose([at(1, 5), begin, mended], [], points, attempt=2, kept=9, age_s_max=1.0) == [at(1, 5), mended]
    assert choose([at(1, 5), begin, at(2, 15)], [], points, attempt=2) == [at(1, 5), begin]


def test_retention_deletes_whole_directories(store: ObjectStore, tmp_path: Path) -> None:
    for step in (5, 10, 15):
        begun(store, 1, step)
        commit_empty(store, 1, step)
    gone = ["a000001-s00000005", "a000001-s00000010"]
    assert retain(store, attempt=1, rule=KEEP_ONE, now_s=0.0) == gone
    assert list_checkpoints(tmp_path) == ([at(1, 15)], [])
    assert not any((tmp_path / name).exists() for name in gone)


def test_nothing_is_deleted_because_of_a_resume_point_that_was_rebuilt(store: ObjectStore, tmp_path: Path) -> None:
    """Attempt 2 began at 5, so what attempt 1 left at 10 lies outside history: if its point was lost, 10 stays."""
    for attempt, step in ((1, 5), (1, 10), (2, 15)):
        commit_empty(store, attempt, step)
    fix(store, 1, None)
    for attempt, steps in ((1, range(1, 11)), (2, range(6, 16))):
        store.put(steps_key(attempt), "".join(f'{{"step": {step}}}\n' for step in steps).encode())
    assert retain(store, attempt=2, rule=KEEP_ONE, now_s=0.0) == ["a000001-s00000005"]
    fix(store, 2, "a000001-s00000005")
    assert retain(store, attempt=2, rule=KEEP_ONE, now_s=0.0) == ["a000001-s00000010"]


@pytest.mark.parametrize(
    ("key", "data"),
    [(claim_key(2), b""), (attempt_key(2), b'{"attempt": 2, "resumeFrom": null}')],
    ids=["about to choose", "has chosen"],
)
def test_an_attempt_with_a_successor_commits_and_deletes_nothing(
    store: ObjectStore, tmp_path: Path, key: str, data: bytes
) -> None:
    for step in (5, 10):
        commit_empty(store, 1, step)
    begun(store, 1, 15)
    store.put(key, data)
    with pytest.raises(FencedError, match=rf"attempt is fenced: 1, a newer one has started \({re.escape(key)} exists"):
        commit(store, marker(step=15))
    with pytest.raises(FencedError):
        retain(store, attempt=1, rule=KEEP_ONE, now_s=0.0)
    assert list_checkpoints(tmp_path) == ([at(1, 5), at(1, 10)], [at(1, 15)])


def test_a_save_of_other_sizes_in_one_attempt_is_no_silent_mixture(root: ObjectStore, group: dist.ProcessGroup) -> None:
    with writer_of(root, group) as writer:
        writer.start(make_content(1), step=5, after=AfterStep(loader={}))
        writer.wait()
        with pytest.raises(RuntimeError, match="size"):
            writer.start(make_content(1, rows=12), step=10, after=AfterStep(loader={}))


def test_the_first_save_finds_its_buffers_allocated_by_the_saving_thread(
    store: ObjectStore, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step would wait for seconds while they are pinned."""
    allocated: list[str] = []

    def allocate(tensors: Sequence[Tensor]) -> list[Tensor]:
        allocated.append(threading.current_thread().name)
        return host_buffers(tensors)

    monkeypatch.setattr(staging, "host_buffers", allocate)
    with writer_of(store, group, kept=2) as writer:
        writer.prepare(make_content(1))
        for step in (5, 10):
            writer.start(make_content(step), step=step, after=AfterStep(loader={}))
        writer.wait()
    assert [name.partition("_")[0] for name in allocated] == ["checkpoint"]
    held = make_content(7)
    name = "a000001-s00000010"
    load_checkpoint(held, open_checkpoint(store, name, KIMI_VL_NANO), store, name, group=group)
    assert equal(held, make_content(10))
