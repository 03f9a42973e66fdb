"""What is known is computed once: by a second run, by a second job, with another tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_datahub import hub
from polyreme_datahub.processing import ProcessReport
from tests.unit.datahub.jobs import Home, digits, make_spec, picture, record, write_jsonl

pytestmark = pytest.mark.slow


def misses(report: ProcessReport) -> dict[str, int]:
    return {count.operation: count.misses for count in report.operations}


def home_with_digits(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    home.register("two", digits(2, pages=300))
    home.register("two-heldout", digits(2, pages=40, heldout=True))
    return home


def test_a_second_run_computes_nothing(tmp_path: Path) -> None:
    home = home_with_digits(tmp_path)
    spec = make_spec(["two"], heldout=["two-heldout"])
    first, second = home.process(spec), home.process(spec)
    assert misses(first) == {"ingest": 340, "decode": 340, "compose": 340, "tokenize": 340, "index": 340}
    assert set(misses(second).values()) == {0}
    assert [count.hits for count in second.operations] == [340] * 5
    assert [part.manifest for part in first.datasets] == [part.manifest for part in second.datasets]


def test_another_tokenizer_recomputes_tokens_and_index_only(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    words = ["".join(random.Random(at).choices("abcdefghij", k=12)) for at in range(30)]
    home.register("mine", write_jsonl(tmp_path / "set", [record(word) for word in words]))
    first = home.process(make_spec(["mine"], vocabulary=300))
    second = home.process(make_spec(["mine"], vocabulary=320))
    assert first.tokenizer != second.tokenizer
    assert misses(second) == {"ingest": 0, "decode": 0, "compose": 0, "tokenize": 30, "index": 30}


def test_another_sequence_length_rebuilds_the_index_only(tmp_path: Path) -> None:
    home = home_with_digits(tmp_path)
    home.process(make_spec(["two"], sequence_tokens=64))
    report = home.process(make_spec(["two"], sequence_tokens=96))
    assert misses(report)["tokenize"] == 0
    assert misses(report)["index"] == 300


def test_two_homes_give_the_same_bytes(tmp_path: Path) -> None:
    spec = make_spec(["two"], heldout=["two-heldout"])
    one = home_with_digits(tmp_path / "a").process(spec)
    two = home_with_digits(tmp_path / "b").process(spec)
    assert [part.manifest for part in one.datasets] == [part.manifest for part in two.datasets]


def test_a_job_keeps_the_versions_of_its_first_run(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.register("mine", write_jsonl(tmp_path / "one", [record("a"), record("b")]))
    spec = make_spec(["mine"])
    home.process(spec, job="uid-1")
    home.register("mine", write_jsonl(tmp_path / "two", [record("c")]))
    assert [part.reference for part in home.process(spec, job="uid-1").datasets] == ["mine@1"]
    assert [part.reference for part in home.process(spec, job="uid-2").datasets] == ["mine@2"]


def test_a_file_that_changed_after_it_was_registered_is_refused(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    path = write_jsonl(tmp_path / "set", [record("a")])
    home.register("mine", path)
    path.write_text("{}\n", "utf-8")
    with pytest.raises(InvalidConfigError, match="changed since it was registered"):
        home.process(make_spec(["mine"]))


def test_an_unknown_dataset_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    home = Home(tmp_path)
    with pytest.raises(NotFoundError, match="did you mean 'sample/digits-1'"):
        hub.check_datasets(home.registry, make_spec(["sample/digit-1"]))
    with pytest.raises(NotFoundError, match="sample/digits-1@7"):
        home.process(make_spec(["sample/digits-1@7"]))


def test_a_later_version_computes_new_records_alone(tmp_path: Path) -> None:
    home = Home(tmp_path)
    for at in range(8):
        (tmp_path / f"{at}.png").write_bytes(picture(56, 28, seed=at))
    rows = [record(f"r{at}", [f"{at}.png"]) for at in range(8)]
    home.register("mine", write_jsonl(tmp_path, rows[:6]))
    home.process(make_spec(["mine"]))
    home.register("mine", write_jsonl(tmp_path, rows))
    counts = {count.operation: (count.hits, count.misses) for count in home.process(make_spec(["mine@2"])).operations}
    assert counts["decode"] == counts["compose"] == (6, 2)
