"""The real operator in virtual time over the embedded store, which refuses and counts what a story tells it to."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from polyreme_api import labels
from polyreme_api.progress import ProgressRecord
from polyreme_cluster.forwarding_port import Call, ForwardingPort
from polyreme_cluster.port import STATUS_SUBRESOURCE, Manifest, NotFoundError, ObjectRef, PortError
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.controller import run_operator
from polyreme_operator.plan_worker import Planner
from polyreme_operator.publishing.metrics import Metrics
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.settings import Settings
from polyreme_simulator.event_loop import SimClock, VirtualLoop
from tests.leaders import Leaders
from tests.unit.operator.operator_scenes import DEVICE

_Answer = TypeVar("_Answer")
NAMESPACE = "default"
Refusal = Callable[[str, ObjectRef, Manifest], PortError | None]
"""Returns what the API server answers instead of doing a write: verb, object, manifest or patch."""


class RefusingCluster(ForwardingPort):
    """The embedded cluster with an admission plugin of the story's."""

    def __init__(self, store: Store) -> None:
        super().__init__(EmbeddedCluster(store))
        self.refuses: Refusal = lambda verb, ref, body: None
        self.writes: list[tuple[str, ObjectRef]] = []
        """Every create and patch that was tried."""

    def count(self, verb: str, kind: str) -> int:
        """Count the tries of a verb on a kind."""
        return sum((verb, kind) == (tried, ref.kind) for tried, ref in self.writes)

    async def _forward(self, call: Call, act: Callable[[], Awaitable[_Answer]]) -> _Answer:
        if call.body is not None:
            self.writes.append((call.verb, call.ref))
            if (error := self.refuses(call.verb, call.ref, call.body)) is not None:
                raise error
        return await act()


class Story:
    """A cluster with nodes and jobs, and the operators that run over it."""

    def __init__(self, loop: VirtualLoop, settings: Settings) -> None:
        self.clock, self._settings = SimClock(loop), settings
        numbers = iter(range(1_000_000))
        self.store = Store(new_uid=lambda: f"{next(numbers):08x}-0000", now_s=self.clock.now_s)
        self.cluster = RefusingCluster(self.store)
        self.metrics = Metrics()
        self.leaders = Leaders()
        self.entropy = random.Random(2).randbytes

    @contextlib.asynccontextmanager
    async def operator(self, planner: Planner | None = None) -> Any:
        """Run one operator, which must still run at the end."""
        task = asyncio.ensure_future(
            run_operator(
                self.cluster,
                self.clock,
                settings=self._settings,
                rng=random.Random(1),
                entropy=self.entropy,
                observer=self.metrics,
                planner=planner,
            )
        )
        try:
            yield task
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def change(self, settings: Settings) -> None:
        """Give the next operator other settings."""
        self._settings = settings

    def node(self, name: str = "n0", devices: int = 1) -> None:
        """Store a ready node."""
        ready = [{"type": "Ready", "status": "True"}]
        status = {"allocatable": {DEVICE: str(devices)}, "conditions": ready}
        self.store.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "status": status})

    def job(self, name: str, *, replicas: int = 1, elastic: tuple[int, int] | None = None, **spec: Any) -> str:
        """Store a job, which may have between so many workers; return its UID."""
        bounds = {} if elastic is None else {"minReplicas": elastic[0], "maxReplicas": elastic[1]}
        manifest = {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND_JOB,
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {
                "model": {"preset": "kimi-vl-nano"},
                "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
                "training": {"steps": 1000, "packsPerStep": 12},
                "workers": {"replicas": replicas, "devices": 1, **bounds},
                **spec,
            },
        }
        return str(self.store.create(manifest)["metadata"]["uid"])

    def ref(self, name: str) -> ObjectRef:
        """Return the address of a job."""
        return ObjectRef(kind=labels.KIND_JOB, namespace=NAMESPACE, name=name)

    def status(self, name: str) -> Manifest:
        """Return a job's status."""
        return dict(self.store.get(self.ref(name)).get("status") or {})

    def condition(self, name: str, kind: str) -> tuple[str, str, str]:
        """Return status, reason and message of a condition; empty where there is none."""
        for entry in self.status(name).get("conditions") or ():
            if entry["type"] == kind:
                return entry["status"], entry["reason"], entry.get("message", "")
        return "", "", ""

    def admitted(self, name: str) -> bool:
        """Tell whether a job is admitted."""
        return self.condition(name, "Admitted")[0] == "True"

    def objects(self, kind: str) -> list[Manifest]:
        """Return all objects of a kind."""
        return [record.manifest for record in self.store.records(kind)]

    def delete(self, kind: str, name: str, *, namespace: str = NAMESPACE) -> None:
        """Delete an object by hand."""
        self.store.delete(ObjectRef(kind=kind, namespace=namespace, name=name), uid=None)

    def runs(self) -> None:
        """Let every pod run, and those that are being deleted end, as kubelets would."""
        for pod in self.objects("Pod"):
            if pod["metadata"].get("deletionTimestamp"):
                self.store.delete(ObjectRef.of(pod), uid=None, grace_period_s=0)
            elif pod["status"]["phase"] == "Pending":
                patch = {"status": {"phase": "Running"}}
                self.store.patch(ObjectRef.of(pod), patch, subresource=STATUS_SUBRESOURCE)

    def reports(self, name: str, uid: str, **record: Any) -> None:
        """Renew a job's Lease, as its leader does."""
        attempt = self.status(name)["attempt"]
        runs: list[list[int]] = attempt["replacements"]
        said = {
            "attempt": attempt["number"],
            "replacement": runs[0][0] if runs else 0,
            "released": True,
            "joined": attempt["replicas"],
            "phase": "Training",
            **record,
        }
        lease = ObjectRef(kind="Lease", namespace=NAMESPACE, name=labels.job_object_name(name, uid))
        annotations = self.leaders.annotations(
            self.store.get(self.ref(name)),
            ProgressRecord.model_validate(said),
            self.objects("Secret"),
            at_s=self.clock.now_s(),
        )
        self.store.change(lease, {"metadata": {"annotations": annotations}})

    def exists(self, kind: str, name: str, *, namespace: str = NAMESPACE) -> bool:
        """Tell whether there is an object."""
        try:
            self.store.get(ObjectRef(kind=kind, namespace=namespace, name=name))
        except NotFoundError:
            return False
        return True


def play(story: Callable[[Story], Coroutine[Any, Any, None]], settings: Settings | None = None) -> None:
    """Tell a story in virtual time."""
    with _virtual_loop() as loop:
        loop.run_until_complete(story(Story(loop, settings or Settings(defaults=PodDefaults(launcher_rbac=True)))))


@contextlib.contextmanager
def _virtual_loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        yield loop
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
