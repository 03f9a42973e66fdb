"""Additions of the API server to a new worker pod, known before: LimitRanges and RuntimeClasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyreme_api.job import TrainingJobSpec
from polyreme_cluster.port import Manifest
from polyreme_operator.types.inventory import PODS, Requests
from polyreme_operator.types.resources import amounts, canonical, larger, pod_requests


@dataclasses.dataclass(frozen=True, slots=True)
class Additions:
    """What a pod gets that its template does not request."""

    defaults: Requests = ()
    """Of each container that requests nothing: the namespace's LimitRanges."""
    overhead: Requests = ()
    """Of the pod: its RuntimeClass."""


NONE = Additions()


def worker_requests(spec: TrainingJobSpec, additions: Additions) -> Requests:
    """Return the requests of a worker pod as the API server will store it; the devices are those of one container."""
    body: Mapping[str, Any] = spec.workers.template.get("spec") or {}
    containers = [dict(container) for container in body.get("containers") or [{}]]
    resources = dict(containers[0].get("resources") or {})
    devices = {spec.workers.device_resource: str(spec.workers.devices)}
    resources["limits"] = {**(resources.get("limits") or {}), **devices}
    resources["requests"] = {**(resources.get("requests") or {}), **devices}
    containers[0]["resources"] = resources
    requested = pod_requests({**body, "containers": containers}, defaults=additions.defaults)
    if additions.overhead and not body.get("overhead"):
        added = dict(additions.overhead)
        requested = canonical({name: amount + added.pop(name, 0) for name, amount in requested} | added)
    return canonical({**dict(requested), PODS: 1})


def runtime_class_of(spec: TrainingJobSpec) -> str:
    """Return the name of the RuntimeClass of a job's pods; empty if there is none."""
    return str((spec.workers.template.get("spec") or {}).get("runtimeClassName") or "")


def parse_limit_range(manifest: Manifest) -> Requests:
    """Parse what a LimitRange gives to a container that requests nothing.

    Without a default request that is the default limit, without that the largest or the smallest amount allowed; the
    API server stores this with a LimitRange, other servers may not.
    """
    given: Requests = ()
    for limit in (manifest.get("spec") or {}).get("limits") or ():
        if limit.get("type") != "Container":
            continue
        in_order = (limit.get(name) for name in ("min", "max", "default", "defaultRequest"))
        merged: dict[str, int] = {}
        for stated in in_order:
            merged |= amounts(stated)
        given = larger(given, canonical(merged))
    return given


def parse_runtime_class(manifest: Manifest) -> Requests:
    """Parse the overhead of a RuntimeClass."""
    return canonical(amounts((manifest.get("overhead") or {}).get("podFixed")))
