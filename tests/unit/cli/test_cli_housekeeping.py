"""Commands that look after runs and checkpoints: delete, verify, log, export again; and what bare commands say."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer import Typer
from typer.main import get_command

from polyreme.commands.checkpoint import _is_replaceable
from polyreme.local_run.outcome import dead_letter_words, dead_letters
from polyreme.local_run.progress_view import _step
from polyreme.main import app, invoke
from polyreme.plugin.main import app as plugin_app
from polyreme.run_files.identity import serving
from polyreme.run_files.paths import Home, RunDirectory
from polyreme_api.commit_marker import CommitMarker, SavedFile, seal
from polyreme_api.exit_codes import ExitCode
from polyreme_api.history import COMMIT_MARKER, ResumePoint, attempt_key, steps_key
from polyreme_api.job import parse_job
from polyreme_api.progress import ProgressRecord, RankPhase, StepRecord

MANIFEST: dict[str, Any] = {
    "apiVersion": "polyreme.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "kept"},
    "spec": {
        "model": {"preset": "kimi-vl-nano"},
        "data": {"sequenceTokens": 160, "sources": [{"name": "one", "dataset": "talk"}]},
        "training": {"steps": 600, "packsPerStep": 4},
        "workers": {"replicas": 2, "devices": 2},
    },
}
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(path=tmp_path / "home")


@pytest.fixture
def call(home: Home, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call a command on the test's home; returns exit code, data, and messages."""

    def on_home(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = invoke(["--home", str(home.path), *arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return on_home


@pytest.fixture
def run(home: Home) -> RunDirectory:
    """A run that has trained three steps and saved after the second and third."""
    run = home.run("default", "kept")
    run.path.mkdir(parents=True)
    run.identity_file.write_text("{}")
    run.job_file.write_text(yaml.safe_dump(MANIFEST))
    for key, text in (
        (attempt_key(1), ResumePoint(attempt=1).model_dump_json(by_alias=True)),
        (steps_key(1), "".join(f"{StepRecord(attempt=1, step=n, loss=1 / n).model_dump_json()}\n" for n in (1, 2, 3))),
    ):
        path = run.checkpoints / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for step in (2, 3):
        save(run.checkpoints / f"a000001-s{step:08d}", step)
    return run


def save(folder: Path, step: int) -> None:
    """Write a checkpoint of one small file."""
    folder.mkdir()
    (folder / "data").write_bytes(b"1234")
    marker = CommitMarker(
        attempt=1,
        step=step,
        world=1,
        model_digest="",
        model_shape={},
        plan_hash="",
        files={"data": SavedFile.of(b"1234")},
        loader={},
        committed_at_s=0.0,
    )
    (folder / COMMIT_MARKER).write_bytes(seal(marker))


def item(output: str) -> Any:
    """The data of the JSON envelope."""
    value = json.loads(output)
    return value["item"] if "item" in value else value["items"]


def parameters(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All commands with their path."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from parameters(child, (*path, name))


def test_a_bare_command_is_answered_by_its_help(call: Call) -> None:
    for arguments in ("runs", "data", "checkpoint"):
        code, shown, said = call(arguments)
        assert (code, said) == (ExitCode.OK, "")
        assert "Usage" in shown
    assert invoke([]) == ExitCode.OK


def test_the_version_is_an_option_too(call: Call) -> None:
    code, shown, _ = call("--version")
    assert code == ExitCode.OK
    assert shown.startswith("polyreme ")
    assert shown.count("\n") == 1


def test_no_help_text_has_brackets_that_the_terminal_swallows_as_markup() -> None:
    for path, command in parameters(get_command(app)):
        for parameter in command.params:
            assert "[" not in (getattr(parameter, "help", "") or ""), (*path, parameter.name)


@pytest.mark.parametrize(
    ("program", "called"), [(app, "polyreme"), (plugin_app, "kubectl polyreme")], ids=["polyreme", "plugin"]
)
def test_every_help_has_an_example_of_its_command(program: Typer, called: str) -> None:
    for path, command in parameters(get_command(program)):
        if not hasattr(command, "commands"):
            assert "Example" in command.help, path
            assert " ".join((called, *path)) in command.help, path


def test_every_command_that_prints_data_takes_the_json_option() -> None:
    lacking = {
        " ".join(path)
        for path, command in parameters(get_command(app))
        if path
        and not hasattr(command, "commands")
        and "output" not in {parameter.name for parameter in command.params}
    }
    assert lacking == {"node", "data worker", "serve", "console"}, "they serve until they are stopped, and log"


def test_a_run_is_deleted_and_its_checkpoints_only_when_asked_for(run: RunDirectory, call: Call) -> None:
    assert call("runs", "rm", "kept")[0] == ExitCode.USAGE
    code, output, _ = call("runs", "rm", "kept", "--yes", "-o", "json")
    assert code == ExitCode.OK
    assert item(output)["deleted"] == [str(run.path)]
    assert not run.path.exists()
    assert run.checkpoints.exists()
    assert call("runs", "rm", "kept", "--yes")[0] == ExitCode.NOT_FOUND


def test_a_run_is_deleted_with_its_checkpoints(run: RunDirectory, call: Call) -> None:
    code, table, _ = call("runs", "rm", "kept", "--checkpoints", "--yes")
    assert code == ExitCode.OK
    assert str(run.checkpoints) in table
    assert not run.checkpoints.exists()


def test_a_run_that_is_served_is_not_deleted(run: RunDirectory, call: Call) -> None:
    with serving(run):
        assert call("runs", "rm", "kept", "--yes")[0] == ExitCode.REFUSED
    assert run.path.exists()


def test_a_dataset_is_deleted_unless_a_run_names_it_and_registers_again(
    run: RunDirectory, call: Call, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    source = tmp_path / "talk.jsonl"
    source.write_text(json.dumps({"id": "a", "conversations": turns}) + "\n")
    assert call("data", "register", "talk", str(source))[0] == ExitCode.OK
    code, _, said = call("data", "rm", "talk", "--yes")
    assert code == ExitCode.REFUSED
    assert "used by kept" in said
    assert call("runs", "rm", "kept", "--yes")[0] == ExitCode.OK
    assert item(call("data", "rm", "talk", "--yes", "-o", "json")[1])["deleted"] == ["talk@1"]
    assert call("data", "show", "talk")[0] == ExitCode.NOT_FOUND
    assert "talk@1" in call("data", "register", "talk", str(source))[1]


def test_logs_show_the_loss_of_each_step(run: RunDirectory, call: Call) -> None:
    code, output, _ = call("runs", "logs", "kept", "--steps", "--tail", "2", "-o", "json")
    assert code == ExitCode.OK
    assert [(row["step"], row["loss"]) for row in item(output)] == [(2, 0.5), (3, 1 / 3)]
    assert call("runs", "logs", "kept", "--steps", "--attempt", "2")[0] == ExitCode.NOT_FOUND


def test_verify_gives_a_verdict_and_never_passes_a_damaged_checkpoint_over(run: RunDirectory, call: Call) -> None:
    code, output, _ = call("checkpoint", "verify", "kept", "-o", "json")
    assert code == ExitCode.OK
    assert item(output)["checkpoint"] == "a000001-s00000003"
    assert item(output)["verdict"].startswith("intact")
    (run.checkpoints / "a000001-s00000003" / "data").unlink()
    code, _, said = call("checkpoint", "verify", "kept")
    assert code == ExitCode.REFUSED
    assert "a000001-s00000003 is damaged: data is missing" in said
    assert call("checkpoint", "verify", "kept", "--checkpoint", "a000001-s00000002")[0] == ExitCode.OK


def test_an_export_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    assert _is_replaceable(tmp_path)
    for name in ("config.json", "model.safetensors.index.json", "model-00001-of-00001.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "text").mkdir()
    assert _is_replaceable(tmp_path)
    (tmp_path / "thesis.tex").write_text("")
    assert not _is_replaceable(tmp_path)
    (tmp_path / "alone").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "alone" / name).write_text("{}")
    assert _is_replaceable(tmp_path / "alone")


def test_an_export_to_where_nothing_can_be_written_is_the_machines_fault(run: RunDirectory, call: Call) -> None:
    code, _, said = call("checkpoint", "export", "kept", "--to", "/proc/model")
    assert code == ExitCode.ENVIRONMENT
    assert "/proc/model can't be created or written" in said
    assert said.count("\n") == 1


def test_dead_letters_are_counted_by_dataset_and_their_command_is_named() -> None:
    stages = [
        {"dataset": "talk@1", "stage": "ingest", "deadLetters": 1},
        {"dataset": "talk@1", "stage": "decode", "deadLetters": 2},
        {"dataset": "fine@1", "stage": "decode", "deadLetters": 0},
    ]
    counts = dead_letters({"stages": stages})
    assert counts == {"talk@1": 3}
    assert dead_letter_words(counts) == ["3 records of talk@1 could not be used: polyreme data show talk@1"]


def test_an_attempt_before_its_first_step_is_at_its_checkpoints_step() -> None:
    status = {"step": 70, "lastCheckpoint": {"attempt": 1, "step": 50}}
    job = parse_job({**MANIFEST, "status": status})
    assert _step(job, None) == 70
    assert _step(job, ProgressRecord(attempt=2, phase=RankPhase.STARTING)) == 50
    assert _step(job, ProgressRecord(attempt=2, phase=RankPhase.LOADING, resumed_from_step=50)) == 50
    assert _step(job, ProgressRecord(attempt=2, phase=RankPhase.TRAINING, resumed_from_step=50, step=51)) == 51
