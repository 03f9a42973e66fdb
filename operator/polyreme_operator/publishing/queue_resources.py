"""Check that a queue's quotas name devices that nodes offer: other devices are unlimited, and so is a typo."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Set as AbstractSet

from polyreme_operator.placement.unsatisfiable import NODE_RESOURCES
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.queues import QueueView

RESOURCES_NAMED = "ResourcesNamed"
"""Condition of a queue."""
NAMED = "Named"
UNNAMED = "UnnamedUnlimited"
REFUSED = "UnnamedRefused"
UNKNOWN = "UnknownResource"
SHOWN_MAX = 8
"""Resources that a message names."""


@dataclasses.dataclass(frozen=True, slots=True)
class NamedResources:
    """Value of the condition."""

    holds: bool
    reason: str
    message: str = ""


def named_resources(view: QueueView, tree: QueueTree, offered: AbstractSet[str]) -> NamedResources:
    """Compare the quotas of a queue and its parents with what nodes offer.

    Nothing is reported about cpu, memory and what else every node has, since most queues limit devices alone.

    Args:
        view: The queue.
        tree: All queues.
        offered: Resources that any node offers; without any, no quota can be wrong.
    """
    devices = {name for name in offered - NODE_RESOURCES if "/" in name}
    unknown = sorted(quota.resource for quota in view.quotas if offered and quota.resource not in offered)
    if unknown:
        near = difflib.get_close_matches(unknown[0], sorted(offered), n=1)
        meant = f"; did you mean {near[0]}?" if near else "; correct spec.quotas, or add nodes"
        return NamedResources(False, UNKNOWN, f"no node offers {_listed(unknown)}, which spec.quotas names{meant}")
    unnamed = sorted(devices - tree.limited(view.name))
    if not unnamed:
        return NamedResources(True, NAMED)
    if any(tree.views[name].refuses_unnamed for name in tree.path(view.name)):
        return NamedResources(True, REFUSED, f"jobs that request {_listed(unnamed)} are refused")
    words = f"jobs may use {_listed(unnamed)} without limit: neither the queue nor a parent has a quota for that"
    return NamedResources(False, UNNAMED, f"{words}; add one to spec.quotas, or set unnamedResources: Refuse")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_MAX} more" if len(names) > SHOWN_MAX else ""
    return f"{', '.join(names[:SHOWN_MAX])}{more}"
