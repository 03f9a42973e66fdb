"""A job that can't be read, or about which a decision raises an error, is left as it is; everyone else continues."""

import asyncio
import json
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_cluster.port import STATUS_SUBRESOURCE, Manifest, ObjectRef
from polyreme_operator.quarantine import FORGIVEN_AFTER_S, RETRIES_MAX, RETRY_FIRST_S, RETRY_LONGEST_S, Retries
from polyreme_operator.scheduler import gangs
from polyreme_operator.types.intents import parse_intents
from polyreme_operator.types.inventory import GangRequest
from polyreme_operator.types.views import JobView
from tests.unit.operator.operator_stage import Stage, node_manifest

PATIENCE_S = 5.0
NODE_LOST_S = 60.0
WORKED_S = 60.0


def ref(name: str) -> ObjectRef:
    return ObjectRef(kind=labels.KIND_JOB, namespace="default", name=name)


def cut(names: dict[str, Any]) -> dict[str, Any]:
    """Names of nodes with one number less than their text has places for."""
    return {**names, "parts": ["a", "b", "c"], "numbers": ["0"], "digits": [1], "texts": []}


class Cursed:
    """An error that placing the job of one name raises, while it lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lasts = True
        self.raised = 0
        for module in ("admit", "head_of_line", "preemption.victims", "resize", "repair"):
            monkeypatch.setattr(f"polyreme_operator.scheduler.{module}.gang_of", self.gang_of)

    def gang_of(self, job: JobView, workers: int, **options: Any) -> GangRequest:
        if job.name == "cursed" and self.lasts:
            self.raised += 1
            raise LookupError("a bug of ours")
        return gangs.gang_of(job, workers, **options)


def test_a_job_on_which_the_scheduler_fails_is_quarantined_and_the_others_are_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, bug = Stage(), Cursed(monkeypatch)
    stage.add_nodes(2)

    async def story() -> None:
        stage.add_job("cursed", priority=10)
        await asyncio.sleep(0.5)
        stage.add_job("fine")
        await asyncio.sleep(PATIENCE_S)
        assert stage.condition("fine", "Admitted")["status"] == "True"
        degraded = stage.condition("cursed", "Degraded")
        assert (degraded["status"], degraded["reason"]) == ("True", "InternalError")
        assert "LookupError: a bug of ours" in degraded["message"]
        assert stage.status("cursed")["reason"] == "InternalError"
        assert len(stage.events("InternalError")) == 1
        assert stage.metric("polyreme_quarantined_jobs") == 1
        assert stage.metric("polyreme_internal_errors_total", error="LookupError") == bug.raised
        bug.lasts = False
        await asyncio.sleep(WORKED_S)
        assert stage.condition("cursed", "Degraded") == {}
        assert stage.condition("cursed", "Admitted")["status"] == "True"

    stage.run(story)
    assert bug.raised < 10


def test_a_job_leaves_quarantine_when_its_spec_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, bug = Stage(), Cursed(monkeypatch)
    stage.add_nodes(2)

    async def story() -> None:
        stage.add_job("cursed")
        await asyncio.sleep(20.0)
        bug.lasts = False
        # The next retry is ten seconds away.
        await stage.cluster.patch(ref("cursed"), {"spec": {"workers": {"replicas": 2}}})
        await asyncio.sleep(1.0)
        assert stage.condition("cursed", "Admitted")["status"] == "True"

    stage.run(story)


def test_a_running_job_in_quarantine_keeps_its_devices_and_is_healed(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, bug = Stage(), Cursed(monkeypatch)
    stage.add_nodes(1)
    bug.lasts = False

    async def story() -> None:
        uid = stage.add_job("cursed", workers={"minReplicas": 1, "maxReplicas": 2})
        await asyncio.sleep(2.0)
        await stage.report("cursed", uid, attempt=1, phase="Training", step=5, stepSeconds=1.0)
        bug.lasts = True
        stage.store.create(node_manifest("late"))
        monkeypatch.setattr("polyreme_operator.scheduler.resize.elastic.larger_sizes", lambda *_: 1 / 0)
        await asyncio.sleep(2.0)
        assert stage.condition("cursed", "Degraded")["reason"] == "InternalError"
        stage.add_job("fine")
        stage.add_job("third")
        await asyncio.sleep(2.0)
        admitted = [name for name in ("cursed", "fine", "third") if stage.condition(name, "Admitted").get("status")]
        assert admitted == ["cursed", "fine"]
        exits = [{"rank": 0, "signal": 9}]
        await stage.report("cursed", uid, attempt=1, phase="Training", step=6, exits=exits)
        await asyncio.sleep(2.0)
        assert stage.status("cursed")["attempt"]["number"] == 2

    stage.run(story)


def test_an_error_while_a_pod_is_made_puts_only_its_job_in_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyreme_operator.reconcile.worker_pods import WorkerPods

    made = WorkerPods.manifest

    def manifest(self: WorkerPods, *, index: int, node: str) -> Manifest:
        if self._job.name == "cursed":
            raise TypeError("a bug of ours")
        return made(self, index=index, node=node)

    monkeypatch.setattr(WorkerPods, "manifest", manifest)
    stage = Stage()
    stage.add_nodes(2)

    async def story() -> None:
        stage.add_job("cursed")
        stage.add_job("fine")
        await asyncio.sleep(PATIENCE_S)
        assert stage.condition("cursed", "Degraded")["reason"] == "InternalError"
        assert stage.status("fine")["replicas"] == 1

    stage.run(story)


def test_a_round_that_raises_for_nobodys_sake_stops_no_healing(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    stage.add_nodes(1)

    async def story() -> None:
        uid = stage.add_job("fine")
        await asyncio.sleep(2.0)
        await stage.report("fine", uid, attempt=1, phase="Training", step=5)
        with monkeypatch.context() as broken:
            broken.setattr("polyreme_operator.scheduler.admit.scheduling_order", lambda *_: 1 / 0)
            stage.add_job("second")
            await asyncio.sleep(PATIENCE_S)
            await stage.report("fine", uid, attempt=1, phase="Training", step=6, exits=[{"rank": 0, "signal": 9}])
            await asyncio.sleep(PATIENCE_S)
            assert stage.status("fine")["attempt"]["number"] == 2
        await asyncio.sleep(PATIENCE_S)
        assert stage.condition("second", "Queued")["status"] == "True"

    stage.run(story)


def test_a_job_whose_status_can_not_be_read_keeps_its_devices_and_says_so() -> None:
    stage = Stage()
    stage.add_nodes(1)

    async def story() -> None:
        uid = stage.add_job("held")
        await asyncio.sleep(2.0)
        await stage.cluster.patch(ref("held"), {"status": {"attempt": {"number": "x"}}}, subresource=STATUS_SUBRESOURCE)
        await asyncio.sleep(2.0)
        degraded = stage.condition("held", "Degraded")
        assert degraded["reason"] == "Unreadable"
        assert "status.attempt.number" in degraded["message"]
        stage.add_job("second")
        await asyncio.sleep(2.0)
        assert stage.condition("second", "Queued")["status"] == "True"
        await stage.cluster.patch(ref("held"), {"status": {"attempt": {"number": 1}}}, subresource=STATUS_SUBRESOURCE)
        await asyncio.sleep(2.0)
        assert stage.condition("held", "Degraded") == {}
        nodes = stage.status("held")["attempt"]["placement"]["nodes"]
        for changed in ({"order": "7"}, {"order": "0-99999999999"}, {"order": "0", "nodes": [cut(nodes[0])]}):
            placement = {"attempt": {"placement": changed}}
            await stage.cluster.patch(ref("held"), {"status": placement}, subresource=STATUS_SUBRESOURCE)
            await asyncio.sleep(2.0)
            assert "status.attempt.placement" in stage.condition("held", "Degraded")["message"]
        assert stage.condition("second", "Queued")["status"] == "True"
        await stage.cluster.delete(ref("held"), uid=uid)
        await asyncio.sleep(5.0)
        assert stage.condition("second", "Admitted")["status"] == "True"
        assert stage.metric("polyreme_quarantined_jobs") == 0

    stage.run(story)


MALFORMED: tuple[Manifest, ...] = (
    {"kind": "Pod", "metadata": {"name": "bad", "namespace": "default"}, "spec": "oops"},
    {"kind": "Pod", "metadata": {"name": "bad", "namespace": "default"}, "spec": {"nodeName": "n0", "containers": [7]}},
    {"kind": "Node", "metadata": {"name": "bad", "labels": {"a": ["b"]}}},
    {"kind": "Node", "metadata": {"name": "bad"}, "spec": {"taints": ["team"]}},
    {"kind": "Node", "metadata": {"name": "bad"}, "status": {"allocatable": "all"}},
    {"kind": "TrainingQueue", "metadata": {"name": "bad"}, "spec": {"weight": 0}},
    {"kind": "TrainingQueue", "metadata": {"name": "bad"}, "spec": {"parent": ["a"]}},
    {"kind": "ClusterTopology", "metadata": {"name": "default"}, "spec": {"levels": [{"name": "rack"}]}},
    {"kind": "PriorityClass", "metadata": {"name": "bad"}, "value": "high"},
    {"kind": "LimitRange", "metadata": {"name": "bad", "namespace": "default"}, "spec": {"limits": 5}},
    {"kind": "RuntimeClass", "metadata": {"name": "bad"}, "overhead": "much"},
)


@pytest.mark.parametrize("manifest", MALFORMED, ids=str)
def test_a_malformed_object_is_left_out_with_an_event_and_a_metric(manifest: Manifest) -> None:
    stage = Stage()
    stage.add_nodes(1)

    async def story() -> None:
        await asyncio.sleep(1.0)
        stage.store.create({"apiVersion": "v1", **manifest})
        await asyncio.sleep(1.0)
        stage.add_job("fine")
        await asyncio.sleep(PATIENCE_S)
        assert stage.condition("fine", "Admitted")["status"] == "True"
        assert stage.metric("polyreme_unreadable_objects_total", kind=manifest["kind"]) == 1
        (event,) = stage.events("Unreadable")
        assert event["involvedObject"]["kind"] == manifest["kind"]

    stage.run(story)


def test_a_pod_and_a_node_that_become_unreadable_move_no_gang() -> None:
    stage = Stage()
    stage.add_nodes(2)

    async def story() -> None:
        uid = stage.add_job("fine")
        await asyncio.sleep(2.0)
        await stage.report("fine", uid, attempt=1, phase="Training", step=5)
        (pod,) = [record.manifest for record in stage.store.records("Pod")]
        node = pod["spec"]["nodeName"]
        await stage.cluster.patch(ObjectRef.of(pod), {"spec": {"containers": [7]}})
        await stage.cluster.patch(ObjectRef(kind="Node", name=node), {"spec": {"taints": ["team"]}})
        for step in range(6, 12):
            await asyncio.sleep(NODE_LOST_S / 4)
            await stage.report("fine", uid, attempt=1, phase="Training", step=step)
        assert [record.manifest["metadata"]["uid"] for record in stage.store.records("Pod")] == [pod["metadata"]["uid"]]
        assert stage.status("fine")["attempt"]["number"] == 1
        assert stage.metric("polyreme_unreadable_objects_total", kind="Pod") >= 1
        stage.add_job("second")
        await asyncio.sleep(PATIENCE_S)
        (placed,) = stage.status("second")["attempt"]["placement"]["nodes"]
        assert placed != node

    stage.run(story)


@pytest.mark.parametrize("amount", ["-99999999999999999999999", "99999999999999999999999", "-1e99", "1e999999"])
def test_a_node_amount_beyond_64_bits_blocks_no_job(amount: str) -> None:
    stage = Stage()
    stage.add_nodes(1)
    beyond = node_manifest("beyond")
    beyond["status"]["allocatable"]["cpu"] = amount

    async def story() -> None:
        stage.store.create(beyond)
        stage.add_job("fine")
        await asyncio.sleep(PATIENCE_S)
        assert stage.condition("fine", "Admitted")["status"] == "True"

    stage.run(story)


def test_a_time_that_is_past_is_not_waited_for_without_end() -> None:
    """A condition of a bound pod without a time made a deadline in 1970: passes followed each other without a pause."""
    stage = Stage()
    stage.add_nodes(1)

    async def story() -> None:
        uid = stage.add_job("fine")
        await asyncio.sleep(2.0)
        pod = ObjectRef(kind="Pod", namespace="default", name=labels.pod_name("fine", uid, index=0, replacement=0))
        refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        await stage.cluster.patch(pod, {"status": {"conditions": [refused]}}, subresource=STATUS_SUBRESOURCE)
        await asyncio.sleep(PATIENCE_S)
        assert stage.status("fine")["attempt"]["number"] == 1

    stage.run(story)


def test_a_foreign_queue_status_is_overwritten() -> None:
    stage = Stage()
    stage.add_nodes(1)
    queue = ObjectRef(kind="TrainingQueue", name="default")

    async def story() -> None:
        stage.store.create({"apiVersion": labels.API_VERSION, "kind": queue.kind, "metadata": {"name": queue.name}})
        await asyncio.sleep(2.0)
        decayed = [{"resource": {}, "seconds": "1"}]
        await stage.cluster.patch(queue, {"status": {"decayed": decayed}}, subresource=STATUS_SUBRESOURCE)
        stage.add_job("fine")
        await asyncio.sleep(PATIENCE_S)
        assert stage.condition("fine", "Admitted")["status"] == "True"
        assert stage.store.get(queue)["status"].get("decayed") != decayed

    stage.run(story)


def test_intents_of_other_types_are_not_believed() -> None:
    row = {"namespace": "n", "name": "j", "uid": "u", "attempt": 1, "cancelledAdmissions": 0}
    (entry,) = parse_intents(json.dumps([row]))
    assert entry.uid == "u"
    for field, value in (("uid", ["u"]), ("attempt", "1"), ("cancelledAdmissions", None)):
        with pytest.raises(TypeError):
            parse_intents(json.dumps([{**row, field: value}]))


def test_a_job_is_retried_later_each_time_and_not_for_ever() -> None:
    now_s = [0.0]
    quarantine = Retries(lambda: now_s[0])
    waits = []
    for _ in range(RETRIES_MAX):
        wait_s = quarantine.add("u", generation=1)
        assert wait_s is not None
        waits.append(wait_s)
        now_s[0] += wait_s
        assert quarantine.wait_s("u") == 0.0
    assert waits[:3] == [RETRY_FIRST_S, 2 * RETRY_FIRST_S, 4 * RETRY_FIRST_S]
    assert max(waits) == RETRY_LONGEST_S
    assert quarantine.add("u", generation=1) is None
    assert quarantine.add("u", generation=2) == RETRY_FIRST_S
    now_s[0] += FORGIVEN_AFTER_S + 1.0
    assert quarantine.add("u", generation=2) == RETRY_FIRST_S
