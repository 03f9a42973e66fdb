"""What of a pod a process can be, and which processes are an earlier host's."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyreme_cluster.port import Manifest
from polyreme_local.kubelet import status
from polyreme_local.kubelet.container import (
    PodFiles,
    pod_command,
    pod_environment,
    secret_names,
    unhonoured_fields,
)
from polyreme_local.kubelet.process import (
    RECORD_FILE,
    TOKEN_VARIABLE,
    end_leftovers,
    has_run,
    runs,
    start_process,
)

PATIENCE_S = 60.0
FILES = PodFiles(directory=Path("/p"), secret=Path("/p/secret"), token=Path("/p/token"))


def pod(**container: object) -> Manifest:
    return {
        "kind": "Pod",
        "metadata": {"name": "a-0-0", "namespace": "here", "uid": "u", "labels": {"polyreme.dev/index": "0"}},
        "spec": {"nodeName": "n", "subdomain": "a", "containers": [{"name": "main", **container}]},
    }


def variables(manifest: Manifest, **secrets: dict[str, bytes]) -> dict[str, str]:
    return pod_environment(
        manifest,
        host={"PATH": "/bin"},
        files=FILES,
        leader_address="127.0.0.1:7",
        api_url="http://127.0.0.1:8",
        secrets=secrets,
    )


def test_a_process_runs_until_it_is_stopped_or_has_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert runs(child.pid)
        os.kill(child.pid, signal.SIGSTOP)
        assert os.waitid(os.P_PID, child.pid, os.WSTOPPED) is not None
        assert not runs(child.pid)
        os.kill(child.pid, signal.SIGCONT)
        assert os.waitid(os.P_PID, child.pid, os.WCONTINUED) is not None
        assert runs(child.pid)
        child.kill()
        assert os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) is not None
        assert not runs(child.pid), "a zombie"
    assert not runs(child.pid)


def test_fields_that_a_process_cannot_honour_are_named() -> None:
    template = {
        "spec": {
            "nodeSelector": {"a": "b"},
            "volumes": [],
            "containers": [{"name": "main", "image": "x", "env": [], "resources": {"limits": {}}}, {"name": "side"}],
        }
    }
    assert unhonoured_fields(template) == [
        "spec.containers[0].image",
        "spec.containers[0].resources",
        "spec.containers[1]",
        "spec.nodeSelector",
    ]
    assert unhonoured_fields({}) == []


def test_variables_come_from_values_the_pod_and_secrets() -> None:
    found = variables(
        pod(
            env=[
                {"name": "PLAIN", "value": "1"},
                {"name": "BUILT", "value": "$(PLAIN)-$(UNKNOWN)"},
                {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "INDEX", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['polyreme.dev/index']"}}},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            ]
        ),
        s={"k": b"hidden"},
    )
    assert {name: found[name] for name in ("PLAIN", "BUILT", "NAME", "INDEX", "NODE", "PASSWORD")} == {
        "PLAIN": "1",
        "BUILT": "1-$(UNKNOWN)",
        "NAME": "a-0-0",
        "INDEX": "0",
        "NODE": "n",
        "PASSWORD": "hidden",
    }


def test_addresses_and_paths_inside_a_cluster_are_rewritten() -> None:
    found = variables(
        pod(
            env=[
                {"name": "POLYREME_LEADER_ADDRESS", "value": "a.here.svc:29400"},
                {"name": "POLYREME_TOKEN_FILE", "value": "/var/run/token"},
                {"name": "MASTER_ADDR", "value": "a.here.svc"},
            ]
        )
    )
    assert found["POLYREME_LEADER_ADDRESS"] == "127.0.0.1:7"
    assert found["POLYREME_API_URL"] == "http://127.0.0.1:8"
    assert found["POLYREME_TOKEN_FILE"] == "/p/token"
    assert found["MASTER_ADDR"] == "127.0.0.1"


def test_a_pod_without_the_hosts_variables_sees_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mine")
    assert "AWS_SECRET_ACCESS_KEY" not in variables(pod())


def test_a_command_is_command_and_arguments_with_this_interpreter() -> None:
    manifest = pod(command=["python", "-m", "x"], args=["$(WHO)"], env=[{"name": "WHO", "value": "me"}])
    assert pod_command(manifest) == [sys.executable, "-m", "x", "me"]


def test_secrets_are_those_of_volumes_and_variables() -> None:
    manifest = pod(env=[{"name": "P", "valueFrom": {"secretKeyRef": {"name": "two", "key": "k"}}}])
    manifest["spec"]["volumes"] = [{"name": "v", "secret": {"secretName": "one"}}, {"name": "w", "emptyDir": {}}]
    assert secret_names(manifest) == ["one", "two"]


@pytest.mark.parametrize(
    ("code", "phase", "exit_code", "number"),
    [(0, "Succeeded", 0, None), (3, "Failed", 3, None), (-9, "Failed", 137, 9)],
)
def test_the_status_shows_how_a_process_ended(code: int, phase: str, exit_code: int, number: int | None) -> None:
    written = status.ended(pod(), code=code, at="t")
    terminated = written["containerStatuses"][0]["state"]["terminated"]
    assert (written["phase"], terminated["exitCode"], terminated.get("signal")) == (phase, exit_code, number)


@pytest.mark.slow
def environment_of(process: subprocess.Popen[bytes]) -> bytes:
    return Path(f"/proc/{process.pid}/environ").read_bytes()


def test_leftovers_of_an_earlier_host_are_killed_and_strangers_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "pod"
    folder.mkdir()
    ours = subprocess.Popen(["sleep", "60"], env={**os.environ, TOKEN_VARIABLE: "earlier"})
    stranger = subprocess.Popen(["sleep", "60"], env={**os.environ, TOKEN_VARIABLE: "of another run"})
    try:
        # The record names a pid that belongs to the stranger by now.
        record = {"uid": "u", "token": "earlier", "pid": stranger.pid, "startedTicks": 1}
        (folder / RECORD_FILE).write_text(json.dumps(record))
        (tmp_path / "torn").mkdir()
        (tmp_path / "torn" / RECORD_FILE).write_text('{"uid')
        # In the middle of its exec, a process has no environment.
        until_s = time.monotonic() + PATIENCE_S
        while not all(f"{TOKEN_VARIABLE}=".encode() in environment_of(each) for each in (ours, stranger)):
            assert time.monotonic() < until_s
            time.sleep(0.005)
        assert end_leftovers(tmp_path) == [ours.pid]
        assert ours.wait(PATIENCE_S) == -signal.SIGKILL
        assert stranger.poll() is None
    finally:
        for process in (ours, stranger):
            process.kill()
            process.wait()


@pytest.mark.slow
async def test_a_process_is_recorded_stopped_with_grace_and_killed_after_it(tmp_path: Path) -> None:
    process = start_process(
        ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.01; done"],
        environment={"PATH": os.environ["PATH"]},
        directory=tmp_path,
        uid="u",
        token="t",
        descriptors=[],
    )
    assert has_run(tmp_path, "u")
    assert not has_run(tmp_path, "another")
    async with asyncio.timeout(PATIENCE_S):
        while "up" not in (tmp_path / "pod.log").read_text():
            await asyncio.sleep(0.005)
        assert await process.stop(grace_s=0.05) == -signal.SIGKILL
