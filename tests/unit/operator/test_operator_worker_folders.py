"""A worker's user may write to folders of the pod's own, whatever its image and its root file system allow."""

from typing import Any

import pytest

from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.worker_pods import POD_FOLDER, PodDefaults
from polyreme_operator.types.actions import CreatePod
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, snapshot

OWN = {"name": "scratch", "mountPath": "/tmp"}


@pytest.mark.parametrize("mounts", [[], [OWN]])
def test_a_launcher_has_folders_that_it_may_write_to_and_a_template_may_bring_its_own(mounts: list[Any]) -> None:
    container = {"name": "launcher", "volumeMounts": mounts}
    template = {"spec": {"containers": [container], "volumes": [{"name": "scratch", "emptyDir": {}}]}}
    owner = admitted(job(workers={"replicas": 2, "devices": 1, "template": template}), replicas=0)
    decision = reconcile(snapshot(owner, lease=lease(owner, attempt=9)), NOW_S, defaults=PodDefaults())
    body, _ = [action.manifest["spec"] for action in decision.actions if isinstance(action, CreatePod)]
    mounted = {mount["mountPath"]: mount["name"] for mount in body["containers"][0]["volumeMounts"]}
    assert {POD_FOLDER, "/tmp"} < set(mounted)
    assert mounted["/tmp"] == ("scratch" if mounts else "polyreme-tmp")
    names = [volume["name"] for volume in body["volumes"]]
    assert len(names) == len(set(names))
    assert set(mounted.values()) <= set(names)
    assert {volume["name"] for volume in body["volumes"] if volume.get("emptyDir") == {}} >= {mounted[POD_FOLDER]}
