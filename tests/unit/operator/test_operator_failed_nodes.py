"""Nodes whose kubelet rejects pods, never starts them or does not end them: workers move, jobs keep their budgets."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest

from polyreme_api import labels
from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.placement import Placement
from polyreme_api.job.status import FailedNode
from polyreme_api.node_report import CONDITION_POD_START, decode
from polyreme_api.times import rfc3339
from polyreme_cluster.port import STATUS_SUBRESOURCE, Manifest, ObjectRef
from polyreme_operator.health.record import HEALTH
from polyreme_operator.node_marks import COUNTED_S, Mark, with_condition
from polyreme_operator.reconcile.failed_nodes import REMEMBERED_S, remembered
from polyreme_operator.settings import Settings
from polyreme_operator.types.views import ENDS_WITHIN_S
from polyreme_simulator.scenario import topology_manifest
from tests.unit.operator.operator_scenes import DEVICE, NOW_S
from tests.unit.operator.operator_stories import Story, play

STRICT: dict[str, Any] = {
    "failurePolicy": {"maxRestarts": 0, "noProgressMax": 1, "backoff": {"initialSeconds": 5, "maxSeconds": 40}}
}
"""A job that no failure may cost anything."""
REJECTIONS = ("UnexpectedAdmissionError", "OutOfcpu", "OutOfpods", "NodeAffinity", "TopologyAffinityError", "Evicted")
TICK_S = 0.5
CREATING = {"name": "launcher", "state": {"waiting": {"reason": "ContainerCreating"}}}


class Kubelets:
    """Run pods, and end those that are deleted, but not as the sets of nodes below say."""

    def __init__(self, story: Story) -> None:
        self._story = story
        self.rejecting: dict[str, str] = {}
        """Reason by node."""
        self.never_starting: set[str] = set()
        self.never_ending: set[str] = set()
        self.start_failing: set[str] = set()
        self.tried: list[tuple[int, str]] = []
        """Worker index and node of each pod that came to a node."""
        self._known: set[str] = set()

    def act(self) -> None:
        for pod in self._story.objects("Pod"):
            ref, node = ObjectRef.of(pod), pod["spec"].get("nodeName", "")
            if pod["metadata"]["uid"] not in self._known:
                self._known.add(pod["metadata"]["uid"])
                self.tried.append((int(pod["metadata"]["labels"][labels.LABEL_INDEX]), node))
            if pod["metadata"].get("deletionTimestamp"):
                if node not in self.never_ending:
                    self._story.store.delete(ref, uid=None, grace_period_s=0)
            elif (pod["status"] or {}).get("phase") == "Pending":
                status = self._status(node)
                self._story.store.change(ref, {"status": status}, subresource=STATUS_SUBRESOURCE)

    def _status(self, node: str) -> Manifest:
        if node in self.rejecting:
            return {"phase": "Failed", "reason": self.rejecting[node], "message": "Pod was rejected: no healthy device"}
        if node in self.never_starting:
            return {"phase": "Pending", "containerStatuses": [CREATING]}
        if node in self.start_failing:
            ended = {"exitCode": 128, "reason": "StartError", "message": "nvidia-container-cli: no device"}
            return {"phase": "Failed", "containerStatuses": [{"name": "launcher", "state": {"terminated": ended}}]}
        return {"phase": "Running"}

    async def run(self, for_s: float, *, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; tell whether ``until`` became true."""
        for _ in range(int(for_s / TICK_S)):
            await asyncio.sleep(TICK_S)
            self.act()
            if until():
                return True
        return False


def told(story: Callable[[Story, Kubelets], Any], **settings: Any) -> None:
    async def begin(stage: Story) -> None:
        async with stage.operator():
            await story(stage, Kubelets(stage))

    play(begin, Settings(**settings))


def places(story: Story, name: str) -> list[str]:
    return Placement.model_validate(story.status(name)["attempt"]["placement"]).node_by_index()


def runs(story: Story, name: str, count: int) -> Callable[[], bool]:
    """Tell whether so many pods of a job run."""

    def check() -> bool:
        pods = [pod for pod in story.objects("Pod") if pod["metadata"]["labels"][labels.LABEL_JOB] == name]
        live = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
        return len([pod for pod in live if pod["status"]["phase"] == "Running"]) == count

    return check


def nodes(story: Story, *names: str) -> None:
    for name in names:
        story.node(name)


@pytest.mark.parametrize("reason", REJECTIONS)
def test_worker_of_rejected_pod_moves_at_once_and_costs_no_budget(reason: str) -> None:
    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0", "n1", "n2")
        kubelets.rejecting = {"n0": reason}
        stage.job("one", replicas=2, **STRICT)
        assert await kubelets.run(5.0, until=runs(stage, "one", 2))
        assert sorted(places(stage, "one")) == ["n1", "n2"]
        (record,) = stage.status("one")["restartRecords"]
        assert (record["cause"], record["counts"]) == ("PodRejected", False)
        assert record["message"].startswith("worker 0: node n0 rejected pod one-")
        assert f"({reason}): Pod was rejected: no healthy device" in record["message"]

    told(story)


def test_rejection_in_the_middle_of_training_does_not_end_the_job() -> None:
    """The kubelet of the node restarts its device plugin just when a rank fails."""

    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0", "n1", "n2")
        uid = stage.job("one", replicas=2, failurePolicy={"maxRestarts": 1})
        assert await kubelets.run(5.0, until=runs(stage, "one", 2))
        stage.reports("one", uid, step=12_600)
        failed, kept = stage.objects("Pod")
        kubelets.rejecting = {failed["spec"]["nodeName"]: "UnexpectedAdmissionError"}
        ended = {"name": "launcher", "state": {"terminated": {"exitCode": 1}}}
        status = {"status": {"phase": "Failed", "containerStatuses": [ended]}}
        stage.store.change(ObjectRef.of(failed), status, subresource=STATUS_SUBRESOURCE)
        assert await kubelets.run(60.0, until=runs(stage, "one", 2))
        assert failed["spec"]["nodeName"] not in places(stage, "one")
        assert [each["counts"] for each in stage.status("one")["restartRecords"]] == [True, False]
        assert kept["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in stage.objects("Pod")}

    told(story)


def test_node_is_tried_again_after_growing_waits_where_no_other_has_room() -> None:
    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0", "n1")
        kubelets.rejecting = {"n0": "UnexpectedAdmissionError"}
        stage.job("one", replicas=2, **STRICT)
        await kubelets.run(3.0)
        status, reason, message = stage.condition("one", "Restarting")
        assert (status, reason) == ("True", "PodRejected")
        assert "no other node has room, it is tried again at" in message
        attempts: dict[int, float] = {}

        def seen() -> bool:
            attempts.setdefault(stage.status("one")["attempt"]["number"], stage.clock.now_s())
            return False

        await kubelets.run(200.0, until=seen)
        began = [attempts[number] for number in sorted(attempts)][1:]
        waits = [round(later - earlier) for earlier, later in itertools.pairwise(began)]
        assert waits[:5] == [10, 20, 40, 40, 40], "doubled, to the longest wait of the job's backoff"
        assert {node for index, node in kubelets.tried if index == 1} == {"n1"}, "the other worker keeps its place"
        kubelets.rejecting = {}
        assert await kubelets.run(60.0, until=runs(stage, "one", 2))
        assert not stage.condition("one", "Failed")[0]

    told(story)


def test_as_many_rejected_workers_move_as_other_nodes_have_room_for() -> None:
    async def story(stage: Story, kubelets: Kubelets) -> None:
        stage.node("n0", devices=3)
        nodes(stage, "n1")
        kubelets.rejecting = {"n0": "UnexpectedAdmissionError"}
        stage.job("one", replicas=3, **STRICT)
        assert await kubelets.run(10.0, until=runs(stage, "one", 1))
        assert places(stage, "one") == ["n1", "n0", "n0"]
        nodes(stage, "n2")
        assert await kubelets.run(30.0, until=runs(stage, "one", 2)), "each place that comes free is taken"
        assert places(stage, "one") == ["n1", "n2", "n0"]
        kubelets.rejecting = {}
        assert await kubelets.run(60.0, until=runs(stage, "one", 3))
        assert all(not each["counts"] for each in stage.status("one")["restartRecords"])

    told(story)


def test_worker_tries_every_node_before_one_twice() -> None:
    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0", "n1", "n2", "n3", "n4", "n5")
        kubelets.rejecting = dict.fromkeys(("n0", "n1", "n2", "n3"), "UnexpectedAdmissionError")
        stage.job("one", **STRICT)
        assert await kubelets.run(120.0, until=runs(stage, "one", 1))
        assert [node for _, node in kubelets.tried] == ["n0", "n1", "n2", "n3", "n4"]
        assert [each["node"] for each in stage.status("one")["failedNodes"]] == ["n0", "n1", "n2", "n3"]

    told(story)


def test_whole_gang_moves_after_three_failures_of_one_worker_if_it_fits_elsewhere() -> None:
    async def story(stage: Story, kubelets: Kubelets) -> None:
        stage.store.create(topology_manifest([("rack", "rack")]))
        for rack in "ab":
            for number in range(4):
                stage.node(f"{rack}{number}")
                patch = {"metadata": {"labels": {"rack": rack}}}
                stage.store.change(ObjectRef(kind="Node", name=f"{rack}{number}"), patch)
        kubelets.rejecting = dict.fromkeys(("a0", "a2", "a3"), "UnexpectedAdmissionError")
        stage.job("one", replicas=2, topology={"required": "rack"}, **STRICT)
        assert await kubelets.run(120.0, until=runs(stage, "one", 2))
        assert {node[0] for node in places(stage, "one")} == {"b"}, "a has one other node"
        assert stage.status("one")["restartRecords"][-1]["scope"] == "RestartGang"

    told(story)


def test_failed_nodes_are_forgotten_after_an_hour() -> None:
    status = TrainingJobStatus(
        failed_nodes=[FailedNode(node=f"n{age}", index=0, cause="PodRejected", at=rfc3339(NOW_S - age)) for age in AGES]
    )
    assert [each.node for each in remembered(status, NOW_S)] == ["n3599", "n0"]


AGES = (REMEMBERED_S, 3599, 0)


def test_worker_whose_pod_never_starts_moves_and_its_node_is_named() -> None:
    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0", "n1", "n2")
        kubelets.never_starting = {"n1"}
        stage.job("one", replicas=2)
        await kubelets.run(70.0)
        message = stage.condition("one", "PodsReady")[2]
        assert "worker 1: pod one-" in message
        assert message.endswith("has not started on node n1 (ContainerCreating)")
        kept = [pod["metadata"]["uid"] for pod in stage.objects("Pod") if pod["spec"]["nodeName"] == "n0"]
        assert await kubelets.run(560.0, until=runs(stage, "one", 2))
        assert places(stage, "one") == ["n0", "n2"]
        (record,) = stage.status("one")["restartRecords"]
        assert (record["cause"], record["index"], record["counts"]) == ("StartTimedOut", 1, True)
        assert "has not started on node n1 (ContainerCreating)" in record["message"]
        assert kept == [pod["metadata"]["uid"] for pod in stage.objects("Pod") if pod["spec"]["nodeName"] == "n0"]

    told(story)


def test_node_that_cannot_start_a_container_is_left_and_costs_budget() -> None:
    """The template may be at fault as well, so it may not be tried forever."""

    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0", "n1")
        kubelets.start_failing = {"n0"}
        stage.job("one")
        assert await kubelets.run(60.0, until=runs(stage, "one", 1))
        (record,) = stage.status("one")["restartRecords"]
        assert (record["cause"], record["counts"], places(stage, "one")) == ("PodFailed", True, ["n1"])
        assert "nvidia-container-cli: no device; node n0 could not start its container" in record["message"]

    told(story)


def test_worker_moves_when_its_old_pod_does_not_end_on_a_ready_node() -> None:
    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0", "n1", "n2")
        stage.job("one", replicas=2)
        assert await kubelets.run(5.0, until=runs(stage, "one", 2))
        stuck = next(pod for pod in stage.objects("Pod") if pod["spec"]["nodeName"] == "n1")
        kubelets.never_ending = {"n1"}
        grace_s = stuck["spec"]["terminationGracePeriodSeconds"]
        stage.store.delete(ObjectRef.of(stuck), uid=None)
        await kubelets.run(grace_s + ENDS_WITHIN_S - 5)
        assert not runs(stage, "one", 2)(), "the old pod may still end"
        assert await kubelets.run(15.0, until=runs(stage, "one", 2))
        assert places(stage, "one") == ["n0", "n2"]
        record = stage.status("one")["restartRecords"][-1]
        assert (record["cause"], record["counts"]) == ("PodStuck", False)
        assert f"pod {stuck['metadata']['name']} on node n1 is still terminating" in record["message"]

    told(story)


def test_job_whose_old_pod_does_not_end_waits_for_it_where_no_other_node_has_room() -> None:
    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0", "n1")
        stage.job("one", replicas=2)
        assert await kubelets.run(5.0, until=runs(stage, "one", 2))
        stuck = next(pod for pod in stage.objects("Pod") if pod["spec"]["nodeName"] == "n1")
        kubelets.never_ending = {"n1"}
        stage.store.delete(ObjectRef.of(stuck), uid=None)
        await kubelets.run(400.0)
        assert stage.status("one")["attempt"]["number"] == 2, "no attempt begins only to wait for the same pod"
        message = stage.condition("one", "Restarting")[2]
        assert "although the node is ready; no other node has room, it waits for that pod to end" in message
        kubelets.never_ending = set()
        assert await kubelets.run(60.0, until=runs(stage, "one", 2))

    told(story)


def test_waiting_job_is_admitted_beside_a_pod_of_its_own_that_does_not_end() -> None:
    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0", "n1")
        stage.job("one")
        assert await kubelets.run(5.0, until=runs(stage, "one", 1))
        kubelets.never_ending = {"n0"}
        stage.store.change(stage.ref("one"), {"spec": {"suspend": True}})
        assert await kubelets.run(600.0, until=lambda: stage.condition("one", "Suspended")[1] == "Suspended")
        stage.store.change(stage.ref("one"), {"spec": {"suspend": False}})
        assert await kubelets.run(400.0, until=runs(stage, "one", 1))
        assert places(stage, "one") == ["n1"]

    told(story)


def queue_manifest(**spec: Any) -> Manifest:
    quota = {"resource": DEVICE, "nominal": 2}
    body = {"quotas": [quota], "preemption": {"cooldownSeconds": 0}, **spec}
    return {
        "apiVersion": labels.API_VERSION,
        "kind": "TrainingQueue",
        "metadata": {"name": "team"},
        "spec": body,
    }


def test_job_whose_pods_never_start_keeps_neither_quota_nor_victims() -> None:
    """A job of the highest priority, whose user lets its start take a day, displaces another once, and for a while."""

    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0", "n1")
        stage.store.create(queue_manifest(setAsideSeconds=120))
        uid = stage.job("honest", replicas=2, queueName="team", checkpoint={"preemptionGraceSeconds": 1})
        assert await kubelets.run(5.0, until=runs(stage, "honest", 2))
        stage.reports("honest", uid, step=5)
        kubelets.never_starting = {"n0", "n1"}
        long: dict[str, Any] = {"health": {"startTimeoutSeconds": 86_400}}
        stage.job("thief", replicas=2, queueName="team", priority=1_000_000_000, **long)
        assert await kubelets.run(60.0, until=lambda: stage.admitted("thief"))
        taken_s = stage.clock.now_s()
        assert await kubelets.run(125.0, until=lambda: not stage.admitted("thief"))
        assert round(stage.clock.now_s() - taken_s) == 120
        assert stage.condition("thief", "Queued")[:2] == ("True", "SetAside")
        assert "its pods did not all start in 120 s; worker 0 (and 1 more)" in stage.condition("thief", "Queued")[2]
        kubelets.never_starting = set()
        assert await kubelets.run(10.0, until=runs(stage, "honest", 2))
        stage.reports("honest", uid, step=6)

        def beats() -> bool:
            stage.reports("honest", uid, step=7)
            return False

        await kubelets.run(3_700.0, until=beats)
        assert stage.admitted("honest"), "it may not be displaced again for pods that have never started"
        assert stage.status("honest")["preemptionCount"] == 1
        stage.reports("honest", uid, step=1000, outcome="Succeeded", phase="Done")
        assert await kubelets.run(60.0, until=runs(stage, "thief", 2))
        assert stage.status("thief").get("setAside") == {"times": 1, "until": ANY}

    told(story)


def test_waits_of_a_job_that_is_set_aside_again_and_again_double() -> None:
    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0")
        stage.store.create(queue_manifest(setAsideSeconds=100))
        kubelets.never_starting = {"n0"}
        stage.job("one", queueName="team")
        admitted: list[float] = []

        def note() -> bool:
            if stage.admitted("one") != (len(admitted) % 2 == 1):
                admitted.append(stage.clock.now_s())
            return len(admitted) == 9

        assert await kubelets.run(3_000.0, until=note)
        lengths = [round(later - earlier) for earlier, later in itertools.pairwise(admitted)]
        assert lengths[::2] == [100] * 4
        assert lengths[1::2] == [60, 120, 240, 480]
        kubelets.never_starting = set()
        uid = next(job["metadata"]["uid"] for job in stage.objects(labels.KIND_JOB))
        await kubelets.run(5.0, until=runs(stage, "one", 1))
        stage.reports("one", uid, step=1)
        await kubelets.run(5.0)
        assert "setAside" not in stage.status("one")

    told(story)


def start_condition(story: Story, node: str) -> dict[str, Any]:
    conditions = story.store.get(ObjectRef(kind="Node", name=node))["status"]["conditions"]
    return next((each for each in conditions if each["type"] == CONDITION_POD_START), {})


def test_rejections_are_evidence_that_a_policy_acts_on_and_a_start_clears() -> None:
    policy = {"mode": "Enforce", "classes": ["node-software"], "breaker": {"nodesPercent": 50}}

    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0", "n1", "n2", "n3")
        body = {"apiVersion": labels.API_VERSION, "kind": labels.KIND_FAULT_POLICY, "metadata": {"name": "software"}}
        stage.store.create({**body, "spec": policy})
        kubelets.rejecting = {"n0": "UnexpectedAdmissionError"}
        stage.job("moves", **STRICT)
        assert await kubelets.run(10.0, until=runs(stage, "moves", 1))
        await kubelets.run(5.0)
        shown = start_condition(stage, "n0")
        assert (shown["status"], shown["reason"]) == ("True", "PodRejected")
        stage.job("other", **STRICT)
        assert await kubelets.run(10.0, until=runs(stage, "other", 1))
        assert kubelets.tried[-1] == (0, "n2"), "one rejection makes the node a risk that others avoid"
        only = {"spec": {"nodeSelector": {"kubernetes.io/hostname": "n0"}}}
        stage.job("tied", workers={"template": only}, **STRICT)
        await kubelets.run(20.0)
        (event,) = decode(start_condition(stage, "n0")["message"])[0]
        assert (event.code, event.count) == ("PodRejected", 3)
        (taint,) = stage.store.get(ObjectRef(kind="Node", name="n0"))["spec"]["taints"]
        assert (taint["key"], taint["value"]) == (HEALTH, "node-software"), "three within an hour"

    told(story, node_health=True)

    async def heals(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0")
        kubelets.rejecting = {"n0": "UnexpectedAdmissionError"}
        uid = stage.job("one", **STRICT)
        await kubelets.run(8.0)
        assert start_condition(stage, "n0")["status"] == "True"
        kubelets.rejecting = {}
        assert await kubelets.run(30.0, until=runs(stage, "one", 1))
        stage.reports("one", uid, step=1)
        await kubelets.run(5.0)
        assert start_condition(stage, "n0")["status"] == "False"

    told(heals)


def test_failure_of_a_node_is_counted_once() -> None:
    """The job's record is read again by a restarted operator."""

    def marked(conditions: list[dict[str, Any]], at_s: float, reason: str = "PodRejected") -> list[dict[str, Any]]:
        mark = Mark(condition=CONDITION_POD_START, failed=True, reason=reason, message="worker 0", at_s=at_s)
        return with_condition(conditions, mark, at=rfc3339(NOW_S))

    once = marked([{"type": "Ready", "status": "True"}], NOW_S)
    assert marked(once, NOW_S) is once
    twice = marked(once, NOW_S + 60)
    assert [(event.code, event.count) for event in decode(twice[1]["message"])[0]] == [("PodRejected", 2)]
    other = marked(twice, NOW_S + 61, "PodStuck")
    counts = {event.code: event.count for event in decode(other[1]["message"])[0]}
    assert counts == {"PodStuck": 1, "PodRejected": 2}
    late = marked(twice, NOW_S + 60 + COUNTED_S)
    assert [event.count for event in decode(late[1]["message"])[0]] == [1]


def test_pods_that_started_before_a_failure_do_not_clear_it() -> None:
    failed = Mark(condition=CONDITION_POD_START, failed=True, reason="PodRejected", message="worker 0", at_s=NOW_S)
    conditions = with_condition([], failed, at=rfc3339(NOW_S))

    def after(began_s: float) -> list[dict[str, Any]]:
        started = Mark(condition=CONDITION_POD_START, failed=False, reason="PodStarted", at_s=began_s)
        return with_condition(conditions, started, at=rfc3339(NOW_S + 90))

    assert after(NOW_S - 60) is conditions
    assert [each["status"] for each in after(NOW_S + 60)] == ["False"]


def test_job_that_is_set_aside_reports_it_again_after_its_queue_was_missing() -> None:
    async def story(stage: Story, kubelets: Kubelets) -> None:
        nodes(stage, "n0")
        stage.store.create(queue_manifest(setAsideSeconds=100))
        kubelets.never_starting = {"n0"}
        stage.job("one", queueName="team")
        assert await kubelets.run(200.0, until=lambda: stage.condition("one", "Queued")[1] == "SetAside")
        stage.store.delete(ObjectRef(kind="TrainingQueue", name="team"), uid=None)
        assert await kubelets.run(10.0, until=lambda: stage.condition("one", "Queued")[1] == "QueueMissing")
        stage.store.create(queue_manifest(setAsideSeconds=100))
        assert await kubelets.run(10.0, until=lambda: stage.condition("one", "Queued")[1] == "SetAside")
        assert "its pods did not all start in time; set aside until " in stage.condition("one", "Queued")[2]

    told(story)
