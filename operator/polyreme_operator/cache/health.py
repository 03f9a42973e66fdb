"""Nodes and policies as the health of nodes sees them, and which of them have changed since it was last decided."""

from __future__ import annotations

import dataclasses

from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.policy import PolicyView
from polyreme_operator.health.signs import AGENT_SILENT_S


class HealthIndex:
    """Nodes by name, policies by name, and what is to be decided again."""

    def __init__(self) -> None:
        self.nodes: dict[str, HealthNode] = {}
        self.policies: dict[str, PolicyView] = {}
        self.tainted: set[str] = set()
        self.not_ready_since_s: dict[str, float] = {}
        self.shown_s: dict[str, float] = {}
        """When each node's present conditions were first seen, by our clock."""
        self._beat_s: dict[str, float] = {}
        self._dirty: dict[str, None] = {}

    def put_node(self, node: HealthNode, now_s: float) -> bool:
        """Add or replace a node; tell whether its state must be decided again."""
        before = self.nodes.get(node.name)
        self.nodes[node.name] = node
        if node.tainted:
            self.tainted.add(node.name)
        else:
            self.tainted.discard(node.name)
        if before is None or before.beat != node.beat:
            self._beat_s[node.name] = now_s
        if before is None or before.conditions != node.conditions:
            self.shown_s[node.name] = now_s
        if node.not_ready_since_s is None:
            moved = self.not_ready_since_s.pop(node.name, None) is not None
        else:
            moved = self.not_ready_since_s.get(node.name) != node.not_ready_since_s
            self.not_ready_since_s[node.name] = node.not_ready_since_s
        if before is not None and before.judged == node.judged:
            return moved
        self._dirty[node.name] = None
        return True

    def remove_node(self, name: str) -> bool:
        """Remove a node; tell whether there was one."""
        self.tainted.discard(name)
        for known in (self.not_ready_since_s, self.shown_s, self._beat_s):
            known.pop(name, None)
        if self.nodes.pop(name, None) is None:
            return False
        self._dirty[name] = None
        return True

    def put_policy(self, policy: PolicyView) -> bool:
        """Add or replace a policy; tell whether anything must be decided again."""
        before = self.policies.get(policy.name)
        self.policies[policy.name] = policy
        same = before is not None and _spec(before) == _spec(policy)
        if not same:
            self.touch_all()
        return not same

    def remove_policy(self, name: str) -> bool:
        """Remove a policy; tell whether there was one."""
        if self.policies.pop(name, None) is None:
            return False
        self.touch_all()
        return True

    def touch_all(self) -> bool:
        """Have the state of every node decided again; tell whether there are any."""
        self._dirty.update(dict.fromkeys(self.nodes))
        return bool(self.nodes)

    def touch(self, *names: str) -> None:
        """Have the state of some nodes decided again."""
        self._dirty.update(dict.fromkeys(names))

    def take_dirty(self) -> list[str]:
        """Return the nodes whose state must be decided, and forget them."""
        names, self._dirty = sorted(self._dirty), {}
        return names

    def is_silent(self, name: str, now_s: float) -> bool:
        """Tell whether the agent of a node has reported, and does so no more."""
        node = self.nodes[name]
        if node.beat is None:
            return False
        return node.agent == "Unknown" or now_s - self._beat_s.get(name, now_s) >= AGENT_SILENT_S


def _spec(policy: PolicyView) -> PolicyView:
    """Return a policy without its status, which the operator writes itself."""
    return dataclasses.replace(policy, resource_version="", status={})
