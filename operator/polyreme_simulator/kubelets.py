"""The nodes of the simulated cluster, their kubelets, and the cleanup after nodes that are gone."""

from __future__ import annotations

import base64
import random
import signal
from collections.abc import Callable
from typing import Any, Protocol

from polyreme_api import labels
from polyreme_api.environment import PodEnvironment
from polyreme_api.exit_codes import ExitCode, code_of_signal
from polyreme_api.times import rfc3339
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef, PortError
from polyreme_simulator.launcher import LauncherContext, SimLauncher
from polyreme_simulator.nodes import OWNED, SimNode, devices_of
from polyreme_simulator.ownership import is_set_apart, owner_uid

KUBELET_S = 0.3
"""Longest time that a kubelet takes to act."""
NOT_READY_S = 4.0
"""Time until a silent node is marked NotReady."""
EVICTION_S = 6.0
"""Time from NotReady until the node's pods are deleted: they stay Terminating, since no kubelet ends them."""
POD_GARBAGE_S = 12.0
"""Longest time until pods of a node that is no more are removed."""
MOUNT_RETRY_S = 1.0
HOST = "kubernetes.io/hostname"


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
    """All nodes, and what their kubelets do.

    Args:
        world: The cluster.
    """

    def __init__(self, world: KubeletContext) -> None:
        self._world = world
        self._store = world.store
        self.nodes: dict[str, SimNode] = {}
        self.foreign: dict[str, tuple[str, int]] = {}
        """Node and devices of the running pods that are none of ours, by UID."""
        self.lost_s: dict[str, float] = {}
        """When each node was last away, or said to be out of service."""

    # ---------------------------------------------------------------------------------------------------------- nodes

    def add(self, node: SimNode, *, owned: bool) -> None:
        """Add a machine to the cluster."""
        self.nodes[node.name] = node
        self._store.create(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": node.name, "labels": {HOST: node.name, **node.labels}},
                "spec": {"taints": [OWNED]} if owned else {},
                "status": {
                    "allocatable": {
                        labels.RESOURCE_DEVICE: str(node.devices),
                        "cpu": "64",
                        "memory": "512Gi",
                        "pods": "110",
                    },
                    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": self._now()}],
                },
            }
        )

    def away(self, name: str, *, dead: bool) -> None:
        """A node is cut off; a dead one runs nothing any more."""
        node = self.nodes[name]
        if not node.up:
            return
        node.up = False
        self.lost_s[name] = self._world.time_s()
        if dead:
            self._kill_all(name)
        self._world.after(NOT_READY_S, lambda: None if node.up else self._say_ready(name, "Unknown"))
        if self._world.rng.random() < 0.5:
            self._world.after(NOT_READY_S + EVICTION_S, lambda: None if node.up else self._evict(name))

    def back(self, name: str) -> None:
        """It is back, with whatever it still runs."""
        node = self.nodes[name]
        if node.up or not node.present:
            return
        node.up = True
        self.lost_s[name] = self._world.time_s()
        self._say_ready(name, "True")
        self._sync_bound_to(name)
        for launcher in list(self._world.launchers.values()):
            if launcher.node == name and launcher.alive:
                self.sync(launcher.ref, launcher.pod_uid)
                if launcher.leading is not None:
                    launcher.read_job()

    def remove(self, name: str) -> None:
        """The machine is gone for good, and its Node object with it; its pods are cleared up later."""
        node = self.nodes[name]
        node.up = node.present = False
        self.lost_s[name] = self._world.time_s()
        self._kill_all(name)
        ref = ObjectRef(kind="Node", name=name)
        self._store.delete(ref, uid=self._store.shown(ref)["metadata"]["uid"])
        self._world.soon(POD_GARBAGE_S, lambda: self._clear(name))

    def add_again(self, name: str, *, owned: bool) -> None:
        """A new, empty machine of that name joins; its kubelet lists the pods still bound to it, and ends them."""
        old = self.nodes[name]
        self.lost_s[name] = self._world.time_s()
        self.add(SimNode(name=name, devices=old.devices, labels=old.labels), owned=owned)
        self._sync_bound_to(name)

    def flap(self, name: str, for_s: float) -> None:
        """A Node object is deleted; the machine, still running, registers again with the same labels and status."""
        node, ref = self.nodes[name], ObjectRef(kind="Node", name=name)
        known = self._store.shown(ref)
        node.present = False
        self._store.delete(ref, uid=known["metadata"]["uid"])
        again = {name: known[name] for name in ("apiVersion", "kind", "spec", "status")}
        again["metadata"] = {"name": name, "labels": known["metadata"].get("labels") or {}}

        def register() -> None:
            if not node.present and self.nodes[name] is node:
                node.present = True
                self._store.create(again)
                if not node.up:
                    self._say_ready(name, "Unknown")

        self._world.after(for_s, register)

    def patch(self, name: str, patch: Manifest) -> None:
        """Change a Node object, as an administrator does."""
        self._store.change(ObjectRef(kind="Node", name=name), patch)

    def resume(self, name: str) -> None:
        """A kubelet does its work again: it looks at the pods of its node."""
        if self.nodes[name].up and self.nodes[name].present:
            self._sync_bound_to(name)

    def _sync_bound_to(self, name: str) -> None:
        """Do what a kubelet does that begins: it lists the pods of its node, those that wait for their end too."""
        for record in list(self._store.records("Pod")):
            if record.manifest["spec"].get("nodeName") == name and not is_set_apart(record.manifest):
                self.sync(ObjectRef.of(record.manifest), record.uid)

    def _kill_all(self, name: str) -> None:
        for launcher in list(self._world.launchers.values()):
            if launcher.node == name and launcher.alive:
                launcher.kill()
        self.foreign = {uid: taken for uid, taken in self.foreign.items() if taken[0] != name}

    def _evict(self, name: str) -> None:
        """Delete a silent node's pods, as the taint manager does: they get a deletion time, and stay."""
        for record in list(self._store.records("Pod")):
            if record.manifest["spec"].get("nodeName") == name:
                self._world.reached["stuck Terminating", ""] += 1
                self._store.delete(ObjectRef.of(record.manifest), uid=record.uid)

    def _clear(self, name: str) -> None:
        """Remove the pods of a node that is no more."""
        if self.nodes[name].present:
            return
        for record in list(self._store.records("Pod")):
            if record.manifest["spec"].get("nodeName") == name:
                self._store.delete(ObjectRef.of(record.manifest), uid=record.uid, grace_period_s=0)

    def _say_ready(self, name: str, status: str) -> None:
        if not self.nodes[name].present:
            return
        condition = {"type": "Ready", "status": status, "lastTransitionTime": self._now()}
        self._store.change(
            ObjectRef(kind="Node", name=name), {"status": {"conditions": [condition]}}, subresource="status"
        )

    # ----------------------------------------------------------------------------------------------------------- pods

    def sync(self, ref: ObjectRef, uid: str) -> None:
        """What a pod's kubelet does about it."""
        launcher = self._world.launchers.get(uid)
        pod = self._pod(ref, uid)
        name = pod["spec"].get("nodeName") if pod is not None else launcher.node if launcher is not None else None
        node = self.nodes.get(name or "")
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
        if not self.nodes[launcher.node].up:
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

    def _now(self) -> str:
        return rfc3339(self._world.clock.now_s())
