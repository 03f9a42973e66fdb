"""Kubernetes resource amounts: quantities as integers, and the requests of pods."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Any

from polyreme_operator.types.inventory import CPU, MEMORY, PODS, Constraints, Requests

_MILLI = 1000
_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10),
    "Mi": Decimal(2**20),
    "Gi": Decimal(2**30),
    "Ti": Decimal(2**40),
    "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}
UNSTATED = 1 << 53
"""Amount of cpu, memory or pods on a node that does not state it, as embedded nodes don't: no limit."""
HUGE_PAGES = "hugepages-"
RESIZE_PENDING = "PodResizePending"
"""Condition of a pod whose resize its node has not taken up."""
_STATED_BY_KUBELETS = (CPU, MEMORY, PODS)
_COUNTED_MAX = 1 << 60
"""Larger amounts are reduced to this one, so that sums fit into 64 bits."""
_DIGITS_MAX = 40
"""A number with more integer digits is reduced to that amount without parsing it, which could be expensive."""


@functools.lru_cache(maxsize=4096)
def quantity(text: str, resource: str) -> int:
    """Parse a quantity, rounded up: cpu in thousandths of a core, everything else in its own unit.

    Raises:
        ValueError: If it is none.
    """
    number = text.strip()
    suffix = number.lstrip("+-0123456789.")
    if suffix[:1] in {"e", "E"} and suffix[1:].lstrip("+-").isdigit():
        suffix = ""
    body = number[: len(number) - len(suffix)] if suffix else number
    if suffix not in _SUFFIXES:
        raise ValueError(
            f"quantity {text!r} of {resource} has the suffix {suffix!r}, expected one of {', '.join(_SUFFIXES)}"
        )
    try:
        given = Decimal(body)
        if given == 0:
            return 0
        if given.adjusted() > _DIGITS_MAX:
            return _COUNTED_MAX if given > 0 else -_COUNTED_MAX
        amount = given * _SUFFIXES[suffix] * (_MILLI if resource == CPU else 1)
        return max(-_COUNTED_MAX, min(_COUNTED_MAX, int(amount.to_integral_value(rounding=ROUND_CEILING))))
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"quantity {text!r} of {resource} is no number") from error


def amounts(stated: Mapping[str, Any] | None) -> dict[str, int]:
    """Parse a resource list; invalid entries are ignored."""
    read: dict[str, int] = {}
    for name, text in (stated or {}).items():
        try:
            read[sys.intern(name)] = quantity(str(text), name)
        except ValueError:
            continue
    return read


def allocatable(stated: Mapping[str, Any] | None) -> Requests:
    """Parse the allocatable resources of a node. Resources that every kubelet states are unlimited if missing."""
    return _shared(tuple(sorted({**dict.fromkeys(_STATED_BY_KUBELETS, UNSTATED), **amounts(stated)}.items())))


def pod_requests(
    spec: Mapping[str, Any], status: Mapping[str, Any] | None = None, *, defaults: Requests = ()
) -> Requests:
    """Return the effective requests of a pod, including one of ``pods``: what kube-scheduler counts for it.

    This is ``PodRequests`` of k8s.io/component-helpers, after the defaults that the API server stores with a new pod:
    the larger of what its containers request together and what any step of its initialisation requests (sidecars run
    beside both), replaced by what the pod itself requests (KEP-2837), and the overhead of its runtime class.

    Args:
        spec: The pod's, or a template's.
        status: The pod's. While it is resized in place, the largest of what is asked, allocated and in force counts.
        defaults: What the namespace's LimitRanges give to containers that request nothing.
    """
    resized = _Resize(status or {})
    requested = _containers_requests(spec, resized, dict(defaults))
    own = spec.get("resources") or {}
    if own.get("limits") or own.get("requests"):
        # The API server completes a pod's own requests before LimitRanges are applied.
        summed = _containers_requests(spec, resized, {}) if defaults else requested
        requested |= resized.of_pod(_own_requests(own, summed))
    _add(requested, amounts(spec.get("overhead")))
    requested[PODS] = 1
    return canonical(requested)


class _Resize:
    """What a pod's status says of its resources, which may be changed in place."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        groups = ("containerStatuses", "initContainerStatuses")
        found: list[Mapping[str, Any]] = [container for group in groups for container in status.get(group) or ()]
        self._containers = {each.get("name"): each for each in found if each.get("resources") is not None}
        self._pod = status
        reasons = [
            entry.get("reason") for entry in status.get("conditions") or () if entry.get("type") == RESIZE_PENDING
        ]
        self._infeasible = reasons[:1] == ["Infeasible"]

    def of_container(self, name: object, asked: dict[str, int]) -> dict[str, int]:
        return self._largest(self._containers.get(name), asked)

    def of_pod(self, asked: dict[str, int]) -> dict[str, int]:
        if self._pod.get("resources") is None:
            return asked
        largest = self._largest(self._pod, asked)
        return {name: largest.get(name, 0) for name in asked}

    def _largest(self, seen: Mapping[str, Any] | None, asked: dict[str, int]) -> dict[str, int]:
        if seen is None:
            return asked
        largest = {} if self._infeasible else dict(asked)
        _raise(largest, amounts((seen.get("resources") or {}).get("requests")))
        _raise(largest, amounts(seen.get("allocatedResources")))
        return largest


def _containers_requests(spec: Mapping[str, Any], resized: _Resize, defaults: dict[str, int]) -> dict[str, int]:
    running: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        asked = defaults | container_requests(container)
        if container.get("restartPolicy") == "Always":
            _add(running, resized.of_container(container.get("name"), asked))
            _raise(peak, running)
        else:
            _raise(peak, {name: running.get(name, 0) + asked.get(name, 0) for name in running | asked})
    for container in spec.get("containers") or ():
        _add(running, resized.of_container(container.get("name"), defaults | container_requests(container)))
    _raise(running, peak)
    return running


def container_requests(container: Mapping[str, Any]) -> dict[str, int]:
    """Return the requests of a container; limits count where a request is missing."""
    resources = container.get("resources") or {}
    return {**amounts(resources.get("limits")), **amounts(resources.get("requests"))}


def _own_requests(own: Mapping[str, Any], summed: Mapping[str, int]) -> dict[str, int]:
    """Return the pod's own requests; where it has limits, those that are missing are its containers', then its limits.

    Only cpu, memory and huge pages can be requested for a whole pod. Huge pages of containers are not overcommitted, so
    they count as they are.
    """
    limits, requests = amounts(own.get("limits")), amounts(own.get("requests"))
    if limits:
        requests = limits | {name: summed[name] for name in (CPU, MEMORY) if name in summed} | requests
    return {name: amount for name, amount in requests.items() if name in (CPU, MEMORY) or name.startswith(HUGE_PAGES)}


def canonical(taken: Mapping[str, int]) -> Requests:
    """Return amounts sorted by name; equal values share one object."""
    return _shared(tuple(sorted((name, amount) for name, amount in taken.items() if amount > 0)))


def larger(one: Requests, other: Requests) -> Requests:
    """Return the larger amount of each resource."""
    if one == other or not other:
        return one
    highest = dict(one)
    _raise(highest, dict(other))
    return canonical(highest)


def constraints_of(spec: Mapping[str, Any]) -> Constraints:
    """Return which nodes a pod spec accepts."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return Constraints(
        node_selector=tuple(sorted((str(k), str(v)) for k, v in (spec.get("nodeSelector") or {}).items())),
        required_affinity="" if not required else _json(required),
        tolerations=_json(spec.get("tolerations") or []),
    )


@functools.lru_cache(maxsize=4096)
def _shared(pairs: Requests) -> Requests:
    return pairs


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _add(into: dict[str, int], more: Mapping[str, int]) -> None:
    for name, amount in more.items():
        into[name] = into.get(name, 0) + amount


def _raise(into: dict[str, int], least: Mapping[str, int]) -> None:
    for name, amount in least.items():
        into[name] = max(into.get(name, 0), amount)
