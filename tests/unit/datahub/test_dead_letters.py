"""Bad records become dead letters with their rule; processing continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_datahub import hub
from polyreme_datahub.processing import ProcessReport
from tests.unit.datahub.jobs import Home, make_spec, picture, record, write_jsonl


def process_lines(tmp_path: Path) -> tuple[Home, ProcessReport]:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "good.png").write_bytes(picture(60, 50))
    (folder / "cut.jpg").write_bytes(picture(200, 150, kind="JPEG")[:900])
    (folder / "mask.png").write_bytes(picture(10, 10))
    long = record("long")
    long["conversations"][1]["content"] = " ".join(str(number * 7919) for number in range(200))
    lines: list[dict[str, Any] | str] = [
        record("good", ["good.png"], masks=["good.png"], boxes=[{"image": 0, "box": [0, 0, 30, 25], "label": "a"}]),
        record("cut", ["cut.jpg"]),
        record("wrong-mask", ["good.png"], masks=["mask.png"]),
        record("missing", ["nowhere.png"]),
        "{no json",
        record("escape", ["../outside.png"]),
        record("good", ["good.png"]),
        long,
        {"id": "silent", "conversations": [{"role": "user", "content": "?"}]},
        record("text-only"),
    ]
    home = Home(tmp_path / "home")
    home.register("mine", write_jsonl(folder, lines))
    return home, home.process(make_spec(["mine"]))


@pytest.mark.slow
def test_every_bad_record_is_a_dead_letter_with_its_rule(tmp_path: Path) -> None:
    _, report = process_lines(tmp_path)
    letters = {letter.sample_id: (letter.operation, letter.rule) for letter in report.datasets[0].dead_letters}
    assert letters == {
        "cut": ("decode", "truncated"),
        "wrong-mask": ("decode", "mask"),
        "missing": ("ingest", "file"),
        "line-5": ("ingest", "json"),
        "escape": ("ingest", "path"),
        "good": ("ingest", "id"),
        "long": ("index", "sequence-tokens"),
        "silent": ("ingest", "conversations"),
    }


@pytest.mark.slow
def test_the_good_records_are_indexed_and_counted(tmp_path: Path) -> None:
    home, report = process_lines(tmp_path)
    assert report.datasets[0].samples == 2
    details = hub.show_dataset(home.registry, home.objects, "mine")
    assert (details.samples, details.dead, len(details.dead_letters)) == (5, 8, 8)
    assert {count.stage: count.dead for count in details.stages} == {
        "ingest": 5,
        "decode": 2,
        "compose": 0,
        "tokenize": 0,
        "index": 1,
    }


@pytest.mark.slow
def test_a_second_run_reuses_verdicts_as_it_reuses_results(tmp_path: Path) -> None:
    home, first = process_lines(tmp_path)
    second = home.process(make_spec(["mine"]))
    assert second.datasets[0].dead_letters == first.datasets[0].dead_letters
    assert all(count.misses == 0 for count in second.operations)
    assert second.datasets[0].manifest == first.datasets[0].manifest
