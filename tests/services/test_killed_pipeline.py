"""Every process of the pipeline is killed while it works, connections are cut: nothing is lost, nothing doubled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.pipeline_faults import KINDS, Faults, plant, undisturbed

pytestmark = [pytest.mark.services, pytest.mark.slow]


def test_kills_of_every_process_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    source, bad = plant(tmp_path / "set", 1000, 16)
    expected = undisturbed(tmp_path / "alone", source)
    assert expected["samples"] == 1000 - 16
    assert sorted(name for name, _, _ in expected["letters"]) == bad
    with Faults(tmp_path / "servers", kills=dict.fromkeys(KINDS, 1), seed=7) as faults:
        outcome = faults.run(source, 1000, limit_s=240.0)
    assert outcome.kills == dict.fromkeys(KINDS, 1)
    assert outcome.cuts
    assert outcome.refusals
    assert set(outcome.again.pop("made").values()) == {0}
    expected.pop("made")
    outcome.facts.pop("made")
    assert outcome.facts == expected
    assert outcome.again == expected
