"""Checkpoint roots with what another job or release left: refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from polyreme.job_files import read_job
from polyreme.local_run import preflight
from polyreme.main import invoke
from polyreme.run_files.paths import Home
from polyreme_api.checkpoint_inventory import survey
from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.history import CHECKPOINT_FORMAT
from polyreme_planner.plan import shape_of
from tests.roots import store_at
from tests.unit.cli.refused_jobs import committed, located, manifest, registered_home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return registered_home(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_by_the_first_size_that_differs(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    committed(root, located(root, layers=2))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(located(root)))
    capsys.readouterr()
    assert invoke(["--home", str(home.path), "run", str(path)]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "decoder.layers=2" in said
    assert "a000001-s00000002" in said
    assert "spec.checkpoint.location" in said
    assert not (home.path / "runs").exists()


def test_a_checkpoint_of_a_later_format_says_which_version_goes_on(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    committed(root, located(root), format=CHECKPOINT_FORMAT + 1)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(located(root)))
    capsys.readouterr()
    assert invoke(["--home", str(home.path), "run", str(path)]) == ExitCode.USAGE
    assert "continue with the version of polyreme that wrote it" in capsys.readouterr().err


def test_a_torn_checkpoint_and_one_of_this_model_refuse_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    marker = committed(root, located(root))
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(located(root)))
    job = read_job(path)
    preflight.check_checkpoints(survey(store_at(root)), root.as_uri(), shape_of(job.spec))
    marker.write_text("{torn")
    preflight.check_checkpoints(survey(store_at(root)), root.as_uri(), shape_of(job.spec))
    marker.unlink()
    preflight.check_checkpoints(survey(store_at(root)), root.as_uri(), shape_of(job.spec))


def test_a_swapped_root_refuses_a_run_that_would_go_on(home: Home, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest()))
    job, run = read_job(path), home.run("default", "refused")
    preflight.check(home, run, job, resumes=True, fresh=False)
    committed(run.checkpoints, located(tmp_path, layers=2))
    with pytest.raises(InvalidConfigError, match=r"decoder\.layers=2"):
        preflight.check(home, run, job, resumes=True, fresh=False)
    preflight.check(home, run, job, resumes=False, fresh=True)


def test_a_root_with_the_attempts_of_another_run_is_not_begun_again(home: Home, tmp_path: Path) -> None:
    root = tmp_path / "root"
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(located(root)))
    job, run = read_job(path), home.run("default", "refused")
    (root / "attempts").mkdir(parents=True)
    attempt = root / "attempts" / "000001.json"
    attempt.write_text('{"attempt": 1}')
    for _ in (attempt, committed(root, located(root))):
        for fresh in (False, True):
            with pytest.raises(RefusedError, match="checkpoint root belongs to another run: "):
                preflight.check(home, run, job, resumes=False, fresh=fresh)
        preflight.check(home, run, job, resumes=True, fresh=False)
        attempt.unlink(missing_ok=True)


def test_a_checkpoint_root_that_is_a_file_is_refused(home: Home, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(located(tmp_path / "file" / "root")))
    with pytest.raises(InvalidConfigError, match="is a file"):
        preflight.check(home, home.run("default", "refused"), read_job(path), resumes=False, fresh=False)
