"""``kubectl polyreme`` as kubectl finds and runs it, against a real API server, verb by verb."""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from polyreme.plugin.main import invoke
from polyreme.plugin.operator_lease import NAMESPACE_VARIABLE
from polyreme_api import labels
from polyreme_api.exit_codes import ExitCode
from polyreme_api.times import rfc3339
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef
from tests.cluster.kube import api_client, new_namespace
from tests.contract.manifests import job as sample_job
from tools.cluster.binaries import program_path

DEVICE = labels.RESOURCE_DEVICE
LOG = "2026-11-26T10:00:00.5+02:00 worker joins\n2026-11-26T10:00:01.25+02:00 [rank 1 attempt 1] says hello\n"
"""As a kubelet hands it out with times."""


class Stage:
    """One namespace with jobs whose status is as an operator would have left it."""

    def __init__(self, kubeconfig: str, namespace: str) -> None:
        self.kubeconfig, self.namespace = kubeconfig, namespace

    def run(self, *arguments: str) -> int:
        """Run the plugin in this process."""
        return invoke([*arguments, "--kubeconfig", self.kubeconfig])

    def here(self, *arguments: str) -> int:
        return self.run(*arguments, "-n", self.namespace)

    def make(self, name: str, *, queue: str = "", replicas: int = 2, **spec: Any) -> Manifest:
        """Create a job; a queue of its own keeps it apart from others' tests."""
        manifest = sample_job(name, namespace=self.namespace)
        for optional in ("export", "parallelism"):
            manifest["spec"].pop(optional, None)
        manifest["spec"] |= {"queueName": queue or self.namespace, **spec}
        manifest["spec"]["workers"] = {"replicas": replicas, "minReplicas": 1, "maxReplicas": 4, "devices": 1}
        return asyncio.run(self._create(manifest))

    def create(self, manifest: Manifest) -> Manifest:
        return asyncio.run(self._create(manifest))

    def say(self, job: Manifest, status: Manifest) -> Manifest:
        """Write a job's status."""

        async def story() -> Manifest:
            async with self._cluster() as cluster:
                return await cluster.patch(ObjectRef.of(job), {"status": status}, subresource="status")

        return asyncio.run(story())

    def get(self, name: str) -> Manifest:
        async def story() -> Manifest:
            async with self._cluster() as cluster:
                return await cluster.get(ObjectRef(kind="TrainingJob", namespace=self.namespace, name=name))

        return asyncio.run(story())

    def drop(self, *manifests: Manifest) -> None:
        async def story() -> None:
            async with self._cluster() as cluster:
                for manifest in manifests:
                    with contextlib.suppress(NotFoundError):
                        await cluster.delete(ObjectRef.of(manifest), uid=manifest["metadata"]["uid"], grace_period_s=0)

        asyncio.run(story())

    async def _create(self, manifest: Manifest) -> Manifest:
        async with self._cluster() as cluster:
            return await cluster.create(manifest)

    def _cluster(self) -> KubernetesCluster:
        return KubernetesCluster(from_kubeconfig(self.kubeconfig))


@pytest.fixture
def stage(kubeconfig: str) -> Iterator[Stage]:
    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        made = Stage(kubeconfig, namespace)
        queue = {
            "apiVersion": labels.API_VERSION,
            "kind": "TrainingQueue",
            "metadata": {"name": namespace},
            "spec": {"quotas": [{"resource": DEVICE, "nominal": 4}]},
        }
        queue = made.create(queue)
        try:
            yield made
        finally:
            made.drop(queue)


def condition(kind: str, reason: str, message: str = "", *, status: str = "True") -> Manifest:
    at = rfc3339(1_700_000_000.0)
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": at}


def waits(reason: str, message: str) -> Manifest:
    return {"conditions": [condition("Queued", reason, message)]}


def runs(node: str, *, replicas: int = 2) -> Manifest:
    attempt = {
        "number": 1,
        "planHash": "h",
        "replicas": replicas,
        "devices": 1,
        "placement": placement(node, replicas),
        "startedAt": rfc3339(1_700_000_000.0),
    }
    conditions = [condition(kind, reason) for kind, reason in (("Admitted", "Admitted"), ("Running", "Training"))]
    accounting = {"effectiveMilliseconds": 900_000, "lost": [{"cause": "Hung", "milliseconds": 100_000}]}
    return {
        "conditions": conditions,
        "attempt": attempt,
        "readyReplicas": replicas,
        "step": 7,
        "accounting": accounting,
    }


def placement(node: str, replicas: int) -> Manifest:
    from polyreme_api.job.placement import Placement

    return Placement.of([node] * replicas).model_dump(mode="json", by_alias=True, exclude_none=True)


def test_kubectl_finds_the_plugin_and_passes_its_exit_code(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.make("big")
    for name, module in (("kubectl-polyreme", "main"), ("kubectl_complete-polyreme", "completion")):
        script = tmp_path / name
        script.write_text(f"#!{sys.executable}\nfrom polyreme.plugin.{module} import main\nmain()\n")
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("KUBECONFIG", stage.kubeconfig)
    assert "big" in kubectl_finds("polyreme", "get", "-n", stage.namespace).stdout
    shown = kubectl_finds("__complete", "polyreme", "why", "-n", stage.namespace, "b").stdout
    assert shown.splitlines()[0] == "big"
    failed = kubectl_finds("polyreme", "why", "small", "-n", stage.namespace)
    assert failed.returncode == ExitCode.NOT_FOUND
    assert failed.stderr.startswith("kubectl polyreme: no job 'small' in namespace")


def kubectl_finds(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run kubectl as a person does: it looks for plugins on PATH, and takes no option before a plugin's name."""
    program = program_path("kubectl", os.environ)
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_get_lists_and_hands_on_objects(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.here("get") == 0
    assert capsys.readouterr().err == f"no jobs in namespace {stage.namespace}\n"
    stage.say(stage.make("big"), waits("ExceedsQuota", "needs 2 devices"))
    assert stage.here("get", "-o", "wide") == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["NAME", "STATE", "QUEUE", "READY"]
    assert line.split()[:4] == ["big", "Queued", stage.namespace, "0/2"]
    assert line.endswith("needs 2 devices")
    assert stage.here("get", "-o", "name") == 0
    assert capsys.readouterr().out == "trainingjob.polyreme.dev/big\n"
    assert stage.here("get", "big", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["metadata"]["name"] == "big"
    assert stage.run("get", "-A") == 0
    assert f"{stage.namespace}   big" in capsys.readouterr().out


def test_why_shows_reason_remedy_position_and_victims(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    older = stage.make("older", priority=5)
    stage.say(older, waits("ExceedsQuota", "needs 2 devices; queue has 0 of 4 left"))
    big = stage.make("big")
    stage.say(
        big, waits("WaitingForPreemption", "preempting team/victim: 50 device-seconds since the last checkpoints")
    )
    asked = {
        "by": big["metadata"]["uid"],
        "byName": f"{stage.namespace}/big",
        "requestedAt": rfc3339(1_700_000_000.0),
        "deadline": "2099-01-01T00:00:00Z",
    }
    stage.say(stage.make("victim", priority=-1), {**runs("n0"), "preemption": asked})
    assert stage.here("why", "big") == 0
    text = capsys.readouterr().out
    why = "preempting team/victim: 50 device-seconds since the last checkpoints"
    assert f"{stage.namespace}/big is Queued (WaitingForPreemption): {why}" in text
    assert f"2 of 2 in queue {stage.namespace}" in text
    assert f"{stage.namespace}/older" in text
    assert f"{stage.namespace}/victim" in text
    assert stage.here("why", "big", "-o", "json") == 0
    answer = json.loads(capsys.readouterr().out)["item"]
    assert (answer["reason"], answer["position"]) == ("WaitingForPreemption", 2)
    assert [victim["job"] for victim in answer["victims"]] == [f"{stage.namespace}/victim"]
    assert stage.here("why", "nobody") == ExitCode.NOT_FOUND


def test_describe_shows_conditions_and_events(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    made = stage.say(stage.make("big"), runs("n0"))
    stage.create(
        {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": "big.1", "namespace": stage.namespace},
            "involvedObject": {
                "kind": "TrainingJob",
                "namespace": stage.namespace,
                "name": "big",
                "uid": made["metadata"]["uid"],
            },
            "reason": "Admitted",
            "message": "2 workers on 1 node",
            "type": "Normal",
        }
    )
    assert stage.here("describe", "big") == 0
    text = capsys.readouterr().out
    assert "Running (Training)" in text
    assert "2 workers on 1 node" in text
    assert "Hung" in text


def test_queue_shows_quota_use_and_pending_jobs(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.say(stage.make("runs", replicas=3), runs("n0", replicas=3))
    stage.say(stage.make("waits"), waits("ExceedsQuota", ""))
    assert stage.run("queue", stage.namespace) == 0
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if line.startswith(stage.namespace)]
    assert line.split() == [stage.namespace, DEVICE, "3", "4", "[" + "#" * 15 + "." * 5 + "]", "-", "1", "1", "-"]
    assert f"{stage.namespace}/waits" in text
    assert stage.run("queue", "-o", "json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["items"]}
    assert rows[stage.namespace]["pending"] == 1
    assert stage.run("queue", "nowhere") == ExitCode.NOT_FOUND


def test_topology_shows_the_jobs_on_each_node(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    name = stage.namespace
    node = stage.create(
        {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "annotations": {"kwok.x-k8s.io/node": "fake"}},
            "spec": {"taints": [{"key": "polyreme.dev/test", "value": name, "effect": "NoSchedule"}]},
            "status": {"allocatable": {DEVICE: "8"}, "capacity": {DEVICE: "8"}},
        }
    )
    try:
        stage.say(stage.make("big"), runs(name))
        assert stage.run("topology", "--domain", name) == 0
        line = capsys.readouterr().out.splitlines()[0]
        assert line.startswith(f"host {name}")
        assert "2/8 used" in line
        assert f"{name}/big x2" in line
        assert stage.run("topology", "--level", "nothing") == ExitCode.USAGE
        assert stage.run("topology", "--domain", "nowhere") == ExitCode.NOT_FOUND
    finally:
        stage.drop(node)


def test_top_shows_the_pace_that_the_lease_tells(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    made = stage.say(stage.make("big"), runs("n0"))
    uid = made["metadata"]["uid"]
    record = {"attempt": 1, "step": 9, "steps": 40, "stepSeconds": 0.5, "tokensPerSecond": 1200.0, "loss": 2.5}
    stage.create(
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": labels.job_object_name("big", uid),
                "namespace": stage.namespace,
                "labels": {labels.LABEL_JOB_UID: uid},
                "ownerReferences": [controlled_by("big", uid)],
                "annotations": {labels.ANNOTATION_PROGRESS: json.dumps(record)},
            },
            "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15},
        }
    )
    assert stage.here("top") == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split()[:2] == ["big", "Running"]
    for word in ("9/", "0.5 s", "1,200 tok/s", "2.5", "90 %"):
        assert word in line


def test_suspend_resume_and_scale_change_one_field_and_say_what_follows(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAMESPACE_VARIABLE, stage.namespace)  # where no operator works
    stage.say(stage.make("big"), runs("n0"))
    assert stage.here("suspend", "big") == 0
    said = capsys.readouterr().err
    assert "will be suspended: it saves a checkpoint and stops" in said
    assert "no operator has looked at this job: is one installed?" in said
    assert stage.get("big")["spec"]["suspend"] is True
    assert stage.here("suspend", "big") == 0
    assert "already" in capsys.readouterr().err
    assert stage.here("resume", f"tj/{'big'}") == 0
    assert stage.get("big")["spec"]["suspend"] is False
    assert stage.here("scale", "big", "--replicas", "3", "--no-wait") == 0
    assert stage.get("big")["spec"]["workers"]["replicas"] == 3
    assert stage.here("scale", "big", "--replicas", "9") == ExitCode.USAGE
    assert "expected 1 to 4" in capsys.readouterr().err
    capsys.readouterr()
    for verb in (["suspend", "big", "--wait"], ["resume", "big", "--wait"], ["scale", "big", "--replicas", "2"]):
        assert stage.here(*verb) == ExitCode.ENVIRONMENT
        said = capsys.readouterr().err
        lease = f"no Lease polyreme-operator in namespace {stage.namespace}"
        assert f"no operator has looked at this job: is one installed? ({lease})" in said
    ended = {"conditions": [condition("Succeeded", "Completed")]}
    stage.say(stage.get("big"), ended)
    assert stage.here("resume", "big") == ExitCode.REFUSED


def test_cancel_asks_for_yes_and_deletes_the_job_it_saw(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.make("big")
    assert stage.here("cancel", "big") == ExitCode.USAGE
    assert stage.get("big")["metadata"]["name"] == "big"
    assert stage.here("cancel", "big", "--yes", "--wait", "--timeout", "30") == 0
    assert "and its pods are gone" in capsys.readouterr().err
    with pytest.raises(NotFoundError):
        stage.get("big")
    assert stage.here("cancel", "big", "--yes") == ExitCode.NOT_FOUND


@contextlib.asynccontextmanager
async def kubelet(folder: Path, asked: list[str]) -> AsyncIterator[int]:
    """A kubelet's log endpoint, as far as the API server calls it: the test's nodes have no kubelet."""
    await asyncio.to_thread(
        subprocess.run,
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key", "-out", "crt", "-subj", "/CN=k"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "crt", folder / "key")

    connections: list[asyncio.Transport] = []

    async def show(request: web.Request) -> web.Response:
        asked.append(request.path_qs)
        assert request.transport is not None
        connections.append(request.transport)
        return web.Response(text=LOG)

    app = web.Application()
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", show)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield runner.addresses[0][1]
    finally:
        # The API server keeps its connection; to part from it by TLS's farewell could take longer than the loop lives.
        for connection in connections:
            connection.abort()
        await runner.cleanup()


def test_logs_finds_the_pod_of_a_rank_and_shows_its_lines(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = stage.say(stage.make("big"), runs(stage.namespace))
    uid, asked = made["metadata"]["uid"], list[str]()

    async def story() -> int:
        async with kubelet(tmp_path, asked) as port:
            return await asyncio.to_thread(read, port)

    def read(port: int) -> int:
        node = stage.create(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": stage.namespace},
                "status": {
                    "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                    "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
                },
            }
        )
        try:
            stage.create(worker_pod(stage, uid, index=1))
            assert stage.here("logs", "big", "--rank", "1", "--tail", "5") == 0
            return stage.here("logs", "big", "--index", "1", "--tail", "5")
        finally:
            stage.drop(node)

    assert asyncio.run(story()) == 0
    of_rank = "[rank 1 attempt 1] says hello\n"
    assert capsys.readouterr().out == f"{of_rank}worker joins\n{of_rank}"
    folder = f"/containerLogs/{stage.namespace}/{labels.pod_name('big', uid, index=1, replacement=0)}/main"
    assert all(path.startswith(folder) and "timestamps=true" in path for path in asked)
    # A kubelet knows no ranks: of one, the last lines are chosen here.
    assert ["tailLines=5" in path for path in asked] == [False, True]
    assert stage.here("logs", "big", "--rank", "2") == ExitCode.USAGE
    assert stage.here("logs", "big", "--index", "0") == ExitCode.NOT_FOUND
    assert "no lines of worker 0 of" in capsys.readouterr().err


def controlled_by(name: str, uid: str) -> Manifest:
    return {"apiVersion": labels.API_VERSION, "kind": labels.KIND_JOB, "name": name, "uid": uid, "controller": True}


def worker_pod(stage: Stage, uid: str, *, index: int) -> Manifest:
    tags = {
        labels.LABEL_JOB: "big",
        labels.LABEL_JOB_UID: uid,
        labels.LABEL_INDEX: str(index),
        labels.LABEL_REPLACEMENT: "0",
    }
    name = labels.pod_name("big", uid, index=index, replacement=0)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": stage.namespace,
            "labels": tags,
            "ownerReferences": [controlled_by("big", uid)],
        },
        "spec": {"nodeName": stage.namespace, "containers": [{"name": "main", "image": "none"}]},
    }


def test_no_cluster_is_one_message_and_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["get", "--kubeconfig", str(tmp_path / "none")]) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("kubectl polyreme: kubeconfig")
