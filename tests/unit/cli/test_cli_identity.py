"""The identity of a run: what may change under it, and how other changes are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.run_files.identity import changes, check_same_run, read_identity, serving, write_identity
from polyreme.run_files.paths import Home
from polyreme_api.errors import RefusedError
from polyreme_api.job import parse_job

SAMPLE = Path(__file__).parents[3] / "manifests" / "samples" / "quickstart.yaml"


def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
    return loaded


def test_the_same_file_is_the_same_run() -> None:
    assert check_same_run(parse_job(manifest()), parse_job(manifest())) == []


def test_a_default_written_out_changes_nothing() -> None:
    spelled = manifest()
    spelled["spec"]["suspend"] = False
    spelled["spec"]["queueName"] = "default"
    assert changes(parse_job(manifest()), parse_job(spelled)) == []


def test_an_edited_field_is_named_with_both_values_and_the_ways_out() -> None:
    edited = manifest()
    edited["spec"]["training"]["packsPerStep"] = 5
    edited["spec"]["data"]["sources"][2]["weight"] = 5
    with pytest.raises(RefusedError) as error:
        check_same_run(parse_job(manifest()), parse_job(edited))
    assert "spec.training.packsPerStep: 4 -> 5" in str(error.value)
    assert "spec.data.sources[2].weight: 0 -> 5" in str(error.value)
    assert "--fresh" in str(error.value)
    assert "metadata.name" in str(error.value)


def test_the_end_of_a_run_replicas_suspend_and_what_damage_does_may_change_under_a_run() -> None:
    edited = copy.deepcopy(manifest())
    edited["spec"]["training"]["steps"] = 700
    edited["spec"]["checkpoint"]["keep"] = 7
    edited["spec"]["data"]["onDamage"] = "Placeholder"
    edited["spec"]["workers"]["replicas"] = 4
    edited["spec"]["suspend"] = True
    found = check_same_run(parse_job(manifest()), parse_job(edited))
    others = {"spec.data.onDamage", "spec.suspend", "spec.training.steps", "spec.checkpoint.keep"}
    assert {change.field for change in found} == {"spec.workers.replicas", *others}


def test_the_schedule_may_get_more_entries_and_loses_or_changes_none() -> None:
    entries = [{"fromStep": step, "weights": [{"source": "one", "weight": step}]} for step in (700, 800, 900)]

    def scheduled(count: int, **change: Any) -> Any:
        given = manifest()
        known = given["spec"]["data"].get("schedule", [])
        given["spec"]["data"]["schedule"] = [*known, *copy.deepcopy(entries[:count])]
        given["spec"]["data"]["schedule"][-1] |= change
        given["spec"]["data"]["sources"][0]["name"] = "one"
        return parse_job(given)

    assert [change.field for change in check_same_run(scheduled(1), scheduled(3))] == ["spec.data.schedule"]
    for before, after in [(scheduled(2), scheduled(1)), (scheduled(2, fromStep=801), scheduled(3))]:
        with pytest.raises(RefusedError, match=r"spec\.data\.schedule: \["):
            check_same_run(before, after)
    with pytest.raises(RefusedError, match=r"spec\.data\.schedule\[\d\]\.fromStep: 800 -> 801"):
        check_same_run(scheduled(2), scheduled(2, fromStep=801))


def test_a_long_list_of_changes_is_cut_and_counted() -> None:
    edited = manifest()
    edited["spec"]["training"]["optimizer"] = {
        "learningRate": "3e-3",
        "beta1": "0.8",
        "beta2": "0.9",
        "epsilon": "1e-6",
        "weightDecay": "0",
        "clipNorm": "2",
        "warmupSteps": 7,
        "momentum": "0.8",
    }
    edited["spec"]["training"]["seed"] = 9
    with pytest.raises(RefusedError, match="and 1 more"):
        check_same_run(parse_job(manifest()), parse_job(edited))


def test_a_second_process_keeps_when_the_run_was_created(tmp_path: Path) -> None:
    run = Home(path=tmp_path).run("default", "x")
    first = write_identity(run, created_s=1.0, pid=11, process_started_s=2.0)
    second = write_identity(run, created_s=9.0, pid=12, process_started_s=3.0)
    identity = read_identity(run)
    assert identity is not None
    assert identity["createdAt"] == 1.0
    assert identity["host"] == {"pid": 12, "processStartedAt": 3.0, "token": second}
    assert first != second


def test_a_run_that_lost_its_identity_is_known_by_its_journal(tmp_path: Path) -> None:
    home = Home(path=tmp_path)
    run = home.run("default", "small")
    run.path.mkdir(parents=True)
    assert not run.exists
    run.journal_file.write_bytes(b"")
    assert run.exists
    assert [found.name for found in home.runs()] == ["small"]


def test_one_process_serves_a_run_at_a_time(tmp_path: Path) -> None:
    run = Home(path=tmp_path).run("default", "x")
    write_identity(run, created_s=1.0, pid=11, process_started_s=2.0)
    with serving(run), pytest.raises(RefusedError, match="already running in process 11"), serving(run):
        pass
    with serving(run):
        pass
