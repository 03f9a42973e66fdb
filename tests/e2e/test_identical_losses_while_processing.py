"""A run that trains while its data are processed: killed half-way on both sides, its losses are those of whole data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.polyreme_home import PolyremeHome, unless_gone
from tests.unit.datahub.jobs import released_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

RECORDS = 2 * 4096
STEPS = 20
"""The last ones need a second block."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[PolyremeHome]:
    """A home of its own, in which no plan is another job's."""
    (tmp_path / "home").mkdir()
    opened = PolyremeHome(tmp_path / "home")
    yield opened
    opened.close()


@pytest.fixture
def spec(tmp_path: Path, home: PolyremeHome) -> dict[str, Any]:
    """A job over two blocks of short texts, which are registered."""
    folder = tmp_path
    lines = (
        {"conversations": [{"role": "user", "content": f"{at} {at * at}?"}, {"role": "assistant", "content": str(at)}]}
        for at in range(RECORDS)
    )
    (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = home.call("data", "register", "texts", str(folder / "texts.jsonl"))
    assert done.code == 0, done.said
    return {
        "data": {
            "sources": [{"name": "texts", "dataset": "texts"}],
            "sequenceTokens": 256,
            "seed": 3,
            "tokenizer": released_tokenizer(folder / "tokenizer"),
            "startWhileProcessing": True,
        },
        "training": {"steps": STEPS, "packsPerStep": 16, "seed": 1},
        "parallelism": {"mode": "Auto"},
        "workers": {"replicas": 1, "devices": 1},
        "checkpoint": {"everySteps": 4, "keep": 3},
    }


def plans(home: PolyremeHome, name: str) -> list[Path]:
    return sorted((home.path / "data" / "objects" / "plans").glob(name))


def test_losses_are_those_of_processed_data_though_both_sides_are_killed(
    home: PolyremeHome, spec: dict[str, Any]
) -> None:
    serving = home.start(home.write_job("early", **spec))
    serving.until(lambda: plans(home, "*/0000/*.json"), "a block is sealed")
    for worker in serving.running("polyreme_datahub_service.worker"):
        unless_gone(worker.kill)
    serving.until(lambda: serving.committed(1), "a checkpoint is committed")
    serving.trained(attempt=1, steps=6)
    serving.kill_rank(0)
    ended = serving.end()
    assert ended.code == 0, ended.said
    # The plan of the whole may come after the last step, and then not at all: the next run makes it.
    [last] = plans(home, "*/0000/00000001.json")
    assert home.records("early").history[0].ended_at_s < last.stat().st_mtime, "training began before processing ended"
    assert len(serving.attempts) == 2
    late = home.start(home.write_job("late", **spec)).end()
    assert late.code == 0, late.said
    assert len(home.losses("early")) == STEPS
    assert home.losses("early") == home.losses("late")
