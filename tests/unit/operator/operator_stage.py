"""The real operator on virtual time, over a store that checks nothing: what is stored may be malformed."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from polyreme_api import labels
from polyreme_api.data_report import ANNOTATION_DATA, DataReport, DataState, data_digest
from polyreme_api.job import parse_job
from polyreme_api.progress import ProgressRecord
from polyreme_cluster.port import STATUS_SUBRESOURCE, ClusterPort, Manifest, ObjectRef
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.controller import run_operator
from polyreme_operator.publishing.metrics import Metrics
from polyreme_operator.settings import Settings
from polyreme_operator.types.observer import Observer
from polyreme_simulator.event_loop import SimClock, VirtualLoop
from tests.leaders import Leaders
from tests.unit.operator.operator_scenes import DEVICE

KUBELET_EVERY_S = 0.5


class Stage:
    """One operator; its store has no schemas, as a CRD with relaxed validation."""

    def __init__(self, settings: Settings | None = None, *, observer: Observer | None = None) -> None:
        self._virtual = VirtualLoop()
        self.clock = SimClock(self._virtual)
        numbers = iter(range(10_000_000))
        self.store = Store(new_uid=lambda: f"{next(numbers):08x}-0000", now_s=self.clock.now_s)
        self.cluster: ClusterPort = EmbeddedCluster(self.store)
        self.metrics = Metrics()
        self._leaders = Leaders()
        self._observer = observer or self.metrics
        self._settings = settings or Settings(retry_max_s=5.0)

    def run(self, story: Callable[[], Awaitable[None]]) -> None:
        """Play a story beside the operator, which must live to its end."""

        async def play() -> None:
            operator = asyncio.ensure_future(
                run_operator(
                    self.cluster,
                    self.clock,
                    settings=self._settings,
                    rng=random.Random(1),
                    entropy=bytes,
                    observer=self._observer,
                )
            )
            kubelet = asyncio.ensure_future(self._start_pods())
            acts = asyncio.ensure_future(story())
            await asyncio.wait({operator, acts}, return_when=asyncio.FIRST_COMPLETED)
            died = operator.done()
            for task in (acts, kubelet, operator):
                task.cancel()
            _, _, ended = await asyncio.gather(acts, kubelet, operator, return_exceptions=True)
            assert not died, f"the operator ended: {ended!r}"
            if not acts.cancelled():
                acts.result()

        try:
            self._virtual.run_until_complete(play())
            self._virtual.run_until_complete(self._virtual.shutdown_asyncgens())
        finally:
            self._virtual.close()

    def add_nodes(self, count: int, devices: int = 1, **spec: Any) -> None:
        for at in range(count):
            self.store.create(node_manifest(f"n{at}", devices, **spec))

    def add_job(self, name: str, template: object = None, **spec: Any) -> str:
        """Store a job; return its UID."""
        workers: dict[str, Any] = {} if template is None else {"template": template}
        manifest = {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND_JOB,
            "metadata": {"name": name, "namespace": "default"},
            "spec": {
                "model": {"preset": "kimi-vl-nano"},
                "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
                "training": {"steps": 1000, "packsPerStep": 2},
                "workers": workers,
                **spec,
            },
        }
        return str(self.store.create(manifest)["metadata"]["uid"])

    def status(self, name: str) -> dict[str, Any]:
        ref = ObjectRef(kind=labels.KIND_JOB, namespace="default", name=name)
        return dict(self.store.get(ref).get("status") or {})

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        found = (each for each in self.status(name).get("conditions") or () if each["type"] == kind)
        return next(found, {})

    def events(self, reason: str) -> list[Manifest]:
        return [each.manifest for each in self.store.records("Event") if each.manifest["reason"] == reason]

    def metric(self, name: str, **tags: str) -> float:
        """Sum the samples of a metric that have these labels."""
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and tags.items() <= sample.labels.items()
        )

    async def report(self, name: str, uid: str, **record: Any) -> None:
        """Renew a job's Lease as its leader does."""
        lease = ObjectRef(kind="Lease", namespace="default", name=labels.job_object_name(name, uid))
        job = self.store.get(ObjectRef(kind=labels.KIND_JOB, namespace="default", name=name))
        said = ProgressRecord.model_validate({"joined": 1, "released": True, **record})
        secrets = [each.manifest for each in self.store.records("Secret")]
        annotations = self._leaders.annotations(job, said, secrets, at_s=self.clock.now_s())
        await self.cluster.patch(lease, {"metadata": {"annotations": annotations}})

    def report_data(self, name: str, state: DataState, **report: Any) -> None:
        """Report on a job's data as the datahub controller does."""
        ref = ObjectRef(kind=labels.KIND_JOB, namespace="default", name=name)
        about = data_digest(parse_job(self.store.get(ref)).spec)
        text = DataReport.model_validate({"state": state, "about": about, **report}).to_annotation()
        self.annotate(name, text)

    def annotate(self, name: str, text: str | None) -> None:
        """Store a report on a job's data as it is; None removes it."""
        ref = ObjectRef(kind=labels.KIND_JOB, namespace="default", name=name)
        self.store.change(ref, {"metadata": {"annotations": {ANNOTATION_DATA: text}}})

    async def _start_pods(self) -> None:
        """Play a kubelet that does no more than run the pods of jobs, and end them when they are deleted."""
        while True:
            await asyncio.sleep(KUBELET_EVERY_S)
            for record in list(self.store.records("Pod")):
                pod, ref = record.manifest, ObjectRef.of(record.manifest)
                if pod["metadata"].get("deletionTimestamp"):
                    self.store.delete(ref, uid=None, grace_period_s=0)
                elif pod["metadata"].get("ownerReferences") and pod.get("status") == {"phase": "Pending"}:
                    self.store.change(ref, {"status": {"phase": "Running"}}, subresource=STATUS_SUBRESOURCE)


def node_manifest(name: str, devices: int = 1, **spec: Any) -> Manifest:
    capacity = {DEVICE: str(devices)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "spec": spec,
        "status": {"allocatable": capacity, "conditions": [{"type": "Ready", "status": "True"}]},
    }
