"""Jobs that no queue accepts: of other namespaces, above the largest priority, of a queue that does not exist."""

from __future__ import annotations

import copy
import random
from typing import Any

from polyreme_api import labels
from polyreme_cluster.port import Manifest
from polyreme_simulator.foreign_queue_facts import MISSING
from polyreme_simulator.ownership import FOREIGN
from polyreme_simulator.world import World

GUARDED = f"{FOREIGN}guarded"
PRIORITY_MAX = 1_000
PRIORITY = 1_000_000
OURS, STRANGERS = "default", "strangers"
DEVICES = 64


class ForeignQueues:
    """Creates such jobs, each a copy of one of the seed's own jobs.

    Args:
        world: The cluster.
        rng: Every draw.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self._count = 0

    def begin(self) -> None:
        """Create the queue, which selects one namespace of two."""
        for name, team in ((OURS, "ours"), (STRANGERS, "theirs")):
            metadata = {"name": name, "labels": {"team": team}}
            self._world.store.create({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        spec = {
            "quotas": [{"resource": labels.RESOURCE_DEVICE, "nominal": DEVICES}],
            "namespaceSelector": {"matchLabels": {"team": "ours"}},
            "priorityMax": PRIORITY_MAX,
        }
        kind = {"apiVersion": labels.API_VERSION, "kind": labels.KIND_QUEUE}
        self._world.store.create({**kind, "metadata": {"name": GUARDED}, "spec": spec})

    def submit(self, like: Manifest) -> bool:
        """Create a job that asks for what another asks for, from a queue that does not accept it."""
        self._count += 1
        namespace, queue, priority = self._rng.choice(
            ((STRANGERS, GUARDED, 0), (STRANGERS, GUARDED, PRIORITY), (OURS, GUARDED, PRIORITY), (OURS, MISSING, 0))
        )
        metadata = {
            "name": f"{FOREIGN}{self._count}",
            "namespace": namespace,
            # Its data is that of the other job, and as ready.
            "annotations": dict(like["metadata"].get("annotations") or {}),
        }
        spec: dict[str, Any] = copy.deepcopy(like["spec"])
        spec |= {"queueName": queue, "priority": priority, "priorityClassName": "", "suspend": False}
        head = {"apiVersion": labels.API_VERSION, "kind": labels.KIND_JOB}
        self._world.store.create({**head, "metadata": metadata, "spec": spec})
        return True
