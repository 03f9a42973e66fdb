"""Where an attempt begins: fixed once, from checkpoints that a trainer really committed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from polyreme.launcher.resume import fix_resume
from polyreme_api.history import COMMIT_MARKER, attempt_key, checkpoint_name
from polyreme_api.marker import CommitMarker, ForeignFormatError, SavedFile
from polyreme_api.progress import CheckpointRef
from polyreme_datahub.objects import open_store


def save(root: Path, attempt: int, step: int, *, format_version: int = 1) -> Path:
    """Leave what a finished save leaves."""
    name = checkpoint_name(CheckpointRef(attempt=attempt, step=step))
    data = f"{attempt}-{step}".encode()
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "__0_0.distcp").write_bytes(data)
    marker = CommitMarker(
        format=format_version,
        attempt=attempt,
        step=step,
        world=1,
        model_digest="d",
        model_shape={},
        plan_hash="p",
        files={"__0_0.distcp": SavedFile(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())},
        loader={},
        committed_at_s=0.0,
    )
    (directory / COMMIT_MARKER).write_text(marker.model_dump_json(by_alias=True))
    return directory


def fix(root: Path, attempt: int) -> str | None:
    point = fix_resume(open_store(root.as_uri()), attempt=attempt, by="one", now_s=1.0)
    assert point is not None
    return point.resume_from


def test_an_attempt_goes_on_from_the_newest_committed_checkpoint(tmp_path: Path) -> None:
    assert fix(tmp_path, 1) is None
    save(tmp_path, 1, 50)
    save(tmp_path, 1, 100)
    assert fix(tmp_path, 2) == "a000001-s00000100"


def test_the_choice_is_made_once(tmp_path: Path) -> None:
    fix(tmp_path, 1)
    save(tmp_path, 1, 50)
    assert fix(tmp_path, 2) == "a000001-s00000050"
    save(tmp_path, 1, 100)
    assert fix(tmp_path, 2) == "a000001-s00000050"
    assert json.loads((tmp_path / attempt_key(2)).read_text())["resumeFrom"] == "a000001-s00000050"


def test_a_point_is_its_writers_alone_whatever_else_is_lost(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    mine = fix_resume(store, attempt=1, by="one", now_s=1.0)
    assert mine == fix_resume(store, attempt=1, by="one", now_s=2.0)
    assert fix_resume(store, attempt=1, by="another", now_s=2.0) is None
    assert fix_resume(store, attempt=2, by="another", now_s=3.0) is not None


def test_a_late_commit_of_an_older_attempt_is_never_history(tmp_path: Path) -> None:
    fix(tmp_path, 1)
    save(tmp_path, 1, 50)
    fix(tmp_path, 2)
    save(tmp_path, 1, 150)
    assert fix(tmp_path, 3) == "a000001-s00000050"


def test_a_torn_checkpoint_is_passed_over_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fix(tmp_path, 1)
    save(tmp_path, 1, 50)
    (save(tmp_path, 1, 100) / "__0_0.distcp").unlink()
    (save(tmp_path, 1, 150) / "__0_0.distcp").write_bytes(b"")
    (save(tmp_path, 1, 200) / COMMIT_MARKER).write_text("{")
    (save(tmp_path, 1, 250) / COMMIT_MARKER).unlink()
    assert fix(tmp_path, 2) == "a000001-s00000050"
    said = capsys.readouterr().err
    assert all(f"a000001-s00000{step} is torn" in said for step in (100, 150, 200))


def test_a_checkpoint_of_another_format_is_never_passed_over_in_silence(tmp_path: Path) -> None:
    fix(tmp_path, 1)
    save(tmp_path, 1, 50)
    save(tmp_path, 1, 100, format_version=99)
    with pytest.raises(ForeignFormatError, match="format 99"):
        fix(tmp_path, 2)
