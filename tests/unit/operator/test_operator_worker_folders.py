"""A worker's user may write to folders of the pod's own, whatever its image and its root file system allow."""

from typing import Any

import pytest

from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.worker_pods import POD_FOLDER, PodDefaults
from polyreme_operator.types.actions import CreatePod
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, snapshot

MEMORY = "/dev/shm"
OWN = {"name": "scratch", "mountPath": "/tmp"}


def created(container: dict[str, Any], *, devices: int = 1, mode: str = "Launcher") -> dict[str, Any]:
    """Return the spec of the first pod of a job of two workers."""
    template = {"spec": {"containers": [container], "volumes": [{"name": "scratch", "emptyDir": {}}]}}
    owner = admitted(
        job(workers={"replicas": 2, "devices": devices, "template": template, "runtime": {"mode": mode}}), replicas=0
    )
    decision = reconcile(snapshot(owner, lease=lease(owner, attempt=9)), NOW_S, defaults=PodDefaults())
    body, _ = [action.manifest["spec"] for action in decision.actions if isinstance(action, CreatePod)]
    return dict(body)


@pytest.mark.parametrize("mode", ["Launcher", "Environment"])
@pytest.mark.parametrize(("limits", "size"), [({}, "8192Mi"), ({"memory": "32Gi"}, "4096Mi")])
def test_shared_memory_of_a_worker_is_sized_by_its_devices_and_its_limit(
    limits: dict[str, str], size: str, mode: str
) -> None:
    body = created({"name": "trainer", "image": "own", "resources": {"limits": limits}}, devices=8, mode=mode)
    (mount,) = (each for each in body["containers"][0]["volumeMounts"] if each["mountPath"] == MEMORY)
    (volume,) = (each for each in body["volumes"] if each["name"] == mount["name"])
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": size}


@pytest.mark.parametrize("mode", ["Launcher", "Environment"])
def test_shared_memory_of_the_template_replaces_it(mode: str) -> None:
    own = {"name": "trainer", "image": "own", "volumeMounts": [{"name": "scratch", "mountPath": MEMORY}]}
    body = created(own, mode=mode)
    assert [each["name"] for each in body["containers"][0]["volumeMounts"] if each["mountPath"] == MEMORY] == [
        "scratch"
    ]
    assert not any((each.get("emptyDir") or {}).get("medium") for each in body["volumes"])


@pytest.mark.parametrize("mounts", [[], [OWN]])
def test_a_launcher_has_folders_that_it_may_write_to_and_a_template_may_bring_its_own(mounts: list[Any]) -> None:
    body = created({"name": "launcher", "volumeMounts": mounts})
    mounted = {mount["mountPath"]: mount["name"] for mount in body["containers"][0]["volumeMounts"]}
    assert {POD_FOLDER, "/tmp"} < set(mounted)
    assert mounted["/tmp"] == ("scratch" if mounts else "polyreme-tmp")
    names = [volume["name"] for volume in body["volumes"]]
    assert len(names) == len(set(names))
    assert set(mounted.values()) <= set(names)
    assert {volume["name"] for volume in body["volumes"] if volume.get("emptyDir") == {}} >= {mounted[POD_FOLDER]}
