"""The machines of the simulated cluster, their Node objects, and the cleanup after machines that are gone."""

from __future__ import annotations

from polyreme_api import labels
from polyreme_api.times import rfc3339
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_simulator.kubelets import KubeletContext, Kubelets
from polyreme_simulator.nodes import OWNED, SimNode

NOT_READY_S = 4.0
"""Time until a silent node is marked NotReady."""
EVICTION_S = 6.0
"""Time from NotReady until the node's pods are deleted: they stay Terminating, since no kubelet ends them."""
POD_GARBAGE_S = 12.0
"""Longest time until pods of a node that is no more are removed."""
HOST = "kubernetes.io/hostname"


class Machines:
    """All machines, those that are gone too.

    Args:
        world: The cluster.
        kubelets: What runs on them.
    """

    def __init__(self, world: KubeletContext, kubelets: Kubelets) -> None:
        self._world, self._kubelets, self._store = world, kubelets, world.store
        self.nodes: dict[str, SimNode] = {}
        self.lost_s: dict[str, float] = {}
        """When each node was last away, or said to be out of service."""

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
        self._kubelets.sync_node(name)
        for launcher in list(self._world.launchers.values()):
            if launcher.node == name and launcher.alive:
                self._kubelets.sync(launcher.ref, launcher.pod_uid)
                if launcher.leading is not None:
                    launcher.leading.read_job()

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
        self._kubelets.sync_node(name)

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
            self._kubelets.sync_node(name)

    def _kill_all(self, name: str) -> None:
        for launcher in list(self._world.launchers.values()):
            if launcher.node == name and launcher.alive:
                launcher.kill()
        self._kubelets.forget_foreign(name)

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

    def _now(self) -> str:
        return rfc3339(self._world.clock.now_s())
