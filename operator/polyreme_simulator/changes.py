"""Changes by people and others in the cluster: nodes, labels, queues, topologies, namespaces, pods of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from polyreme_api import labels
from polyreme_cluster.port import ObjectRef, PortError
from polyreme_simulator.nodes import OWNED
from polyreme_simulator.ownership import owner_uid
from polyreme_simulator.quotas import queue_manifest
from polyreme_simulator.scenario import (
    COHORT,
    RACK,
    URGENT,
    Scenario,
    class_manifest,
    draw_queues,
    topology_manifest,
)
from polyreme_simulator.world import World

NAMESPACED = ("TrainingJob", "Pod", "Service", "Secret", "Lease", "ServiceAccount", "Role", "RoleBinding")
FOREIGN_S = (5.0, 20.0, 60.0)
"""How long pods of others stay."""
AWAY_S = (5.0, 20.0, 60.0)
MAINTENANCE = {"key": "example.com/maintenance", "effect": "NoSchedule"}
NO_EXECUTE = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}


class Changes:
    """Draws and makes them.

    Args:
        world: The cluster.
        scenario: What it was at the beginning.
        rng: Every draw.
    """

    def __init__(self, world: World, scenario: Scenario, rng: random.Random) -> None:
        self._world, self._scenario, self._rng = world, scenario, rng
        self._count = 0
        self.acts: dict[str, tuple[int, Callable[[], bool]]] = {
            "foreign pod": (4, self._foreign_pod),
            "node removed": (1, self._remove_node),
            "node cordoned": (1, self._cordon),
            "node tainted": (1, self._taint),
            "node out of service": (1, self._out_of_service),
            "queue changed": (3, self._change_queue),
            "queue stopped": (1, self._stop_queue),
            "queue cycle": (1, self._make_cycle),
            "queue deleted": (1, self._delete_queue),
            "topology changed": (2, self._change_topology),
            "node relabelled": (1, self._relabel),
            "priority class changed": (1, self._change_class),
            "namespace deleted": (1, self._delete_namespace),
        }
        """Weight and act by name."""

    def draw(self) -> tuple[str, Callable[[], bool]]:
        """Draw one."""
        names, favours = list(self.acts), self._scenario.profile.favours
        name = self._rng.choices(names, [favours.get(name, self.acts[name][0]) for name in names])[0]
        return name, self.acts[name][1]

    def repair(self) -> None:
        """Put everything back in order, so that every job that fits can run."""
        for name, node in self._world.nodes.items():
            if not node.present:
                self._node_again(name)
            self._world.machines.patch(name, {"spec": {"unschedulable": None, "taints": self._taints()}})
        for name, spec in self._scenario.queues.items():
            self._put_queue(name, spec)
        self._put_topology()
        for name, _, rack in self._scenario.nodes:
            self._world.machines.patch(name, {"metadata": {"labels": {RACK: rack}}})
        for record in list(self._world.store.records("Pod")):
            if not owner_uid(record.manifest):
                self._world.store.delete(ObjectRef.of(record.manifest), uid=record.uid)

    # ---------------------------------------------------------------------------------------------------------- pods

    def _foreign_pod(self) -> bool:
        self._count += 1
        stays_s = self._rng.choice(FOREIGN_S)
        devices = self._rng.choice((1, 1, 2))
        ref = ObjectRef(kind="Pod", namespace="others", name=f"foreign-{self._count}")
        resources = {"limits": {labels.RESOURCE_DEVICE: str(devices)}}
        pod = self._world.store.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": ref.name, "namespace": ref.namespace},
                "spec": {"containers": [{"name": "c", "image": "i", "resources": resources}]},
            }
        )
        uid = pod["metadata"]["uid"]
        self._world.after(stays_s, lambda: self._try(lambda: self._world.store.delete(ref, uid=uid)))
        return True

    def _delete_namespace(self) -> bool:
        """Delete what a namespace holds, in any order and one by one, as its controller does."""
        found = [
            ObjectRef.of(record.manifest)
            for kind in NAMESPACED
            for record in self._world.store.records(kind, namespace="team")
        ]
        self._rng.shuffle(found)
        for ref in found:
            self._world.soon(2.0, lambda ref=ref: self._delete(ref))  # type: ignore[misc]
        return bool(found)

    # ---------------------------------------------------------------------------------------------------------- nodes

    def _node(self) -> str | None:
        names = [name for name, node in self._world.nodes.items() if node.present]
        return self._rng.choice(names) if names else None

    def _taints(self) -> list[dict[str, str]]:
        return [OWNED] if self._scenario.owned else []

    def _remove_node(self) -> bool:
        name = self._node()
        if name is None:
            return False
        self._world.machines.remove(name)
        self._world.after(self._rng.choice(AWAY_S), lambda: self._node_again(name))
        return True

    def _node_again(self, name: str) -> None:
        if not self._world.nodes[name].present:
            self._world.machines.add_again(name, owned=self._scenario.owned)

    def _for_a_while(self, patch: dict[str, Any], back: dict[str, Any]) -> bool:
        name = self._node()
        if name is None:
            return False
        self._world.machines.patch(name, patch)
        self._world.after(self._rng.choice(AWAY_S), lambda: self._try(lambda: self._world.machines.patch(name, back)))
        return True

    def _cordon(self) -> bool:
        return self._for_a_while({"spec": {"unschedulable": True}}, {"spec": {"unschedulable": None}})

    def _taint(self) -> bool:
        taints = self._taints()
        return self._for_a_while({"spec": {"taints": [*taints, MAINTENANCE]}}, {"spec": {"taints": taints}})

    def _out_of_service(self) -> bool:
        """An administrator says of a dead node that nothing runs there any more."""
        name = self._node()
        if name is None or not self._world.nodes[name].up:
            return False
        self._world.machines.away(name, dead=True)
        taints = self._taints()
        self._world.machines.patch(name, {"spec": {"taints": [*taints, NO_EXECUTE]}})

        def back() -> None:
            if self._world.nodes[name].present:
                self._world.machines.patch(name, {"spec": {"taints": taints}})
                self._world.machines.back(name)

        self._world.after(self._rng.choice(AWAY_S), back)
        return True

    def _relabel(self) -> bool:
        name = self._node()
        if name is None:
            return False
        rack = self._rng.choice(("r0", "r1", None))
        self._world.machines.patch(name, {"metadata": {"labels": {RACK: rack}}})
        self._world.nodes[name].labels = {} if rack is None else {RACK: rack}
        return True

    # ----------------------------------------------------------------------------------------------- queues, topology

    def _queue(self) -> str | None:
        return self._rng.choice(sorted(self._scenario.queues)) if self._scenario.queues else None

    def _put_queue(self, name: str, spec: dict[str, Any]) -> None:
        ref = ObjectRef(kind="TrainingQueue", name=name)
        try:
            known = self._world.store.shown(ref)
        except PortError:
            self._world.store.create(queue_manifest(name, spec, labels.API_VERSION))
            return
        gone = dict.fromkeys(known["spec"].keys() - spec.keys())
        self._world.store.change(ref, {"spec": {**gone, **spec}})

    def _change_queue(self) -> bool:
        """Give all queues other quotas."""
        if not self._scenario.queues:
            return False
        for name, spec in draw_queues(self._rng, self._scenario.profile).items():
            if name in self._scenario.queues:
                parent = self._scenario.queues[name].get("parent", "")
                self._put_queue(name, {**spec, "parent": parent} if parent else spec)
        return True

    def _stop_queue(self) -> bool:
        name = self._queue()
        if name is None:
            return False
        policy = self._rng.choice(("Hold", "HoldAndDrain"))
        ref = ObjectRef(kind="TrainingQueue", name=name)

        def say(policy: str) -> None:
            self._try(lambda: self._world.store.change(ref, {"spec": {"stopPolicy": policy}}))

        say(policy)
        self._world.after(self._rng.choice(AWAY_S), lambda: say("None"))
        return True

    def _make_cycle(self) -> bool:
        if COHORT not in self._scenario.queues:
            return False
        ref = ObjectRef(kind="TrainingQueue", name=COHORT)
        below = self._rng.choice([name for name in sorted(self._scenario.queues) if name != COHORT])

        def say(parent: str | None) -> None:
            self._try(lambda: self._world.store.change(ref, {"spec": {"parent": parent}}))

        say(below)
        self._world.after(self._rng.choice(AWAY_S), lambda: say(None))
        return True

    def _delete_queue(self) -> bool:
        name = self._queue()
        if name is None or not self._delete(ObjectRef(kind="TrainingQueue", name=name)):
            return False
        again_s = self._rng.choice(AWAY_S)
        self._world.after(again_s, lambda: self._put_queue(name, self._scenario.queues[name]))
        return True

    def _put_topology(self) -> None:
        if self._scenario.racks:
            ref = ObjectRef(kind="ClusterTopology", name="default")
            manifest = topology_manifest([("rack", RACK)])
            try:
                self._world.store.change(ref, {"spec": manifest["spec"]})
            except PortError:
                self._world.store.create(manifest)

    def _change_class(self) -> bool:
        """Create the class, delete it, or recreate it with another value: the value of a class never changes."""
        gone = self._delete(ObjectRef(kind="PriorityClass", name=URGENT))
        if not gone or self._rng.random() < 0.5:
            self._world.store.create(class_manifest(self._rng.choice((0, 1, 3))))
        return True

    def _change_topology(self) -> bool:
        if not self._scenario.racks:
            return False
        ref = ObjectRef(kind="ClusterTopology", name="default")
        if self._rng.random() < 0.5:
            if not self._delete(ref):
                return False
        else:
            levels = topology_manifest([("zone", "example.com/zone"), ("rack", RACK)])["spec"]
            self._try(lambda: self._world.store.change(ref, {"spec": levels}))
        self._world.after(self._rng.choice(AWAY_S), self._put_topology)
        return True

    # --------------------------------------------------------------------------------------------------------- basics

    def _delete(self, ref: ObjectRef) -> bool:
        try:
            self._world.store.delete(ref, uid=self._world.store.shown(ref)["metadata"]["uid"])
        except PortError:
            return False
        return True

    @staticmethod
    def _try(act: Callable[[], Any]) -> None:
        """Do what may have become impossible."""
        try:
            act()
        except PortError:
            return
