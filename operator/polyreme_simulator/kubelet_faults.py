"""Kubelets that are up and do not do their work: they reject pods, start none, or end none."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_simulator.nodes import SimNode
from polyreme_simulator.ownership import is_set_apart, owner_uid
from polyreme_simulator.world import World

KINDS = ("kubelet rejects pods", "kubelet starts no pods", "kubelet ends no pods")
REASONS = ("UnexpectedAdmissionError", "OutOfcpu", "OutOfpods", "NodeAffinity", "Evicted")
EVENTS = (1, 2, 4)
LASTS_S = (5.0, 20.0, 60.0)
CALM_EVENTS = 2
CALM_LASTS_S = (10.0, 30.0)
SEEDS_PER_ONE = 5
WITH_ONE = 3
"""Of so many seeds, one after the other, this one has such kubelets; those beside it have other anomalies."""


def has_kubelet_faults(seed: int) -> bool:
    """Tell whether a seed has them."""
    return seed % SEEDS_PER_ONE == WITH_ONE


class KubeletFaults:
    """Draws and makes them.

    Args:
        world: The cluster.
        rng: Every draw.
        reached: Counts what came about.
    """

    def __init__(self, world: World, rng: random.Random, reached: Counter[tuple[str, str]]) -> None:
        self._world, self._rng, self._reached = world, rng, reached

    def begin(self, lasts_s: float) -> None:
        """Plan those of the time of faults. One that ends no pods lasts to their end, or nothing would be stuck."""
        self._world.after(1.0 + 4.0 * self._rng.random(), lambda: self._do(KINDS[2], lasts_s))
        for _ in range(self._rng.choice(EVENTS)):
            at_s, kind = 1.0 + self._rng.random() * (lasts_s - 2.0), self._rng.choice(KINDS[:2])
            self._world.after(at_s, lambda kind=kind: self._do(kind, self._rng.choice(LASTS_S)))  # type: ignore[misc]

    def calm(self, within_s: float) -> None:
        """Plan those of the calm period after the faults, in which nothing else goes wrong."""
        for _ in range(CALM_EVENTS):
            self._world.soon(within_s / 2, lambda: self._do(KINDS[0], self._rng.choice(CALM_LASTS_S)))

    def end(self) -> None:
        """Heal every kubelet."""
        for node in self._world.nodes.values():
            self._heal(node)

    def _do(self, kind: str, lasts_s: float) -> None:
        """Let one kubelet fail, and take a pod from its node, so that another comes."""
        nodes = [node for _, node in sorted(self._world.nodes.items()) if node.present and node.up and not node.fails]
        if not nodes:
            return
        node = self._rng.choice(nodes)
        acts: dict[str, Callable[[], None]] = {
            KINDS[0]: lambda: setattr(node, "rejects", self._rng.choice(REASONS)),
            KINDS[1]: lambda: setattr(node, "starts_pods", False),
            KINDS[2]: lambda: setattr(node, "ends_pods", False),
        }
        acts[kind]()
        self._reached[kind, ""] += 1
        if taken := self._pod_on(node):
            self._world.store.delete(ObjectRef.of(taken), uid=taken["metadata"]["uid"])
        self._world.after(lasts_s, lambda: self._heal(node))

    def _pod_on(self, node: SimNode) -> Manifest | None:
        pods = (record.manifest for record in self._world.store.records("Pod"))
        found = [
            pod
            for pod in pods
            if not is_set_apart(pod) and owner_uid(pod) and pod["spec"].get("nodeName") == node.name
            if not pod["metadata"].get("deletionTimestamp")
        ]
        return self._rng.choice(found) if found else None

    def _heal(self, node: SimNode) -> None:
        if node.fails:
            node.rejects, node.starts_pods, node.ends_pods = "", True, True
            self._world.machines.resume(node.name)
