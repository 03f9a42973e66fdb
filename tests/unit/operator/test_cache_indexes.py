"""What the small indexes of the cache remember, and what they forget."""

import dataclasses
import json

import numpy as np
import pytest

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache import absent_nodes
from polyreme_operator.cache.absent_nodes import AbsentNodes
from polyreme_operator.cache.children import ChildIndex
from polyreme_operator.cache.health import HealthIndex
from polyreme_operator.cache.jobs import wants_resize
from polyreme_operator.cache.leases import LeaseIndex, lease_ref
from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.cache.seen_objects import SeenObjects
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.policy import PolicyView
from polyreme_operator.health.signs import AGENT_SILENT_S, ConditionView
from polyreme_operator.types.job_keys import JobKeys
from polyreme_operator.types.resources import canonical
from polyreme_operator.types.views import JobView
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, admitted, job, node, owner_reference

FAULT = ConditionView(type="polyreme.dev/GPU", status="True", reason="Xid79")


def lease_manifest(owner: JobView, *, owner_uid: str = "") -> Manifest:
    record = {"attempt": 1, "released": True, "joined": 2, "updatedAtS": 1.0}
    reference = {**owner_reference(owner.name), "uid": owner_uid or owner.uid}
    metadata = {
        "name": lease_ref(owner).name,
        "namespace": owner.namespace,
        "uid": "lease",
        "resourceVersion": "1",
        "ownerReferences": [reference],
        "annotations": {labels.ANNOTATION_PROGRESS: json.dumps(record)},
    }
    return {"metadata": metadata}


def index_of(owner: JobView) -> LeaseIndex:
    return LeaseIndex(JobKeys(), {owner.ref: owner}.get)


def test_a_lease_that_names_another_job_is_no_longer_the_first_ones() -> None:
    owner = job()
    index = index_of(owner)
    for number in range(2):
        changes = index.put(lease_ref(owner), lease_manifest(owner), NOW_S + number)
        assert changes is not None
        assert changes.jobs == {owner.uid}
    # Another job of that name, whose UID begins in the same way.
    stolen = index.put(lease_ref(owner), lease_manifest(owner, owner_uid="u-idj"), NOW_S + 2)
    assert stolen is not None
    assert stolen.jobs == {owner.uid}
    assert index.by_job == {}


def test_an_outage_excuses_silence_and_missing_progress_up_to_the_present() -> None:
    owner = job()
    index = index_of(owner)
    index.put(lease_ref(owner), lease_manifest(owner), NOW_S - 50)
    index.put(lease_ref(owner), lease_manifest(owner), NOW_S)
    index.excuse_silence(30.0, now_s=NOW_S + 20)
    excused = index.by_job[owner.uid]
    assert (excused.seen_s, excused.advanced_seen_s) == (NOW_S + 20, NOW_S - 20)


def test_conditions_are_dated_when_they_change_and_an_agent_when_its_beat_does() -> None:
    index = HealthIndex()
    first = HealthNode(name="n", agent="True", beat="1", conditions=(FAULT,))
    index.put_node(first, 100.0)
    index.put_node(dataclasses.replace(first, beat="2"), 150.0)
    assert index.shown_s["n"] == 100.0
    index.put_node(dataclasses.replace(first, beat="2", labels=(("a", "b"),)), 200.0)
    assert index.is_silent("n", 150.0 + AGENT_SILENT_S), "the third state had no new beat"
    assert not index.is_silent("n", 149.0 + AGENT_SILENT_S)
    index.put_node(dataclasses.replace(first, beat="2", conditions=()), 300.0)
    assert index.shown_s["n"] == 300.0


def test_the_status_of_a_policy_has_no_node_decided_again() -> None:
    index, policy = HealthIndex(), PolicyView(name="p")
    index.put_node(HealthNode(name="n"), 1.0)
    assert index.put_policy(policy)
    assert index.take_dirty() == ["n"]
    assert not index.put_policy(dataclasses.replace(policy, resource_version="2", status={"nodes": 1}))
    assert index.take_dirty() == []


def test_when_too_many_absent_nodes_are_noted_those_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent_nodes, "NOTED_MAX", 2)
    absent = AbsentNodes(lambda name: name == "used")
    absent.absent(["used"], 1.0)
    absent.absent(["free"], 2.0)
    assert absent.absent(["used", "free"], 3.0)["free"].not_ready_since_s == 2.0, "the limit is not exceeded yet"
    absent.absent(["new"], 4.0)
    seen = absent.absent(["used", "free"], 5.0)
    assert (seen["used"].not_ready_since_s, seen["free"].not_ready_since_s) == (1.0, 5.0)


def test_an_attempt_that_starts_pods_has_all_objects_confirmed_again() -> None:
    index = ChildIndex()
    index.confirm("u", "Secret", now_s=1.0)
    assert index.known("u", now_s=2.0) == {"Secret"}
    index.begin("u")
    assert (index.known("u", now_s=2.0), index.until_s("u")) == (frozenset(), None)


def test_a_deleted_object_is_known_until_a_list_does_not_show_it() -> None:
    seen, ref = SeenObjects(), ObjectRef(kind="Pod", namespace="a", name="b")
    assert ref not in seen
    seen.take(ref, 5)
    assert ref in seen
    seen.drop_deleted("Pod", version=5)
    assert ref not in seen


def test_a_suspended_job_is_not_resized() -> None:
    running = admitted(job(replicas=2, workers={"replicas": 2, "minReplicas": 1, "maxReplicas": 4}))
    assert wants_resize(running)
    assert running.spec is not None
    suspended = dataclasses.replace(running, spec=running.spec.model_copy(update={"suspend": True}))
    assert not wants_resize(suspended)


def test_the_devices_and_the_pods_on_a_node_are_counted_up_and_down() -> None:
    table = NodeTable()
    table.put(node("n0", 4))
    requests = canonical({DEVICE: 2})
    table.add("n0", requests, 1, busy=True)
    table.add("n0", requests, 1, busy=True)
    table.add("n0", requests, -1, busy=True)
    found = table.snapshot()
    np.testing.assert_array_equal(found.busy_N, [1])
    assert found.used_NR[0, found.resources.index(DEVICE)] == dict(requests)[DEVICE]
