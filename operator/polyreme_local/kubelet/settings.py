"""Settings of a kubelet."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from polyreme_api import labels
from polyreme_cluster.port import Manifest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KubeletSettings:
    """One node, and what its pods get from this host."""

    node: str
    """Name of the node that this host registers."""
    devices: int
    """Devices that the node has."""
    directory: Path
    """Folder of the pods' folders."""
    run_token: str
    """Random text of this host's life, by which a later host knows what this one left."""
    api_url: str
    """Root of the API for the pods."""
    token_for: Callable[[Manifest], str]
    """Returns the bearer token of a pod's API access."""
    device_resource: str = labels.RESOURCE_DEVICE
    """Resource that counts devices."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further variables of every pod."""
    heartbeat_s: float | None = None
    """How often the node shows that it lives; None where nothing checks it, as in the embedded cluster."""
    node_labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Labels of the node, as its places in the topology."""
    ends_leftovers: bool = True
    """Whether to end what an earlier host left in the folder; False for further nodes with one folder."""
