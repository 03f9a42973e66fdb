"""Markers, commits and retention, on a real directory and without ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from polyreme_api.errors import FencedError, NotFoundError, RefusedError
from polyreme_api.history import COMMIT_MARKER, ResumePoint, attempt_key, checkpoint_name, claim_key
from polyreme_api.marker import CommitMarker
from polyreme_api.plan.plan import shape_digest
from polyreme_api.plan.shapes import KIMI_VL_NANO, model_shape
from polyreme_api.progress import CheckpointRef
from polyreme_trainer.checkpoint.directory import (
    commit,
    create_if_absent,
    damaged_files,
    digest_file,
    list_checkpoints,
    remove,
)
from polyreme_trainer.checkpoint.load import name_torn, open_checkpoint
from polyreme_trainer.checkpoint.retention import expendable, retain


def at(attempt: int, step: int) -> CheckpointRef:
    return CheckpointRef(attempt=attempt, step=step)


def marker(attempt: int = 1, step: int = 5) -> CommitMarker:
    return CommitMarker(
        attempt=attempt,
        step=step,
        world=4,
        model_digest=shape_digest(KIMI_VL_NANO),
        model_shape=dataclasses.asdict(KIMI_VL_NANO),
        plan_hash="abc",
        files={},
        loader={"seed": 1},
        committed_at_s=12.5,
    )


def begun(root: Path, attempt: int, step: int) -> str:
    name = checkpoint_name(at(attempt, step))
    (root / name).mkdir()
    return name


def fix(root: Path, attempt: int, resume_from: str | None) -> None:
    path = root / attempt_key(attempt)
    path.parent.mkdir(exist_ok=True)
    path.write_text(ResumePoint(attempt=attempt, resume_from=resume_from).model_dump_json(by_alias=True))


def test_a_commit_makes_a_checkpoint_that_reads_back(tmp_path: Path) -> None:
    name = begun(tmp_path, 1, 5)
    commit(tmp_path, name, marker())
    assert open_checkpoint(tmp_path, name, KIMI_VL_NANO) == marker()
    assert [path.name for path in (tmp_path / name).iterdir()] == [COMMIT_MARKER], "no temporary file stays"


def test_a_checkpoint_is_committed_once(tmp_path: Path) -> None:
    name = begun(tmp_path, 1, 5)
    commit(tmp_path, name, marker())
    with pytest.raises(FencedError, match=f"checkpoint exists: {name}"):
        commit(tmp_path, name, marker())


def test_an_attempt_with_a_successor_commits_nothing(tmp_path: Path) -> None:
    name = begun(tmp_path, 1, 5)
    fix(tmp_path, 2, None)
    with pytest.raises(FencedError, match="attempt is fenced: 1, a newer one has begun"):
        commit(tmp_path, name, marker())
    assert list_checkpoints(tmp_path) == ([], [at(1, 5)])


def test_what_its_successor_deleted_is_a_fence_and_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def succeeded(path: Path, _data: bytes) -> None:
        fix(tmp_path, 2, None)
        raise FileNotFoundError(path)

    name = begun(tmp_path, 1, 5)
    monkeypatch.setattr("polyreme_trainer.checkpoint.directory.create_if_absent", succeeded)
    with pytest.raises(FencedError):
        commit(tmp_path, name, marker())


def test_create_if_absent_changes_nothing_that_is_there(tmp_path: Path) -> None:
    create_if_absent(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        create_if_absent(tmp_path / "file", b"second")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"first"]


def test_an_unknown_format_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    name = begun(tmp_path, 1, 5)
    (tmp_path / name / COMMIT_MARKER).write_text(json.dumps({"format": 99}))
    with pytest.raises(
        RefusedError, match="has format 99, this version reads 1; go on with the version of polyreme that"
    ):
        open_checkpoint(tmp_path, name, KIMI_VL_NANO)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 3}', '{"format": 1, "attempt": 0}'])
def test_a_damaged_marker_is_refused(tmp_path: Path, text: str) -> None:
    name = begun(tmp_path, 1, 5)
    (tmp_path / name / COMMIT_MARKER).write_text(text)
    with pytest.raises(RefusedError, match="checkpoint marker is damaged"):
        open_checkpoint(tmp_path, name, KIMI_VL_NANO)


def test_a_checkpoint_of_another_model_is_refused_with_the_first_size_that_differs(tmp_path: Path) -> None:
    name = begun(tmp_path, 1, 5)
    commit(tmp_path, name, marker())
    other = model_shape("kimi-vl-nano", {"decoder": {"experts": 16}, "vision": {"layers": 3}})
    with pytest.raises(RefusedError, match=r"decoder\.experts=8, this run has 16"):
        open_checkpoint(tmp_path, name, other)


def test_torn_and_missing_checkpoints_are_named_and_never_opened(tmp_path: Path) -> None:
    name = begun(tmp_path, 1, 5)
    assert name_torn(tmp_path) == [name]
    with pytest.raises(RefusedError, match=f"checkpoint is torn: {name}"):
        open_checkpoint(tmp_path, name, KIMI_VL_NANO)
    with pytest.raises(NotFoundError, match="no checkpoint a000001-s00000009"):
        open_checkpoint(tmp_path, "a000001-s00000009", KIMI_VL_NANO)


def test_damage_is_told_file_by_file(tmp_path: Path) -> None:
    for name in ("good", "short", "other"):
        (tmp_path / name).write_bytes(b"content")
    files = {name: digest_file(tmp_path / name) for name in ("good", "short", "other")}
    (tmp_path / "short").write_bytes(b"cont")
    (tmp_path / "other").write_bytes(b"c0ntent")
    assert damaged_files(tmp_path, [*files.items(), ("gone", files["good"])]) == [
        "short has 4 bytes, the marker says 7",
        "other has another digest than the marker says",
        "gone is missing",
    ]


def test_retention_keeps_the_newest_of_history_and_clears_what_older_attempts_left() -> None:
    points = [
        ResumePoint(attempt=1, resume_from=None),
        ResumePoint(attempt=2, resume_from=checkpoint_name(at(1, 10))),
    ]
    committed = [at(1, 5), at(1, 10), at(1, 15), at(2, 15), at(2, 20)]
    torn = [at(1, 20), at(2, 25), at(3, 5)]
    gone = expendable(committed, torn, points, attempt=2, kept=2)
    assert gone == [at(1, 5), at(1, 10), at(1, 15), at(1, 20), at(2, 25)]


def test_retention_never_deletes_the_only_checkpoint_of_history() -> None:
    points = [ResumePoint(attempt=1, resume_from=None)]
    assert expendable([at(1, 5)], [], points, attempt=1, kept=0) == []
    assert expendable([], [at(1, 5)], points, attempt=2, kept=1) == []


def test_a_late_commit_does_not_push_history_out() -> None:
    points = [ResumePoint(attempt=1), ResumePoint(attempt=2, resume_from=checkpoint_name(at(1, 5)))]
    gone = expendable([at(1, 5), at(1, 10), at(1, 15)], [], points, attempt=2, kept=1)
    assert gone == [at(1, 10), at(1, 15)]


def test_a_fenced_attempt_deletes_nothing(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        commit(tmp_path, begun(tmp_path, 1, step), marker(step=step))
    fix(tmp_path, 2, None)
    with pytest.raises(FencedError):
        retain(tmp_path, attempt=1, kept=1)
    assert len(list_checkpoints(tmp_path)[0]) == 3


def test_retention_deletes_whole_directories(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        commit(tmp_path, begun(tmp_path, 1, step), marker(step=step))
    assert retain(tmp_path, attempt=1, kept=1) == ["a000001-s00000005", "a000001-s00000010"]
    assert list_checkpoints(tmp_path) == ([at(1, 15)], [])


def test_a_checkpoint_that_is_half_deleted_is_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = begun(tmp_path, 1, 5)
    commit(tmp_path, name, marker())
    monkeypatch.setattr("shutil.rmtree", lambda _path: None)
    remove(tmp_path / name)
    assert list_checkpoints(tmp_path) == ([], [at(1, 5)])


def test_an_attempt_whose_successor_is_about_to_choose_commits_and_deletes_nothing(tmp_path: Path) -> None:
    for step in (5, 10):
        commit(tmp_path, begun(tmp_path, 1, step), marker(step=step))
    (tmp_path / "attempts").mkdir()
    (tmp_path / claim_key(2)).touch()
    with pytest.raises(FencedError, match=r"attempts/000002\.claim exists"):
        retain(tmp_path, attempt=1, kept=1)
    with pytest.raises(FencedError):
        commit(tmp_path, begun(tmp_path, 1, 15), marker(step=15))
    assert list_checkpoints(tmp_path) == ([at(1, 5), at(1, 10)], [at(1, 15)])
