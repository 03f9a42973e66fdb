"""The resume point of an attempt: fixed once, from checkpoints that a trainer really committed."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.checkpoint_inventory import read_mixture, survey
from polyreme_api.commit_marker import CommitMarker, ForeignFormatError, SavedFile, seal
from polyreme_api.errors import EnvironmentFailedError, RefusedError
from polyreme_api.history import (
    CHECKPOINT_FORMAT,
    COMMIT_MARKER,
    DAMAGE_RECORD,
    attempt_key,
    checkpoint_name,
    steps_key,
)
from polyreme_api.job.spec import STORED, TrainingJobSpec
from polyreme_api.progress import CheckpointRef
from polyreme_datahub.loader import source
from polyreme_datahub.loader.engine import read_ahead
from polyreme_datahub.objects import open_store
from polyreme_launcher.mixture_leader import CHANGES_FILE, MixtureLeader, changes_of
from polyreme_launcher.resume import fix_resume
from polyreme_planner.mixture import STEPS_AHEAD_MAX, in_force, with_steps
from polyreme_system.files import write_atomically
from tests.unit.datahub.jobs import make_spec


def save(
    root: Path,
    attempt: int,
    step: int,
    *,
    format_version: int = CHECKPOINT_FORMAT,
    loader: Mapping[str, Any] | None = None,
) -> Path:
    """Leave what a finished save leaves."""
    name = checkpoint_name(CheckpointRef(attempt=attempt, step=step))
    data = f"{attempt}-{step}".encode()
    directory = root / name
    directory.mkdir(parents=True)
    (directory / "00000-000.bin").write_bytes(data)
    marker = CommitMarker(
        format=format_version,
        attempt=attempt,
        step=step,
        world=1,
        model_digest="d",
        model_shape={},
        plan_hash="p",
        files={"00000-000.bin": SavedFile.of(data)},
        loader=dict(loader or {}),
        committed_at_s=0.0,
    )
    (directory / COMMIT_MARKER).write_bytes(seal(marker))
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


def test_the_choice_is_made_once_and_a_late_commit_of_an_older_attempt_is_never_history(tmp_path: Path) -> None:
    fix(tmp_path, 1)
    save(tmp_path, 1, 50)
    assert fix(tmp_path, 2) == "a000001-s00000050"
    save(tmp_path, 1, 100)
    assert fix(tmp_path, 2) == "a000001-s00000050"
    assert json.loads((tmp_path / attempt_key(2)).read_text())["resumeFrom"] == "a000001-s00000050"
    assert fix(tmp_path, 3) == "a000001-s00000050"


def test_a_point_is_its_writers_alone_whatever_else_is_lost(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    mine = fix_resume(store, attempt=1, by="one", now_s=1.0)
    assert mine == fix_resume(store, attempt=1, by="one", now_s=2.0)
    assert fix_resume(store, attempt=1, by="another", now_s=2.0) is None
    assert fix_resume(store, attempt=2, by="another", now_s=3.0) is not None


def test_a_torn_or_damaged_checkpoint_is_passed_over_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fix(tmp_path, 1)
    save(tmp_path, 1, 50)
    (save(tmp_path, 1, 100) / "00000-000.bin").unlink()
    (save(tmp_path, 1, 150) / "00000-000.bin").write_bytes(b"")
    (save(tmp_path, 1, 200) / COMMIT_MARKER).write_text("{")
    (save(tmp_path, 1, 250) / COMMIT_MARKER).unlink()
    (save(tmp_path, 1, 300) / DAMAGE_RECORD).write_text('{"damage": ["00000-000.bin: a bit"]}')
    assert fix(tmp_path, 2) == "a000001-s00000050"
    said = capsys.readouterr().err
    assert "a000001-s00000100 is damaged and is not used: 00000-000.bin is missing" in said
    assert "a000001-s00000150 is damaged and is not used: 00000-000.bin has 0 bytes, expected 5" in said
    assert "a000001-s00000200 is damaged and is not used: checkpoint marker is damaged" in said
    assert "a000001-s00000300 is damaged and is not used: 00000-000.bin: a bit" in said, (
        "as ranks of an attempt found it"
    )


def test_a_run_with_damaged_checkpoints_never_starts_over(tmp_path: Path) -> None:
    fix(tmp_path, 1)
    file = save(tmp_path, 1, 50) / "00000-000.bin"
    file.write_bytes(b"")
    with pytest.raises(RefusedError, match=r"no checkpoint of the run is intact: a000001-s00000050: 00000-000"):
        fix(tmp_path, 2)
    file.write_bytes(b"1-50")
    assert fix(tmp_path, 2) == "a000001-s00000050"
    file.write_bytes(b"")
    assert fix(tmp_path, 2) == "a000001-s00000050", "what was fixed stays, and its ranks say what is wrong"


def test_a_checkpoint_of_another_format_is_never_passed_over_in_silence(tmp_path: Path) -> None:
    fix(tmp_path, 1)
    save(tmp_path, 1, 50)
    save(tmp_path, 1, 100, format_version=99)
    with pytest.raises(ForeignFormatError, match="format 99"):
        fix(tmp_path, 2)


def train(root: Path, attempt: int, steps: range) -> None:
    """Leave the step records of an attempt."""
    path = root / steps_key(attempt)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f'{{"attempt": {attempt}, "step": {step}, "loss": 1.0}}\n' for step in steps))


@pytest.mark.parametrize("lost", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_a_resume_point_that_is_lost_is_rebuilt_from_the_steps_of_its_attempt(
    tmp_path: Path, lost: tuple[int, ...], how: str
) -> None:
    fix(tmp_path, 1)
    train(tmp_path, 1, range(1, 61))
    save(tmp_path, 1, 50)
    fix(tmp_path, 2)
    train(tmp_path, 2, range(51, 121))
    save(tmp_path, 2, 100)
    before = survey(open_store(tmp_path.as_uri())).points
    for attempt in lost:
        path = tmp_path / attempt_key(attempt)
        if how == "gone":
            path.unlink()
        else:
            path.write_text("{")
    seen = survey(open_store(tmp_path.as_uri()))
    assert [(point.attempt, point.resume_from) for point in seen.points] == [
        (point.attempt, point.resume_from) for point in before
    ]
    assert seen.rebuilt == set(lost)
    assert fix(tmp_path, 3) == "a000002-s00000100"


def test_an_attempt_whose_own_point_is_lost_is_never_released_again(tmp_path: Path) -> None:
    fix(tmp_path, 1)
    (tmp_path / attempt_key(1)).write_text("{")
    with pytest.raises(RefusedError, match=r"attempts/000001\.json can't be read"):
        fix(tmp_path, 1)


def scheduled(*entries: tuple[int, str]) -> TrainingJobSpec:
    """A job with windows of 64 steps from each change on; each entry gives weight to one source."""
    spec = make_spec(["a", "b"]).model_dump(mode="json", by_alias=True, exclude_none=True)
    spec["data"]["schedule"] = [
        {"fromStep": step, "weights": [{"source": source, "weight": 1}]} for step, source in entries
    ]
    return TrainingJobSpec.model_validate(spec, context=STORED)


def test_an_attempt_fixes_which_appended_changes_it_trains_by_and_from_which_step(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    fix = functools.partial(fix_resume, store, by="one", now_s=1.0)
    known, appended = scheduled((20, "s0")), scheduled((20, "s0"), (40, "s1"))
    fix(attempt=1, spec=known)
    first = read_mixture(store, 1)
    assert first is not None
    assert ([entry.from_step for entry in first.base], first.changes) == ([20], ())
    save(tmp_path, 1, 50)
    point = fix(attempt=2, spec=appended)
    assert point is not None
    assert point.mixture is not None
    assert [(change.from_step, change.step) for change in point.mixture.changes] == [(40, 84)]
    more = scheduled((20, "s0"), (40, "s1"), (60, "s9"), (70, "s0"))
    assert fix(attempt=2, spec=more) == point, "a try that is repeated reads what is fixed, whatever the job says now"
    save(tmp_path, 2, 130)
    later = fix(attempt=3, spec=more)
    assert later is not None
    assert later.mixture is not None
    assert [change.step for change in later.mixture.changes] == [84, 148], "a source that there is not is left out"
    assert fix(attempt=4, spec=known) is not None
    assert read_mixture(store, 4) == later.mixture, "a leader that reads an older job takes nothing back"


def test_changes_that_are_appended_while_an_attempt_runs_are_fixed_once_and_kept(tmp_path: Path) -> None:
    """Windows of 64 steps. Rank 0 fixes them ahead of what any rank may know; later attempts keep them."""
    store, file = open_store(tmp_path.as_uri()), tmp_path / CHANGES_FILE
    known = scheduled((20, "s0"))
    fix_resume(store, attempt=1, by="one", now_s=1.0, spec=known)
    leader = MixtureLeader(file, store, attempt=1, spec=known)
    assert not leader(1), "nothing was written yet"

    def write(*entries: tuple[int, str]) -> TrainingJobSpec:
        spec = scheduled(*entries)
        write_atomically(file, json.dumps(changes_of(spec.model_dump(mode="json", by_alias=True))))
        return spec

    def fixed(attempt: int = 1) -> list[tuple[int, int]]:
        mixture = read_mixture(store, attempt)
        assert mixture is not None
        return [(change.from_step, change.step) for change in mixture.changes]

    write((20, "s0"))
    assert not leader(2), "nothing was appended"
    write((20, "s0"), (40, "s1"))
    assert leader(50)
    assert fixed() == [(40, 84)]
    assert not leader(51), "fixed once"
    file.write_text("[{]")
    assert not leader(60), "what can't be read fails no step"
    spec = write((20, "s0"), (40, "s1"), (41, "s9"), (70, "s0"))
    assert leader(84 - STEPS_AHEAD_MAX), "the window at step 84 may be known already"
    assert fixed() == [(40, 84), (70, 148)], "a source that there is not is left out"
    assert MixtureLeader(file, store, attempt=1, spec=known)(90) is False, "a rank that starts again has nothing to fix"
    save(tmp_path, 1, 60)
    later = fix_resume(store, attempt=2, by="one", now_s=1.0, spec=spec)
    assert later is not None
    assert fixed(2) == [(40, 84), (70, 148)], "though the attempt resumes before both"
    (tmp_path / attempt_key(1)).unlink()
    assert fix_resume(store, attempt=3, by="one", now_s=1.0, spec=spec) is not None
    assert fixed(3) == [(40, 84), (70, 148)]


def test_an_end_that_is_moved_while_an_attempt_runs_is_fixed_once_and_kept(tmp_path: Path) -> None:
    store, file = open_store(tmp_path.as_uri()), tmp_path / CHANGES_FILE
    known = scheduled((20, "s0"))
    fix_resume(store, attempt=1, by="one", now_s=1.0, spec=known)
    leader = MixtureLeader(file, store, attempt=1, spec=known)

    def write(steps: int) -> TrainingJobSpec:
        spec = with_steps(known, steps)
        write_atomically(file, json.dumps(changes_of(spec.model_dump(mode="json", by_alias=True))))
        return spec

    def last_step(attempt: int) -> int:
        return in_force(known, read_mixture(store, attempt)).training.steps_known

    longer = write(known.training.steps_known + 50)
    assert leader(10)
    assert not leader(11), "fixed once"
    assert last_step(1) == longer.training.steps
    write(20)
    assert not leader(20 - STEPS_AHEAD_MAX + 1), "another rank may train a later step already"
    assert last_step(1) == longer.training.steps
    point = fix_resume(store, attempt=2, by="one", now_s=1.0, spec=longer)
    assert point is not None
    assert last_step(2) == longer.training.steps


def test_what_reads_ahead_stays_below_the_steps_at_which_a_change_may_begin() -> None:
    """A rank asks for one step more than it trains, an engine prepares three more, and looks at shards beyond these."""
    assert 1 + read_ahead.STEPS_AHEAD + source.STEPS_HELD < STEPS_AHEAD_MAX


def test_the_mixture_of_a_resume_point_that_is_lost_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    store, spec = open_store(tmp_path.as_uri()), scheduled((20, "s0"), (40, "s1"))
    fix_resume(store, attempt=1, by="one", now_s=1.0, spec=scheduled((20, "s0")))
    save(tmp_path, 1, 50)
    point = fix_resume(store, attempt=2, by="one", now_s=1.0, spec=spec)
    assert point is not None
    assert point.mixture is not None
    save(tmp_path, 2, 200, loader={"mixture": point.mixture.summary()})
    (tmp_path / steps_key(2)).parent.mkdir(exist_ok=True)
    (tmp_path / steps_key(2)).write_text('{"step": 51}\n')
    (tmp_path / attempt_key(2)).write_text("{")
    fix_resume(store, attempt=3, by="one", now_s=1.0, spec=spec)
    assert read_mixture(store, 3) == point.mixture
    (tmp_path / attempt_key(3)).write_text("{")
    with pytest.raises(EnvironmentFailedError, match="resume point of attempt 3 can't be read"):
        read_mixture(store, 3)


def test_a_checkpoint_of_a_release_without_records_says_which_changes_were_there_from_the_beginning(
    tmp_path: Path,
) -> None:
    store, spec = open_store(tmp_path.as_uri()), scheduled((20, "s0"), (40, "s1"))
    fix_resume(store, attempt=1, by="one", now_s=1.0)
    save(tmp_path, 1, 50, loader={"data": "of one entry"})
    entries_of = {"of one entry": 1}
    point = fix_resume(
        store, attempt=2, by="one", now_s=1.0, spec=spec, entries_of=lambda state: entries_of[state["data"]]
    )
    assert point is not None
    assert point.mixture is not None
    assert [entry.from_step for entry in point.mixture.base] == [20]
    assert [(change.from_step, change.step) for change in point.mixture.changes] == [(40, 84)]
