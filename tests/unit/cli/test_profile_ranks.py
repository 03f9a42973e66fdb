"""Ranks of ``polyreme profile`` begin as a job's do, and their errors become one sentence and an exit code."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from polyreme.local_run import profile_ranks
from polyreme_api.errors import InvalidConfigError, PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import parse_job
from polyreme_launcher.rank_processes import with_torch_settings
from polyreme_planner.plan import plan_for
from polyreme_planner.plan_inputs import mix_of
from tests.unit.api.jobs import job_with

H100 = {"spec.workers.devices": 2, "spec.workers.hardware": "h100-80g", "spec.training.tf32": True}


def test_a_job_planned_for_other_devices_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job_with(H100)))
    command = [sys.executable, "-c", "from polyreme.main import main; main()", "profile", str(path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert ended.returncode == ExitCode.USAGE, ended.stderr
    assert ended.stderr.count("\n") == 1
    assert "plan was made for other hardware: h100-80g" in ended.stderr


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[PolyremeError]:
    """Errors of a rank that has a device and runs out of its memory."""

    def take(hardware: str, *, local_rank: int, tf32: bool) -> str:
        assert (hardware, local_rank, tf32) == ("h100-80g", 0, True)
        return "cuda"

    def check(ranks: int) -> None:
        raise InvalidConfigError(f"shared memory of {ranks}")

    for name in with_torch_settings({}, tmp_path):
        monkeypatch.setenv(name, "")  # what the rank changes is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(profile_ranks, "take_device", take)
    monkeypatch.setattr(profile_ranks, "check_shared_memory", check)
    return be_rank(tmp_path)


def be_rank(folder: Path) -> list[PolyremeError]:
    spec = parse_job(job_with(H100)).spec
    plan, errors = plan_for(spec), list[PolyremeError]()
    mix = mix_of(plan.shape, plan.pack_tokens)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(SystemExit):
        profile_ranks._be_rank(0, server, folder, errors.append, spec=spec, plan=plan, mix=mix, steps=1, trace=None)
    return errors


def test_a_rank_takes_its_device_as_a_rank_of_a_job_does(reported: list[PolyremeError], tmp_path: Path) -> None:
    assert [str(error) for error in reported] == ["shared memory of 2"]
    assert with_torch_settings({}, tmp_path).items() <= os.environ.items()


def test_a_full_device_is_reported_by_what_fills_it(
    reported: list[PolyremeError], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fill(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    reported.clear()
    monkeypatch.setattr(profile_ranks, "check_shared_memory", lambda _: None)
    monkeypatch.setattr(profile_ranks, "profile_rank", fill)
    (error,) = be_rank(tmp_path)
    assert "out of memory" in str(error)
    assert error.exit_code == ExitCode.RUN_FAILED
