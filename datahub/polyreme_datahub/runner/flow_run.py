"""Runs flows in this process: items, barriers, and what is lost and recomputed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeVar

from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.registry import flows, progress, work_items
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.barrier_work import BarrierWork
from polyreme_datahub.runner.catalog import CatalogHandler, describe
from polyreme_datahub.runner.chain_work import ChainWork
from polyreme_datahub.runner.context import OnCounts, RunContext, ignore_counts
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.owners import free_dead_owners
from polyreme_datahub.runner.pool import LOOKS_MAX, Handler, Pool

_Read = TypeVar("_Read")


class FlowHandler:
    """Does the items of one flow; one object for each thread."""

    def __init__(self, context: RunContext, flow: Flow, on_counts: OnCounts = ignore_counts) -> None:
        self._flow = flow
        self.chain = ChainWork(context, flow, on_counts)
        self._barrier = BarrierWork(context, flow, on_counts)

    def do(self, item: WorkItem) -> None:
        """Do an item to its end."""
        is_barrier = self._flow.chain(item.operation).is_barrier
        (self._barrier if is_barrier else self.chain).do(item)

    def close(self) -> None:
        """End the sandboxes' children."""
        self.chain.close()


def do_nothing() -> None:
    """Do nothing at a look."""


def run_flow(
    context: RunContext,
    flow: Flow,
    *,
    on_counts: OnCounts = ignore_counts,
    on_look: Callable[[], None] = do_nothing,
    looks_max: int = LOOKS_MAX,
) -> None:
    """Do everything of a flow that is not done.

    Args:
        context: What work needs of its process.
        flow: The flow.
        on_counts: Called after each commit of this process, from worker threads.
        on_look: Called whenever this thread looks whether the flow is done; it may take its time.
        looks_max: As in ``Pool``.

    Raises:
        EnvironmentFailedError: If store, registry or sources stay away; what was not done is still due.
        PolyremeError: The first other error that a worker met; what was not done is still due.
    """
    flows.add_flow(context.database, flow.id, describe(flow), now_s=context.now_s())
    work_items.add(context.database, flow.first_items())

    def handler() -> Handler:
        if context.topics is None:
            return FlowHandler(context, flow, on_counts)
        # The topics of a bus are shared with other flows.
        return CatalogHandler(
            context,
            lambda found: FlowHandler(context, found, on_counts if found.id == flow.id else ignore_counts),
        )

    def done() -> bool:
        on_look()
        return open_barriers(context.database, flow, now_s=context.now_s())

    away = context.only_seals and context.topics is not None
    _run_items(
        dataclasses.replace(context, workers=0 if away else context.workers),
        [chain.name for chain in flow.chains],
        flow=flow.id,
        handler=handler,
        done=done,
        looks_max=looks_max,
    )


def run_seal(context: RunContext, handler: Handler, items: Sequence[WorkItem]) -> None:
    """Do the items of one seal, those again that are done; errors as ``run_flow``."""
    if not items:
        return
    flow, operation = items[0].flow, items[0].operation
    work_items.add(context.database, items)
    work_items.reopen(context.database, [item.key for item in items])
    _run_items(
        dataclasses.replace(context, topics=None),
        [operation],
        flow=flow,
        handler=lambda: handler,
        done=lambda: not work_items.open_count(context.database, flow, operation),
    )


def serve(context: RunContext, operations: Sequence[str], *, stopped: Callable[[], bool], on_counts: OnCounts) -> None:
    """Do items of any flow whose chain is one of ``operations``, until stopped: for those who wait for flows.

    Raises:
        EnvironmentFailedError: If store or registry stay away.
        PolyremeError: The first other error that a worker met; what was not done is still due.
    """

    def handler() -> Handler:
        return CatalogHandler(context, lambda flow: FlowHandler(context, flow, on_counts))

    Pool(context, handler, operations=operations, flow=None).run_until(stopped)


def read_whole(
    context: RunContext, flow: Flow, ordinals: tuple[DatasetVersion, int, int], read: Callable[[], _Read]
) -> _Read:
    """Read what is stored of some ordinals (version, first, count); what is lost is recomputed from the source.

    Raises:
        IndexDamagedError: If the source no longer gives what it gave.
    """
    try:
        return read()
    except (IndexDamagedError, ObjectNotFoundError):
        with closing(FlowHandler(context, flow)) as handler:
            handler.chain.remake(*ordinals)
        return read()


def open_barriers(database: Database, flow: Flow, *, now_s: float) -> bool:
    """Open each barrier whose chain before is closed; return whether every chain is closed.

    Records whose id is taken are rejected first: a barrier must not keep one of them and drop another for it.
    """
    counts = work_items.counts_by_operation(database, flow.id)
    for chain in flow.chains:
        opened, closed = counts.get(chain.name, (0, 0))
        if not opened and not closed and chain.is_barrier:
            for version in flow.versions.values():
                progress.reject_duplicates(database, version.id, now_s=now_s)
            work_items.add(database, [item for of in flow.versions.values() for item in flow.items(chain, of)])
            return False
        if opened or not closed:
            return False
    return True


def _run_items(
    context: RunContext,
    operations: Sequence[str],
    *,
    flow: str,
    handler: Callable[[], Handler],
    done: Callable[[], bool],
    looks_max: int = LOOKS_MAX,
) -> None:
    """Do the items of some chains of one flow until ``done``; errors as ``run_flow``."""
    if done():
        return
    free_dead_owners(context.database, flow)
    if context.topics is None:
        # Keys that an earlier process had in its memory are gone with it.
        work_items.unpublish_expired(context.database, flow=flow, now_s=context.now_s(), lost_after_s=0.0)
    Pool(context, handler, operations=operations, flow=flow, looks_max=looks_max).run_until(done)
