"""A node's sign of life: its Lease, without which a cluster's controllers take the node for lost after 50 s."""

from __future__ import annotations

import logging

from polyreme_api.clock import Clock
from polyreme_api.times import rfc3339
from polyreme_cluster.port import ClusterPort, Manifest, NotFoundError, ObjectRef, PortError

LEASE_NAMESPACE = "kube-node-lease"
LEASE_S = 40
"""How long a heartbeat holds, as the kubelet's own."""

_log = logging.getLogger(__name__)


async def beat(cluster: ClusterPort, node: str, *, every_s: float, clock: Clock) -> None:
    """Renew a node's Lease until cancelled."""
    while True:
        try:
            await _renew(cluster, node, at=rfc3339(clock.now_s()))
        except PortError as error:
            _log.warning("can't renew the heartbeat of node %s: %s", node, error)
        await clock.sleep(every_s)


async def _renew(cluster: ClusterPort, node: str, *, at: str) -> None:
    ref = ObjectRef(kind="Lease", namespace=LEASE_NAMESPACE, name=node)
    spec = {"holderIdentity": node, "leaseDurationSeconds": LEASE_S, "renewTime": at}
    try:
        await cluster.patch(ref, {"spec": spec})
    except NotFoundError:
        lease: Manifest = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": ref.name, "namespace": ref.namespace},
            "spec": spec,
        }
        await cluster.create(lease)
