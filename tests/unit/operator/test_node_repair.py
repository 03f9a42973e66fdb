"""Repairs by hooks: one Job at a time, one owner, retries and escalation, and what a success has to prove."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from polyreme_api.fault_policy import CheckHook, RepairHook
from polyreme_cluster.port import STATUS_SUBRESOURCE, Manifest, ObjectRef
from polyreme_operator.health.facts import Step
from polyreme_operator.health.owners import OURS, REPAIR_OWNER
from polyreme_operator.health.record import HEALTH, NodeState, Record, RepairPhase, parse, render
from polyreme_operator.health.repair import LATE_S, JobSight, JobState
from polyreme_operator.health.repair_rules import repair_result
from tests.unit.operator.health_stage import SETTINGS, HealthStage
from tests.unit.operator.node_health_scenes import POLICY, Node, bus_sign, shown

NAMESPACE = SETTINGS.namespace
HOOKED = dataclasses.replace(
    POLICY,
    hooks=(
        RepairHook(action="Reboot", template="reboot", attempts=2),
        RepairHook(action="Replace", template="replace"),
    ),
)


def broken(**facts: Any) -> Node:
    """Return an empty node with a fault, for which repairs are on."""
    given = {"policy": HOOKED, "reading": shown(bus_sign(at_s=90.0)), "repairs": True, "others": 0, **facts}
    node = Node(**given)
    node.step(100.0)
    return node


def saw(node: Node, state: JobState, now_s: float, uid: str = "u1") -> Step:
    """Decide after the Job of the repair under way was read."""
    repair = node.record.repair
    assert repair is not None
    node.now(job=JobSight(name=repair.job, uid="" if state is JobState.MISSING else uid, state=state))
    return node.step(now_s)


def results(before: Record | None, step: Step) -> list[tuple[str, str]]:
    """Return what is counted of repairs."""
    found = (repair_result(before, step.record, note) for note in step.notes)
    return [each for each in found if each is not None]


def phase(node: Node) -> tuple[str, int, str]:
    """Return action, attempt and phase of the repair under way."""
    repair = node.record.repair
    assert repair is not None
    return repair.action, repair.attempt, repair.phase


def test_an_empty_node_is_repaired_checked_and_returns_in_probation() -> None:
    policy = dataclasses.replace(HOOKED, check=CheckHook(template="check"))
    node = broken(policy=policy)
    node.step(101.0)
    assert phase(node) == ("Reboot", 1, RepairPhase.REPAIR)
    assert parse(render(node.record)) == (node.record, "")
    saw(node, JobState.RUNNING, 110.0)
    assert not node.step(600.0).changed
    saw(node, JobState.SUCCEEDED, 700.0)
    assert phase(node) == ("Reboot", 1, RepairPhase.CHECK)
    saw(node, JobState.SUCCEEDED, 800.0, uid="u2")
    assert phase(node) == ("Reboot", 1, RepairPhase.SETTLE)
    node.now(reading=shown())
    node.step(810.0)
    assert (node.record.state, node.record.repair) == (NodeState.PROBATION, None)


def test_a_reset_that_succeeded_ends_events_from_before_it_and_hides_no_later_one() -> None:
    reset = dataclasses.replace(POLICY, hooks=(RepairHook(action="Replace", template="r"),))
    node = broken(policy=reset)
    node.step(101.0)
    saw(node, JobState.RUNNING, 110.0)
    saw(node, JobState.SUCCEEDED, 200.0)
    node.step(201.0)
    assert node.record.state is NodeState.PROBATION
    assert not node.step(300.0).needs_charge
    node.now(reading=shown(bus_sign(count=2, at_s=250.0)))
    assert node.step(301.0).needs_charge


def test_a_reboot_ends_only_what_the_next_boot_does_not_show() -> None:
    node = broken()
    node.step(101.0)
    saw(node, JobState.RUNNING, 110.0)
    saw(node, JobState.SUCCEEDED, 200.0)
    node.step(210.0)
    assert phase(node) == ("Reboot", 1, RepairPhase.SETTLE)
    assert not node.step(210.1).changed, "each change is a write, and each write another look"


def test_failures_are_retried_then_the_next_action_then_the_node_is_retired() -> None:
    node, now_s, tried, counted = broken(), 101.0, [], []
    for _ in range(3):
        before = node.record
        counted += results(before, node.step(now_s))
        tried.append(phase(node)[:2])
        saw(node, JobState.RUNNING, now_s + 1.0)
        before = node.record
        counted += results(before, saw(node, JobState.FAILED, now_s + 2.0))
        now_s += 3.0
    assert counted == [(action, result) for action, _ in tried for result in ("Started", "Failed")]
    assert tried == [("Reboot", 1), ("Reboot", 2), ("Replace", 1)]
    assert (node.record.state, node.record.repair) == (NodeState.RETIRED, None)
    assert "no repair helped" in node.record.evidence


def test_a_job_that_hangs_is_deleted_and_gone_before_the_next_begins() -> None:
    node = broken()
    node.step(101.0)
    saw(node, JobState.RUNNING, 110.0)
    saw(node, JobState.RUNNING, 110.0 + 961.0)
    assert phase(node) == ("Reboot", 1, RepairPhase.STOP)
    saw(node, JobState.RUNNING, 1_200.0)
    assert phase(node)[2] is RepairPhase.STOP
    saw(node, JobState.MISSING, 1_210.0)
    node.step(1_211.0)
    assert phase(node) == ("Reboot", 2, RepairPhase.REPAIR)


def test_a_hook_that_lies_is_found_out() -> None:
    node = broken(reading=shown(bus_sign(at_s=0.0)))
    node.step(101.0)
    saw(node, JobState.RUNNING, 110.0)
    saw(node, JobState.SUCCEEDED, 120.0)
    node.step(719.0)
    assert phase(node) == ("Reboot", 1, RepairPhase.SETTLE)
    node.step(721.0)
    assert phase(node)[:2] == ("Reboot", 2)


@pytest.mark.parametrize(
    "fact",
    [
        {"latched": True},
        {"claimed": "nvsentinel"},
        {"workers": 1},
        {"others": 2},
        {"others": None},
        {"repairs": False},
        {"policy": POLICY},
    ],
)
def test_it_begins_only_when_the_node_is_empty_ours_and_no_breaker_is_latched(fact: dict[str, Any]) -> None:
    node = broken(**fact)
    node.step(105.0)
    assert node.record.repair is None


def test_a_manual_release_of_the_node_stops_its_repair_job() -> None:
    node = broken()
    node.step(101.0)
    saw(node, JobState.RUNNING, 110.0)
    node.now(tainted=False)
    node.step(120.0)
    assert not node.record.state.is_out
    assert phase(node)[2] is RepairPhase.STOP
    saw(node, JobState.MISSING, 122.0)
    assert phase(node)[2] is RepairPhase.STOP, "its create may still be under way"
    assert node.step(122.0).wake_at_s == 120.0 + LATE_S
    node.step(120.0 + LATE_S)
    assert node.record.repair is None


def test_a_clock_that_is_set_back_prolongs_a_repair_by_nothing() -> None:
    node = broken()
    node.step(101.0)
    saw(node, JobState.RUNNING, 110.0)
    node.now(tainted=False)
    node.step(120.0)
    saw(node, JobState.MISSING, -7_000.0)
    node.step(-7_000.0 + LATE_S)
    assert node.record.repair is None


class RepairStage(HealthStage):
    """A cluster with templates of hooks; Jobs are ended by the test."""

    def __init__(self) -> None:
        super().__init__(4, dataclasses.replace(SETTINGS, repairs=True))
        for name in ("reboot", "check"):
            self.store.create(
                {
                    "apiVersion": "v1",
                    "kind": "PodTemplate",
                    "metadata": {"name": name, "namespace": NAMESPACE},
                    "template": {"spec": {"containers": [{"name": "hook", "image": "hooks:1"}]}},
                }
            )
        hooks = [{"action": "Reboot", "template": "reboot", "attempts": 2}]
        self.add_policy(repairs={"hooks": hooks, "check": {"template": "check"}})

    def jobs(self) -> list[Manifest]:
        return [record.manifest for record in self.store.records("Job")]

    def end(self, job: Manifest, kind: str = "Complete") -> None:
        status = {"conditions": [{"type": kind, "status": "True", "reason": "x"}]}
        self.store.change(ObjectRef.of(job), {"status": status}, subresource=STATUS_SUBRESOURCE)

    def owner(self, node: str) -> str | None:
        found = (self.node(node)["metadata"].get("annotations") or {}).get(REPAIR_OWNER)
        return None if found is None else str(found)


def test_the_hook_runs_on_the_node_with_the_annotation_taken_and_both_end() -> None:
    stage = RepairStage()

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.show("n1")
        await asyncio.sleep(10.0)
        (job,) = stage.jobs()
        spec = job["spec"]["template"]["spec"]
        assert (spec["nodeName"], spec["tolerations"], spec["restartPolicy"]) == (
            "n1",
            [{"operator": "Exists"}],
            "Never",
        )
        assert {"name": "POLYREME_NODE", "value": "n1"} in spec["containers"][0]["env"]
        assert (job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == (0, 900)
        assert stage.owner("n1") == OURS
        stage.end(job)
        await asyncio.sleep(10.0)
        check = next(each for each in stage.jobs() if each["metadata"]["name"] != job["metadata"]["name"])
        stage.end(check)
        stage.show("n1", status="False")
        await asyncio.sleep(10.0)
        assert (stage.out(), stage.owner("n1")) == ([], None)
        record = stage.record("n1")
        assert record is not None
        assert record.state is NodeState.PROBATION
        assert len(stage.jobs()) == 2

    stage.run(story)
    counted = [stage.metric("polyreme_node_repairs_total", result=each) for each in ("Started", "Succeeded", "Failed")]
    assert counted == [1.0, 1.0, 0.0]


def test_a_job_whose_record_was_damaged_is_gone_before_the_next_begins() -> None:
    stage = RepairStage()

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.show("n1")
        await asyncio.sleep(10.0)
        (lost,) = stage.jobs()
        ref = ObjectRef(kind="Node", name="n1")
        stage.store.change(ref, {"metadata": {"annotations": {HEALTH: "{"}}, "spec": {"taints": []}})
        for _ in range(60):
            await asyncio.sleep(10.0)
            assert len(stage.jobs()) <= 1
            if [job["metadata"]["uid"] for job in stage.jobs()] not in ([], [lost["metadata"]["uid"]]):
                return
        pytest.fail("the repair never begins again")

    stage.run(story)


def test_a_policy_with_hooks_says_that_the_operator_runs_none() -> None:
    stage = HealthStage(2)
    stage.add_policy(repairs={"hooks": [{"action": "Reboot", "template": "reboot"}]})

    async def story() -> None:
        await asyncio.sleep(5.0)
        assert "its repairs are not carried out" in stage.policy()["conditions"][0]["message"]

    stage.run(story)


def test_a_node_that_another_tool_repairs_is_left_to_it() -> None:
    stage = RepairStage()

    async def story() -> None:
        await asyncio.sleep(5.0)
        ref = ObjectRef(kind="Node", name="n1")
        stage.store.change(ref, {"metadata": {"annotations": {REPAIR_OWNER: "nvsentinel"}}})
        stage.show("n1")
        await asyncio.sleep(30.0)
        assert (stage.out(), stage.jobs(), stage.owner("n1")) == (["n1"], [], "nvsentinel")
        stage.store.change(ref, {"metadata": {"annotations": {REPAIR_OWNER: None}}})
        await asyncio.sleep(10.0)
        assert len(stage.jobs()) == 1

    stage.run(story)


def test_without_a_template_it_is_reported_and_the_node_is_still_examined() -> None:
    stage = RepairStage()

    async def story() -> None:
        await asyncio.sleep(5.0)
        template = next(each for each in stage.store.records("PodTemplate") if each.name == "reboot").manifest
        stage.store.delete(ObjectRef.of(template), uid=template["metadata"]["uid"])
        stage.show("n1", reason="GPUMissing")
        await asyncio.sleep(30.0)
        assert [each["message"] for each in stage.events("NodeRepairBlocked")] == [
            f"there is no PodTemplate {NAMESPACE}/reboot; create it"
        ]
        stage.show("n1", status="False")
        await asyncio.sleep(1_500.0)
        assert (stage.out(), stage.jobs()) == ([], [])

    stage.run(story)
