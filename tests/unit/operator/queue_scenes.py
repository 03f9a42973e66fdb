"""Queues, waiting and running jobs for tests, by their telling fields."""

from typing import Any

import numpy as np

from polyreme_operator.types.inventory import Requests
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
