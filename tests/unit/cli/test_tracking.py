"""The committed history of a run in TensorBoard, MLflow and CSV: each step once, whatever fails on the way."""

from __future__ import annotations

import csv
import io
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polyreme.job_files import read_job
from polyreme.main import invoke
from polyreme.run_files.paths import Home
from polyreme.run_files.records import read_records
from polyreme.tracking import feed, live
from polyreme.tracking.history import tracked_run
from polyreme.tracking.mlflow import Mlflow
from polyreme.tracking.mlflow_client import MlflowClient
from polyreme.tracking.port import Point, TrackedRun
from polyreme.tracking.registry import live_target
from polyreme.tracking.tensorboard import TensorBoard
from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode
from tests.kept.folders import FINISHED, STOPPED, VERSIONS, copy_home
from tests.unit.cli.event_reader import crc32c, message, read_events
from tests.unit.cli.mlflow_server import FakeMlflow, served

Export = Callable[..., tuple[int, str, str]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A finished run, and one that was stopped after a rank was killed."""
    return copy_home(VERSIONS[0], tmp_path)


@pytest.fixture
def export(home: Path, capsys: pytest.CaptureFixture[str]) -> Export:
    """Run ``polyreme runs export``; return its exit code and what it wrote."""

    def export(*arguments: object) -> tuple[int, str, str]:
        return invoke(["--home", str(home), "runs", "export", *map(str, arguments)]), *capsys.readouterr()

    return export


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMlflow]:
    for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("time.sleep", lambda s: None)
    with served() as server:
        yield server


def losses(home: Path, name: str) -> list[tuple[int, float]]:
    return [(record.step, record.loss) for record in read_records(home / "checkpoints/default" / name).history]


def add_torn_attempt(home: Path) -> None:
    """Let the stopped run have trained two steps that no checkpoint holds."""
    path = home / "checkpoints/default" / STOPPED / "steps/a000002.jsonl"
    last = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as stream:
        stream.writelines(json.dumps(last | {"step": last["step"] + ahead}) + "\n" for ahead in (1, 2))


def test_checksum_is_that_of_the_published_vectors() -> None:
    assert crc32c(b"123456789") == 0xE3069283


def test_tensorboard_shows_each_committed_step_once_at_its_time(home: Path, export: Export, tmp_path: Path) -> None:
    expected = read_records(home / "checkpoints/default" / STOPPED).history
    add_torn_attempt(home)
    code, said, noted = export(STOPPED, "--tensorboard", tmp_path / "tb", "-o", "json")
    assert code == ExitCode.OK
    assert json.loads(said)["items"][0]["steps"] == len(expected)
    assert "2 steps after the newest checkpoint are left out" in noted
    events = read_events(tmp_path / "tb" / STOPPED)
    assert events[0].version == "brain.Event:2"
    shown = [event for event in events if "train/loss" in event.values]
    assert [(e.step, e.at_s) for e in shown] == [(record.step, record.ended_at_s) for record in expected]
    assert [e.values["train/loss"] for e in shown] == pytest.approx([record.loss for record in expected])
    assert [e.step for e in events if e.starts] == [5]
    assert {e.step: e.values["eval/loss/heldout"] for e in shown if "eval/loss/heldout" in e.values}.keys() == {
        4,
        8,
        12,
    }


def test_tensorboard_shows_the_spec_as_text_and_as_hyper_parameters(export: Export, tmp_path: Path) -> None:
    export(FINISHED, "--tensorboard", tmp_path)
    events = read_events(tmp_path / FINISHED)
    texts = {name: words for event in events for name, words in event.texts.items()}
    assert "| training.optimizer.name | Muon |" in texts["run/spec"]
    assert "| state | Succeeded |" in texts["run/state"]
    (plugin, content) = next(e.plugins["_hparams_/session_start_info"] for e in events if e.plugins)
    session = message(message(content)[3][0])
    parameters = {message(each)[1][0].decode(): message(message(each)[2][0]) for each in session[1]}
    assert plugin == "hparams"
    assert parameters["training.optimizer.name"] == {3: [b"Muon"]}
    assert parameters["training.steps"] == {2: [2.0]}
    assert next(e.values["eval/exact_match"] for e in events if "eval/exact_match" in e.values) == 0.0


def test_a_second_export_appends_after_a_torn_record(home: Path, export: Export, tmp_path: Path) -> None:
    export(STOPPED, "--tensorboard", tmp_path)
    (path,) = (tmp_path / STOPPED).iterdir()
    whole = path.read_bytes()
    assert export(STOPPED, "--tensorboard", tmp_path)[0] == ExitCode.OK
    assert path.read_bytes() == whole
    path.write_bytes(whole[: len(whole) * 3 // 4])
    assert export(STOPPED, "--tensorboard", tmp_path)[0] == ExitCode.OK
    shown = [event.step for event in read_events(tmp_path / STOPPED) if "train/loss" in event.values]
    assert shown == [step for step, _ in losses(home, STOPPED)]


def test_a_run_that_was_started_over_gets_a_folder_of_its_own(home: Path, export: Export, tmp_path: Path) -> None:
    export(FINISHED, "--tensorboard", tmp_path)
    identity = home / "runs/default" / FINISHED / "run.json"
    identity.write_text(json.dumps(json.loads(identity.read_text()) | {"uid": "another-uid"}))
    export(FINISHED, "--tensorboard", tmp_path)
    assert {path.name for path in tmp_path.glob(f"{FINISHED}*")} == {FINISHED, f"{FINISHED}-another-"}


def test_one_process_writes_into_a_file(home: Path, export: Export, tmp_path: Path) -> None:
    run = Home(path=home).run("default", STOPPED)
    other = TensorBoard(str(tmp_path))
    other.open(tracked_run(run, read_job(run.job_file), state="Running", attempts=2))
    code, _, said = export(STOPPED, "--tensorboard", tmp_path)
    other.close()
    assert (code, "by another process" in said) == (ExitCode.REFUSED, True)
    assert export(STOPPED, "--tensorboard", tmp_path)[0] == ExitCode.OK


def test_csv_has_a_line_for_each_step(home: Path, export: Export, tmp_path: Path) -> None:
    code, said, _ = export(FINISHED, "--csv", "-")
    rows = list(csv.DictReader(io.StringIO(said)))
    assert code == ExitCode.OK
    assert [(int(row["step"]), float(row["train/loss"])) for row in rows] == losses(home, FINISHED)
    assert [row["eval/exact_match/heldout"] for row in rows] == ["", "0.0"]
    export(FINISHED, "--csv", tmp_path / "steps.csv")
    assert (tmp_path / "steps.csv").read_text() == said


def test_mlflow_gets_each_committed_step_once_and_continues(home: Path, export: Export, server: FakeMlflow) -> None:
    records = home / "checkpoints/default" / STOPPED / "steps/a000002.jsonl"
    add_torn_attempt(home)
    assert export(STOPPED, "--mlflow", server.url)[0] == ExitCode.OK
    assert server.history("train/loss") == losses(home, STOPPED)[:-2]
    export(STOPPED, "--mlflow", server.url)
    assert server.history("train/loss") == losses(home, STOPPED)[:-2]
    state = home / "runs/default" / STOPPED / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"state": "Succeeded", "finished": True}))
    export(STOPPED, "--mlflow", server.url)
    assert server.history("train/loss") == losses(home, STOPPED)
    (run,) = server.runs.values()
    assert run["info"]["status"] == "FINISHED"
    assert run["info"]["end_time"] == int(json.loads(records.read_text().splitlines()[-1])["endedAtS"] * 1000)
    assert run["tags"] | {"polyreme.attempts": "2", "polyreme.state": "Succeeded"} == run["tags"]
    assert run["params"]["data.sources.0.dataset"]
    assert not any(name.startswith("workers.template") for name in run["params"])


def test_a_changed_parameter_is_a_tag(export: Export, server: FakeMlflow, home: Path) -> None:
    export(FINISHED, "--mlflow", server.url)
    job = home / "runs/default" / FINISHED / "job.yaml"
    job.write_text(job.read_text().replace("steps: 2\n", "steps: 3\n"))
    assert export(FINISHED, "--mlflow", server.url)[0] == ExitCode.OK
    (run,) = server.runs.values()
    assert (run["params"]["training.steps"], run["tags"]["polyreme.changed.training.steps"]) == ("2", "3")


def tracked(uid: str = "u1", name: str = "wide", parameters: int = 1) -> TrackedRun:
    return TrackedRun(
        namespace="default",
        name=name,
        uid=uid,
        created_s=1.0,
        parameters={f"p[{number}].x": "v" * 600 for number in range(parameters)},
        state="Running",
        tags={"attempts": "1"},
    )


def points(steps: int, names: int = 3) -> list[Point]:
    return [
        Point(step=step, attempt=1, at_s=float(step), values={f"m/{name}": step / 7 for name in range(names)})
        for step in range(1, steps + 1)
    ]


def test_more_than_a_request_may_hold_is_sent_in_several(server: FakeMlflow) -> None:
    sender = feed.Feed(Mlflow(server.url, "wide"), lambda s: None)
    assert sender.send(tracked(parameters=250), points(1200)) == 1200
    (run,) = server.runs.values()
    assert (len(run["params"]), len(run["metrics"])) == (250, 3600)
    assert len(run["params"]["p.0.x"]) == 500
    assert run["params"]["p.0.x"].endswith("…")


def test_numbers_that_are_none_are_sent_as_protocol_buffers_write_them(server: FakeMlflow) -> None:
    broken = Point(step=1, attempt=1, at_s=1.0, values={"a": math.nan, "b": math.inf, "c": -math.inf})
    feed.Feed(Mlflow(server.url, "x"), lambda s: None).send(tracked(), [broken])
    assert [server.history(name) for name in "abc"] == [[(1, "NaN")], [(1, "Infinity")], [(1, "-Infinity")]]


@pytest.mark.parametrize("stored", [0, 7, 1000], ids=["nothing", "a-part", "all"])
def test_a_request_that_failed_midway_doubles_nothing(stored: int, server: FakeMlflow) -> None:
    failures = iter([True])

    def fault(of: FakeMlflow, path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        if body.get("metrics") and body["metrics"][0]["step"] > 1 and next(failures, False):
            of.runs_log_batch(body | {"metrics": body["metrics"][:stored]})
            return 500, {"error_code": "INTERNAL_ERROR"}
        return None

    server.fault = fault
    feed.Feed(Mlflow(server.url, "x"), lambda s: None).send(tracked(), points(600))
    assert [server.history(f"m/{name}") for name in range(3)] == [[(step, step / 7) for step in range(1, 601)]] * 3


def test_a_server_that_does_not_answer_is_tried_a_bounded_number_of_times(
    export: Export, server: FakeMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MlflowClient.__init__, "__kwdefaults__", {"timeout_s": 0.5})
    release = threading.Event()
    server.fault = lambda of, path, body: (200, {}) if release.wait(60) else None
    code, _, said = export(FINISHED, "--mlflow", server.url)
    # The last one may not have come to its thread yet. No sleep: that is replaced here.
    tries, until_s = len(feed.WAITS_S) + 1, time.monotonic() + 60
    while len(server.calls) < tries and time.monotonic() < until_s:
        release.wait(0.01)
    release.set()
    assert code == ExitCode.ENVIRONMENT
    assert f"MLflow does not answer: {server.url} (no answer within 0.5 s)" in said
    assert len(server.calls) == tries


@pytest.mark.parametrize(
    ("answer", "code", "words", "calls"),
    [
        ((503, b"busy"), ExitCode.ENVIRONMENT, "answered 503: busy", 4),
        ((429, {"error_code": "REQUEST_LIMIT_EXCEEDED"}), ExitCode.ENVIRONMENT, "answered 429", 4),
        ((404, b"<html>"), ExitCode.USAGE, "not an MLflow server: http://", 1),
        ((200, b"<html>"), ExitCode.USAGE, "answered 200 with text/html", 1),
        ((200, {"title": "x"}), ExitCode.USAGE, "an answer without 'experiment'", 1),
        ((302, b""), ExitCode.USAGE, "not an MLflow server: http://", 1),
        ((401, b"expired"), ExitCode.REFUSED, "MLflow refuses the credentials", 1),
        ((400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "no"}), ExitCode.REFUSED, "VALUE: no", 1),
    ],
)
def test_what_a_server_refuses_is_one_sentence(
    answer: tuple[int, Any], code: ExitCode, words: str, calls: int, export: Export, server: FakeMlflow
) -> None:
    server.fault = lambda of, path, body: answer
    ended, _, said = export(FINISHED, "--mlflow", server.url)
    assert (ended, len(server.calls), said.count("\n")) == (code, calls, 1)
    assert words in said


def test_credentials_come_from_the_environment_as_mlflows_clients_read_them(
    export: Export, server: FakeMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t0")
    export(FINISHED, "--mlflow", server.url)
    assert set(server.headers) == {"Bearer t0"}
    server.headers.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "a")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "b")
    export(FINISHED, "--mlflow", server.url)
    assert set(server.headers) == {"Basic YTpi"}


def test_bad_arguments_are_refused_in_one_sentence(home: Path, export: Export, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    steps = home / "checkpoints/default" / STOPPED / "steps"
    cases: list[tuple[list[Any], ExitCode, str]] = [
        (["stoped", "--csv", "-"], ExitCode.NOT_FOUND, f"did you mean '{STOPPED}'?"),
        ([STOPPED], ExitCode.USAGE, "no place to export to"),
        ([STOPPED, "--tensorboard", file], ExitCode.USAGE, f"{file} is a file"),
        ([STOPPED, "--tensorboard", file / "below"], ExitCode.USAGE, f"{file} is a file"),
        ([STOPPED, "--csv", tmp_path], ExitCode.USAGE, "is a folder"),
        ([STOPPED, "--mlflow", "localhost:5000"], ExitCode.USAGE, "expected http://HOST:PORT"),
        ([STOPPED, "--mlflow", "http://me:secret@host"], ExitCode.USAGE, "MLFLOW_TRACKING_TOKEN"),
    ]
    for arguments, expected, words in cases:
        code, _, said = export(*arguments)
        assert (code, said.count("\n")) == (expected, 1), said
        assert words in said
        assert "secret" not in said
    for path in steps.iterdir():
        path.unlink()
    code, _, said = export(STOPPED, "--csv", "-")
    assert (code, "it has trained none" in said) == (ExitCode.NOT_FOUND, True)
    for target in ("mlflow", "csv:file", "wandb:x", f"tensorboard:{file}"):
        with pytest.raises(InvalidConfigError):
            live_target(target)


@pytest.fixture
def follow(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str], list[str]], Any]:
    """Follow the stopped run, looking every moment."""
    monkeypatch.setattr(live, "POLL_S", 0.01)
    run = Home(path=home).run("default", STOPPED)

    def follow(targets: list[str], said: list[str]) -> Any:
        return live.following([live_target(target) for target in targets], run, read_job(run.job_file), said.append)

    return follow


def test_trackers_follow_a_run_and_hold_all_of_it_at_its_end(
    home: Path, follow: Callable[[list[str], list[str]], Any], server: FakeMlflow, tmp_path: Path
) -> None:
    said: list[str] = []
    state = home / "runs/default" / STOPPED / "state.json"
    with follow([f"tensorboard:{tmp_path}", f"mlflow:{server.url}"], said):
        while not (server.runs and len(server.history("train/loss")) == 12):
            threading.Event().wait(0.01)
        add_torn_attempt(home)
        state.write_text(json.dumps(json.loads(state.read_text()) | {"state": "Succeeded", "finished": True}))
    assert server.history("train/loss") == losses(home, STOPPED)
    shown = [event.step for event in read_events(tmp_path / STOPPED) if "train/loss" in event.values]
    assert shown == list(range(1, 15))
    assert said == []


def test_a_dead_server_holds_nothing_up_and_is_reported_once(
    home: Path, follow: Callable[[list[str], list[str]], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(live, "WAITS_S", (0.01, 0.01))
    said: list[str] = []
    with follow(["mlflow:http://127.0.0.1:9", f"tensorboard:{tmp_path}"], said):
        while not said:
            threading.Event().wait(0.01)
        threading.Event().wait(0.1)
    assert len(said) == 1
    assert f"polyreme runs export {STOPPED} sends what is missing" in said[0]
    assert len(losses(home, STOPPED)) == 12
    assert any(event.step == 12 for event in read_events(tmp_path / STOPPED))


def test_a_server_that_hangs_delays_the_end_by_a_bounded_time(
    follow: Callable[[list[str], list[str]], Any], server: FakeMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "END_S", 0.05)
    release = threading.Event()
    server.fault = lambda of, path, body: (200, {}) if release.wait(60) else None
    said: list[str] = []
    with follow([f"mlflow:{server.url}"], said):
        while not server.calls:
            threading.Event().wait(0.01)
    assert not release.is_set()
    assert [words.count("no answer within 0.05 s") for words in said] == [1]
    release.set()
