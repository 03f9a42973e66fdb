"""Nodes that a job avoids because they failed its pods, and those where its own pods do not end."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from polyreme_operator.reconcile import failed_nodes
from polyreme_operator.types.inventory import BoolArray, Inventory
from polyreme_operator.types.views import JobView, PodView


def retry_times(job: JobView, now_s: float) -> dict[str, float]:
    """Return the nodes that have failed a job's pods, each with the time from which it may be tried again."""
    failures = failed_nodes.remembered(job.status, now_s) if job.status.failed_nodes else []
    if not failures or job.spec is None:
        return {}
    return dict(failed_nodes.avoided(failures, job.spec.failure_policy.backoff))


def avoided_nodes(job: JobView, pods: Iterable[PodView], now_s: float, *, retries: bool) -> set[str]:
    """Return the nodes that a job avoids.

    Args:
        job: The job.
        pods: Its pods.
        now_s: The time.
        retries: Whether nodes that have failed it may be tried again if their time has come.
    """
    stuck = {pod.node for pod in pods if pod.is_stuck(now_s)}
    return stuck | {node for node, retry_s in retry_times(job, now_s).items() if not retries or retry_s > now_s}


def marked(inventory: Inventory, nodes: Collection[str]) -> BoolArray:
    """Return which nodes these are."""
    marked_N = np.zeros(len(inventory.names), dtype=np.bool_)
    marked_N[[inventory.rows[node] for node in nodes if node in inventory.rows]] = True
    return marked_N
