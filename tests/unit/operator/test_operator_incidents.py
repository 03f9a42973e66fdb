"""The operator writes one NodeIncident for each time that a node is out of service, with steps, reasons and cost."""

from __future__ import annotations

import asyncio
from typing import Any

from polyreme_api.incident import STEPS_MAX, NodeIncidentSpec
from polyreme_api.job.placement import Placement
from polyreme_api.times import rfc3339
from polyreme_cluster.port import Manifest, ObjectRef, ServerError
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.health.incidents import ENDED, Incident, Kept, escaped, name_of, surplus, with_step
from polyreme_operator.health.record import HEALTH, NodeState, Record, render
from polyreme_operator.health_decision.history import rooms
from polyreme_operator.health_observer import HealthObserver
from polyreme_operator.settings import Settings
from tests.unit.operator.health_stage import HealthStage


def incidents(stage: HealthStage, node: str) -> list[Manifest]:
    found = [each.manifest for each in stage.store.records("NodeIncident")]
    return sorted((each for each in found if each["spec"]["node"] == node), key=lambda each: each["spec"]["since"])


def actions(incident: Manifest) -> list[str]:
    return [step["action"] for step in incident["status"]["steps"]]


def test_an_incident_shows_cause_steps_and_what_each_job_lost() -> None:
    stage = HealthStage(8)
    stage.add_policy(examineSeconds=20, probationSeconds=30)
    parallel = {"mode": "Explicit", "dp": 6}
    training = {"steps": 1000, "packsPerStep": 6}
    asked: dict[str, Any] = {"onNodeFault": {"action": "Now"}}
    workers = {"replicas": 3, "devices": 2}
    uid = stage.add_job("job", workers=workers, parallelism=parallel, training=training, failurePolicy=asked)

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.report("job", uid, attempt=1, joined=3, phase="Training", step=10, stepSeconds=1.0)
        await asyncio.sleep(1.0)
        node = _last_node(stage)
        stage.show(node, reason="GPUMissing")
        await asyncio.sleep(20.0)
        assert stage.status("job")["attempt"]["number"] == 2
        await stage.report(
            "job", uid, attempt=2, joined=3, phase="Training", step=8, stepSeconds=1.0, resumedFromStep=4
        )
        await asyncio.sleep(40.0)
        (incident,) = incidents(stage, node)
        spec, status = incident["spec"], incident["status"]
        assert (spec["faultClass"], spec["reason"], spec["owner"], spec["rule"]) == (
            "gpu-lost",
            "GPUMissing",
            "policy/gpus",
            "fault table",
        )
        assert "fell off the bus" in spec["evidence"]
        assert spec["hardware"]
        assert actions(incident)[:3] == ["Quarantined", "Draining", "WorkStopped"]
        assert "by policy gpus (the fault table)" in status["steps"][0]["why"]
        (job,) = status["jobs"]
        # It stopped with the taint and trained its first new step 16 s later; six steps were repeated, on six devices.
        assert (job["outcome"], job["devices"], job["repeatedSteps"]) == ("Resumed", 6, 6)
        assert 6 * (15 + 6) <= job["lostSeconds"] <= 6 * (17 + 6)
        assert status["deviceHours"] == f"{job['lostSeconds'] / 3600:.2f}"
        stage.show(node, status="False", reason="Healthy")
        await asyncio.sleep(200.0)
        (incident,) = incidents(stage, node)
        assert (incident["status"]["state"], incident["status"]["ended"]) == ("ended", "Healthy")
        assert actions(incident)[-2:] == ["Returned", "Healthy"]

    stage.run(story)
    assert stage.metric("polyreme_node_incident_lost_device_seconds_total", **{"class": "gpu-lost"}) > 100.0
    assert stage.metric("polyreme_node_incidents_dropped_total") == 0.0


def _last_node(stage: HealthStage) -> str:
    return Placement.model_validate(stage.status("job")["attempt"]["placement"]).node_by_index()[2]


def test_a_manual_quarantine_and_release_are_recorded_by_name() -> None:
    stage = HealthStage(4)
    stage.add_policy()

    async def story() -> None:
        await asyncio.sleep(5.0)
        ref, now_s = ObjectRef(kind="Node", name="n2"), stage.clock.now_s()
        mine = {"key": HEALTH, "value": "planned", "effect": "NoSchedule"}
        out = Record(
            state=NodeState.QUARANTINED,
            owner="person/ada",
            fault_class="planned",
            reason="Manual",
            evidence="new \x1b[31mcable\n",
            since_s=now_s,
            examine_at_s=now_s + 9e4,
        )
        annotations = {"annotations": {HEALTH: render(out)}}
        stage.store.change(ref, {"metadata": annotations, "spec": {"taints": [mine]}})
        await asyncio.sleep(5.0)
        (incident,) = incidents(stage, "n2")
        assert incident["metadata"]["name"] == name_of("n2", round(now_s, 3))
        assert (incident["spec"]["owner"], incident["spec"]["evidence"]) == ("person/ada", "new \\x1b[31mcable\\n")
        stage.store.change(ref, {"spec": {"taints": []}})
        await asyncio.sleep(5.0)
        (incident,) = incidents(stage, "n2")
        assert incident["status"]["ended"] == "Released"
        assert actions(incident) == ["Quarantined", "Released"]

    stage.run(story)


def test_what_the_record_shows_and_the_history_lacks_is_written_at_start() -> None:
    stage = HealthStage(4)
    stage.add_policy()
    taint = {"key": HEALTH, "value": "gpu-lost", "effect": "NoSchedule"}
    out = Record(
        state=NodeState.REPAIRING,
        owner="policy/gpus",
        fault_class="gpu-lost",
        reason="Xid79",
        action="Reboot",
        condition="polyreme.dev/GPU",
        since_s=stage.clock.now_s() - 60.0,
        examine_at_s=stage.clock.now_s() + 1e4,
    )
    ref = ObjectRef(kind="Node", name="n1")
    stage.store.change(ref, {"metadata": {"annotations": {HEALTH: render(out)}}, "spec": {"taints": [taint]}})
    stage.store.create(
        {
            "apiVersion": "polyreme.dev/v1alpha1",
            "kind": "NodeIncident",
            "metadata": {"name": name_of("n2", 0.5)},
            "spec": {"node": "n2", "since": "1970-01-01T00:00:00.500000Z", "owner": "policy/gpus", "reason": "Xid48"},
        }
    )

    async def story() -> None:
        await asyncio.sleep(10.0)
        (shown,) = incidents(stage, "n1")
        assert actions(shown) == ["Quarantined", "Repairing"]
        # Its status was not written before a crash, and the node is healthy by now.
        (lost,) = incidents(stage, "n2")
        assert (lost["status"]["ended"], actions(lost)) == ("Healthy", ["Quarantined", "Returned"])

    stage.run(story)


def test_an_api_server_that_fails_delays_the_history_and_not_the_taint() -> None:
    stage = HealthStage(4)
    stage.add_policy()
    create, failures = stage.cluster.create, iter(range(5))

    async def failing(manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        if manifest["kind"] == "NodeIncident" and next(failures, None) is not None:
            raise ServerError("away")
        return await create(manifest, dry_run=dry_run)

    stage.cluster.create = failing  # type: ignore[method-assign]

    async def story() -> None:
        await asyncio.sleep(5.0)
        stage.show("n1")
        await asyncio.sleep(1.0)
        assert stage.out() == ["n1"]
        assert incidents(stage, "n1") == []
        await asyncio.sleep(10.0)
        assert len(incidents(stage, "n1")) == 1

    stage.run(story)


def test_the_oldest_ended_incidents_make_room_and_open_ones_never() -> None:
    def kept(name: str, node: str, ended_s: float | None) -> Kept:
        return Kept(name=name, node=node, uid=name, ended_s=ended_s)

    found = [kept("a", "n1", 3.0), kept("b", "n1", 1.0), kept("c", "n1", None), kept("d", "n2", 0.5)]

    def deleted(node: str, of_node: int, of_all: int) -> list[str] | None:
        excess = surplus(found, node=node, of_node=of_node, of_all=of_all)
        return None if excess is None else [each.name for each in excess]

    assert deleted("n1", 4, 9) == []
    assert deleted("n1", 3, 9) == ["b"]
    assert deleted("n1", 2, 9) == ["b", "a"]
    assert deleted("n1", 1, 9) is None
    assert deleted("n3", 9, 4) == ["d"]
    assert deleted("n1", 3, 3) == ["b", "d"]
    assert deleted("n3", 9, 1) is None


def test_steps_and_foreign_text_are_bounded() -> None:
    incident = Incident(name="a", spec=NodeIncidentSpec(node="n1", since="1970-01-01T00:00:01Z"))
    incident = with_step(incident, "Quarantined", 1.0, "x" * 9_000)
    for at in range(200):
        incident = with_step(incident, "Escalated", 2.0 + at, "graver")
    steps = incident.status.steps
    assert (len(steps), incident.status.steps_dropped) == (STEPS_MAX, 201 - STEPS_MAX)
    assert (steps[0].action, len(steps[0].why)) == ("Quarantined", 512)
    assert escaped("\u202egpu\ud800\t" * 200).isprintable()
    assert len(name_of("N.example." * 25, 1e11)) <= 63


def test_of_a_node_whose_incidents_can_not_be_stored_the_newest_are_kept() -> None:
    known = HealthObserver(ClusterCache(), Settings(incidents_per_node=2))
    waiting = [Incident(name=f"n1-{at}", spec=NodeIncidentSpec(node="n1", since=rfc3339(at))) for at in range(1, 5)]
    waiting.append(Incident(name="n2-1", spec=NodeIncidentSpec(node="n2", since=rfc3339(1.0))))
    writes = rooms(waiting, known.snapshot([], 10.0, writable=True))
    assert [write.incident.name for write in writes if not write.fits] == ["n1-1", "n1-2"]
    assert [write.incident.name for write in writes if write.fits] == ["n1-3", "n1-4", "n2-1"]


def test_an_incident_waits_for_the_room_that_the_end_of_another_makes() -> None:
    known = HealthObserver(ClusterCache(), Settings(incidents_per_node=2))
    begun = [Incident(name=f"n1-{at}", spec=NodeIncidentSpec(node="n1", since=rfc3339(at))) for at in range(4)]
    ended = [each.with_status(state=ENDED, ended_at=rfc3339(9.0)) for each in begun]

    def written(*incidents: Incident) -> list[tuple[str, list[str], bool]]:
        writes = rooms(list(incidents), known.snapshot([], 10.0, writable=True))
        return [(write.incident.name, [each.name for each in write.deletes], write.fits) for write in writes]

    for each in (ended[0], begun[1]):
        known.put_incident(stored(each))
    assert written(ended[1], ended[2], begun[3]) == [("n1-1", [], True), ("n1-2", ["n1-0"], True)]
    known.remove_incident("n1-0", "n1")
    for each in (ended[1], ended[2]):
        known.put_incident(stored(each))
    assert written(begun[3]) == [("n1-3", ["n1-1"], True)]


def stored(incident: Incident) -> Manifest:
    manifest = incident.manifest()
    return {**manifest, **incident.status_patch(), "metadata": {**manifest["metadata"], "uid": incident.name}}
