"""A dataset of the user's own: bad records are named and cost nothing, and what was processed once is used again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polyreme.run_files.paths import Home
from polyreme_system.files import read_json
from tests.e2e.polyreme_home import PolyremeHome
from tests.e2e.small_jobs import RECORDS, SEQUENCE_TOKENS, record, small, write_jsonl, write_records

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

STAGES = ("ingest", "decode", "compose", "tokenize", "index")
BAD_RULES = {
    "torn": ("decode", "truncated"),
    "wrong-mask": ("decode", "mask"),
    "wrong-box": ("ingest", "boxes"),
    "tiny": ("decode", "image-size"),
    "no-file": ("ingest", "file"),
    "line-64": ("ingest", "json"),
    "too-long": ("index", "sequence-tokens"),
}
"""Stage and rule of each bad record."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, home: PolyremeHome) -> Path:
    """Sixty good records and seven bad ones between them, registered; the good ones alone, registered."""
    folder = tmp_path_factory.mktemp("own") / "pictures"
    good = write_records(folder)
    whole = (folder / "00.jpg").read_bytes()
    (folder / "torn.jpg").write_bytes(whole[: len(whole) // 3])
    Image.new("L", (9, 9)).save(folder / "mask.png")
    Image.new("RGB", (3, 3)).save(folder / "tiny.png")
    bad: list[dict[str, Any] | str] = [
        # One of each colour gets past the first stage, so that words are as frequent as among the good records, and
        # the tokenizer is the same.
        record("torn", ["torn.jpg"], "red"),
        record("tiny", ["tiny.png"], "yellow"),
        record("wrong-mask", ["01.png"], "green", masks=["mask.png"]),
        record("wrong-box", ["02.jpg"], "blue", boxes=[{"image": 0, "box": [9, 9, 1, 1], "label": "x"}]),
        record("no-file", ["nowhere.png"], "yellow"),
        record("too-long", [f"{at:02d}.{'png' if at % 2 else 'jpg'}" for at in range(SEQUENCE_TOKENS // 2)], "blue"),
        '{"id": "torn-line", "images": [',
    ]
    messy = write_jsonl(folder / "messy.jsonl", [*good[:20], *bad[:4], *good[20:57], *bad[4:], *good[57:]])
    for name, path in (("messy", messy), ("good", write_jsonl(folder / "good.jsonl", list(good)))):
        done = home.call("data", "register", name, str(path), "-o", "json")
        assert done.code == 0, done.said
        assert done.item["reference"] == f"{name}@1"
    return folder


@pytest.fixture(scope="module")
def messy(own: Path, home: PolyremeHome) -> dict[str, Any]:
    """A run on good and bad records; returns what it says at its end."""
    assert own.is_dir()
    return run(home, "messy-first", small("messy"))


def run(home: PolyremeHome, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Run a job to its success."""
    ended = home.start(home.write_job(name, **spec)).end()
    assert ended.code == 0, ended.said
    item: dict[str, Any] = ended.item
    assert item["state"] == "Succeeded"
    return item


def data_report(home: PolyremeHome, name: str) -> dict[str, Any]:
    """What the data pipeline did for a run."""
    found = read_json(Home(path=home.path).run("default", name).data_report)
    assert found is not None
    return found


def tokenizer(home: PolyremeHome, name: str) -> str:
    """Digest of the tokenizer that a run's data was made with."""
    plan = Home(path=home.path).path / "data" / "objects" / data_report(home, name)["plan"]
    found = read_json(plan)
    assert found is not None
    return str(found["tokenizer"])


def made(home: PolyremeHome, name: str) -> dict[str, int]:
    """Records that each stage processed for a run."""
    return {row["stage"]: row["processed"] for row in data_report(home, name)["stages"]}


def test_bad_records_are_dead_letters_and_training_goes_on(messy: dict[str, Any], home: PolyremeHome) -> None:
    shown = home.call("data", "show", "messy", "-o", "json").item
    letters = {letter["sampleId"]: (letter["stage"], letter["rule"]) for letter in shown["deadLetters"]}
    assert letters == BAD_RULES
    assert shown["dead"] == len(BAD_RULES)
    assert shown["indexes"][0]["samples"] == RECORDS
    table = home.call("data", "show", "messy").output
    lines = {line.split()[0]: line for line in table.partition("dead letters\nRECORD")[2].splitlines()[1:]}
    assert {name: (line.split()[1], line.split()[2]) for name, line in lines.items()} == BAD_RULES, table
    report = Path(messy["report"]).read_text()
    assert [name for name, (_, rule) in BAD_RULES.items() if name not in report or rule not in report] == []


def test_the_good_records_alone_give_the_same_losses(messy: dict[str, Any], own: Path, home: PolyremeHome) -> None:
    assert own.is_dir()
    # A held-out sample of text alone is answered and reported like any other.
    question = write_jsonl(own / "question.jsonl", [record("said", [], "red")])
    assert home.call("data", "register", "question", str(question)).code == 0
    held_out = {"sets": [{"name": "asked", "dataset": "question"}]}
    alone = run(home, "good-alone", small("good", evaluation=held_out))
    assert "The picture is filled with red" in Path(alone["report"]).read_text()
    assert tokenizer(home, "good-alone") == tokenizer(home, "messy-first")
    assert home.losses("good-alone") == home.losses("messy-first")
    assert alone["loss"] == messy["loss"]


def test_a_second_job_processes_nothing(messy: dict[str, Any], home: PolyremeHome) -> None:
    first = made(home, "messy-first")
    assert all(first[stage] > 0 for stage in STAGES), first
    again = run(home, "messy-again", small("messy", steps=1))
    assert made(home, "messy-again") == dict.fromkeys(STAGES, 0)
    reused = {row["stage"]: row["reused"] for row in data_report(home, "messy-again")["stages"]}
    assert reused["index"] == RECORDS
    assert "reused" in Path(again["report"]).read_text()
    assert data_report(home, "messy-again")["deadLetters"] == data_report(home, "messy-first")["deadLetters"]
    assert messy["step"] == 2
