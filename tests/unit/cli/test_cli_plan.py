"""``polyreme plan``: the choice, the runners-up, the picture; refusals end with the documented code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from polyreme.main import invoke
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import parse_job
from polyreme_planner.plan import plan_for
from tests.unit.api.jobs import job_with


def job_file(folder: Path, changes: dict[str, object]) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job_with(changes)))
    return str(path)


BIG = {"spec.model.preset": "kimi-vl-a3b", "spec.data.sequenceTokens": 4096, "spec.training.packsPerStep": 64}


@pytest.mark.slow
def test_the_choice_comes_with_runners_up_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(tmp_path, BIG | {"spec.workers": {"replicas": 4, "devices": 8, "hardware": "h100-80g"}})
    assert invoke(["plan", path, "-o", "json"]) == ExitCode.OK
    item = json.loads(capsys.readouterr().out)["item"]
    assert item["startGiB"] < item["memoryGiB"] <= 72
    assert sum(map(int, item["stageLayers"].split())) == 27
    assert item["runnersUp"][0]["stepSeconds"] >= item["stepSeconds"]
    assert "slower" in item["runnersUp"][0]["why"]
    assert all(row.startswith("rank ") for row in item["picture"])
    assert invoke(["plan", path]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "runners-up" in shown
    kept = yaml.safe_load(shown.partition("to keep this layout, add to the job's spec:\n")[2])
    assert kept == item["spec"]
    assert kept["parallelism"]["stageLayers"] == list(map(int, item["stageLayers"].split()))
    document = yaml.safe_load(Path(path).read_text())
    document["spec"]["parallelism"] = kept["parallelism"]
    document["spec"]["training"] |= kept["training"]
    plan = plan_for(parse_job(document).spec)
    assert list(plan.cut.stage_layers) == kept["parallelism"]["stageLayers"]
    assert item["plan"].startswith(f"{plan.layout} {plan.cut.schedule}, {plan.cut.microbatches} x ")


def test_a_small_job_on_processors_needs_no_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(tmp_path, {"spec.workers": {"replicas": 2, "devices": 2}})
    assert invoke(["plan", path, "--runners-up", "0", "-o", "json"]) == ExitCode.OK
    item = json.loads(capsys.readouterr().out)["item"]
    assert item["plan"].startswith("dp4")
    assert item["picture"] == item["runnersUp"] == []


def test_the_time_to_draw_answers_has_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objective = {"kind": "GroupRelative", "reward": "a:b", "samples": 2, "answerTokens": 8}
    stages = [{"name": "read", "steps": 2}, {"name": "reward", "steps": 8, "objective": objective}]
    path = job_file(tmp_path, {"spec.workers": {"replicas": 2}, "spec.training.stages": stages})
    assert invoke(["plan", path, "-o", "json"]) == ExitCode.OK
    item = json.loads(capsys.readouterr().out)["item"]
    assert list(item["drawSeconds"]) == ["reward"]
    assert invoke(["plan", path]) == ExitCode.OK
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("draw seconds"))
    assert line.split()[2:] == ["reward", f"{item['drawSeconds']['reward']:.3g}"]
    assert invoke(["plan", job_file(tmp_path, {})]) == ExitCode.OK
    assert "draw seconds" not in capsys.readouterr().out


def test_a_slow_device_gets_bits_with_which_it_keeps_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gang = {"replicas": 4, "devices": 8, "deviceResource": "nvidia.com/gpu", "hardware": "a100-80g"}
    more = {"spec.model.preset": "moonlight-16b-a3b", "spec.workers": gang, "spec.training.parameterSharding": "FSDP2"}
    path = job_file(tmp_path, BIG | {"spec.training.packsPerStep": 32} | more)
    asked = ["plan", path, "--slow-device", "l40s-48g"]
    assert invoke([*asked, "-o", "json"]) == ExitCode.OK
    item = json.loads(capsys.readouterr().out)["item"]
    assert len(item["bits"]) == 27
    assert set(item["bits"]) == {8, 16}
    assert item["stepSeconds"] <= item["limitSeconds"]
    assert item["memoryGiB"] <= item["usableGiB"]
    assert 0 < item["error"] < 1
    assert invoke(asked) == ExitCode.OK
    shown = " ".join(capsys.readouterr().out.split())
    assert f"bits of layers {item['bits'].count(8)} x 8, {item['bits'].count(16)} x 16" in shown
    assert invoke([*asked[:-1], "abacus"]) == ExitCode.USAGE
    assert "unknown device: 'abacus'" in capsys.readouterr().err


def test_adapters_of_a_model_that_does_not_fit_are_planned_on_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapters = {"rank": 16, "alpha": "32", "targets": ["Attention", "Dense", "Experts"]}
    path = job_file(tmp_path, BIG | {"spec.training.adapters": adapters, "spec.training.precision": "bfloat16"})
    assert invoke(["plan", path, "--hardware", "h200-141g", "-o", "json"]) == ExitCode.OK
    item = json.loads(capsys.readouterr().out)["item"]
    assert 16.4e9 * 2 / 2**30 < item["startGiB"] < 36


@pytest.mark.slow
def test_what_does_not_fit_ends_with_the_code_of_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["plan", job_file(tmp_path, BIG), "--hardware", "h100-80g"]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert "does not fit 1 x h100-80g" in told
    assert "change spec.workers.replicas" in told


@pytest.mark.parametrize("wrong", [["--hardware", "abacus"], ["--visual-share", "2"], ["--image-patches", "0"]])
def test_a_wrong_option_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    assert invoke(["plan", job_file(tmp_path, {}), *wrong]) == ExitCode.USAGE
    assert f"change {wrong[0]}" in capsys.readouterr().err


def test_a_row_of_hardware_of_ones_own_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, row = job_file(tmp_path, {"spec.workers": {"replicas": 2, "devices": 2}}), tmp_path / "mine.json"
    row.write_text('{"format": "polyreme.dev/hardware/v1", "like": "h100-80g", "name": "mine", "memoryBytes": 9e9}')
    assert invoke(["plan", job, "--hardware-file", str(row), "--runners-up", "0", "-o", "json"]) == ExitCode.OK
    item = json.loads(capsys.readouterr().out)["item"]
    assert (item["hardware"], item["precision"]) == ("mine", "bfloat16")
    assert invoke(["plan", job, "--hardware-file", str(row), "--hardware", "cpu"]) == ExitCode.USAGE
    row.write_text("{")
    assert invoke(["plan", job, "--hardware-file", str(row)]) == ExitCode.USAGE
    assert "hardware can't be read: Expecting property name" in capsys.readouterr().err


SERVING = ["plan", "--serving", "--devices", "l40s-48g,l4-24g", "--batch", "4", "--prompt-tokens", "256"]


def test_serving_is_planned_for_a_model_or_for_that_of_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([*SERVING, "--model", "kimi-vl-nano", "-o", "json"]) == ExitCode.OK
    item = json.loads(capsys.readouterr().out)["item"]
    assert sum(stage["layers"] for stage in item["stages"]) == sum(len(stage["bits"]) for stage in item["stages"]) == 3
    assert item["error"] <= 0.5
    assert item["seconds"] == pytest.approx(item["prefillSeconds"] + item["decodeSeconds"], abs=2e-6)
    job = job_file(tmp_path, {"spec.model.preset": "kimi-vl-nano"})
    assert invoke(["plan", job, *SERVING[1:], "-o", "json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["item"] == item
    assert invoke([*SERVING, "--model", "kimi-vl-nano"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("batch seconds", "device", "layers", "bits", "memory GiB", "prefill s"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["plan"], "no job is given"),
        ([*SERVING], "serving needs one model"),
        ([*SERVING, "--model", "abacus"], "unknown model: 'abacus'"),
        ([*SERVING, "--model", "kimi-vl-nano", "--devices", "abacus"], "unknown device: 'abacus'"),
        ([*SERVING, "--model", "kimi-vl-nano", "--devices", ","], "change --devices"),
        ([*SERVING, "--model", "kimi-vl-nano", "--devices", ",".join(["l4-24g"] * 9)], "9 devices are given"),
        ([*SERVING, "--model", "kimi-vl-nano", "--quality-budget", "1.5"], "quality budget is 1.5, expected 0 to 1"),
        ([*SERVING, "--model", "kimi-vl-nano", "--batch", "0"], "batch is 0"),
        ([*SERVING, "--model", "kimi-vl-nano", "--prompt-tokens", "0"], "prompt-tokens is 0"),
        ([*SERVING, "--model", "kimi-vl-nano", "--answer-tokens", "0"], "answer-tokens is 0"),
        ([*SERVING, "--model", "deepseek-v3"], "GiB short"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(
    capsys: pytest.CaptureFixture[str], wrong: list[str], words: str
) -> None:
    assert invoke(wrong) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_container_with_training_of_its_own_has_no_layout_to_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job_file(tmp_path, {"spec.workers": {"runtime": {"mode": "Environment"}}})
    assert invoke(["plan", path]) == ExitCode.USAGE
    assert "spec.workers.runtime.mode" in capsys.readouterr().err


def test_validate_counts_the_memory_of_a_rank_as_the_planner_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With stages, bytes of a number and a divided update: none of them counted once."""
    state = {}
    for degrees in ({"dp": 8}, {"dp": 2, "pp": 4, "microbatches": 8}):
        changes = BIG | {
            "spec.workers": {"replicas": 1, "devices": 8, "hardware": "h200-141g"},
            "spec.parallelism": {"mode": "Explicit", "ep": 2, **degrees},
        }
        path = job_file(tmp_path, changes)
        capsys.readouterr()
        assert invoke(["validate", path, "--for-cluster", "-o", "json"]) == ExitCode.OK
        item = json.loads(capsys.readouterr().out)["item"]
        assert item["stateBytesPerRank"] < item["memoryBytesPerRank"] <= 141e9
        assert item["stateBytesPerRank"] <= item["startBytesPerRank"] < item["memoryBytesPerRank"]
        assert item["precision"] == "bfloat16"
        state[degrees.get("pp", 1)] = item["stateBytesPerRank"]
        assert invoke(["validate", path, "--for-cluster"]) == ExitCode.OK
        shown = capsys.readouterr().out
        assert f"parameters        {item['parameters']:,}" in shown
        assert "64 x 4,096 tokens" in shown
    assert state[4] < state[1] * 0.6
