"""One job from several files and ``--set``: what is merged, how values are read, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.job_overrides import merged, parse_setting, parse_settings, with_setting
from polyreme.main import invoke
from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode
from tests.unit.cli.refused_jobs import manifest


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job that is right."""
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(manifest()))
    return path


def effective(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """The manifest that ``validate -o yaml`` prints."""
    assert invoke(["validate", *arguments, "--for-cluster", "-o", "yaml"]) == ExitCode.OK
    return yaml.safe_load(capsys.readouterr().out)


def test_maps_merge_and_lists_are_replaced_and_null_removes() -> None:
    earlier = {"a": {"x": 1, "y": [1, 2]}, "b": 1, "c": {"z": 1}}
    assert merged(
        earlier, {"a": {"y": [3], "n": None}, "b": None, "c": 2, "d": {"new": {"deep": 1, "none": None}}}
    ) == {
        "a": {"x": 1, "y": [3]},
        "c": 2,
        "d": {"new": {"deep": 1}},
    }
    assert earlier == {"a": {"x": 1, "y": [1, 2]}, "b": 1, "c": {"z": 1}}


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("training.optimizer.learningRate=3e-4", "spec.training.optimizer.learningRate", "3e-4"),
        ("training.optimizer.learningRate=0.0003", "spec.training.optimizer.learningRate", "0.0003"),
        ("training.optimizer.learningRate=1", "spec.training.optimizer.learningRate", "1"),
        ("data.sources[0].weight=2", "spec.data.sources[0].weight", 2),
        ("spec.suspend=true", "spec.suspend", True),
        ("metadata.name=007", "metadata.name", "007"),
        ("metadata.labels.team=7", "metadata.labels.team", "7"),
        ("training.epochs=null", "spec.training.epochs", None),
        ('workers.template.spec.nodeSelector."a.b/c"=x', "spec.workers.template.spec.nodeSelector.a.b/c", "x"),
        ("workers.template.spec.x={cpu: 0.5}", "spec.workers.template.spec.x", {"cpu": "0.5"}),
    ],
)
def test_values_are_yaml_and_decimals_stay_text(text: str, field: str, value: Any) -> None:
    setting = parse_setting(text)
    assert (setting.field, setting.value) == (field, value)
    assert type(setting.value) is type(value)


def test_a_list_of_values_is_split_at_commas_outside_brackets() -> None:
    assert [setting.value for setting in parse_settings("training.optimizer.learningRate=1e-3,0.1,1")] == [
        "1e-3",
        "0.1",
        "1",
    ]
    assert [setting.value for setting in parse_settings("workers.template.args=[a, b],[c]")] == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training.steps", "expected PATH=VALUE"),
        ("training.steps=", "expected PATH=VALUE"),
        ("training..steps=1", "expected PATH=VALUE"),
        ("training.steps=[1", "is not YAML"),
        ("data.sources[1].weight=2", "spec.data.sources has entries 0 to 0"),
        ("data.schedule[0].fromStep=2", "spec.data.schedule has no entries"),
        ("training.steps.more=2", "spec.training.steps is 3, which has no fields"),
    ],
)
def test_a_setting_that_leads_nowhere_is_refused(text: str, words: str) -> None:
    document = {"spec": {"training": {"steps": 3}, "data": {"sources": [{"name": "one"}]}}}
    with pytest.raises(InvalidConfigError, match="--set") as refused:
        with_setting(document, parse_setting(text))
    assert words in str(refused.value)


def test_a_setting_changes_one_of_two_fields_that_share_an_anchor() -> None:
    document = yaml.safe_load("spec: {a: &one {x: 1}, b: *one}")
    assert with_setting(document, parse_setting("a.x=2")) == {"spec": {"a": {"x": 2}, "b": {"x": 1}}}


def test_validate_prints_what_files_and_settings_give(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("metadata: {name: mine}\nspec: {training: {steps: 7, seed: 5}}\n")
    printed = effective(capsys, str(job), str(mine), "--set", "training.seed=6")
    expected = manifest()
    expected["metadata"]["name"] = "mine"
    expected["spec"]["training"] |= {"steps": 7, "seed": 6}
    assert printed == expected


def test_the_examples_of_the_page_about_variants_are_right(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["data.sources[0].weight=2", "training.steps=null", "training.epochs=3"]
    printed = effective(capsys, str(job), *(word for text in settings for word in ("--set", text)))
    assert printed["spec"]["training"]["epochs"] == 3
    assert "steps" not in printed["spec"]["training"]
    assert printed["spec"]["data"]["sources"][0]["weight"] == 2
    settings = ["metadata.name=slow", "training.optimizer.learningRate=3e-4"]
    printed = effective(capsys, str(job), *(word for text in settings for word in ("--set", text)))
    assert printed["metadata"]["name"] == "slow"
    assert printed["spec"]["training"]["optimizer"]["learningRate"] == "3e-4"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("training.stepz=3", ["unknown field: spec.training.stepz", "did you mean 'steps'?"]),
        ("training.steps=three", ["spec.training.steps is refused: 'three', must be a whole number"]),
    ],
)
@pytest.mark.parametrize("command", ["run", "validate", "plan"])
def test_a_wrong_setting_is_refused_as_a_file_is(
    command: str, setting: str, words: list[str], job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = invoke(["--home", str(tmp_path / "home"), command, str(job), "--set", setting])
    said = capsys.readouterr().err
    assert code == ExitCode.USAGE
    assert said.count("\n") == 1
    assert all(each in said for each in words)
    assert not (tmp_path / "home").exists()
