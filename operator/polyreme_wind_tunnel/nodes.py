"""Nodes of a simulated cluster: in the gang, in reserve, or away until they are repaired."""

from __future__ import annotations

import heapq

from polyreme_wind_tunnel.scenario import Machines


class Nodes:
    """Nodes by number; ``number // nodes_per_rack`` is the rack."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self.gang = list(range(machines.nodes))
        self.idle = list(range(machines.nodes, machines.nodes + machines.spares))
        self._away: list[tuple[int, int]] = []

    @property
    def whole(self) -> bool:
        """Whether the gang has all its nodes."""
        return len(self.gang) == self._machines.nodes

    def of_rack(self, node: int) -> set[int]:
        """Return the nodes in service that share a node's rack."""
        rack = node // self._machines.nodes_per_rack
        return {each for each in (*self.gang, *self.idle) if each // self._machines.nodes_per_rack == rack}

    def workers_on(self, nodes: set[int]) -> list[int]:
        """Return the workers of the gang on some nodes."""
        return [index for index, node in enumerate(self.gang) if node in nodes]

    def lose(self, lost: set[int], *, until_ms: int) -> None:
        """Take those of some nodes that serve out of service."""
        serving = {*self.gang, *self.idle}
        self.gang = [node for node in self.gang if node not in lost]
        self.idle = [node for node in self.idle if node not in lost]
        for node in lost & serving:
            heapq.heappush(self._away, (until_ms, node))

    def next_return_ms(self) -> int | None:
        """Return when the next node is repaired; None if none is away."""
        return self._away[0][0] if self._away else None

    def fill(self, now_ms: int) -> None:
        """Take repaired nodes back, and fill the gang from those in reserve."""
        while self._away and self._away[0][0] <= now_ms:
            self.idle.append(heapq.heappop(self._away)[1])
        missing = self._machines.nodes - len(self.gang)
        if missing > 0:
            self.gang += self.idle[:missing]
            self.idle = self.idle[missing:]
