"""The end of a pod of others: jobs for which it made room are tried at once, and for all others no cycle runs."""

import asyncio
from collections.abc import Mapping

import pytest

from polyreme_cluster.port import STATUS_SUBRESOURCE, ObjectRef
from polyreme_operator.publishing.metrics import Metrics
from polyreme_operator.types.observer import CycleReport
from tests.unit.operator.operator_scenes import DEVICE
from tests.unit.operator.operator_stage import Stage
from tests.unit.operator.test_queue_access import queue_manifest

OTHER = ObjectRef(kind="Pod", namespace="default", name="other")
WAITING = 60


class Counts(Metrics):
    """Counts what cycles do."""

    def __init__(self) -> None:
        super().__init__()
        self.cycles = 0
        self.searches = 0

    def on_cycle_finished(self, report: CycleReport) -> None:
        self.cycles += 1
        self.searches += len(report.placement_s)
        super().on_cycle_finished(report)


async def create_other(stage: Stage, requests: Mapping[str, str]) -> None:
    container = {"name": "a", "image": "a", "resources": {"requests": dict(requests)}}
    spec = {"nodeName": "n0", "containers": [container]}
    stage.store.create(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "namespace": "default"}, "spec": spec}
    )
    await stage.cluster.patch(OTHER, {"status": {"phase": "Running"}}, subresource=STATUS_SUBRESOURCE)
    await asyncio.sleep(5)


@pytest.mark.parametrize("quota", [True, False], ids=["no quota is left", "no device is free"])
def test_no_cycle_runs_for_jobs_that_it_does_not_help(quota: bool) -> None:
    counts = Counts()
    stage = Stage(observer=counts)

    async def story() -> None:
        stage.add_nodes(4)
        stage.store.create(queue_manifest("q", quotas=[{"resource": DEVICE, "nominal": 2}] if quota else []))
        await create_other(stage, {"cpu": "1"})
        stage.add_job("first", queueName="q", workers={"replicas": 2 if quota else 4}, preemptionPolicy="Never")
        await asyncio.sleep(5)
        for at in range(WAITING):
            # Each is a class of its own.
            workers = {"replicas": 1 + at % 2}
            stage.add_job(f"j{at}", queueName="q", workers=workers, minRuntimeSeconds=at, preemptionPolicy="Never")
        await asyncio.sleep(100)
        before = counts.cycles, counts.searches
        await stage.cluster.patch(OTHER, {"status": {"phase": "Succeeded"}}, subresource=STATUS_SUBRESOURCE)
        await asyncio.sleep(5)
        stage.store.delete(OTHER, uid=None, grace_period_s=0)
        await asyncio.sleep(5)
        assert (counts.cycles, counts.searches) == before

    stage.run(story)


def test_a_job_for_which_it_made_room_is_admitted_and_so_is_one_that_waited_behind_it() -> None:
    stage = Stage()

    async def story() -> None:
        stage.add_nodes(2)
        await create_other(stage, {DEVICE: "1"})
        stage.add_job("mine", workers={"replicas": 2})
        await asyncio.sleep(5)
        stage.add_job("later", workers={"replicas": 2})
        await asyncio.sleep(5)
        assert not stage.condition("mine", "Admitted")
        await stage.cluster.patch(OTHER, {"status": {"phase": "Succeeded"}}, subresource=STATUS_SUBRESOURCE)
        await asyncio.sleep(2)
        assert stage.condition("mine", "Admitted")["status"] == "True"

    stage.run(story)
