"""The work of a barrier: one look over all samples of a version, which names those that are dropped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.recipes.recipe import Step
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rows import Drop, Results, StageCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.resolution import Keys, letter_key
from polyreme_datahub.runner.walk import Walk


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BarrierRow:
    """What one sample brings to a barrier."""

    ordinal: int
    sample_id: str
    inputs: Sequence[Mapping[str, Any]]
    """Data of each input, in the order of the barrier's inputs."""


class BarrierWork:
    """Does the barriers of one flow.

    A barrier only selects: what later steps make of a sample that stays depends on nothing but that sample. Samples
    that come later, by a replay, can drop further ones and bring none back, since the smallest ordinal always stays.

    Args:
        database: Registry.
        lakehouse: Where bytes lie.
        flow: The flow.
        owner: Holder of the leases.
        now_s: Wall clock [s].
        on_counts: Called after the commit with what it added.
    """

    def __init__(
        self,
        database: Database,
        lakehouse: Lakehouse,
        flow: Flow,
        *,
        owner: str,
        now_s: Callable[[], float],
        on_counts: Callable[[WorkItem, Sequence[StageCount]], None],
    ) -> None:
        self._database, self._flow, self._owner, self._now_s = database, flow, owner, now_s
        self._on_counts = on_counts
        self._walk = Walk(database, lakehouse, constants=flow.recipe.constants)

    def do(self, item: WorkItem) -> None:
        """Do a barrier.

        Raises:
            EnvironmentFailedError: If store or registry stay away; the barrier is still due.
        """
        stage = self._flow.stage(item.stage)
        assert stage.chain is not None, "a barrier is a chain of one step"
        step, version = stage.chain.steps[0], self._flow.versions[item.version_id]
        names: dict[int, str] = {}
        dropped = step.operation.call([self._rows(version, stage.steps_before, step, names)], step.parameters)
        key = Keys(version.digest, self._flow.recipe.constants).of_barrier(step, stage.steps_before)
        drops = [
            Drop(
                key=letter_key(key, ordinal),
                operation=step.name,
                ordinal=ordinal,
                sample_id=names[ordinal],
                reason=str(reason),
            )
            for ordinal, reason in sorted(dropped.items())
        ]
        counts = [StageCount(stage=step.name, misses=len(names) - len(drops), dropped=len(drops))]
        results.commit(
            self._database,
            Results(version_id=version.id, drops=drops, counts=counts),
            finished=item,
            owner=self._owner,
            children=self._flow.following(item),
            now_s=self._now_s(),
        )
        self._on_counts(item, counts)

    def close(self) -> None:
        """Nothing was started."""

    def _rows(
        self, version: DatasetVersion, before: Sequence[Step], step: Step, names: dict[int, str]
    ) -> Iterator[BarrierRow]:
        for walked in self._walk.samples(version, before, values_of=step.inputs):
            names[walked.ordinal] = walked.sample_id
            yield BarrierRow(
                ordinal=walked.ordinal,
                sample_id=walked.sample_id,
                inputs=[walked.values[name].data for name in step.inputs],
            )
