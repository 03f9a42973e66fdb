"""``validate`` checks what administrators apply, and jobs that bring their own training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.main import invoke
from polyreme_api.exit_codes import ExitCode

SAMPLES = Path(__file__).parents[3] / "manifests" / "samples"
QUEUE = "{apiVersion: polyreme.dev/v1alpha1, kind: TrainingQueue, metadata: {name: NAME}, spec: {SPEC}}\n"


def validate(home: Path, path: Path, *options: str) -> int:
    return invoke(["--home", str(home), "validate", str(path), *options])


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_sample_is_valid(path: Path, tmp_path: Path) -> None:
    assert validate(tmp_path / "home", path) == ExitCode.OK
    assert not (tmp_path / "home").exists()


def test_queues_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(tmp_path, SAMPLES / "queues.yaml", "-o", "json") == ExitCode.OK
    items = json.loads(capsys.readouterr().out)["items"]
    assert [item["name"] for item in items] == ["company", "research", "product", "default"]
    assert {item["kind"] for item in items} == {"TrainingQueue"}


def test_a_job_that_brings_its_own_training_has_a_layout_and_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validate(tmp_path, SAMPLES / "own-container.yaml", "-o", "json") == ExitCode.OK
    item = json.loads(capsys.readouterr().out)["item"]
    assert item["layout"] == "dp4 pp2 tp8"
    assert item["ranks"] == 64
    assert "model" not in item


def test_a_machine_without_containers_does_not_run_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["--home", str(tmp_path), "run", str(SAMPLES / "own-container.yaml")]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "workers.runtime.mode is Environment, and there is no container runtime; apply the job to a cluster" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["weight: 0"], "spec.weight is refused: 0"),
        (["weight: 1", "wait: 1"], "document 2, a TrainingQueue: unknown field: spec.wait, did you mean 'weight'?"),
        (["parent: q0"], "spec.parent is 'q0', the queue itself"),
    ],
)
def test_a_wrong_queue_is_refused_with_one_line(
    specs: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [QUEUE.replace("NAME", f"q{at}").replace("SPEC", spec) for at, spec in enumerate(specs)]
    path = tmp_path / "queues.yaml"
    path.write_text("---\n".join(texts))
    assert validate(tmp_path / "home", path) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_job_among_queues_is_refused_as_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "both.yaml"
    job = (SAMPLES / "quickstart.yaml").read_text()
    path.write_text(QUEUE.replace("NAME", "q").replace("SPEC", "weight: 1") + "---\n" + job)
    assert validate(tmp_path / "home", path) == ExitCode.USAGE
    assert "holds 2 YAML documents, expected exactly one TrainingJob" in capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--for-cluster",)])
def test_fields_of_the_pod_template_that_kubernetes_does_not_know_are_named(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = yaml.safe_load((SAMPLES / "own-container.yaml").read_text())
    job["spec"]["workers"]["template"]["spec"]["nodeSelectors"] = {"disk": "ssd"}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    assert validate(tmp_path / "home", path, *options) == ExitCode.OK
    said = capsys.readouterr().err
    assert "spec.workers.template.spec.nodeSelectors is no field of a pod's spec; did you mean nodeSelector?" in said


def test_the_plan_has_the_step_time_of_polyreme_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(command: str, *options: str, **parallelism: object) -> Any:
        job = {
            "apiVersion": "polyreme.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "big"},
            "spec": {
                "model": {"preset": "kimi-vl-a3b"},
                "workers": {"devices": 8, "deviceResource": "nvidia.com/gpu", "hardware": "h200-141g"},
                "data": {"sequenceTokens": 8192, "sources": [{"name": "one", "dataset": "one"}]},
                "training": {"steps": 10, "packsPerStep": 16},
                **({"parallelism": {"mode": "Explicit", **parallelism}} if parallelism else {}),
            },
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        assert invoke(["--home", str(tmp_path), command, str(tmp_path / "job.yaml"), *options, "-o", "json"]) == 0
        return json.loads(capsys.readouterr().out)["item"]

    planned = shown("plan")
    assert shown("validate", "--for-cluster")["stepSeconds"] == planned["stepSeconds"]
    kept = {name: value for name, value in planned["spec"]["parallelism"].items() if name != "mode"}
    assert shown("validate", "--for-cluster", **kept)["stepSeconds"] == planned["stepSeconds"]
    stages = {"dp": 2, "ep": 4, "pp": 2, "tp": 2, "schedule": "1F1B", "microbatches": 8}
    even, uneven = (
        shown("validate", "--for-cluster", **stages, stageLayers=layers)["stepSeconds"]
        for layers in ([13, 14], [7, 20])
    )
    assert planned["stepSeconds"] < even < uneven
