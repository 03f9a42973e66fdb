"""The acting user as the API server knows them, which a record on a node names."""

from __future__ import annotations

import getpass

from polyreme_cluster.port import ClusterPort, InvalidObjectError
from polyreme_cluster.port import NotFoundError as PortNotFoundError
from polyreme_operator.health.record import OWNER_CHARACTERS_MAX, PERSON

REVIEW = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview", "metadata": {}}


async def who_acts(cluster: ClusterPort) -> str:
    """Return the user's name on the cluster; where that may not be asked for, the local one, which proves nothing."""
    try:
        answer = await cluster.create(dict(REVIEW))
        name = str(((answer.get("status") or {}).get("userInfo") or {}).get("username") or "")
    except (InvalidObjectError, PortNotFoundError):
        name = ""
    return (name or f"{_local_user()} (unverified)")[: OWNER_CHARACTERS_MAX - len(PERSON) - 1]


def _local_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
