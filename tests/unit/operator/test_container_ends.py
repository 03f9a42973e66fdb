"""How containers end is read of every container of a pod, reported in words, and matched by rules in every mode."""

import dataclasses
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_operator.reconcile.failure_policy import GiveUp, Restart, judge
from polyreme_operator.reconcile.observe import find_failure
from polyreme_operator.reconcile.pod_ending import how_it_ended
from polyreme_operator.types.parse import parse_pod
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import PodPhase, PodView
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, owner_reference, pod, snapshot

OOM = "was killed for using more memory than its limit (OOMKilled, exit code 137)"
LIMITED = {"resources": {"limits": {"memory": "8Gi"}}}


def end(name: str, code: int, reason: str = "Error", **more: Any) -> dict[str, Any]:
    return {"name": name, "state": {"terminated": {"exitCode": code, "reason": reason, **more}}}


def parsed(
    *statuses: dict[str, Any], init: tuple[dict[str, Any], ...] = (), spec: dict[str, Any] | None = None, **status: Any
) -> PodView:
    """A failed pod with a launcher, a helper, an init container and a sidecar, as its kubelet reports it."""
    body = {
        "containers": [{"name": "launcher", **LIMITED}, {"name": "helper", **LIMITED}],
        "initContainers": [{"name": "fetch", **LIMITED}, {"name": "mesh", "restartPolicy": "Always", **LIMITED}],
    }
    manifest = {
        "metadata": {
            "name": labels.pod_name("j", "uid-j", index=0, replacement=0),
            "namespace": "default",
            "uid": "pod-0",
            "resourceVersion": "1",
            "labels": {labels.LABEL_INDEX: "0", labels.LABEL_REPLACEMENT: "0"},
            "ownerReferences": [owner_reference("j")],
        },
        "spec": spec or body,
        "status": {"phase": "Failed", "containerStatuses": statuses, "initContainerStatuses": init, **status},
    }
    view = parse_pod(manifest, seen_s=NOW_S)
    assert view is not None
    return view


STOPPED = end("mesh", 143, finishedAt="2026-11-26T10:00:09Z")
"""A sidecar that was ended after the others."""
EARLY, LATE = {"finishedAt": "2026-11-26T10:00:01Z"}, {"finishedAt": "2026-11-26T10:00:05Z"}


@pytest.mark.parametrize(
    ("view", "words"),
    [
        (parsed(end("launcher", 137, "OOMKilled")), f"pod {{pod}} {OOM}"),
        (parsed(end("helper", 0, "Completed"), end("launcher", 137, "OOMKilled")), f"pod {{pod}} {OOM}"),
        (
            parsed(end("helper", 137, "OOMKilled", **LATE), end("launcher", 1, **EARLY)),
            f"container helper of pod {{pod}} {OOM}",
        ),
        (parsed(end("launcher", 3, **EARLY), init=(STOPPED,)), "pod {pod} ended as Failed with exit code 3"),
        (
            parsed(end("helper", 143, **LATE), end("launcher", 3, message="no GPU", **EARLY)),
            "pod {pod} ended as Failed with exit code 3: no GPU",
        ),
        (parsed(init=(end("fetch", 4),)), "container fetch of pod {pod} ended as Failed with exit code 4"),
        (parsed(init=(end("fetch", 137, "OOMKilled"),)), f"container fetch of pod {{pod}} {OOM}"),
        (
            parsed(end("launcher", 128, "StartError", message="exec: no such file")),
            "pod {pod} could not be started (StartError, exit code 128): exec: no such file",
        ),
        (
            parsed(end("launcher", 127, "ContainerCannotRun")),
            "pod {pod} could not be started (ContainerCannotRun, exit code 127)",
        ),
        (
            parsed(end("launcher", 143), reason="DeadlineExceeded"),
            "pod {pod} ran longer than its activeDeadlineSeconds (DeadlineExceeded, exit code 143)",
        ),
        (parsed(reason="DeadlineExceeded"), "pod {pod} ran longer than its activeDeadlineSeconds (DeadlineExceeded)"),
        (
            parsed(end("launcher", 137, "ContainerStatusUnknown"), reason="NodeLost"),
            "pod {pod} ended as Failed (NodeLost, ContainerStatusUnknown) with exit code 137",
        ),
        (parsed(reason="OutOfDevices"), "pod {pod} ended as Failed (OutOfDevices)"),
        (
            parsed(end("launcher", 137, "OOMKilled"), spec={"containers": [{"name": "launcher"}]}),
            f"pod {{pod}} {OOM}; it states no limit, so that of its node counts",
        ),
        (
            parsed(end("launcher", 137, "OOMKilled"), spec={"containers": [{"name": "launcher"}], **LIMITED}),
            f"pod {{pod}} {OOM}",
        ),
    ],
)
def test_the_end_of_a_pod_is_reported_in_words(view: PodView, words: str) -> None:
    assert how_it_ended(view) == words.format(pod=view.name)


def test_a_sidecar_that_was_restarted_ends_no_pod() -> None:
    restarted = {"name": "mesh", "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 137}}}
    assert parsed(init=(restarted,)).exit_code is None


def ended(code: int, *, mode: str = "Launcher", rules: list[dict[str, Any]], **fields: Any) -> JobSnapshot:
    """Of two workers the second one's container has ended."""
    workers = {"replicas": 2, "devices": 1, "runtime": {"mode": mode}}
    owner = admitted(job(workers=workers, failurePolicy={"rules": rules}), ("n0", "n1"))
    fields = {"phase": PodPhase.FAILED, "exit_code": code, **fields}
    return snapshot(owner, pods=(pod(owner, 0), pod(owner, 1, where="n1", **fields)), lease=lease(owner))


def rule(*values: int, operator: str = "In", action: str = "Fail") -> list[dict[str, Any]]:
    return [{"name": "r", "action": action, "onExitCodes": {"operator": operator, "values": list(values)}}]


def verdict(seen: JobSnapshot) -> GiveUp | Restart:
    assert seen.job.spec is not None
    found = judge(seen, seen.job.spec, NOW_S)
    assert isinstance(found, GiveUp | Restart)
    return found


@pytest.mark.parametrize("mode", ["Launcher", "Environment"])
@pytest.mark.parametrize(
    ("code", "rules", "fails"),
    [
        (137, rule(137), True),
        (1, rule(137), False),
        (1, rule(137, operator="NotIn"), True),
        (137, rule(137, operator="NotIn"), False),
        (137, [], False),
    ],
)
def test_a_rule_matches_the_exit_code_of_a_container_in_every_mode(
    mode: str, code: int, rules: list[dict[str, Any]], fails: bool
) -> None:
    found = verdict(ended(code, mode=mode, rules=rules, termination="OOMKilled" if code == 137 else "Error"))
    assert isinstance(found, GiveUp) == fails
    if fails and code == 137:
        assert found.failure.message.endswith(OOM)
        assert isinstance(found, GiveUp)
        assert found.message == f"rule r: {found.failure.message}"


@pytest.mark.parametrize("mode", ["Launcher", "Environment"])
def test_no_rule_matches_the_code_by_which_a_restarted_host_marks_its_pods(mode: str) -> None:
    """Their ends were not observed."""
    assert isinstance(verdict(ended(137, mode=mode, rules=rule(137), reason="HostRestarted")), Restart)


def test_what_a_launcher_knows_of_a_killed_rank_is_reported() -> None:
    owner = admitted(job())
    why = "the kernel killed 1 process of its container for want of memory"
    seen = snapshot(
        owner, pods=(pod(owner, 0), pod(owner, 1)), lease=lease(owner, exits=[{"rank": 1, "signal": 9}], message=why)
    )
    assert owner.spec is not None
    failure = find_failure(seen, owner.spec, NOW_S)
    assert failure is not None
    assert (failure.message, failure.code) == (f"rank 1 on worker 1 was killed by signal 9: {why}", 137)
    silent = dataclasses.replace(seen, lease=lease(owner, exits=[{"rank": 1, "signal": 9}]))
    unknown = find_failure(silent, owner.spec, NOW_S)
    assert unknown is not None
    assert unknown.message == "rank 1 on worker 1 was killed by signal 9"
