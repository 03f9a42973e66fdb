"""Jobs that repair nodes: they succeed, fail, hang, lie or are deleted by hand; and another tool that holds a node."""

from __future__ import annotations

import random
from collections.abc import Callable

from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef
from polyreme_operator.health.owners import OURS, REPAIR_OWNER
from polyreme_operator.health.repair import NODE
from polyreme_simulator.world import World

LOOK_S = 0.5
TAKES_S = (0.5, 2.0, 5.0)
CLAIMED_S = (5.0, 30.0)
NAMESPACE = "polyreme-system"
TEMPLATES = ("reset", "reboot", "replace", "check")
DEADLINE_S = 6
OTHER = "another-tool"
WAYS = ("succeeds", "succeeds", "fails", "hangs", "lies", "is deleted")


class RepairHooks:
    """The Job controller of the simulated cluster.

    Args:
        world: The cluster.
        rng: Every draw.
        heal: Ends the fault of a node.
    """

    def __init__(self, world: World, rng: random.Random, heal: Callable[[str], None]) -> None:
        self._world, self._rng, self._heal = world, rng, heal
        self._known: set[str] = set()

    def begin(self) -> None:
        """Store the templates, and follow the Jobs."""
        for name in TEMPLATES:
            container = {"name": "hook", "image": f"{name}:1"}
            self._world.store.create(
                {
                    "apiVersion": "v1",
                    "kind": "PodTemplate",
                    "metadata": {"name": name, "namespace": NAMESPACE},
                    "template": {"spec": {"containers": [container]}},
                }
            )
        self._world.after(LOOK_S, self._look)

    def spec(self) -> dict[str, object]:
        """Draw the repairs of a policy."""
        hooks = [
            {"action": name.capitalize(), "template": name, "deadlineSeconds": DEADLINE_S, "attempts": attempts}
            for name in ("reset", "reboot", "replace")
            if (attempts := self._rng.choice((0, 1, 2)))
        ]
        checked = {"check": {"template": "check", "deadlineSeconds": DEADLINE_S}} if self._rng.random() < 0.5 else {}
        return {"hooks": hooks, "settleSeconds": 10, **checked}

    def claim(self) -> bool:
        """Another tool takes a node for a while."""
        names = [name for name, node in self._world.nodes.items() if node.present]
        if not names:
            return False
        name = self._rng.choice(names)
        notes = self._world.node_object(name)["metadata"].get("annotations") or {}
        if notes.get(REPAIR_OWNER) == OURS:
            return False
        self._set_owner(name, OTHER)
        self._world.after(self._rng.choice(CLAIMED_S), lambda: self._release(name))
        return True

    def release_all(self) -> None:
        """The other tool gives up what it holds."""
        for name in self._world.nodes:
            self._release(name)

    def _release(self, name: str) -> None:
        if not self._world.nodes[name].present:
            return
        notes = self._world.node_object(name)["metadata"].get("annotations") or {}
        if notes.get(REPAIR_OWNER) == OTHER:
            self._set_owner(name, None)

    def _set_owner(self, name: str, owner: str | None) -> None:
        self._world.machines.patch(name, {"metadata": {"annotations": {REPAIR_OWNER: owner}}})

    def _look(self) -> None:
        self._world.after(LOOK_S, self._look)
        for record in list(self._world.store.records("Job")):
            if record.uid not in self._known:
                self._known.add(record.uid)
                self._run(record.manifest)

    def _run(self, job: Manifest) -> None:
        way = self._rng.choice(WAYS) if self._world.faulty else "succeeds"
        self._world.reached[f"hook {way}", ""] += 1
        if way == "hangs":
            return
        self._world.after(self._rng.choice(TAKES_S), lambda: self._end(job, way))

    def _end(self, job: Manifest, way: str) -> None:
        ref, uid, name = ObjectRef.of(job), job["metadata"]["uid"], job["metadata"]["annotations"][NODE]
        try:
            if self._world.store.get(ref)["metadata"]["uid"] != uid:
                return
            if way == "is deleted":
                self._world.store.delete(ref, uid=uid)
                return
        except NotFoundError:
            return
        if way == "succeeds" and name in self._world.nodes:
            self._heal(name)
        kind = "Failed" if way == "fails" else "Complete"
        status = {"conditions": [{"type": kind, "status": "True", "reason": way}]}
        self._world.store.change(ref, {"status": status}, subresource="status")
