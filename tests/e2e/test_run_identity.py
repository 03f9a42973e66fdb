"""The same file continues the run, an edited one is refused with what changed, and a run is served only once."""

from __future__ import annotations

import pytest
import yaml

from tests.e2e.polyreme_home import STEPS, PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

REFUSED = 4


def test_a_finished_run_says_so_and_starts_nothing(home: PolyremeHome, truth: dict[int, str]) -> None:
    job = home.write_job("undisturbed")
    again = home.call("run", str(job), "-o", "json")
    assert again.code == 0, again.said
    assert "is finished" in again.said
    assert again.item["attempts"] == 1
    assert home.losses("undisturbed") == truth


def test_an_edited_file_is_refused_with_the_names_of_its_changed_fields(
    home: PolyremeHome, truth: dict[int, str]
) -> None:
    job = home.write_job("undisturbed", training={"steps": STEPS, "packsPerStep": 8, "seed": 2})
    refused = home.call("run", str(job))
    assert refused.code == REFUSED
    assert "spec.training.packsPerStep: 4 -> 8" in refused.said
    assert "spec.training.seed: 1 -> 2" in refused.said
    assert home.losses("undisturbed") == truth


def test_a_fresh_run_keeps_the_old_one_beside_it_and_none_is_served_twice(home: PolyremeHome) -> None:
    one_rank = {"workers": {"replicas": 1, "devices": 1}, "parallelism": {"mode": "Auto"}}
    job = home.write_job("fresh", **one_rank)
    training = yaml.safe_load(job.read_text())["spec"]["training"]
    first = home.start(job)
    with first.held(attempt=1, steps=1):
        for arguments in ([], ["--fresh"]):
            refused = home.call("run", str(job), *arguments)
            assert refused.code == REFUSED, "a run has one serving process, also with --fresh"
            assert str(first.process.pid) in refused.said
        first.kill_all()

    old = {path: path.read_bytes() for path in first.run.checkpoints.glob("*/*")}
    short = home.write_job("fresh", training={**training, "steps": 3}, **one_rank)
    ended = home.call("run", str(short), "--fresh", "-o", "json")
    assert ended.code == 0, ended.said
    assert ended.item["step"] == 3
    kept = first.run.checkpoints.with_name("fresh.previous")
    assert {path: (kept / path.relative_to(first.run.checkpoints)).read_bytes() for path in old} == old
    assert first.run.path.with_name("fresh.previous").is_dir()
    names = [row["name"] for row in home.call("runs", "ls", "-o", "json").item]
    assert names.count("fresh") == 1
    assert "fresh.previous" not in names
