"""Rules that a seed once broke though the operator was right: they allow that, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polyreme_api import labels
from polyreme_api.times import rfc3339
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.health.record import HEALTH, NodeState, Record, render
from polyreme_simulator.anomaly_facts import BACK_S
from polyreme_simulator.cluster_history import KNOWN_S
from polyreme_simulator.foreign_queue_facts import MISSING
from polyreme_simulator.forgery_facts import FORGED_STEP
from polyreme_simulator.kubelets import KUBELET_S
from polyreme_simulator.ownership import FOREIGN
from polyreme_simulator.refused_children import REPORTED_S
from polyreme_simulator.scenario import RACK, topology_manifest
from polyreme_simulator.start_facts import FREE_FOR_S
from polyreme_simulator.training import Gang
from tests.simulator.rule_scene import A_TIME, TWO_DEVICES, Scene


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.loop.close()


@pytest.mark.parametrize("refused_again", [False, True])
def test_a_refusal_is_to_be_explained_only_once_a_pod_is_refused_by_it(scene: Scene, refused_again: bool) -> None:
    job = scene.job("j")
    scene.world.add_node("n0", 1)
    scene.admit(job, "n0")
    uid, rules, pod = (
        job["metadata"]["uid"],
        scene.facts.rules.anomalies,
        ObjectRef(kind="Pod", namespace="default", name="p"),
    )
    rules.refuse(uid, "create Pod", "policy 1", scene.world)
    assert rules.refusal("create", pod, uid, scene.world)
    rules.allow(uid, "create Pod")
    rules.refuse(uid, "create Pod", "policy 2", scene.world)
    if refused_again:
        assert rules.refusal("create", pod, uid, scene.world)
    scene.wait(20.0)
    rules.look(scene.world)
    assert scene.broken("a refused pod is explained") == refused_again


def test_a_refusal_of_an_earlier_attempt_is_not_to_be_explained_by_a_later_one(scene: Scene) -> None:
    """Seed 2004722: refused at first, then made to wait by a node's fault, and looked at right after its next start."""
    job = scene.job("j")
    scene.world.add_node("n0", 1)
    scene.admit(job, "n0", attempt=1)
    uid, rules = job["metadata"]["uid"], scene.facts.rules.anomalies
    pod = ObjectRef(kind="Pod", namespace="default", name="p")
    rules.refuse(uid, "create Pod", "policy 2", scene.world)
    assert rules.refusal("create", pod, uid, scene.world)
    scene.wait(100.0)
    scene.admit(job, "n0", attempt=2)
    assert rules.refusal("create", pod, uid, scene.world)
    rules.look(scene.world)
    assert not scene.broken("a refused pod is explained")
    scene.wait(20.0)
    rules.look(scene.world)
    assert scene.broken("a refused pod is explained")


@pytest.mark.parametrize("done", [False, True])
def test_a_refused_object_is_to_be_reported_unless_the_ranks_have_trained_to_the_end(scene: Scene, done: bool) -> None:
    """Seed 4342: a single worker needs no Service, and was looked at between its success and the status."""
    job = scene.job("j")
    scene.world.add_node("n0", 1)
    scene.admit(job, "n0")
    uid, rules = job["metadata"]["uid"], scene.facts.rules.anomalies.children
    service = ObjectRef(kind="Service", namespace="default", name="s")
    rules.refuse("default", "Service", "quota 1")
    assert rules.refusal(service, uid, scene.world)
    scene.world.training.gangs[uid, 1] = Gang(attempt=1, world=1, resumed_from=0, done=done)
    scene.wait(REPORTED_S + 1.0)
    rules.look(scene.world)
    assert scene.broken("a refused object is reported") == (not done)


@pytest.mark.parametrize("taken", [False, True])
def test_a_worker_is_to_leave_a_node_only_while_another_has_room(scene: Scene, taken: bool) -> None:
    """Seed 3643: of the workers that were rejected together, the first had taken the last free device."""
    scene.world.add_node("n0", 2)
    scene.world.add_node("n1", 1)
    scene.world.nodes["n0"].rejects = "OutOfcpu"
    job = scene.job("j", workers={"replicas": 2, "devices": 1})
    scene.admit(job, "n0", "n0")
    rules = scene.facts.rules.starts
    rules.look(scene.world)
    scene.wait(FREE_FOR_S)
    pod = scene.pod(job, nodeName="n0")
    scene.wait(KUBELET_S)
    rules.look(scene.world)
    scene.admit(job, "n0", "n1" if taken else "n0", attempt=2)
    rules.rejected(pod, scene.world)
    assert scene.broken("a worker leaves a node that rejects it") == (not taken)


@pytest.mark.parametrize("refused", [False, True])
def test_others_pass_a_job_only_while_its_status_is_refused(scene: Scene, refused: bool) -> None:
    first = scene.job("first")
    scene.wait(2.0)
    twin = scene.job("twin")
    scene.world.add_node("n0", 1)
    uid, rules = first["metadata"]["uid"], scene.facts.rules.anomalies
    if refused:
        rules.refuse(uid, "patch TrainingJob", "policy 1", scene.world)
        assert rules.refusal("patch", ObjectRef.of(first), "", scene.world)
    scene.wait(10.0)
    scene.admit(twin, "n0")
    assert scene.broken("a job keeps its place") == (not refused)


@pytest.mark.parametrize(
    ("cause", "retry_s", "broken"),
    [("CreateRefused", 12.0, False), ("CreateRefused", 2.0, True), ("RankExited", 12.0, True)],
)
def test_others_pass_a_job_whose_pods_were_refused_only_until_its_retry(
    scene: Scene, cause: str, retry_s: float, broken: bool
) -> None:
    first = scene.job("first")
    scene.wait(2.0)
    twin = scene.job("twin")
    scene.world.add_node("n0", 1)
    retry = rfc3339(scene.world.clock.now_s() + retry_s)
    records = [{"attempt": 1, "cause": cause, "at": scene.now()}]
    scene.say(first, retryAt=retry, restartRecords=records, conditions={"Admitted": f"!{cause}"})
    scene.wait(10.0)
    scene.admit(twin, "n0")
    assert scene.broken("a job keeps its place") == broken


@pytest.mark.parametrize("desired", ["Run", "Stop"])
def test_a_job_waits_for_another_to_stop_only_if_that_was_asked_to(scene: Scene, desired: str) -> None:
    holder, waiting = scene.job("holder"), scene.job("waiting")
    scene.world.add_node("n0", 1)
    scene.pod(holder)
    scene.admit(holder, "n0", desired=desired)
    scene.say(waiting, conditions={"Queued": "WaitingForPreemption"})
    scene.look()
    assert scene.broken("a pending reason follows its cause") == (desired == "Run")


@pytest.mark.parametrize("topology", [{}, {"exclusive": "rack"}])
def test_a_job_that_wants_a_rack_for_itself_finds_no_room_beside_others(scene: Scene, topology: dict[str, str]) -> None:
    scene.world.store.create(topology_manifest([("rack", RACK)]))
    scene.queue("default", 1)
    for name in ("n0", "n1"):
        scene.world.add_node(name, 1, tags={RACK: "r0"})
    holder, waiting = scene.job("holder"), scene.job("waiting", topology=topology)
    scene.admit(holder, "n0")
    scene.say(waiting, conditions={"Queued": "WaitingForCapacity"})
    scene.look()
    assert scene.broken("a pending reason follows its cause") == (not topology)


@pytest.mark.parametrize("spec", [{}, {"acceptProbation": True}])
def test_a_node_on_probation_is_room_for_jobs_that_accept_it_alone(scene: Scene, spec: dict[str, bool]) -> None:
    scene.world.store.create(topology_manifest([("rack", RACK)]))
    scene.queue("default", 3)
    for name, rack in (("n0", "r0"), ("n1", "r0"), ("n2", "r1")):
        scene.world.add_node(name, 1, tags={RACK: rack})
    record = render(Record(state=NodeState.PROBATION, opt_in=True))
    scene.world.store.change(ObjectRef(kind="Node", name="n2"), {"metadata": {"annotations": {HEALTH: record}}})
    scene.admit(scene.job("holder"), "n0")
    # A place is free in each rack: too few for who may not use the second, and not near each other for who may.
    two = {"replicas": 2, "devices": 1}
    waiting = scene.job("waiting", topology={"required": "rack"}, workers=two, **spec)
    scene.say(waiting, conditions={"Queued": "WaitingForNodes"})
    scene.look()
    assert scene.broken("a pending reason follows its cause") == bool(spec)


@pytest.mark.parametrize("late", [False, True])
def test_a_pod_may_come_late_to_a_full_node_after_its_job_is_gone(scene: Scene, late: bool) -> None:
    scene.world.faulty = late
    scene.world.add_node("n0", 1)
    holder, gone = scene.job("holder"), scene.job("gone")
    scene.delete(gone)
    scene.admit(holder, "n0")
    scene.runs(scene.pod(gone, nodeName="n0"))
    assert scene.broken("nodes hold what they can") == (not late)


@pytest.mark.parametrize("seen_by_the_leader", [False, True])
def test_pods_of_a_deleted_job_take_quota_if_the_leader_has_seen_the_job(
    scene: Scene, seen_by_the_leader: bool
) -> None:
    scene.queue("default", 1)
    for name in ("n0", "n1"):
        scene.world.add_node(name, 1)
    gone, job = scene.job("gone"), scene.job("j")
    scene.facts.rules.leaders.sending("first", "patch TrainingJob j", scene.world)
    scene.wait(1.0)
    scene.runs(scene.pod(gone, nodeName="n0"))
    scene.delete(gone)
    if not seen_by_the_leader:
        scene.facts.rules.leaders.sending("second", "patch TrainingJob j", scene.world)
    scene.admit(job, "n1")
    assert scene.broken("queues keep their quota") == seen_by_the_leader


@pytest.mark.parametrize(("resumed_s", "broken"), [(0.1, False), (10.0, True)])
def test_what_is_freed_is_not_held_for_a_job_that_was_suspended_when_others_were_decided(
    scene: Scene, resumed_s: float, broken: bool
) -> None:
    scene.world.add_node("n0", 2)
    by = scene.job("by", workers=TWO_DEVICES, priority=6, suspend=True)
    victim, lesser = scene.job("victim", workers=TWO_DEVICES), scene.job("lesser", workers=TWO_DEVICES, priority=5)
    scene.admit(victim, "n0")
    asked = {"by": by["metadata"]["uid"], "byName": "default/by", "requestedAt": scene.now(), "deadline": scene.now()}
    scene.say(victim, preemption=asked, conditions={"Admitted": "!Suspended"})
    scene.wait(10.0)
    scene.world.store.change(ObjectRef.of(by), {"spec": {"suspend": False}})
    scene.wait(resumed_s)
    scene.admit(lesser, "n0")
    assert scene.broken("what is made free for one goes to no lesser one") == broken


@pytest.mark.parametrize(("lowered_s", "broken"), [(0.1, False), (10.0, True)])
def test_what_is_freed_may_be_taken_while_the_quota_for_both_may_still_be_known(
    scene: Scene, lowered_s: float, broken: bool
) -> None:
    scene.world.add_node("n0", 4)
    scene.queue("team", 4)
    by = scene.job("by", workers=TWO_DEVICES, priority=6, queueName="team")
    victim = scene.job("victim", workers=TWO_DEVICES, queueName="team")
    lesser = scene.job("lesser", workers=TWO_DEVICES, priority=5, queueName="team")
    scene.admit(victim, "n0")
    asked = {"by": by["metadata"]["uid"], "byName": "default/by", "requestedAt": scene.now(), "deadline": scene.now()}
    scene.say(victim, preemption=asked, conditions={"Admitted": "!Suspended"})
    scene.wait(10.0)
    quotas = [{"resource": labels.RESOURCE_DEVICE, "nominal": 2}]
    scene.world.store.change(ObjectRef(kind="TrainingQueue", name="team"), {"spec": {"quotas": quotas}})
    scene.wait(lowered_s)
    scene.admit(lesser, "n0")
    assert scene.broken("what is made free for one goes to no lesser one") == broken


@pytest.mark.parametrize(("ended_s", "broken"), [(0.1, False), (10.0, True)])
def test_what_is_freed_may_be_taken_while_pods_that_kept_the_other_from_starting_may_be_known_to_run(
    scene: Scene, ended_s: float, broken: bool
) -> None:
    for name in ("n0", "n1"):
        scene.world.add_node(name, 2)
    by = scene.job("by", workers={"replicas": 2, "devices": 2}, priority=6)
    victim, lesser = scene.job("victim", workers=TWO_DEVICES), scene.job("lesser", workers=TWO_DEVICES, priority=5)
    before = scene.job("before", workers=TWO_DEVICES, priority=7)
    scene.admit(victim, "n1")
    asked = {"by": by["metadata"]["uid"], "byName": "default/by", "requestedAt": scene.now(), "deadline": scene.now()}
    scene.say(victim, preemption=asked, conditions={"Admitted": "!Suspended"})
    scene.wait(10.0)
    pod = scene.pod(before, nodeName="n0")
    scene.runs(pod)
    scene.world.store.change(ObjectRef.of(pod), {"status": {"phase": "Succeeded"}}, subresource="status")
    scene.wait(ended_s)
    scene.admit(lesser, "n1")
    assert scene.broken("what is made free for one goes to no lesser one") == broken


@pytest.mark.parametrize(("devices", "ended_s", "broken"), [(2, 0.1, False), (1, 10.0, True)])
def test_a_pod_that_ended_makes_no_one_stand_in_the_way(
    scene: Scene, devices: int, ended_s: float, broken: bool
) -> None:
    scene.world.add_node("n0", devices)
    by, victim, lesser = scene.job("by", priority=6), scene.job("victim"), scene.job("lesser", priority=5)
    before = scene.job("before", priority=7)
    scene.admit(victim, "n0")
    asked = {"by": by["metadata"]["uid"], "byName": "default/by", "requestedAt": scene.now(), "deadline": scene.now()}
    scene.say(victim, preemption=asked, conditions={"Admitted": "!Suspended"})
    scene.wait(10.0)
    pod = scene.pod(before, nodeName="n0")
    scene.runs(pod)
    scene.world.store.change(ObjectRef.of(pod), {"status": {"phase": "Succeeded"}}, subresource="status")
    scene.wait(ended_s)
    scene.admit(lesser, "n0")
    assert scene.broken("what is made free for one goes to no lesser one") == broken


@pytest.mark.parametrize("ahead_s", [0, 45])
@pytest.mark.parametrize(("waited_s", "broken"), [(5.0, True), (11.0, False)])
def test_a_preempted_job_has_its_grace_by_whatever_clock_it_was_granted(
    scene: Scene, ahead_s: int, waited_s: float, broken: bool
) -> None:
    scene.world.add_node("n0", 1)
    by, victim = scene.job("by", priority=6), scene.job("victim")
    scene.admit(victim, "n0")
    now_s = scene.world.clock.now_s() + ahead_s
    scene.facts.landing(scene.world.time_s())
    asked = {"by": by["metadata"]["uid"], "requestedAt": rfc3339(now_s), "deadline": rfc3339(now_s + 10.0)}
    stop = {"desired": "Stop", "checkpointRequested": True}
    scene.say(victim, preemption=asked, attempt=stop, conditions={"Admitted": "Admitted"})
    scene.pod(victim)
    scene.wait(waited_s)
    scene.say(victim, conditions={"Admitted": "!Preempted"})
    assert scene.broken("a preempted job has its grace period") == broken


@pytest.mark.parametrize("for_twin", [True, False])
def test_a_job_that_others_made_way_for_goes_before_an_equal_one_that_came_first(scene: Scene, for_twin: bool) -> None:
    victim, first = scene.job("victim"), scene.job("first")
    scene.wait(2.0)
    twin = scene.job("twin")
    scene.world.add_node("n0", 1)
    by = twin if for_twin else first
    scene.say(
        victim,
        preemption={"by": by["metadata"]["uid"], "requestedAt": scene.now()},
        conditions={"Admitted": "!Preempted"},
    )
    scene.wait(10.0)
    scene.admit(twin, "n0")
    assert scene.broken("a job keeps its place") == (not for_twin)


@pytest.mark.parametrize("ended", ["Succeeded", "Failed", None])
def test_an_admission_may_still_be_written_unless_its_job_has_ended(scene: Scene, ended: str | None) -> None:
    job = scene.job("j")
    entry = {"namespace": "default", "name": "j", "uid": job["metadata"]["uid"]}
    scene.world.steps[job["metadata"]["uid"]] = 0
    scene.intend({**entry, "attempt": 1, "cancelledAdmissions": 0})
    scene.say(job, conditions={"Queued": "WaitingForCapacity"} if ended is None else {ended: "Completed"})
    scene.intend()
    assert scene.broken("a batch is settled before the next") == (ended is None)


@pytest.mark.parametrize(("packs", "broken"), [(12, False), (8, True)])
def test_a_job_of_a_foreign_queue_may_fail_only_if_it_has_no_layout(scene: Scene, packs: int, broken: bool) -> None:
    job = scene.job(
        f"{FOREIGN}1",
        queueName=MISSING,
        workers={"replicas": 4, "devices": 2},
        training={"steps": 8, "packsPerStep": packs},
    )
    scene.say(job, conditions={"Failed": "Misconfigured"})
    scene.facts.rules.foreign_queues.check_end(scene.world)
    assert scene.broken("a refused job says so") == broken


@pytest.mark.parametrize(("status", "broken"), [({"completedAt": A_TIME}, False), ({"step": FORGED_STEP}, True)])
def test_the_step_of_a_forged_record_is_not_found_in_a_time(scene: Scene, status: Manifest, broken: bool) -> None:
    """Seed 143 with health."""
    scene.say(scene.job("j"), **status)
    assert scene.broken("a forged record changes no status") == broken


@pytest.mark.parametrize("exists", [True, False])
def test_a_lease_whose_owner_was_removed_is_not_to_come_back(scene: Scene, exists: bool) -> None:
    """Seed 58 with forged records: no leader ran that could have put the owner back."""
    job = scene.job("j")
    scene.world.add_node("n0", 1)
    scene.admit(job, "n0")
    if exists:
        name = labels.job_object_name("j", job["metadata"]["uid"])
        head = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        scene.world.store.create({**head, "metadata": {"name": name, "namespace": "default"}})
    rules = scene.facts.rules.anomalies
    rules.look(scene.world)
    scene.wait(BACK_S["Lease"] + 1.0)
    rules.look(scene.world)
    assert scene.broken("what a job owns comes back") == (not exists)


@pytest.mark.parametrize(("to", "broken"), [("n1", True), ("n2", False)])
def test_a_worker_may_stay_where_others_pods_came_and_none_may_move_there(scene: Scene, to: str, broken: bool) -> None:
    """Seed 3738: one of the workers that were rejected moved, and the others were tried again where they were."""
    for name in ("n0", "n1", "n2"):
        scene.world.add_node(name, 2)
    job = scene.job("j", workers={"replicas": 2, "devices": 1})
    scene.admit(job, "n0", "n1")
    scene.foreign_pod("n1", devices=2)
    scene.wait(KNOWN_S + 1.0)
    scene.admit(job, to, "n1", attempt=2)
    assert scene.broken("others' pods count") == broken
