"""Number of workers that each node can hold now: selectors and taints by class of nodes, resources by array.

Shape suffixes: N nodes, C classes of nodes. The rules are Kubernetes' own: node selector and required node affinity
must hold, taints NoSchedule and NoExecute must be tolerated, PreferNoSchedule is ignored.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyreme_api.labels import GROUP
from polyreme_operator.health.record import HEALTH
from polyreme_operator.types.inventory import (
    HOST_LEVEL,
    BoolArray,
    Constraints,
    GangRequest,
    Inventory,
    NodeClass,
    Requests,
    RowArray,
    Taint,
)

REMEMBERED_MAX = 512
"""Pod templates whose result is cached for one version of the nodes; beyond it the cache is cleared."""
SLOTS_MAX = np.int64(1_000_000)
"""Bound of workers per node if no resource limits them."""
REPELLING = frozenset({"NoSchedule", "NoExecute"})
_OURS = f"{GROUP}/"
NAME_FIELD = "metadata.name"
_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


def slots_N(inventory: Inventory, request: GangRequest, *, blocked_N: BoolArray | None = None) -> RowArray:
    """Return how many workers each node could hold now.

    Args:
        inventory: The nodes.
        request: What one worker needs.
        blocked_N: Nodes that this gang may not use.
    """
    open_N = inventory.usable_N & accepted_N(inventory, request.constraints)
    if blocked_N is not None:
        open_N &= ~blocked_N
    count_N = room_N(inventory, request.requests)
    count_N[~open_N] = 0
    return count_N


def room_N(inventory: Inventory, requests: Requests, *, empty: bool = False) -> RowArray:
    """Return how many workers fit by resources alone.

    Args:
        inventory: The nodes.
        requests: Of one worker.
        empty: As if nothing ran.
    """
    count_N = np.full(len(inventory.names), SLOTS_MAX)
    for resource, amount in requests:
        if amount <= 0:
            continue
        column = inventory.column(resource)
        if column is None:
            return np.zeros(len(inventory.names), dtype=np.int32)
        free_N = inventory.capacity_NR[:, column]
        if not empty:
            free_N = free_N - inventory.used_NR[:, column]
        np.minimum(count_N, free_N if amount == 1 else free_N // amount, out=count_N)
    np.maximum(count_N, 0, out=count_N)
    return count_N.astype(np.int32)


def accepted_N(inventory: Inventory, constraints: Constraints) -> BoolArray:
    """Return the nodes that match a pod template's selectors and tolerations; read-only."""
    return selected_N(inventory, constraints) & tolerated_N(inventory, constraints.tolerations)


def selected_N(inventory: Inventory, constraints: Constraints) -> BoolArray:
    """Return the nodes that match node selector and required node affinity; read-only."""
    key = ("selected", constraints.node_selector, constraints.required_affinity)
    return _remembered(inventory, key, lambda: _selected_N(inventory, constraints))


def tolerated_N(inventory: Inventory, tolerations: str) -> BoolArray:
    """Return the nodes whose taints are tolerated; read-only."""
    return _remembered(inventory, ("tolerated", tolerations), lambda: _tolerated_N(inventory, tolerations))


def _remembered(inventory: Inventory, key: Any, work_out: Any) -> BoolArray:
    kept: dict[Any, BoolArray] = inventory.memo.setdefault("eligible", {})
    found = kept.get(key)
    if found is None:
        if len(kept) >= REMEMBERED_MAX:
            kept.clear()
        found = kept[key] = work_out()
        found.setflags(write=False)
    return found


def _tolerated_N(inventory: Inventory, text: str) -> BoolArray:
    answers: dict[tuple[Taint, ...], bool] = {}
    for node_class in inventory.classes:
        if node_class.taints not in answers:
            answers[node_class.taints] = tolerated(text, node_class.taints)
    return _by_class(inventory, [answers[node_class.taints] for node_class in inventory.classes])


def tolerated(text: str, taints: Sequence[Taint]) -> bool:
    """Tell whether a pod tolerates all taints of a node.

    Args:
        text: The pod's tolerations, as ``Constraints`` has them.
        taints: The node's.
    """
    tolerations = _tolerations(text) if text and taints else ()
    return all(tolerates(tolerations, taint) for taint in taints)


@functools.lru_cache(maxsize=REMEMBERED_MAX)
def _tolerations(text: str) -> Sequence[Mapping[str, Any]]:
    """Parse tolerations; cached, since many jobs have the same ones."""
    read: list[Mapping[str, Any]] = json.loads(text)
    return tuple(read)


def tolerates(tolerations: Sequence[Mapping[str, Any]], taint: Taint) -> bool:
    """Tell whether a taint is tolerated, by the rules of ``core/v1``; no job tolerates that its node is faulty.

    A toleration without a key would otherwise bring a gang back to the node that it has just left, and would accept
    nodes in probation: it does not tolerate taints of polyreme.dev.
    """
    if taint.key == HEALTH and taint.effect in REPELLING:
        return False
    if taint.key.startswith(_OURS):
        tolerations = [each for each in tolerations if each.get("key") == taint.key]
    return taint.effect not in REPELLING or any(_matches_taint(toleration, taint) for toleration in tolerations)


def _matches_taint(toleration: Mapping[str, Any], taint: Taint) -> bool:
    effect, key = toleration.get("effect") or "", toleration.get("key") or ""
    operator = toleration.get("operator") or "Equal"
    if effect and effect != taint.effect:
        return False
    if key and key != taint.key:
        return False
    if operator == "Exists":
        return True
    # An empty key tolerates all with Exists only.
    return operator == "Equal" and bool(key) and (toleration.get("value") or "") == taint.value


def _selected_N(inventory: Inventory, constraints: Constraints) -> BoolArray:
    selector = [{"key": key, "operator": "In", "values": [value]} for key, value in constraints.node_selector]
    open_N = _expressions_N(inventory, selector)
    if constraints.required_affinity:
        affinity = json.loads(constraints.required_affinity)
        any_N = np.zeros(len(inventory.names), dtype=np.bool_)
        for term in affinity.get("nodeSelectorTerms") or []:
            any_N |= _term_N(inventory, term)
        open_N &= any_N
    return open_N


def _term_N(inventory: Inventory, term: Mapping[str, Any]) -> BoolArray:
    """Evaluate one term: all expressions and fields must match; an empty term selects nothing."""
    expressions, fields = term.get("matchExpressions") or [], term.get("matchFields") or []
    if not expressions and not fields:
        return np.zeros(len(inventory.names), dtype=np.bool_)
    open_N = _expressions_N(inventory, expressions)
    for field in fields:
        if field.get("key") != NAME_FIELD:
            open_N[:] = False
        else:
            open_N &= _names_N(inventory, field)
    return open_N


def _expressions_N(inventory: Inventory, expressions: Sequence[Mapping[str, Any]]) -> BoolArray:
    by_host = [expression for expression in expressions if expression.get("key") == HOST_LEVEL]
    by_class = [expression for expression in expressions if expression.get("key") != HOST_LEVEL]
    if by_class:
        open_N = _by_class(inventory, [_class_matches(node_class, by_class) for node_class in inventory.classes])
    else:
        open_N = np.ones(len(inventory.names), dtype=np.bool_)
    for expression in by_host:
        open_N &= _names_N(inventory, expression)
    return open_N


def _class_matches(node_class: NodeClass, expressions: Sequence[Mapping[str, Any]]) -> bool:
    return all(matches(node_class.labels.get(expression.get("key", "")), expression) for expression in expressions)


def _names_N(inventory: Inventory, expression: Mapping[str, Any]) -> BoolArray:
    """Match names of nodes, by row lookup where possible, since lists of names are short."""
    operator = expression.get("operator")
    if operator in {"In", "NotIn"}:
        open_N = np.zeros(len(inventory.names), dtype=np.bool_)
        rows = [inventory.rows[name] for name in expression.get("values") or [] if name in inventory.rows]
        open_N[rows] = True
        return open_N if operator == "In" else ~open_N
    return np.fromiter(
        (matches(name, expression) for name in inventory.names), dtype=np.bool_, count=len(inventory.names)
    )


def matches(value: str | None, expression: Mapping[str, Any]) -> bool:
    """Evaluate one NodeSelectorRequirement on a label's value; None: the node has no such label.

    An operator that Kubernetes does not know matches nothing.
    """
    values = expression.get("values") or []
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return _compare(value, values, sign=1)
        case "Lt":
            return _compare(value, values, sign=-1)
        case _:
            return False


def _compare(value: str | None, values: Sequence[str], *, sign: int) -> bool:
    if value is None or len(values) != 1 or not (_INTEGER.fullmatch(value) and _INTEGER.fullmatch(values[0])):
        return False
    return (int(value) - int(values[0])) * sign > 0


def _by_class(inventory: Inventory, answer_C: Sequence[bool]) -> BoolArray:
    if not inventory.classes:
        return np.ones(len(inventory.names), dtype=np.bool_)
    found: BoolArray = np.asarray(answer_C, dtype=np.bool_)[inventory.class_N]
    return found
