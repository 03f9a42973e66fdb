"""Pods that can't be started say why in the job's condition, and in the failure that ends their attempt."""

import dataclasses
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.observe import find_failure
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.types.actions import CreatePod
from polyreme_operator.types.parse import parse_pod
from polyreme_operator.types.pod_start import PodStart
from polyreme_operator.types.pod_waiting import MESSAGE_CHARACTERS_MAX, Waiting
from polyreme_operator.types.reasons import Cause, ConditionType
from polyreme_operator.types.views import PodPhase, PodView
from tests.unit.operator.operator_scenes import NOW_S, admitted, decide, job, lease, owner_reference, pod, snapshot
from tests.unit.operator.operator_scenes import written as status_of

SECRET = Waiting("CreateContainerConfigError", 'secret "store" not found')


def parsed(state: dict[str, Any] | None, known: PodView | None = None, group: str = "containerStatuses") -> PodView:
    """A pod as the kubelet reports it."""
    manifest = {
        "metadata": {
            "name": labels.pod_name("j", "uid-j", index=0, replacement=0),
            "namespace": "team",
            "uid": "pod-0",
            "resourceVersion": "1",
            "labels": {labels.LABEL_INDEX: "0", labels.LABEL_REPLACEMENT: "0"},
            "ownerReferences": [owner_reference("j")],
        },
        "status": {"phase": "Pending", group: [] if state is None else [{"state": {"waiting": state}}]},
    }
    view = parse_pod(manifest, seen_s=NOW_S, known=known)
    assert view is not None
    return view


def said(*pods: PodView) -> str:
    """The message of PodsReady with these pods."""
    owner = admitted(job())
    known = owner.status.condition(ConditionType.PODS_READY)
    after = status_of(decide(snapshot(owner, pods=pods, lease=lease(owner, joined=0, released=False))))
    condition = after.condition(ConditionType.PODS_READY)
    assert condition is not None
    assert condition != known
    return condition.message


def waits(index: int, why: Waiting | None) -> PodView:
    return pod(admitted(job()), index, phase=PodPhase.PENDING, waiting=why, start=PodStart(ran=False))


def test_a_missing_secret_is_named_with_its_namespace_and_what_to_do() -> None:
    words = said(waits(0, SECRET), waits(1, SECRET))
    assert words.startswith("0 of 2 pods run; worker 0 (and 1 more) can't start on node n0: ")
    assert "Secret store does not exist in namespace default" in words
    assert "kubectl create secret generic store -n default --from-env-file=FILE" in words


def test_another_reason_is_repeated_and_goes_when_the_pods_start() -> None:
    owner = admitted(job())
    why = Waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root")
    assert said(waits(0, None), waits(1, why)).endswith(f"worker 1 can't start on node n0: {why.reason}: {why.message}")
    started = status_of(
        decide(snapshot(owner, pods=(pod(owner, 0), pod(owner, 1)), lease=lease(owner, joined=1, released=False)))
    )
    condition = started.condition(ConditionType.PODS_READY)
    assert condition is not None
    assert "can't start" not in condition.message


def test_an_attempt_that_never_started_ends_with_the_same_sentence() -> None:
    owner = admitted(job(), at_s=NOW_S - 10_000)
    assert owner.spec is not None
    quiet = dataclasses.replace(lease(owner), record=None, advanced_seen_s=NOW_S - 10_000)
    seen = snapshot(owner, pods=(waits(0, SECRET), waits(1, SECRET)), lease=quiet)
    failure = find_failure(seen, owner.spec, NOW_S)
    assert failure is not None
    assert failure.cause is Cause.START_TIMED_OUT
    assert "Secret store does not exist in namespace default" in failure.message


def test_containers_without_a_launcher_differ_from_a_late_launcher() -> None:
    owner = admitted(job(), at_s=NOW_S - 10_000)
    assert owner.spec is not None
    runs = (pod(owner, 0), pod(owner, 1))
    quiet = dataclasses.replace(lease(owner), record=None, advanced_seen_s=NOW_S - 10_000)
    late = lease(owner, joined=1, released=False)
    for heard, said_so in ((quiet, True), (late, False)):
        failure = find_failure(snapshot(owner, pods=runs, lease=heard), owner.spec, NOW_S)
        assert failure is not None
        assert failure.cause is Cause.START_TIMED_OUT
        assert ("needs workers.runtime.mode: Environment" in failure.message) is said_so


@pytest.mark.parametrize("group", ["containerStatuses", "initContainerStatuses"])
def test_the_kubelets_reason_is_read_and_bounded(group: str) -> None:
    view = parsed({"reason": SECRET.reason, "message": SECRET.message}, group=group)
    assert view.waiting == SECRET
    long = parsed({"reason": "ErrImagePull", "message": "x" * 5_000}).waiting
    assert long is not None
    assert len(long.message) == MESSAGE_CHARACTERS_MAX


@pytest.mark.parametrize("state", [None, {}, {"reason": "ContainerCreating"}, {"reason": "PodInitializing"}])
def test_a_start_that_goes_well_has_no_reason(state: dict[str, Any] | None) -> None:
    assert parsed(state).waiting is None


def test_the_registrys_answer_is_kept_while_the_kubelet_backs_off() -> None:
    refused = parsed({"reason": "ErrImagePull", "message": "registry: 401 Unauthorized"})
    again = parsed({"reason": "ImagePullBackOff", "message": "Back-off pulling image"}, known=refused)
    assert again.waiting == refused.waiting


@pytest.mark.parametrize("mode", ["Launcher", "Environment"])
def test_every_workers_container_takes_variables_from_the_secret_and_the_template_goes_before_it(mode: str) -> None:
    own = {"configMapRef": {"name": "own"}}
    template = {"spec": {"containers": [{"name": "a", "image": "i", "envFrom": [own]}, {"name": "b", "image": "i"}]}}
    workers = {"replicas": 2, "devices": 1, "template": template, "runtime": {"mode": mode}}
    owner = admitted(job(workers=workers), replicas=0)
    seen = snapshot(owner, lease=lease(owner, attempt=9))
    decision = reconcile(seen, NOW_S, defaults=PodDefaults(worker_secret="store"))
    made = [action.manifest["spec"]["containers"] for action in decision.actions if isinstance(action, CreatePod)]
    assert len(made) == 2
    for first, second in made:
        assert first["envFrom"] == [{"secretRef": {"name": "store"}}, own]
        assert "envFrom" not in second
