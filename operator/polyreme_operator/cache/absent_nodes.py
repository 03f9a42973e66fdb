"""Nodes that are not seen ready, and since when: what the fence of their pods is measured by.

Measured on the operator's own clock: what the clocks of other machines say must not shorten a fence. An operator that
has just started has seen nothing, and measures from then on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from polyreme_operator.types.views import NodeView

NOTED_MAX = 10_000
"""Nodes that are remembered before those on which no job has a place are dropped."""


class AbsentNodes:
    """Since when nodes are not seen ready: not ready, or without a Node object.

    Args:
        in_use: Tells whether a job has a place on a node.
    """

    def __init__(self, in_use: Callable[[str], bool]) -> None:
        self._since_s: dict[str, float] = {}
        self._absent: dict[str, NodeView] = {}
        self._in_use = in_use

    def seen(self, node: NodeView, now_s: float) -> NodeView:
        """Take a node as it is seen; return it with the time since when it is not ready."""
        self._absent.pop(node.name, None)
        if node.ready:
            self._since_s.pop(node.name, None)
            return dataclasses.replace(node, not_ready_since_s=None)
        return dataclasses.replace(node, not_ready_since_s=self._since(node.name, now_s))

    def absent(self, names: Iterable[str], now_s: float) -> dict[str, NodeView]:
        """Return what stands for nodes that have no Node object, on which jobs have places."""
        found = {}
        for name in names:
            if name not in self._absent:
                # Its pods may still run, so it is not lost yet; what is missing there does not come back to it.
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
