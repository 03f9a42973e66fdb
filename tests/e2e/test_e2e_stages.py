"""The job of the page about stages of training, as written there, run on one processor."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from polyreme.run_files.records import read_records
from tests.e2e.polyreme_home import PolyremeHome

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "train-in-stages.md"


def test_the_documented_job_trains_in_four_stages(home: PolyremeHome) -> None:
    block, _early_stop = re.findall(r"^```yaml\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    job = home.path / "in-stages.yaml"
    job.write_text(block)
    ended = home.start(job).end()
    assert ended.code == 0, ended.said
    item = ended.item
    steps = read_records(Path(item["checkpoints"])).history
    names = [stage["name"] for stage in yaml.safe_load(block)["spec"]["training"]["stages"]]
    assert [record.stage for record in steps] == [name for name in names for _ in range(4)]
    assert [record.learning_rate for record in steps] == pytest.approx(
        [1e-3] + [2e-3] * 7 + [2e-3, 1.55e-3, 1.1e-3, 6.5e-4] + [2e-4] * 4
    )
    assert {record.tokens for record in steps} == {640}, "longer packs, as many tokens"
    assert [sorted(record.held_out) for record in steps if record.held_out] == [["", "one-digit"]] * 4
    assert [record.step for record in steps if record.held_out] == [4, 8, 12, 16]
    config = json.loads((Path(item["export"]) / "config.json").read_text())
    assert config["text_config"]["rope_theta"] == 800_000.0
    page = Path(item["report"]).read_text()
    assert "align, steps 1 to 4, Tower and Projector alone" in page
    assert 'class="held-out"' in page
    assert "layer 2, expert 7: " in page
