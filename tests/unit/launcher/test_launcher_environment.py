"""What a launcher starts has the settings of torch: its fork server, ranks, and checks of the node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_api import environment as names
from polyreme_launcher import agent
from polyreme_launcher.rank_processes import with_torch_settings
from polyreme_system.clock import SystemClock
from tests.unit.launcher.launch_scenes import pod_environment


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
    pod = pod_environment(tmp_path, replicas=1, secret_file=str(secret))
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", names.DATA_ENGINE: "on"}
    agent.Launcher(environment=pod.render() | own, clock=SystemClock())
    expected = with_torch_settings(own, tmp_path)
    assert expected["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert set(given) == {"RankParent", "CheckProcesses", "RankStarter", "DataEngine"}
    for part, environment in given.items():
        assert expected.items() <= environment.items(), part
        assert (names.SECRET_FILE in environment) == (part == "RankParent")
