"""Runs one flow to its end in this process: its items, its barriers, its progress."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.operations.values import Value
from polyreme_datahub.registry import flows, work_items
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rows import StageCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.barrier_work import BarrierWork
from polyreme_datahub.runner.chain_work import ChainWork
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.owners import free_dead_owners
from polyreme_datahub.runner.pace import CommitPace
from polyreme_datahub.runner.pool import BACKOFF_S, Handler, Pool
from polyreme_datahub.sandbox.sandbox import Sandbox
from polyreme_datahub.sandbox.tasks import Limits, SandboxStep
from polyreme_datahub.sources.open import open_source
from polyreme_datahub.sources.types import Source
from polyreme_datahub.topics.memory import InProcessTopics

OnCounts = Callable[[WorkItem, Sequence[StageCount]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What work needs of its process."""

    database: Database
    lakehouse: Lakehouse
    owner: str
    """Name of this process, unique among all that ever ran."""
    now_s: Callable[[], float]
    steady_s: Callable[[], float]
    workers: int
    limits: Limits = dataclasses.field(default_factory=Limits)
    backoff_s: float = BACKOFF_S


class FlowHandler:
    """Does the items of one flow; one object for each thread."""

    def __init__(
        self, around: Surroundings, flow: Flow, *, shared: Mapping[str, Value], sources: Sources, on_counts: OnCounts
    ) -> None:
        self._flow = flow
        steps = [
            SandboxStep(
                name=step.name,
                operation=step.operation.path,
                inputs=step.inputs,
                parameters=dataclasses.asdict(step.parameters),
            )
            for step in flow.recipe.steps
            if not step.operation.barrier
        ]
        self.chain = ChainWork(
            around.database,
            around.lakehouse,
            flow,
            sandbox=Sandbox(steps, around.limits, shared=shared),
            sources=sources.open,
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
        """End the sandbox's children."""
        self.chain.close()


class Sources:
    """Opened sources, shared by the threads of a process."""

    def __init__(self) -> None:
        self._opened: dict[int, Source] = {}
        self._lock = threading.Lock()

    def open(self, version: DatasetVersion) -> Source:
        """Return the source of a version."""
        with self._lock:
            if version.id not in self._opened:
                self._opened[version.id] = open_source(version.source)
            return self._opened[version.id]


def run_flow(
    around: Surroundings, flow: Flow, *, shared: Mapping[str, Value], sources: Sources, on_counts: OnCounts
) -> None:
    """Do everything of a flow that is not done.

    Raises:
        EnvironmentFailedError: If store, registry or sources stay away; what was not done is still due.
        PolyremeError: The first other error that a worker met; what was not done is still due.
    """
    flows.add_flow(around.database, flow.id, describe(flow), now_s=around.now_s())
    work_items.add(around.database, flow.first_items())
    run_items(
        around,
        [stage.name for stage in flow.stages],
        flow=flow.id,
        handler=lambda: FlowHandler(around, flow, shared=shared, sources=sources, on_counts=on_counts),
        done=lambda: open_barriers(around.database, flow),
    )


def run_items(
    around: Surroundings,
    stages: Sequence[str],
    *,
    flow: str,
    handler: Callable[[], Handler],
    done: Callable[[], bool],
) -> None:
    """Do the items of some stages of one flow until ``done``; errors as ``run_flow``."""
    if done():
        return
    free_dead_owners(around.database, flow)
    # Keys that an earlier process had in its memory are gone with it.
    work_items.unpublish_expired(around.database, flow=flow, now_s=around.now_s(), lost_after_s=0.0)
    Pool(
        around.database,
        InProcessTopics(),
        flow=flow,
        stages=stages,
        handler=handler,
        workers=around.workers,
        owner=around.owner,
        now_s=around.now_s,
        backoff_s=around.backoff_s,
    ).run_until(done)


def open_barriers(database: Database, flow: Flow) -> bool:
    """Open each barrier whose stage before is closed; return whether every stage is closed."""
    counts = work_items.counts_by_stage(database, flow.id)
    for stage in flow.stages:
        opened, closed = counts.get(stage.name, (0, 0))
        if not opened and not closed and stage.is_barrier:
            barriers = [item for version in flow.versions.values() for item in flow.items(stage, version)]
            work_items.add(database, barriers)
            return False
        if opened or not closed:
            return False
    return True


def describe(flow: Flow) -> dict[str, object]:
    """Describe a flow so that another process can run it."""
    return {
        "versions": sorted(flow.versions),
        "constants": dict(flow.recipe.constants),
        "steps": [
            {
                "step": step.name,
                "operation": step.operation.path,
                "inputs": list(step.inputs),
                "parameters": dataclasses.asdict(step.parameters),
            }
            for step in flow.recipe.steps
        ],
    }
