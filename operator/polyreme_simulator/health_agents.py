"""Node agents and the people who look after nodes: late, lying and silent agents, releases, broken records, resets."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef, PortError
from polyreme_operator.health.record import HEALTH, NodeState, parse
from polyreme_simulator.health_facts import BY_HAND, GPU, KERNEL, LOST
from polyreme_simulator.repair_hooks import RepairHooks
from polyreme_simulator.scenario import RACK
from polyreme_simulator.world import World

POLICY = "gpus"
AGENT_S = 1.0
LATE_S = 8.0
"""Longest time by which an agent is late while faults last."""
HEALS_S = (4.0, 15.0, 40.0)
HOOKS_FIRST = 10
"""How many times longer a fault lasts by itself where hooks repair nodes."""
SILENT_S = (10.0, 40.0)
EVENTS = (6, 12, 18)
"""How often something happens to nodes, agents and policies while faults last."""
CARE_S = 20.0
"""How often a person looks after the nodes once the faults are over."""
CODES = (LOST, "Xid48", "LinkFlap", "Xid999", KERNEL)
CLASSES = ("gpu-lost", "gpu-memory", "kernel", "network-link")
PERCENTS = (10, 50, 100, 100)
OF_A_RACK = {"level": "rack", "faultClasses": ["gpu-lost"], "nodesPercent": 30}
"""The evacuation rule of some seeds."""
BROKEN = ("{", "[" * 5_000, '{"version":1,"state":"gone"}', "x" * 20_000)
ACTIONS = ("Now", "Checkpoint", "Finish")
FAULTS = (
    "agent lies",
    "agent silent",
    "breaker reset",
    "health record broken",
    "node faulty",
    "node quarantined by hand",
    "node taint removed",
    "policies overlap",
    "policy changed",
    "rack fails",
)


def has_hooks(seed: int) -> bool:
    """Tell whether nodes of a seed are repaired by hooks."""
    return seed % 3 == 2


def has_evacuations(seed: int) -> bool:
    """Tell whether the policy of a seed takes whole racks out."""
    return seed % 5 == 4


class HealthAgents:
    """What happens to nodes; drawn from a generator of its own.

    Args:
        world: The cluster.
        rng: Every draw.
        hooks: Whether the policy has hooks that repair nodes.
        evacuations: Whether it takes whole racks out.
    """

    def __init__(self, world: World, rng: random.Random, *, hooks: bool = False, evacuations: bool = False) -> None:
        self._world, self._rng, self._evacuations = world, rng, evacuations
        self._repairs_rng = random.Random(rng.getstate()[1][0])
        """Draws of probations and repairs, apart from the others so that these stay as they were."""
        self._hooks = RepairHooks(world, random.Random(rng.getstate()[1][1]), self._heal) if hooks else None
        self._faults: dict[str, str] = {}
        """Code that each faulty node shows."""
        self._silent: set[str] = set()
        self._resets = 0
        self._acts: tuple[tuple[int, str, Callable[[], bool]], ...] = (
            (8, "node faulty", self._fail),
            (2, "agent lies", self._lie),
            (2, "agent silent", self._silence),
            (2, "node taint removed", self._release),
            (1, "node quarantined by hand", self._quarantine),
            (1, "health record broken", self._break_record),
            (2, "breaker reset", self._reset),
            (1, "policy changed", self._change_policy),
            (1, "policies overlap", self._overlap),
        )
        if self._hooks is not None:
            self._acts = (*self._acts, (2, "node claimed", self._hooks.claim), (16, "node faulty", self._fail))
        if evacuations:
            self._acts = (*self._acts, (6, "rack fails", self._fail_rack))

    def begin(self, lasts_s: float, *, faults: bool) -> None:
        """Create the policy, and plan what happens."""
        facts = self._world.facts.rules.health
        facts.percent, facts.nodes = self._rng.choice(PERCENTS), len(self._world.nodes)
        if self._hooks is not None:
            self._hooks.begin()
        self._world.store.create(self._policy(POLICY))
        facts.enforced_s = float("inf")
        self._report_all()
        if not faults:
            return
        for _ in range(self._rng.choice(EVENTS)):
            self._world.after(4.0 + self._rng.random() * (lasts_s - 6.0), self._disturb)

    def end(self) -> None:
        """End the faults: nodes are repaired, agents report, people look after what is out."""
        self._faults.clear()
        self._silent.clear()
        if self._hooks is not None:
            self._hooks.release_all()
        self._set_policy({"mode": "Enforce", "classes": list(CLASSES)})
        self._report_all()
        self._care()

    def ask(self, job: Manifest) -> None:
        """Draw how a job leaves a faulty node."""
        asked: dict[str, Any] = {"action": self._rng.choice(ACTIONS)}
        if self._rng.random() < 0.5:
            asked["deadlineSeconds"] = self._rng.choice((2, 10, 30))
        job["spec"].setdefault("failurePolicy", {})["onNodeFault"] = asked
        if self._repairs_rng.random() < 0.3:
            job["spec"]["acceptProbation"] = True

    def _disturb(self) -> None:
        if not self._world.faulty:
            return
        _, name, act = self._rng.choices(self._acts, [weight for weight, _, _ in self._acts])[0]
        if act():
            self._world.reached[name, ""] += 1

    # -------------------------------------------------------------------------------------------------------- agents

    def _fail(self) -> bool:
        """A fault occurs; ranks that run there may die of it, and a repair ends it."""
        name, code = self._rng.choice(sorted(self._world.nodes)), self._rng.choice(CODES)
        self._faults[name] = code
        self._report_soon(name)
        if self._rng.random() < 0.4:
            for launcher in self._world.launchers.values():
                if launcher.node == name and launcher.alive:
                    for rank in list(launcher.ranks.values()):
                        if rank.alive:
                            rank.end(code=None, signal=9)
        heals_s = self._rng.choice(HEALS_S) * (HOOKS_FIRST if self._hooks is not None else 1)
        self._world.after(heals_s, lambda: self._heal(name))
        return True

    def _heal(self, name: str) -> None:
        self._faults.pop(name, None)
        self._report_soon(name)

    def _lie(self) -> bool:
        """A detector shows faults that are none, on many nodes at once."""
        for name in sorted(self._world.nodes):
            if self._rng.random() < 0.7:
                self._faults[name] = LOST
                self._report_soon(name)
                self._world.after(self._rng.choice(HEALS_S), lambda name=name: self._heal(name))  # type: ignore[misc]
        return True

    def _fail_rack(self) -> bool:
        """What the nodes of a rack share fails: most of them show it, for the same time."""
        rack_by_node = {name: node.labels.get(RACK, "") for name, node in self._world.nodes.items()}
        rack = self._rng.choice(sorted(set(rack_by_node.values())))
        heals_s = self._rng.choice(HEALS_S)
        for name in sorted(name for name, its in rack_by_node.items() if its == rack):
            if self._rng.random() < 0.6:
                self._faults[name] = LOST
                self._report_soon(name)
                self._world.after(heals_s, lambda name=name: self._heal(name))  # type: ignore[misc]
        return True

    def _silence(self) -> bool:
        name = self._rng.choice(sorted(self._world.nodes))
        self._silent.add(name)

        def speak() -> None:
            self._silent.discard(name)
            self._report_soon(name)

        self._world.after(self._rng.choice(SILENT_S), speak)
        return True

    def _report_all(self) -> None:
        for name in self._world.nodes:
            self._report_soon(name)
        self._world.after(CARE_S, self._report_all_again)

    def _report_all_again(self) -> None:
        # A node that joined again has no conditions of the agent yet.
        for name in self._world.nodes:
            self._report_soon(name)
        self._world.after(CARE_S, self._report_all_again)

    def _report_soon(self, name: str) -> None:
        longest_s = LATE_S if self._world.faulty and self._rng.random() < 0.2 else AGENT_S
        self._world.after(longest_s * self._rng.random(), lambda: self._report(name))

    def _report(self, name: str) -> None:
        if name in self._silent or not self._world.nodes[name].present:
            return
        code, node = self._faults.get(name, ""), self._world.node_object(name)
        gpu = code not in {"", KERNEL}
        mine = [
            {"type": GPU, "status": str(gpu), "reason": code if gpu else "Healthy"},
            {"type": KERNEL, "status": str(code == KERNEL), "reason": KERNEL if code == KERNEL else "Healthy"},
        ]
        known = node["status"]["conditions"]
        conditions = [*(each for each in known if each["type"] not in {GPU, KERNEL}), *mine]
        if conditions != known:
            ref = ObjectRef(kind="Node", name=name)
            self._world.store.change(ref, {"status": {"conditions": conditions}}, subresource="status")

    # -------------------------------------------------------------------------------------------------------- people

    def _tainted(self) -> list[str]:
        names = [name for name, node in self._world.nodes.items() if node.present]
        return [name for name in names if HEALTH in self._keys(name)]

    def _keys(self, name: str) -> list[str]:
        return [taint["key"] for taint in (self._world.node_object(name).get("spec") or {}).get("taints") or ()]

    def _lift(self, name: str) -> None:
        taints = (self._world.node_object(name).get("spec") or {}).get("taints") or ()
        self._world.machines.patch(name, {"spec": {"taints": [each for each in taints if each["key"] != HEALTH]}})

    def _release(self) -> bool:
        names = self._tainted()
        if names:
            self._lift(self._rng.choice(names))
        return bool(names)

    def _quarantine(self) -> bool:
        names = [name for name, node in self._world.nodes.items() if node.present and HEALTH not in self._keys(name)]
        if names:
            name = self._rng.choice(names)
            taints = (self._world.node_object(name).get("spec") or {}).get("taints") or ()
            mine = {"key": HEALTH, "value": BY_HAND, "effect": "NoSchedule"}
            self._world.machines.patch(name, {"spec": {"taints": [*taints, mine]}})
        return bool(names)

    def _break_record(self) -> bool:
        names = [name for name, node in self._world.nodes.items() if node.present]
        if names:
            text = self._rng.choice(BROKEN)
            self._world.machines.patch(self._rng.choice(names), {"metadata": {"annotations": {HEALTH: text}}})
        return bool(names)

    def _care(self) -> None:
        """Lift what only a person lifts, and reset the breaker."""
        self._world.after(CARE_S, self._care)
        for name in self._tainted():
            record, _ = parse((self._world.node_object(name)["metadata"].get("annotations") or {}).get(HEALTH))
            if record is not None and (record.is_persons or record.state is NodeState.RETIRED):
                self._lift(name)
        self._reset()

    # ------------------------------------------------------------------------------------------------------ policies

    def _policy(self, name: str) -> Manifest:
        more: dict[str, Any] = {} if self._hooks is None or name != POLICY else {"repairs": self._hooks.spec()}
        if self._evacuations:
            more["evacuations"] = [{"name": "rack", **OF_A_RACK}]
        percent = self._world.facts.rules.health.percent
        return policy_manifest(name, self._rng, self._repairs_rng, nodes_percent=percent, **more)

    def _set_policy(self, spec: dict[str, Any]) -> bool:
        try:
            self._world.store.change(ObjectRef(kind=labels.KIND_FAULT_POLICY, name=POLICY), {"spec": spec})
        except PortError:
            return False
        enforces = spec.get("mode", "Enforce") == "Enforce"
        self._world.facts.rules.health.enforced_s = float("inf") if enforces else self._world.time_s()
        return True

    def _reset(self) -> bool:
        self._resets += 1
        ref = ObjectRef(kind=labels.KIND_FAULT_POLICY, name=POLICY)
        try:
            latched = ((self._world.store.shown(ref).get("status") or {}).get("breaker") or {}).get("latched")
            if latched:
                self._world.reached["breaker latched", ""] += 1
                self._world.store.change(ref, {"spec": {"breaker": {"reset": f"{self._resets}"}}})
        except PortError:
            return False
        return bool(latched)

    def _change_policy(self) -> bool:
        """Only observe for a while."""
        changed = self._set_policy({"mode": "Observe"})
        self._world.after(self._rng.choice(HEALS_S), lambda: self._set_policy({"mode": "Enforce"}))
        return changed

    def _overlap(self) -> bool:
        """Another policy selects the same nodes for a while: then none acts."""
        ref = ObjectRef(kind=labels.KIND_FAULT_POLICY, name="other")
        try:
            uid = self._world.store.create(self._policy(ref.name))["metadata"]["uid"]
        except PortError:
            return False
        self._world.after(self._rng.choice(SILENT_S), lambda: self._world.store.delete(ref, uid=uid))
        return True


def policy_manifest(
    name: str, rng: random.Random, repairs_rng: random.Random, *, nodes_percent: int | None, **more: Any
) -> Manifest:
    """Draw a policy that takes nodes out of service."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_FAULT_POLICY,
        "metadata": {"name": name},
        "spec": {
            "mode": "Enforce",
            "classes": list(CLASSES),
            "examineSeconds": rng.choice((3, 8, 15)),
            "probationSeconds": rng.choice((5, 30)),
            "probation": {"loadedSeconds": repairs_rng.choice((0, 3, 10)), "maxSeconds": repairs_rng.choice((10, 40))},
            **more,
            "breaker": {"nodesPercent": nodes_percent, "windowSeconds": rng.choice((1, 20, 60))},
        },
    }
