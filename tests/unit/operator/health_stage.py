"""A stage whose nodes have conditions of the agent, and its policies."""

from __future__ import annotations

from typing import Any

from polyreme_cluster.port import STATUS_SUBRESOURCE, Manifest, ObjectRef
from polyreme_operator.health.record import HEALTH, Record, parse
from polyreme_operator.settings import Settings
from polyreme_operator.types.observer import Observer
from tests.unit.operator.operator_stage import Stage, node_manifest

GPU = "polyreme.dev/GPU"
FOREIGN = {"key": "example.com/keep", "value": "1", "effect": "NoSchedule"}
SETTINGS = Settings(node_health=True, retry_max_s=5.0)


class HealthStage(Stage):
    """A cluster whose nodes have conditions of the agent."""

    def __init__(self, nodes: int = 20, settings: Settings = SETTINGS, *, observer: Observer | None = None) -> None:
        super().__init__(settings, observer=observer)
        for at in range(nodes):
            self.store.create(node_manifest(f"n{at}", 2, taints=[FOREIGN] if at == 0 else []))

    def add_policy(self, name: str = "gpus", **spec: Any) -> None:
        self.store.create(
            {
                "apiVersion": "polyreme.dev/v1alpha1",
                "kind": "NodeFaultPolicy",
                "metadata": {"name": name},
                "spec": {"mode": "Enforce", "classes": ["gpu-lost"], **spec},
            }
        )

    def show(self, node: str, *, status: str = "True", reason: str = "Xid79", kind: str = GPU) -> None:
        """Write a condition as the agent does."""
        ref = ObjectRef(kind="Node", name=node)
        others = [each for each in self.node(node)["status"]["conditions"] if each["type"] != kind]
        mine = {"type": kind, "status": status, "reason": reason, "message": "GPU 0 fell off the bus"}
        self.store.change(ref, {"status": {"conditions": [*others, mine]}}, subresource=STATUS_SUBRESOURCE)

    def node(self, name: str) -> Manifest:
        return self.store.get(ObjectRef(kind="Node", name=name))

    def record(self, name: str) -> Record | None:
        return parse((self.node(name)["metadata"].get("annotations") or {}).get(HEALTH))[0]

    def taints(self, name: str) -> list[str]:
        return [taint["key"] for taint in self.node(name)["spec"].get("taints") or ()]

    def out(self) -> list[str]:
        return sorted(each.name for each in self.store.records("Node") if HEALTH in self.taints(each.name))

    def policy(self, name: str = "gpus") -> dict[str, Any]:
        found = self.store.get(ObjectRef(kind="NodeFaultPolicy", name=name))
        return dict(found.get("status") or {})
