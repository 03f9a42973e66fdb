"""Spikes of the loss in real ranks: one that is skipped changes nothing but the step number, on every rank alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_api.progress import StepRecord
from tests.parallel.attempts import begin, history

INFINITE, CORRUPTED = 6, 11
PLANTED: dict[str, Any] = {
    "spikes": {"action": "Skip", "window_steps": 8, "deviations": 4},
    "infinite_at": INFINITE,
    "corrupted_at": CORRUPTED,
    "interval": 1,
    "kept": 12,
}
pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def _state(root: Path, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.glob(f"a*-s{step:08d}/*.bin")}


def test_a_skipped_step_changes_nothing_but_its_number_also_in_a_resumed_run(start: Any, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    gang = begin(start, whole, 1, **PLANTED)
    assert gang.wait() == [0] * 4, gang.logs()
    lines = (whole / "steps" / "a000001.jsonl").read_text().splitlines()
    assert [step.step for step in map(StepRecord.model_validate_json, lines) if step.skipped] == [INFINITE, CORRUPTED]
    for step in (INFINITE, CORRUPTED):
        assert _state(whole, step) == _state(whole, step - 1) != _state(whole, step + 1)

    begin(start, killed, 1, **PLANTED, faults={8: "kill"}).wait()
    gang = begin(start, killed, 2, **PLANTED)
    assert gang.wait() == [0] * 4, gang.logs()
    assert list(history(killed)) == list(history(whole))
    assert _state(killed, 12) == _state(whole, 12)


@pytest.mark.parametrize(
    "divided",
    [
        {
            "layout": {"pp": 2, "tp": 2},
            "pipeline": {"schedule": "1F1B", "layers": (1, 2), "microbatches": 2},
            "optimizer": {"zero1": True},
        },
        {"layout": {"cp": 2, "dp": 2}, "parameter_sharding": "FSDP2"},
    ],
    ids=["pp 2 x tp 2, ZeRO-1", "cp 2 x dp 2, FSDP2"],
)
def test_a_skipped_step_changes_nothing_in_whatever_layout(start: Any, tmp_path: Path, divided: dict[str, Any]) -> None:
    """Nor do its gradients stay: added to those of the step after it, they would have that skipped too."""
    skips = {"spikes": PLANTED["spikes"], "infinite_at": 2, "interval": 1, "kept": 3, "steps": 3}
    gang = start("train", root=tmp_path, **skips, **divided)
    assert gang.wait() == [0] * 4, gang.logs()
    assert _state(tmp_path, 2) == _state(tmp_path, 1) != _state(tmp_path, 3)


@pytest.mark.parametrize("action", ["Stop", "Rollback"])
def test_a_spike_ends_all_ranks_where_the_job_stops_at_one(start: Any, tmp_path: Path, action: str) -> None:
    """Of a rollback only rank 0 knows the end: without a job whose data could be skipped, the step fails."""
    stop = {"action": action, "window_steps": 8, "deviations": 4}
    gang = begin(start, tmp_path, 1, spikes=stop, corrupted_at=CORRUPTED)
    assert gang.wait() == [101] * 4
    assert f"spike in step {CORRUPTED}: loss" in gang.logs()
    assert list(history(tmp_path)) == list(range(1, CORRUPTED))


def test_the_norm_of_the_update_is_the_same_in_whatever_layout(start: Any, tmp_path: Path) -> None:
    """Each scalar of the model counts once, however many ranks update it."""
    measured = {"window_steps": 8, "update_norm_steps": 1}
    layouts: list[dict[str, Any]] = [
        {"layout": {"dp": 1}},
        {"layout": {"dp": 2, "tp": 2, "ep": 2}},
        {"layout": {"dp": 2, "pp": 2}, "pipeline": {"schedule": "1F1B", "layers": (1, 2), "microbatches": 2}},
        {"layout": {"dp": 4, "ep": 2}, "optimizer": {"zero1": True, "bucket_scalars": 40_000}},
        {"layout": {"dp": 4, "ep": 2}, "parameter_sharding": "FSDP2"},
    ]
    seen = []
    for number, divided in enumerate(layouts):
        root = tmp_path / f"{number}"
        gang = start("train", root=root, steps=2, spikes=measured, **divided)
        assert set(gang.wait()) == {0}, gang.logs()
        lines = (root / "steps" / "a000001.jsonl").read_text().splitlines()
        seen.append([StepRecord.model_validate_json(line).update_norm for line in lines])
    for norms in seen:
        assert norms == pytest.approx(seen[0], rel=2e-3)
