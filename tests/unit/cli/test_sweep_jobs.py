"""Jobs of a sweep: their names and values, what is refused before anything starts, and the exit code."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from polyreme.local_run import sweep_jobs
from polyreme.local_run.sweep import Sweep
from polyreme.local_run.sweep_jobs import JOBS_MAX
from polyreme.main import invoke
from polyreme.run_files.paths import Home
from polyreme.views.sweep_table import SweepRow, SweepView
from polyreme_api.errors import RefusedError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import parse_job
from polyreme_api.labels import LABEL_SWEEP
from polyreme_datahub_service.stored_job import write_job
from polyreme_system.files import write_json
from tests.unit.cli.refused_jobs import manifest, registered_home

RATES = "training.optimizer.learningRate=1e-3,3e-4"


def names(*texts: str, name: str | None = "s") -> list[str]:
    return [each.name for each in sweep_jobs.sweep_jobs(manifest(), texts, name=name)]


def test_each_combination_is_a_job_named_by_what_varies() -> None:
    jobs = sweep_jobs.sweep_jobs(manifest(), ["training.seed=1,2", RATES, "training.steps=7"], name="s")
    assert [each.name for each in jobs] == [
        "s-learningrate-1e-3-seed-1",
        "s-learningrate-3e-4-seed-1",
        "s-learningrate-1e-3-seed-2",
        "s-learningrate-3e-4-seed-2",
    ]
    training = [each.job.spec.training for each in jobs]
    assert [(each.seed, each.optimizer.learning_rate, each.steps) for each in training] == [
        (1, "1e-3", 7),
        (1, "3e-4", 7),
        (2, "1e-3", 7),
        (2, "3e-4", 7),
    ]
    assert {each.job.metadata.labels[LABEL_SWEEP] for each in jobs} == {"s"}


def test_a_name_depends_on_the_values_of_its_job_alone() -> None:
    assert set(names("training.seed=1,2", RATES)) < set(names(RATES, "training.seed=2,1,3"))
    long = "data.sources[0].weight=1,2", "training.optimizer.warmupSteps=1,2", "training.packsPerStep=4,8"
    found = names(*long, name="a-name-of-a-sweep")
    assert len(set(found)) == 8
    assert all(len(each) <= 40 and each.startswith("a-name-of-a-sweep-") for each in found)
    assert found == sorted(names(*reversed(long), name="a-name-of-a-sweep"), key=found.index)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["training.seed=1"], "nothing varies"),
        (["training.seed=1,1"], "a value is given twice"),
        (["metadata.name=a,b"], "use --name"),
        (["training.seed=1,x"], "job with spec.training.seed=x: spec.training.seed is refused: 'x'"),
        (["training.seed=" + ",".join(map(str, range(11))), "data.seed=" + ",".join(map(str, range(10)))], "11 x 10"),
        (["training.seed=1,2", "checkpoint.location=file:///mnt/one"], "2 jobs of the sweep would write there"),
    ],
)
def test_a_sweep_with_a_wrong_job_is_refused_as_a_whole(
    settings: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest()))
    options = [word for text in settings for word in ("--set", text)]
    code = invoke(["--home", str(tmp_path / "home"), "sweep", str(path), *options])
    said = capsys.readouterr().err
    assert code == ExitCode.USAGE
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "home").exists()


def test_a_dry_run_lists_names_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest()))
    command = ["--home", str(tmp_path / "home"), "sweep", str(path), "--set", RATES, "--name", "s", "--dry-run"]
    assert invoke([*command, "-o", "json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["items"] == [
        {"name": "s-learningrate-1e-3", "training.optimizer.learningRate": "1e-3"},
        {"name": "s-learningrate-3e-4", "training.optimizer.learningRate": "3e-4"},
    ]
    assert invoke([*command, "-o", "yaml"]) == ExitCode.OK
    for each, rate in zip(yaml.safe_load_all(capsys.readouterr().out), ("1e-3", "3e-4"), strict=True):
        assert (each["metadata"]["name"], each["metadata"]["labels"]) == (f"s-learningrate-{rate}", {LABEL_SWEEP: "s"})
        assert parse_job(each).spec.training.optimizer.learning_rate == rate
    assert not (tmp_path / "home").exists()
    assert invoke([*command[:-1], "-o", "yaml"]) == ExitCode.USAGE
    assert "add --dry-run" in capsys.readouterr().err


def test_jobs_run_at_once_while_each_rank_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = sweep_jobs.sweep_jobs(manifest(), ["training.seed=1,2"], name=None)
    ranks = jobs[0].job.spec.workers.replicas * jobs[0].job.spec.workers.devices
    for cores, expected in ((1, 1), (ranks, 1), (3 * ranks, 3)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        assert sweep_jobs.at_once(jobs) == expected


@pytest.mark.parametrize(
    ("codes", "signals", "waiting", "expected"),
    [
        ([0, 0], 0, 0, ExitCode.OK),
        ([0, 100], 0, 0, ExitCode.RUN_FAILED),
        ([8, 8, 0], 0, 0, ExitCode.DATA_DAMAGED),
        ([7, 8], 0, 0, ExitCode.RUN_FAILED),
        ([7], 0, 3, ExitCode.ENVIRONMENT),
        ([-9], 0, 0, ExitCode.RUN_FAILED),
        ([0, 6], 1, 0, ExitCode.CANCELLED),
        ([0], 1, 1, ExitCode.CANCELLED),
        ([0], 1, 0, ExitCode.OK),
    ],
)
def test_the_exit_code_says_what_became_of_all_jobs(
    codes: list[int], signals: int, waiting: int, expected: ExitCode, tmp_path: Path
) -> None:
    sweep = Sweep(Home(path=tmp_path), at_once=1)
    sweep._codes = {str(number): code for number, code in enumerate(codes)}
    sweep._signals = signals
    assert sweep._exit_code(waiting) is expected


def test_the_bound_is_written_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["sweep", "--help"]) == ExitCode.OK
    assert f"At most {JOBS_MAX} jobs" in capsys.readouterr().out


def test_a_run_of_another_spec_refuses_the_sweep_and_a_finished_one_is_not_repeated(tmp_path: Path) -> None:
    home = Home(path=registered_home(tmp_path).path)
    jobs = sweep_jobs.sweep_jobs(manifest(), ["training.seed=1,2"], name="s")
    assert sweep_jobs.check_jobs(home, jobs) == jobs
    run = jobs[0].run(home)
    run.path.mkdir(parents=True)
    write_job(run.job_file, jobs[0].job)
    write_json(run.identity_file, {"name": run.name})
    assert sweep_jobs.check_jobs(home, jobs) == jobs
    write_json(run.state_file, {"state": "Succeeded", "finished": True})
    assert sweep_jobs.check_jobs(home, jobs) == jobs[1:]
    others = sweep_jobs.sweep_jobs(manifest(), ["training.seed=1,2", "training.packsPerStep=8"], name="s")
    with pytest.raises(RefusedError, match=r"spec\.training\.packsPerStep: .* -> 8; give the sweep another name"):
        sweep_jobs.check_jobs(home, others)


def test_the_table_shows_running_runs_on_a_terminal_alone() -> None:
    row = SweepRow(name="s-seed-1", state="Running", step=3, steps=9, loss=1.5, held_out_loss=None)
    for terminal in (True, False):
        written = io.StringIO()
        with SweepView(Console(file=written, force_terminal=terminal, width=100)) as view:
            view.show([row], "1 succeeded, 1 running")
        assert ("s-seed-1  Running  3/9   1.5" in written.getvalue()) is terminal
