"""Classes of faults; in a module of its own, since the node agent reads the fault table without pydantic."""

from typing import Literal

FaultClass = Literal[
    "gpu-lost",
    "gpu-memory",
    "gpu-hang",
    "gpu-link",
    "gpu-firmware",
    "gpu-power",
    "gpu-thermal",
    "application",
    "pcie",
    "nic",
    "network-link",
    "disk",
    "kernel",
    "node-software",
    "clock",
    "planned",
    "node-lost",
    "performance",
]
