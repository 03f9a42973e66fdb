"""The kubelets of the simulated cluster: the pods of their nodes are started, ended and reported."""

from __future__ import annotations

import base64
import random
import signal
from collections.abc import Callable
from typing import Any, Protocol

from polyreme_api import labels
from polyreme_api.environment import PodEnvironment
from polyreme_api.exit_codes import ExitCode, code_of_signal
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef, PortError
from polyreme_simulator.launcher import LauncherContext, SimLauncher
from polyreme_simulator.nodes import SimNode, devices_of
from polyreme_simulator.ownership import is_set_apart, owner_uid

KUBELET_S = 0.3
"""Longest time that a kubelet takes to act."""
MOUNT_RETRY_S = 1.0


class KubeletContext(LauncherContext, Protocol):
    """What kubelets need of the simulated cluster."""

    @property
    def rng(self) -> random.Random:
        """Every draw."""

    @property
    def launchers(self) -> dict[str, SimLauncher]:
        """Launchers by the UID of their pod, including those that ended."""

    def soon(self, longest_s: float, act: Callable[[], Any]) -> None:
        """Do something at some time within ``longest_s``."""


class Kubelets:
    """What the kubelets of all nodes do about pods.

    Args:
        world: The cluster.
    """

    def __init__(self, world: KubeletContext) -> None:
        self._world = world
        self._store = world.store
        self.foreign: dict[str, tuple[str, int]] = {}
        """Node and devices of the running pods that are none of ours, by UID."""

    def sync_node(self, name: str) -> None:
        """Do what a kubelet does that begins: it lists the pods of its node, those that wait for their end too."""
        for record in list(self._store.records("Pod")):
            if record.manifest["spec"].get("nodeName") == name and not is_set_apart(record.manifest):
                self.sync(ObjectRef.of(record.manifest), record.uid)

    def forget_foreign(self, name: str) -> None:
        """A node's processes are gone."""
        self.foreign = {uid: taken for uid, taken in self.foreign.items() if taken[0] != name}

    def sync(self, ref: ObjectRef, uid: str) -> None:
        """What a pod's kubelet does about it."""
        launcher = self._world.launchers.get(uid)
        pod = self._pod(ref, uid)
        name = pod["spec"].get("nodeName") if pod is not None else launcher.node if launcher is not None else None
        node = self._world.nodes.get(name or "")
        if node is None:
            if pod is None:
                self.foreign.pop(uid, None)
            return
        if pod is None:
            if launcher is not None and launcher.alive:
                launcher.zombie = launcher.zombie or not node.up
                if node.up:
                    launcher.kill()
        elif node.up:
            self._sync_bound(pod, ref, uid, node)

    def _sync_bound(self, pod: Manifest, ref: ObjectRef, uid: str, node: SimNode) -> None:
        launcher = self._world.launchers.get(uid)
        deleting = pod["metadata"].get("deletionTimestamp") is not None
        if (deleting and not node.ends_pods) or not (deleting or node.starts_pods):
            if launcher is not None:
                # What runs in it is fenced like what runs on a node that is cut off.
                launcher.zombie = launcher.zombie or deleting
            return
        ended = (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
        if deleting:
            if launcher is not None and launcher.alive:
                launcher.terminate(float(pod["metadata"]["deletionGracePeriodSeconds"]))
            else:
                self.foreign.pop(uid, None)
                self._store.delete(ref, uid=uid, grace_period_s=0)
        elif launcher is None and not ended:
            self._start(pod, ref, uid, node)
        elif launcher is not None and not launcher.alive and not ended:
            self._report_end(ref, uid, code_of_signal(signal.SIGKILL))

    def _pod(self, ref: ObjectRef, uid: str) -> Manifest | None:
        try:
            pod = self._store.shown(ref)
        except NotFoundError:
            return None
        return pod if pod["metadata"]["uid"] == uid else None

    def _start(self, pod: Manifest, ref: ObjectRef, uid: str, node: SimNode) -> None:
        if uid in self.foreign:
            return
        if node.rejects and owner_uid(pod):
            self._world.facts.rules.starts.rejected(pod, self._world)
            self._set_status(ref, {"phase": "Failed", "reason": node.rejects, "message": "Pod was rejected"})
            return
        devices = devices_of(pod)
        if self.taken(node.name) + devices > node.devices:
            self._world.reached["refused by its kubelet", ""] += 1
            self._set_status(ref, {"phase": "Failed", "reason": "OutOfDevices"})
            return
        if not owner_uid(pod):
            self.foreign[uid] = (node.name, devices)
            self._set_status(ref, {"phase": "Running"})
            return
        key = self._key_of(pod)
        if key is None:
            # Its container waits for the Secret that it mounts.
            self._world.after(KUBELET_S, lambda: self.sync(ref, uid))
            return
        container = pod["spec"]["containers"][0]
        environment = PodEnvironment.parse({entry["name"]: entry["value"] for entry in container["env"]})
        if not self._world.has_child(environment, "Secret"):
            # Its volume can't be mounted.
            self._world.after(MOUNT_RETRY_S, lambda: self.sync(ref, uid))
            return
        rng = random.Random(self._world.rng.random())
        launcher = SimLauncher(self._world, environment, key=key, pod_uid=uid, node=node.name, rng=rng)
        self._world.launchers[uid] = launcher
        self._set_status(ref, {"phase": "Running"})
        launcher.start()

    def _key_of(self, pod: Manifest) -> bytes | None:
        """Read the Secret that a pod mounts; None while it does not exist."""
        (name,) = (each["secret"]["secretName"] for each in pod["spec"]["volumes"] if "secret" in each)
        try:
            secret = self._store.shown(ObjectRef(kind="Secret", namespace=pod["metadata"]["namespace"], name=name))
        except NotFoundError:
            return None
        return base64.b64decode(secret["data"][labels.SECRET_KEY])

    def taken(self, name: str) -> int:
        """Return the devices of a node that processes hold."""
        ours = sum(
            launcher.pod.devices
            for launcher in self._world.launchers.values()
            if launcher.alive and launcher.node == name
        )
        return ours + sum(devices for node, devices in self.foreign.values() if node == name)

    def _set_status(self, ref: ObjectRef, status: dict[str, Any]) -> None:
        self._store.change(ref, {"status": status}, subresource="status")

    def launcher_ended(self, launcher: SimLauncher, code: int) -> None:
        """A launcher's process is gone; its kubelet says so, if it can."""
        self._world.soon(KUBELET_S, lambda: self._report_end(launcher.ref, launcher.pod_uid, code))

    def _report_end(self, ref: ObjectRef, uid: str, code: int) -> None:
        launcher = self._world.launchers[uid]
        if not self._world.nodes[launcher.node].up:
            return
        try:
            pod = self._store.shown(ref)
            if pod["metadata"]["uid"] != uid:
                return
            if pod["metadata"].get("deletionTimestamp") is not None:
                self._store.delete(ref, uid=uid, grace_period_s=0)
                return
            ended = [{"name": "launcher", "state": {"terminated": {"exitCode": code}}}]
            phase = "Succeeded" if code == ExitCode.OK else "Failed"
            self._set_status(ref, {"phase": phase, "containerStatuses": ended})
        except PortError:
            return
