"""Runs one flow to its end in this process: its items, its barriers, its progress."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.operations.declare import Device
from polyreme_datahub.operations.values import Value
from polyreme_datahub.registry import flows, progress, work_items
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rows import StageCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.barrier_work import BarrierWork
from polyreme_datahub.runner.catalog import CatalogHandler, describe
from polyreme_datahub.runner.chain_work import ChainWork
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.owners import free_dead_owners, owner_name
from polyreme_datahub.runner.pace import CommitPace
from polyreme_datahub.runner.pool import BACKOFF_S, LOOKS_MAX, Handler, OnItem, Pool
from polyreme_datahub.sandbox.sandbox import Sandbox
from polyreme_datahub.sandbox.tasks import Limits, SandboxStep
from polyreme_datahub.sources.open import open_source
from polyreme_datahub.sources.types import Source
from polyreme_datahub.topics.memory import InProcessTopics
from polyreme_datahub.topics.types import Topics

OnCounts = Callable[[WorkItem, Sequence[StageCount]], None]
DEFAULT_WORKERS = 2
SOURCES_MAX = 64
"""Opened sources that a process keeps: a worker of all flows lives for months."""


def do_nothing() -> None:
    """Do nothing at a look."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What work needs of its process."""

    database: Database
    lakehouse: Lakehouse
    owner: str = dataclasses.field(default_factory=owner_name)
    """Name of this process, unique among all that ever ran."""
    now_s: Callable[[], float] = time.time  # noqa: TID251 - the shell's default
    steady_s: Callable[[], float] = time.monotonic  # noqa: TID251 - the shell's default
    workers: int = DEFAULT_WORKERS
    """Threads of this process."""
    only_seals: bool = False
    """Whether flows are left to workers of other processes, and this one waits for them and seals."""
    topics: Topics | None = None
    """The bus between processes; None: this process works alone."""
    on_item: OnItem | None = None
    """Called after each try of an item, from worker threads."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    backoff_s: float = BACKOFF_S


class FlowHandler:
    """Does the items of one flow; one object for each thread."""

    def __init__(
        self, around: Surroundings, flow: Flow, *, shared: Mapping[str, Value], sources: Sources, on_counts: OnCounts
    ) -> None:
        self._flow = flow
        self.chain = ChainWork(
            around.database,
            around.lakehouse,
            flow,
            sandboxes=lambda device: Sandbox(
                sandbox_steps(flow, device), _limits(around.limits, device), shared=shared
            ),
            sources=lambda version: sources.open(version, around.lakehouse),
            owner=around.owner,
            now_s=around.now_s,
            pace=CommitPace(around.steady_s),
            on_counts=on_counts,
        )
        self._barrier = BarrierWork(
            around.database,
            around.lakehouse,
            flow,
            owner=around.owner,
            now_s=around.now_s,
            on_counts=on_counts,
        )

    def do(self, item: WorkItem) -> None:
        """Do an item to its end."""
        if self._flow.stage(item.stage).is_barrier:
            self._barrier.do(item)
        else:
            self.chain.do(item)

    def close(self) -> None:
        """End the sandboxes' children."""
        self.chain.close()


def sandbox_steps(flow: Flow, device: Device) -> list[SandboxStep]:
    """Return the steps that run in a child of one device: all of its kind, for lost outputs of earlier stages, too."""
    return [
        SandboxStep(
            name=step.name,
            operation=step.operation.path,
            inputs=step.inputs,
            parameters=dataclasses.asdict(step.parameters),
        )
        for step in flow.recipe.steps
        if not step.operation.barrier and step.operation.device == device
    ]


def _limits(limits: Limits, device: Device) -> Limits:
    """A GPU's driver maps far more memory than it uses, and opens devices."""
    return limits if device == "cpu" else dataclasses.replace(limits, memory_bytes=None, confine=False)


class Sources:
    """Opened sources, shared by the threads of a process; the ones used last are kept."""

    def __init__(self) -> None:
        self._opened: OrderedDict[int, Future[Source]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, version: DatasetVersion, lakehouse: Lakehouse) -> Source:
        """Return the source of a version; its listing lies in the lakehouse.

        One thread opens it, and the others that want the same one wait for it. An error is that of all of them, and
        the next one opens it again.
        """
        with self._lock:
            known = self._opened.get(version.id)
            opening = self._opened[version.id] = known or Future()
            self._opened.move_to_end(version.id)
            while len(self._opened) > SOURCES_MAX:
                self._opened.popitem(last=False)
        if known is None:
            try:
                opening.set_result(open_source(version.source, lakehouse))
            except BaseException as error:
                with self._lock:
                    self._opened.pop(version.id, None)
                opening.set_exception(error)
                raise
        return opening.result()


def run_flow(
    around: Surroundings,
    flow: Flow,
    *,
    shared: Mapping[str, Value],
    sources: Sources,
    on_counts: OnCounts,
    on_look: Callable[[], None] = do_nothing,
    looks_max: int = LOOKS_MAX,
) -> None:
    """Do everything of a flow that is not done.

    Args:
        around: What work needs of its process.
        flow: The flow.
        shared: Values that its steps share, by name.
        sources: Opened sources.
        on_counts: Called after each commit of this process, from worker threads.
        on_look: Called whenever this thread looks whether the flow is done; it may take its time.
        looks_max: As in ``Pool``.

    Raises:
        EnvironmentFailedError: If store, registry or sources stay away; what was not done is still due.
        PolyremeError: The first other error that a worker met; what was not done is still due.
    """
    flows.add_flow(around.database, flow.id, describe(flow, shared), now_s=around.now_s())
    work_items.add(around.database, flow.first_items())

    def handler() -> Handler:
        def of_flow(found: Flow, values: Mapping[str, Value]) -> Handler:
            known = found.id == flow.id
            return FlowHandler(
                around,
                flow if known else found,
                shared=shared if known else values,
                sources=sources,
                on_counts=on_counts if known else _ignore,
            )

        if around.topics is None:
            return of_flow(flow, shared)
        # The topics of a bus are shared with other flows.
        return CatalogHandler(around.database, around.lakehouse, of_flow)

    def done() -> bool:
        on_look()
        return open_barriers(around.database, flow, now_s=around.now_s())

    run_items(
        around,
        [stage.name for stage in flow.stages],
        flow=flow.id,
        handler=handler,
        done=done,
        topics=around.topics,
        workers=0 if around.only_seals and around.topics is not None else around.workers,
        looks_max=looks_max,
    )


def remake(
    around: Surroundings,
    flow: Flow,
    ordinals: tuple[DatasetVersion, int, int],
    *,
    shared: Mapping[str, Value],
    sources: Sources,
) -> None:
    """Recompute what is stored of some ordinals (version, first, count), from the source on."""
    handler = FlowHandler(around, flow, shared=shared, sources=sources, on_counts=_ignore)
    try:
        handler.chain.remake(*ordinals)
    finally:
        handler.close()


def run_seal(around: Surroundings, sealer: Handler, items: Sequence[WorkItem], *, again: bool) -> None:
    """Do the items of one seal; errors as ``run_flow``.

    Args:
        around: What work needs of its process.
        sealer: Does the items.
        items: Items of one stage and one key; none: nothing is to be done.
        again: Whether those that are done are done again.
    """
    if not items:
        return
    flow, stage = items[0].flow, items[0].stage
    work_items.add(around.database, items)
    if again:
        work_items.reopen(around.database, [item.key for item in items])
    run_items(
        around,
        [stage],
        flow=flow,
        handler=lambda: sealer,
        done=lambda: not work_items.open_count(around.database, flow, stage),
    )


def run_items(
    around: Surroundings,
    stages: Sequence[str],
    *,
    flow: str,
    handler: Callable[[], Handler],
    done: Callable[[], bool],
    topics: Topics | None = None,
    workers: int | None = None,
    looks_max: int = LOOKS_MAX,
) -> None:
    """Do the items of some stages of one flow until ``done``; errors as ``run_flow``."""
    if done():
        return
    free_dead_owners(around.database, flow)
    if topics is None:
        # Keys that an earlier process had in its memory are gone with it.
        work_items.unpublish_expired(around.database, flow=flow, now_s=around.now_s(), lost_after_s=0.0)
    Pool(
        around.database,
        topics or InProcessTopics(),
        flow=flow,
        stages=stages,
        handler=handler,
        workers=around.workers if workers is None else workers,
        owner=around.owner,
        now_s=around.now_s,
        backoff_s=around.backoff_s,
        steady_s=around.steady_s,
        on_item=around.on_item,
        looks_max=looks_max,
    ).run_until(done)


def serve(around: Surroundings, stages: Sequence[str], *, stopped: Callable[[], bool], on_counts: OnCounts) -> None:
    """Do items of any flow whose stage is one of ``stages``, until stopped: a worker beside those who wait for flows.

    Raises:
        EnvironmentFailedError: If store or registry stay away.
        PolyremeError: The first other error that a worker met; what was not done is still due.
    """
    sources = Sources()

    def of_flow(flow: Flow, shared: Mapping[str, Value]) -> Handler:
        return FlowHandler(around, flow, shared=shared, sources=sources, on_counts=on_counts)

    Pool(
        around.database,
        around.topics or InProcessTopics(),
        flow=None,
        stages=stages,
        handler=lambda: CatalogHandler(around.database, around.lakehouse, of_flow),
        workers=around.workers,
        owner=around.owner,
        now_s=around.now_s,
        backoff_s=around.backoff_s,
        steady_s=around.steady_s,
        on_item=around.on_item,
    ).run_until(stopped)


def _ignore(item: WorkItem, counts: Sequence[StageCount]) -> None:
    """Counts of flows that others wait for."""


def open_barriers(database: Database, flow: Flow, *, now_s: float) -> bool:
    """Open each barrier whose stage before is closed; return whether every stage is closed.

    Records whose id is taken are rejected first: a barrier must not keep one of them and drop another for it.
    """
    counts = work_items.counts_by_stage(database, flow.id)
    for stage in flow.stages:
        opened, closed = counts.get(stage.name, (0, 0))
        if not opened and not closed and stage.is_barrier:
            for version in flow.versions.values():
                progress.reject_doubles(database, version.id, now_s=now_s)
            barriers = [item for version in flow.versions.values() for item in flow.items(stage, version)]
            work_items.add(database, barriers)
            return False
        if opened or not closed:
            return False
    return True
