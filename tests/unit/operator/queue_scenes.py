"""Queues, waiting and running jobs for tests, by the fields that matter."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyreme_operator.types.inventory import HOST_LEVEL, Inventory, NodeClass, Requests
from polyreme_operator.types.queues import QueueView, Quota, Running, Waiting

GPU = "nvidia.com/gpu"


def gpus(count: int) -> Requests:
    return ((GPU, count),)


def queue(
    name: str,
    nominal: int | None = None,
    parent: str = "",
    *,
    borrow: int | None = None,
    lend: int | None = None,
    **fields: Any,
) -> QueueView:
    quotas: tuple[Quota, ...] = ()
    if nominal is not None:
        quotas = (Quota(resource=GPU, nominal=nominal, borrowing_limit=borrow, lending_limit=lend),)
    return QueueView(name=name, parent=parent, quotas=quotas, **fields)


def waiting(uid: str, where: str = "a", *, workers: int = 1, devices: int = 1, **fields: Any) -> Waiting:
    given = {"priority": 0, "since_s": 0.0, "kind": 0} | fields
    return Waiting(uid=uid, queue=where, workers=workers, requests=gpus(devices), **given)


def running(uid: str, where: str, rows: list[int], *, devices: int = 1, **fields: Any) -> Running:
    given = {"priority": 0, "admitted_s": 0.0, "started_s": 0.0} | fields
    return Running(
        uid=uid,
        namespace="ns",
        name=uid,
        queue=where,
        requests=gpus(devices),
        devices=devices * len(rows),
        rows_W=np.asarray(rows, dtype=np.int32),
        **given,
    )


def inventory(
    racks: Sequence[int], *, devices: int = 1, jobs: Sequence[Running] = (), foreign: Mapping[int, int] | None = None
) -> Inventory:
    """Nodes in racks of these sizes; ``foreign`` are devices that pods of others hold, by row."""
    count = sum(racks)
    rack_N = np.repeat(np.arange(len(racks), dtype=np.int32), racks)
    found = Inventory(
        names=tuple(f"n{at:03}" for at in range(count)),
        rows={f"n{at:03}": at for at in range(count)},
        resources=(GPU,),
        capacity_NR=np.full((count, 1), devices, dtype=np.int64),
        used_NR=np.zeros((count, 1), dtype=np.int64),
        usable_N=np.ones(count, dtype=np.bool_),
        risk_N=np.zeros(count, dtype=np.float32),
        busy_N=np.zeros(count, dtype=np.int32),
        owned_N=np.zeros(count, dtype=np.bool_),
        class_N=np.zeros(count, dtype=np.int32),
        classes=(NodeClass(labels={}),),
        levels=("rack", HOST_LEVEL),
        domain_LN=np.stack([rack_N, np.arange(count, dtype=np.int32)]),
        domain_names=(tuple(f"r{at}" for at in range(len(racks))), tuple(f"n{at:03}" for at in range(count))),
    )
    for row, amount in (foreign or {}).items():
        found.used_NR[row, 0] += amount
    for job in jobs:
        for row in job.rows_W.tolist():
            if row >= 0:
                found.used_NR[row, 0] += job.requests[0][1]
                found.busy_N[row] += 1
    return found


def used_by(jobs: Sequence[Running]) -> dict[tuple[str, str], int]:
    used: Counter[tuple[str, str]] = Counter()
    for job in jobs:
        used[job.queue, GPU] += job.devices
    return dict(used)
