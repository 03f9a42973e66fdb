"""What a launcher starts has the settings of torch: its fork server, ranks, and checks of the node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_api import environment as names
from polyreme_api.environment import PodEnvironment
from polyreme_launcher import agent
from polyreme_launcher.rank_processes import with_torch_settings
from polyreme_system.clock import SystemClock


def test_a_launcher_passes_the_settings_of_torch_to_all_that_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, dict[str, str]] = {}
    for part in ("RankParent", "CheckProcesses", "RankStarter", "DataEngine"):

        def made(*_: Any, part: str = part, environment: dict[str, str], **__: Any) -> None:
            given[part] = environment

        monkeypatch.setattr(agent, part, made)
    secret = tmp_path / "secret"
    secret.write_bytes(b"s")
    pod = PodEnvironment(
        pod="job-0",
        job="job",
        namespace="team",
        job_uid="u-1",
        index=0,
        replacement=0,
        replicas=1,
        devices=1,
        leader_address="job-0",
        api_url="https://10.0.0.1:6443",
        token_file=str(secret),
        secret_file=str(secret),
        pod_directory=str(tmp_path),
        checkpoint_url=(tmp_path / "root").as_uri(),
    )
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", names.DATA_ENGINE: "on"}
    agent.Launcher(environment=pod.render() | own, clock=SystemClock())
    expected = with_torch_settings(own, tmp_path)
    assert expected["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert set(given) == {"RankParent", "CheckProcesses", "RankStarter", "DataEngine"}
    for part, environment in given.items():
        assert expected.items() <= environment.items(), part
        assert (names.SECRET_FILE in environment) == (part == "RankParent")
