"""A small cluster for tests: embedded store, API server, process kubelet, and a stand-in for the operator's writes."""

import asyncio
import base64
import contextlib
import json
import os
import secrets
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import yaml

from polyreme_api import environment, labels
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.job.status import replacement_runs
from polyreme_api.progress import ProgressRecord
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef
from polyreme_launcher.fork_server import TARGET_VARIABLE
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.server import ApiServer
from polyreme_local.api_server.store import Store
from polyreme_local.api_server.tokens import TokenTable
from polyreme_local.kubelet.container import job_of
from polyreme_local.kubelet.kubelet import ProcessKubelet
from polyreme_local.kubelet.leader_sockets import LeaderSockets
from polyreme_local.kubelet.settings import KubeletSettings
from polyreme_planner.plan import Plan, plan_for
from polyreme_system.clock import SystemClock

ROOT = Path(__file__).parents[4]
SAMPLE = ROOT / "manifests/samples/quickstart.yaml"
PATIENCE_S = 60.0


def stored(plan: Plan) -> Manifest:
    """How an attempt carries its plan."""
    return {"planHash": plan.hash, "plan": plan.to_json()}


def job_manifest(*, replicas: int, devices: int) -> Manifest:
    manifest: Manifest = yaml.safe_load(SAMPLE.read_text())
    spec = manifest["spec"]
    spec["workers"] = {"replicas": replicas, "devices": devices}
    spec["parallelism"] = {"mode": "Explicit", "dp": replicas * devices, "ep": 1}
    manifest["metadata"] |= {"name": "toy", "namespace": "default"}
    return manifest


class Stack:
    """One host with one job of scripted ranks."""

    def __init__(self, root: Path, *, replicas: int = 1, devices: int = 1) -> None:
        self.root = root
        self.replicas, self.devices = replicas, devices
        self.clock = SystemClock()
        self.store = Store(new_uid=lambda: str(uuid.uuid4()), now_s=self.clock.now_s)
        self.cluster = EmbeddedCluster(self.store)
        self.tokens = TokenTable()
        self.server = ApiServer(self.cluster, tokens=self.tokens)
        self.script = root / "script"
        self.run_token = secrets.token_hex(16)
        self.leaders = LeaderSockets()
        self.job: Manifest = {}
        self.kubelet: ProcessKubelet

    def write_script(self, word: str) -> None:
        temporary = self.script.with_suffix(".tmp")
        temporary.write_text(word)
        temporary.replace(self.script)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Stack"]:
        self.write_script("run")
        url = await self.server.start()
        self.kubelet = ProcessKubelet(
            self.cluster,
            KubeletSettings(
                node="here",
                devices=8,
                directory=self.root / "pods",
                run_token=self.run_token,
                api_url=url,
                token_for=self._token,
                variables={
                    "PYTHONPATH": str(ROOT),
                    "SCRIPT": str(self.script),
                    TARGET_VARIABLE: "tests.unit.local.kubelet.scripted_rank:main",
                },
            ),
            clock=self.clock,
            leaders=self.leaders,
        )
        task = asyncio.create_task(self.kubelet.run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.server.close()

    async def submit(self) -> None:
        """Create the job with what the operator makes for it: Lease, Secret, attempt 1, pods."""
        self.job = await self.cluster.create(job_manifest(replicas=self.replicas, devices=self.devices))
        name = labels.job_object_name("toy", self.uid)
        data = {labels.SECRET_KEY: base64.b64encode(secrets.token_bytes(32)).decode()}
        await self.cluster.create(self._owned("v1", "Secret", name) | {"data": data})
        await self.cluster.create(self._owned("coordination.k8s.io/v1", "Lease", name) | {"spec": {}})
        await self.attempt(1)
        for index in range(self.replicas):
            await self.create_pod(index)

    @property
    def uid(self) -> str:
        return str(self.job["metadata"]["uid"])

    @property
    def lease(self) -> ObjectRef:
        return ObjectRef(kind="Lease", namespace="default", name=labels.job_object_name("toy", self.uid))

    async def attempt(self, number: int, *, replacements: dict[int, int] | None = None, **fields: Any) -> None:
        spec = TrainingJobSpec.model_validate(self.job["spec"])
        record = {
            "number": number,
            **stored(plan_for(spec)),
            "replicas": self.replicas,
            "devices": self.devices,
            "desired": "Run",
            "checkpointRequested": False,
            "replacements": replacement_runs(replacements or {}),
            **fields,
        }
        await self.cluster.patch(ObjectRef.of(self.job), {"status": {"attempt": record}}, subresource="status")

    async def create_pod(self, index: int, *, replacement: int = 0) -> None:
        name = self.pod_name(index, replacement)
        variables = environment.PodEnvironment(
            pod=name,
            job="toy",
            namespace="default",
            job_uid=self.uid,
            index=index,
            replacement=replacement,
            replicas=self.replicas,
            devices=self.devices,
            leader_address="toy.default.svc:29400",
            api_url="https://kubernetes.default.svc",
            token_file="/var/run/token",
            secret_file="/var/run/secret",
            pod_directory="/var/lib/pod",
            checkpoint_url=(self.root / "checkpoints").as_uri(),
        ).render()
        tags = {
            labels.LABEL_JOB: "toy",
            labels.LABEL_JOB_UID: self.uid,
            labels.LABEL_INDEX: str(index),
            labels.LABEL_REPLACEMENT: str(replacement),
        }
        secret = labels.job_object_name("toy", self.uid)
        pod = self._owned("v1", "Pod", name)
        pod["metadata"]["labels"] = tags
        pod["spec"] = {
            "nodeName": "here",
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 10,
            "subdomain": secret,
            "containers": [
                {
                    "name": "launcher",
                    "command": ["python", "-m", "polyreme_launcher"],
                    "env": [{"name": key, "value": value} for key, value in variables.items()],
                }
            ],
            "volumes": [{"name": "polyreme", "secret": {"secretName": secret}}],
        }
        await self.cluster.create(pod)

    def pod_name(self, index: int, replacement: int = 0) -> str:
        return labels.pod_name("toy", self.uid, index=index, replacement=replacement)

    def pod_directory(self, index: int, replacement: int = 0) -> Path:
        return self.kubelet.pod_directory(self.pod_name(index, replacement))

    def record(self) -> ProgressRecord | None:
        """Newest record on the Lease."""
        lease = self.store.get(self.lease)
        text = (lease["metadata"].get("annotations") or {}).get(labels.ANNOTATION_PROGRESS)
        return ProgressRecord.model_validate_json(text) if text else None

    def processes(self, index: int, replacement: int = 0) -> dict[str, Any]:
        text = (self.pod_directory(index, replacement) / "processes.json").read_text()
        found: dict[str, Any] = json.loads(text)
        return found

    def rank_pid(self, rank: int, *, attempt: int) -> int:
        path = self.pod_directory(rank // self.devices) / f"born-{rank}.a{attempt}"
        return int(path.read_text().split()[1])

    def pod(self, index: int, replacement: int = 0) -> Manifest | None:
        try:
            return self.store.get(ObjectRef(kind="Pod", namespace="default", name=self.pod_name(index, replacement)))
        except NotFoundError:
            return None

    async def until(self, holds: Callable[[], Any], what: str) -> None:
        """Wait until something holds."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not holds():
                    await asyncio.sleep(0.002)
        except TimeoutError:
            logs = "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(self.root.rglob("*.log")))
            raise AssertionError(f"never: {what}; record {self.record()}\n{logs}") from None

    async def until_training(self, attempt: int) -> None:
        """Wait until every rank of an attempt lives and rank 0 trains."""

        def all_live() -> bool:
            record = self.record()
            born = all(
                (self.pod_directory(rank // self.devices) / f"born-{rank}.a{attempt}").exists()
                for rank in range(self.replicas * self.devices)
            )
            recorded = all((self.pod_directory(index) / "processes.json").exists() for index in range(self.replicas))
            training = record is not None and record.attempt == attempt and record.phase == "Training"
            return training and born and recorded

        await self.until(all_live, f"attempt {attempt} trains")

    def _owned(self, version: str, kind: str, name: str) -> Manifest:
        owner = {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND_JOB,
            "name": "toy",
            "uid": self.uid,
            "controller": True,
        }
        return {
            "apiVersion": version,
            "kind": kind,
            "metadata": {"name": name, "namespace": "default", "ownerReferences": [owner]},
        }

    def _token(self, pod: Manifest) -> str:
        job, uid = job_of(pod)
        return self.tokens.for_job(namespace=pod["metadata"]["namespace"], job=job, uid=uid)


def lives(pid: int) -> bool:
    """Tell whether a process lives, zombies aside."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in {"Z", "X"}


async def host(root: Path) -> None:
    """Run a stack until killed; tells its pids through a file."""
    stack = Stack(root, replicas=2, devices=2)
    async with stack.running():
        await stack.submit()
        await stack.until_training(1)
        # Ranks tell their own pids: the launcher writes a rank down only after it was born.
        pids = [stack.processes(index)[name] for index in range(2) for name in ("launcher", "fork_server")]
        pids += [stack.rank_pid(rank, attempt=1) for rank in range(4)]
        (root / "pids.tmp").write_text(json.dumps({"host": os.getpid(), "token": stack.run_token, "pids": pids}))
        (root / "pids.tmp").replace(root / "pids.json")
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(host(Path(sys.argv[1])))
