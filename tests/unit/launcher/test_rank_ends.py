"""Exits of a rank: on hardware that its plan was not made for, and with a full memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from polyreme_api.environment import RankEnvironment
from polyreme_api.errors import InvalidConfigError, RunFailedError
from polyreme_api.job import parse_job
from polyreme_launcher import rank
from polyreme_planner.plan import plan_for
from tests.unit.api.jobs import job_with


def environment(folder: Path, changes: dict[str, Any]) -> dict[str, str]:
    document = job_with(changes)
    (folder / "job.json").write_text(json.dumps(document))
    (folder / "plan.json").write_text(plan_for(parse_job(document).spec).to_json())
    return RankEnvironment(
        rank=0,
        local_rank=0,
        world_size=1,
        attempt=1,
        master_address="127.0.0.1",
        master_port=1,
        master_fd=None,
        progress_fd=None,
        job_file=str(folder / "job.json"),
        plan_file=str(folder / "plan.json"),
        checkpoint_url=(folder / "checkpoints").as_uri(),
        resume_from=None,
    ).render()


def test_a_plan_for_other_hardware_is_refused_before_any_data_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system")

    monkeypatch.setattr(torch.cuda, "init", no_driver)
    opened: list[Any] = []
    monkeypatch.setattr(rank, "_open_data", lambda *given: opened.append(given))
    with pytest.raises(
        InvalidConfigError, match=r"plan was made for other hardware: h100-80g.*this rank has only a CPU"
    ):
        rank._train(environment(tmp_path, {"spec.workers": {"hardware": "h100-80g"}}))
    assert not opened


def test_out_of_memory_is_reported_with_its_consumers_and_other_errors_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "_open_data", lambda *_: (None, None))
    monkeypatch.setattr(rank, "_in_force", lambda *given: (given[-1], None))

    def too_much(*_: Any, **__: Any) -> int:
        torch.empty(1 << 55, dtype=torch.uint8)
        return 0

    monkeypatch.setattr(rank, "train_rank", too_much)
    with pytest.raises(RunFailedError) as ended:
        rank._train(environment(tmp_path, {}))
    words = ended.value.message
    assert words.startswith("rank ran out of memory: ")
    assert "36028797018963968 bytes" in words
    assert "; the plan, dp1, counts " in words
    assert " MiB per device: activations " in words
    assert "a layout that needs less: dp1, 2 x 2 packs" in words

    def wrong(*_: Any, **__: Any) -> int:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(rank, "train_rank", wrong)
    with pytest.raises(RuntimeError, match="connection closed by peer"):
        rank._train(environment(tmp_path, {}))
