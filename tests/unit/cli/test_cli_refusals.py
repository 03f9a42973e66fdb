"""What is refused before anything starts: one line, exit code 2, nothing on disk; ``validate`` says the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from polyreme.job_files import read_documents, read_job
from polyreme.local_run import preflight
from polyreme.main import invoke
from polyreme.run_files.paths import Home
from polyreme_api.batch import TokenIds, TokenizerFile
from polyreme_api.commit_marker import SavedFile
from polyreme_api.exit_codes import ExitCode
from polyreme_datahub.chat_format import OWN_TEMPLATE
from polyreme_datahub.tokens import train_tokenizer
from polyreme_planner.shapes import model_shape
from polyreme_trainer.model.initialise import outline
from tests.exports import export_model
from tests.unit.cli.refused_jobs import committed, located, manifest, registered_home

Change = Callable[[dict[str, Any]], None]


def put(path: str, value: Any) -> Change:
    """Set a field of the spec."""

    def change(job: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        part = job["spec"]
        for name in parents:
            part = part.setdefault(name, {})
        part[last] = value

    return change


REFUSALS: dict[str, tuple[Change, list[str]]] = {
    "an unknown field": (put("training.stepz", 3), ["spec.training.stepz", "did you mean 'steps'?"]),
    "a wrong type": (put("training.steps", "three"), ["spec.training.steps", "'three'", "must be a whole number"]),
    "a number where decimal text is wanted": (
        put("training.optimizer.learningRate", 0.001),
        ["spec.training.optimizer.learningRate", "0.001", 'in quotes: "0.001"'],
    ),
    "a learning rate with a slip of the exponent": (
        put("training.optimizer.learningRate", "1e99"),
        ["spec.training.optimizer.learningRate", "'1e99'", "a number up to 10"],
    ),
    "a decay that never forgets": (
        put("training.optimizer.beta2", "1"),
        ["spec.training.optimizer.beta2", "a number from 0 to less than 1"],
    ),
    "replicas that no layout fits": (
        put("workers.replicas", 3),
        ["3 workers x 2 devices = 6 ranks", "worker counts that fit: 1, 2", "spec.workers.replicas"],
    ),
    "an explicit layout that does not fit": (
        put("parallelism", {"mode": "Explicit", "dp": 3, "ep": 2}),
        ["dp 3", "3 ranks, not 4", "layouts of 4 ranks that fit: dp4 ep2"],
    ),
    "a dataset that does not exist": (
        put("data.sources", [{"name": "one", "dataset": "sample/digit-1"}]),
        ["sample/digit-1", "did you mean 'sample/digits-1'", "spec.data.sources"],
    ),
    "a dataset that nobody registered": (
        put("data.sources", [{"name": "one", "dataset": "nowhere"}]),
        ["no dataset nowhere: ", "polyreme data register NAME SOURCE makes a file or folder a dataset"],
    ),
    "a warm-up longer than the run": (
        put("training.optimizer", {"warmupSteps": 9_999}),
        ["the warm-up is longer than the run: 9999 steps of ", "change spec.training.optimizer.warmupSteps"],
    ),
    "a version that does not exist": (
        put("data.sources", [{"name": "one", "dataset": "sample/digits-1@7"}]),
        ["no dataset sample/digits-1@7"],
    ),
    "a held-out dataset that does not exist": (
        put("evaluation", {"sets": [{"name": "held", "dataset": "sample/digits-1-heldut"}]}),
        ["sample/digits-1-heldut", "did you mean 'sample/digits-1-heldout'"],
    ),
    "evaluation on what is trained on": (
        put("evaluation", {"sets": [{"name": "held", "dataset": "sample/digits-1"}]}),
        ["'held' evaluates on sample/digits-1", "source 'one' trains on it"],
    ),
    "a tokenizer larger than the model's vocabulary": (
        put("data.tokenizer.vocabulary", 100_000),
        ["100000 tokens", "the model embeds 512", "spec.data.tokenizer.vocabulary"],
    ),
    "checkpoints elsewhere": (
        put("checkpoint.location", "gs://bucket/root"),
        ["gs://", "file:///absolute/path or s3://bucket/prefix", "spec.checkpoint.location"],
    ),
    "the root of the file system for checkpoints": (
        put("checkpoint.location", "file:///"),
        ["not a local folder: 'file:///'", "spec.checkpoint.location"],
    ),
    "credentials in a URL": (
        put("checkpoint.location", "s3://me:private" + "@bucket/root"),
        ["an s3:// URL has credentials", "AWS_SECRET_ACCESS_KEY", "spec.checkpoint.location"],
    ),
    "weights somewhere else": (
        put("model.weights", {"location": "gs://bucket/weights"}),
        ["gs://", "file:///absolute/path", "spec.model.weights.location"],
    ),
    "weights in a bucket, with credentials": (
        put("model.weights", {"location": "s3://me:private" + "@bucket/weights"}),
        ["an s3:// URL has credentials", "spec.model.weights.location"],
    ),
    "an export somewhere else": (
        put("export.location", "gs://bucket/root"),
        ["gs://", "file:///absolute/path", "spec.export.location"],
    ),
    "an export into a bucket, with credentials": (
        put("export.location", "s3://me:private" + "@bucket/root"),
        ["an s3:// URL has credentials", "spec.export.location"],
    ),
}
FILES: dict[str, tuple[str | bytes, list[str]]] = {
    "two documents": (yaml.safe_dump(manifest()) + "---\n" + yaml.safe_dump(manifest()), ["holds 2 YAML documents"]),
    "no document": ("", ["holds 0 YAML documents"]),
    "no YAML": ("{a: [b", ["not YAML"]),
    "a key that is given twice": (
        yaml.safe_dump(manifest()) + "spec: {}\n",
        ["key 'spec' is given twice, first in line 5, then again"],
    ),
    "a date that is none": ("a: 2026-02-30\n", ["not YAML", "day is out of range"]),
    "a number of 5,000 digits": (f"a: {'9' * 5000}\n", ["not YAML"]),
    "nesting without end": ("[" * 5000, ["nested more than 64 levels deep"]),
    "a list": ("- 1\n- 2\n", ["not a TrainingJob", "list"]),
    "bytes that are no text": (b"\xff\xfe\x00", ["not UTF-8"]),
    "UTF-16": (yaml.safe_dump(manifest()).encode("utf-16"), ["job.yaml is UTF-16, not UTF-8 text; save it as UTF-8"]),
    "UTF-16 without its mark": (yaml.safe_dump(manifest()).encode("utf-16-le"), ["UTF-16 without its mark, not UTF-8"]),
    "Latin-1": (b"a: \xe9", ["is not UTF-8 text, from byte 3 on"]),
    "line ends of old": (
        yaml.safe_dump(manifest()).replace("\n", "\r").encode(),
        ["end with a carriage return alone, expected line feeds"],
    ),
    "underscores in a number": (
        yaml.safe_dump(manifest()).replace("steps: 2", "steps: 1_20"),
        ["not YAML", "1_20 would be read as 120; write 120, or put it in quotes"],
    ),
    "a number with a colon": ("a: 1:20\n", ["not YAML", "1:20 would be read as 80"]),
    "a space that is none": (
        "a:\n  b:\u00a01\n",
        ["line 2 of ", "has NO-BREAK SPACE (U+00A0) in column 5, which only looks like ' '; type that instead"],
    ),
    "fullwidth digits": (
        "a: \uff11\uff12\n",
        ["line 1 of ", "has FULLWIDTH DIGIT ONE (U+FF11) in column 4, which only looks like '1'"],
    ),
    "a merge conflict": (
        "a: 1\n<<<<<<< HEAD\nb: 2\n=======\nb: 3\n>>>>>>> other\n",
        ["line 2 of ", "is '<<<<<<< HEAD', left by a merge conflict; choose one side and drop the marks"],
    ),
}


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return registered_home(tmp_path)


def refused(home: Home, job: Path, capsys: pytest.CaptureFixture[str], code: ExitCode = ExitCode.USAGE) -> str:
    """Call both commands; return the one line that both said."""
    said = []
    capsys.readouterr()
    for command in ("validate", "run"):
        assert invoke(["--home", str(home.path), command, str(job)]) == code
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.count("\n") == 1, shown.err
        said.append(shown.err)
    assert said[0] == said[1]
    assert not (home.path / "runs").exists()
    assert not (home.path / "checkpoints").exists()
    assert psutil.Process().children() == []
    return said[0]


@pytest.mark.parametrize("name", REFUSALS)
def test_a_spec_is_refused_with_one_line_and_nothing_starts(
    name: str, home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = REFUSALS[name]
    job = manifest()
    change(job)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    said = refused(home, path, capsys)
    assert [word for word in words if word not in said] == [], said


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_with_one_line_and_nothing_starts(
    name: str, home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, words = FILES[name]
    path = tmp_path / "job.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    said = refused(home, path, capsys)
    assert [word for word in words if word not in said] == [], said


def test_weights_to_start_from_that_do_not_fit_are_refused_by_their_headers(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before data are made or a rank starts; ``validate`` reads them where they are on this machine."""
    shape = model_shape("kimi-vl-nano")
    state = {name: torch.zeros(tensor.shape) for name, tensor in outline(shape).items()}
    export_model(state, shape, tmp_path / "weights", tokens=TokenIds(media=1, end=2, pad=0))
    job = manifest()
    put("model.weights.location", (tmp_path / "weights").as_uri())(job)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    assert invoke(["--home", str(home.path), "validate", str(path)]) == ExitCode.OK
    put("model.overrides.decoder.experts", 16)(job)
    path.write_text(yaml.safe_dump(job))
    said = refused(home, path, capsys)
    assert "config.json says n_routed_experts is 8, expected 16" in said
    assert "change spec.model.overrides.decoder.experts" in said


def test_weights_with_a_tokenizer_use_it_or_are_refused(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export as a run leaves it; nothing is trained with tokens that mean other text."""
    shape, content = model_shape("kimi-vl-nano"), train_tokenizer({"Which digits?": 9}, vocabulary=300)
    state = {name: torch.zeros(tensor.shape) for name, tensor in outline(shape).items()}
    template = OWN_TEMPLATE.model_dump_json(by_alias=True).encode()
    file = TokenizerFile(content=content, chat_template="", template=template, image_tokens_max=80, pixel_version=2)
    export_model(state, shape, tmp_path / "weights", tokens=TokenIds(media=2, end=1, pad=0), tokenizer=file)
    job = manifest()
    put("model.weights.location", (tmp_path / "weights").as_uri())(job)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    said = refused(home, path, capsys)
    assert "weights come with a tokenizer that the job does not use: tokenizer.json in" in said
    assert "set it to that folder; change spec.data.tokenizer.location" in said
    put("data.tokenizer", {"location": (tmp_path / "weights").as_uri()})(job)
    path.write_text(yaml.safe_dump(job))
    assert invoke(["--home", str(home.path), "validate", str(path)]) == ExitCode.OK
    other = shutil.copytree(tmp_path / "weights", tmp_path / "other")
    (other / "tokenizer.json").write_bytes(train_tokenizer({"some other text": 9}, vocabulary=300))
    put("data.tokenizer.location", other.as_uri())(job)
    path.write_text(yaml.safe_dump(job))
    assert "weights were trained with another tokenizer: " in refused(home, path, capsys)


def test_weights_that_are_not_there_are_refused_unless_the_job_is_for_a_cluster(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = manifest()
    put("model.weights.location", (tmp_path / "weights").as_uri())(job)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    said = refused(home, path, capsys, ExitCode.NOT_FOUND)
    assert f"no weights: {tmp_path / 'weights'} is not a folder" in said
    assert invoke(["--home", str(home.path), "validate", str(path), "--for-cluster"]) == ExitCode.OK


def test_a_missing_file_is_not_found(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file" in refused(home, tmp_path / "nowhere.yaml", capsys, ExitCode.NOT_FOUND)


def test_a_checkpoint_folder_that_can_not_be_written_is_the_machines_fault(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(located(Path("/proc/checkpoints"))))
    for command in ("validate", "run"):
        capsys.readouterr()
        assert invoke(["--home", str(home.path), command, str(path)]) == ExitCode.ENVIRONMENT
        said = capsys.readouterr().err
        assert "/proc/checkpoints can't be created or written" in said
        assert "spec.checkpoint.location" in said


def test_a_suspended_job_does_not_wait_for_ever(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest()
    put("suspend", True)(job)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    capsys.readouterr()
    assert invoke(["--home", str(home.path), "run", str(path)]) == ExitCode.USAGE
    assert "spec.suspend is true" in capsys.readouterr().err
    assert invoke(["--home", str(home.path), "validate", str(path)]) == ExitCode.OK


def test_credentials_in_the_url_of_a_buckets_server_are_refused_and_not_printed(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:private" + "@127.0.0.1:9")
    job = manifest()
    put("checkpoint.location", "s3://bucket/root")(job)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    capsys.readouterr()
    for command in (["run", str(path)], ["checkpoint", "ls", "s3://bucket/root"]):
        assert invoke(["--home", str(home.path), *command]) == ExitCode.USAGE
        said = capsys.readouterr().err
        assert "AWS_ENDPOINT_URL" in said
        assert "private" not in said


@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("kill-rank=4@1", "the job has no rank 4, expected 0 to 3"),
        ("stop-rank=9@1", "the job has no rank 9, expected 0 to 3"),
        ("kill-launcher=2@1", "the job has no index 2, expected 0 to 1"),
        ("kill-rank=0@3", "the job has no step 3, expected 0 to 2"),
    ],
)
def test_a_fault_that_can_never_strike_is_refused(
    fault: str, rule: str, home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest()))
    capsys.readouterr()
    assert invoke(["--home", str(home.path), "run", str(path), "--inject", fault]) == ExitCode.USAGE
    assert rule in capsys.readouterr().err
    assert not (home.path / "runs").exists()


def test_a_run_that_goes_on_names_the_checkpoints_that_are_damaged(home: Home, tmp_path: Path) -> None:
    root = tmp_path / "root"
    committed(root, located(root), files={"data": SavedFile.of(b"1234")})
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(located(root)))
    said = preflight.continued(home, home.run("default", "refused"), read_job(path))
    assert said == ["checkpoint a000001-s00000002 is damaged and is not used: data is missing"]


def test_a_job_that_can_run_passes(home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest()))
    capsys.readouterr()
    assert invoke(["--home", str(home.path), "validate", str(path), "-o", "json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["item"]["ranks"] == 4


def test_without_a_home_validate_looks_no_dataset_up_and_says_so_and_makes_no_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = manifest()
    job["spec"]["data"]["sources"][0]["dataset"] = "elsewhere"
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    assert invoke(["--home", str(tmp_path / "none"), "validate", str(path)]) == ExitCode.OK
    assert not (tmp_path / "none").exists()
    said = capsys.readouterr().err
    assert "datasets are not looked up: elsewhere; " in said
    assert "polyreme data register NAME SOURCE" in said
    assert invoke(["--home", str(tmp_path / "none"), "validate", str(path), "--for-cluster"]) == ExitCode.OK
    assert capsys.readouterr().err == ""


def test_a_fresh_run_that_is_refused_leaves_the_old_one_where_it_is(home: Home, tmp_path: Path) -> None:
    old = home.run("default", "refused")
    old.path.mkdir(parents=True)
    old.identity_file.write_text("{}")
    job = manifest()
    job["spec"]["data"]["sources"][0]["dataset"] = "nowhere"
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    assert invoke(["--home", str(home.path), "run", str(path), "--fresh"]) == ExitCode.USAGE
    assert old.identity_file.read_text() == "{}"


def test_a_store_or_a_journal_that_is_no_such_thing_ends_with_what_to_mend(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest()))
    journal = home.run("default", "refused").journal_file
    journal.mkdir(parents=True)
    objects = home.path / "data" / "objects"
    for broken in (journal, objects):
        if broken == objects:
            journal.rmdir()
            objects.rmdir()
            objects.write_text("no folder")
        capsys.readouterr()
        assert invoke(["--home", str(home.path), "run", str(path)]) == ExitCode.ENVIRONMENT
        said = capsys.readouterr().err
        assert str(broken) in said
        assert "fix this, then run the same command again to continue" in said
        assert psutil.Process().children() == []


def test_what_only_looks_odd_is_read(tmp_path: Path) -> None:
    """Windows' line ends, a byte-order mark of UTF-8, and any character in quotes and comments."""
    text = (
        "\ufeff# \u5f00\u59cb\uff1a\uff11\r\na: \"x\u00a0y\"  # \uff11_2\r\nb: '1_20'\r\nc: '=======' \r\nd: 0o10\r\n"
    )
    path = tmp_path / "job.yaml"
    path.write_bytes(text.encode())
    assert read_documents(path) == [{"a": "x\u00a0y", "b": "1_20", "c": "=======", "d": "0o10"}]
