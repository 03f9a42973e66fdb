"""Writes of a kubelet: its node, a pod's status, a pod's removal. Each is retried until it is done."""

from __future__ import annotations

import contextlib
import logging

from polyreme_api.clock import Clock
from polyreme_cluster.port import (
    STATUS_SUBRESOURCE,
    AlreadyExistsError,
    ClusterPort,
    ConflictError,
    Manifest,
    NotFoundError,
    ObjectRef,
    PortError,
)

RETRY_S = 0.2

_log = logging.getLogger(__name__)


async def register_node(cluster: ClusterPort, node: Manifest, *, clock: Clock) -> None:
    """Create a node, or take over the one of its name."""
    ref = ObjectRef.of(node)
    while True:
        try:
            with contextlib.suppress(AlreadyExistsError):
                await cluster.create(node)
            await cluster.patch(ref, {"metadata": {"labels": node["metadata"]["labels"]}})
            await cluster.patch(ref, {"status": node["status"]}, subresource=STATUS_SUBRESOURCE)
            return
        except PortError as error:
            _log.warning("node %s is not registered yet: %s", ref.name, error)
            await clock.sleep(RETRY_S)


async def write_pod_status(cluster: ClusterPort, pod: Manifest, status: Manifest, *, clock: Clock) -> None:
    """Retry writing a status until it is stored, or the pod is gone."""
    ref = ObjectRef.of(pod)
    while True:
        try:
            now = await cluster.get(ref)
            if now["metadata"]["uid"] != pod["metadata"]["uid"]:
                return
            version = now["metadata"]["resourceVersion"]
            await cluster.patch(ref, {"status": status}, resource_version=version, subresource=STATUS_SUBRESOURCE)
            return
        except NotFoundError:
            return
        except ConflictError:
            continue
        except PortError as error:
            _log.warning("status of %s is not written yet: %s", ref, error)
            await clock.sleep(RETRY_S)


async def remove_pod(cluster: ClusterPort, pod: Manifest, *, clock: Clock) -> None:
    """Remove the object of a pod that has no processes left."""
    ref = ObjectRef.of(pod)
    while True:
        try:
            with contextlib.suppress(NotFoundError, ConflictError):
                await cluster.delete(ref, uid=pod["metadata"]["uid"], grace_period_s=0)
            return
        except PortError as error:
            _log.warning("%s is not removed yet: %s", ref, error)
            await clock.sleep(RETRY_S)
