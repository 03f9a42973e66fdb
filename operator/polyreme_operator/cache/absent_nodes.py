"""Nodes that are not ready or absent, and since when, which determines when their pods count as lost.

Times are measured by the operator's own clock, so that other machines' clocks can't shorten them. After a restart the
operator measures from its start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from polyreme_operator.types.views import NodeView

NOTED_MAX = 10_000
"""Remembered nodes beyond which those without a job's place are dropped."""


class AbsentNodes:
    """Times since which nodes are not ready, or have no Node object.

    Args:
        in_use: Tells whether a job has a place on a node.
    """

    def __init__(self, in_use: Callable[[str], bool]) -> None:
        self._since_s: dict[str, float] = {}
        self._absent: dict[str, NodeView] = {}
        self._in_use = in_use

    def seen(self, node: NodeView, now_s: float) -> NodeView:
        """Note a node's state; return the node with the time since which it is not ready."""
        self._absent.pop(node.name, None)
        if node.ready:
            self._since_s.pop(node.name, None)
            return dataclasses.replace(node, not_ready_since_s=None)
        return dataclasses.replace(node, not_ready_since_s=self._since(node.name, now_s))

    def absent(self, names: Iterable[str], now_s: float) -> dict[str, NodeView]:
        """Return views of absent nodes on which jobs have places."""
        found = {}
        for name in names:
            if name not in self._absent:
                # Its pods may still run, so it is not lost yet, but it gets no new pods.
                self._absent[name] = NodeView(
                    name=name, host=name, ready=False, not_ready_since_s=self._since(name, now_s), unschedulable=True
                )
            found[name] = self._absent[name]
        return found

    def _since(self, name: str, now_s: float) -> float:
        if name not in self._since_s and len(self._since_s) >= NOTED_MAX:
            for unused in [noted for noted in self._since_s if not self._in_use(noted)]:
                del self._since_s[unused]
                self._absent.pop(unused, None)
        return self._since_s.setdefault(name, now_s)
