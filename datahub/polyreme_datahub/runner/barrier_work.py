"""The work of a barrier: one look over all samples of a version, which names those that are dropped."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from polyreme_datahub.digests import canonical_json, digest_bytes, digest_value
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.recipes.recipe import Step
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rows import Action, Drop, Results, StageCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.flow import Flow, Stage
from polyreme_datahub.runner.resolution import Keys, letter_key
from polyreme_datahub.runner.walk import Walk, Walked


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
        key = Keys(version.digest, self._flow.recipe.constants).of_barrier(step, stage.steps_before)
        known = results.outputs_of(self._database, [key]).get(key)
        if known is not None and known.value is not None and self._stands(version, stage, key, known.value):
            self._commit_known(item, step, json.loads(known.value))
            return
        names: dict[int, str] = {}
        seen = hashlib.sha256()
        rows = self._rows(version, stage.steps_before, step, names, seen)
        dropped = step.operation.call([rows], step.parameters)
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
        outcome = {"samples": len(names), "dropped": len(drops), "inputs": seen.hexdigest()}
        counts = [StageCount(stage=step.name, misses=len(names) - len(drops), dropped=len(drops))]
        results.commit(
            self._database,
            Results(version_id=version.id, drops=drops, counts=counts, actions=[_action(key, version, step, outcome)]),
            finished=item,
            owner=self._owner,
            children=self._flow.following(item),
            now_s=self._now_s(),
        )
        self._on_counts(item, counts)

    def close(self) -> None:
        """Nothing was started."""

    def _stands(self, version: DatasetVersion, stage: Stage, key: str, outcome: str) -> bool:
        """Tell whether an earlier decision is about the same samples, and what it dropped is noted."""
        assert stage.chain is not None, "a barrier is a chain of one step"
        before, step = stage.steps_before, stage.chain.steps[0]
        seen, ordinals = hashlib.sha256(), set[int]()
        for walked in self._walk.samples(version, before, values_of=()):
            ordinals.add(walked.ordinal)
            _add(seen, walked, step)
        drops = results.drops_between(self._database, version.id, first=0, count=version.records)
        dropped = {drop.ordinal for drop in drops if drop.key == letter_key(key, drop.ordinal)} & ordinals
        found = {"samples": len(ordinals), "dropped": len(dropped), "inputs": seen.hexdigest()}
        return bool(json.loads(outcome) == found)

    def _commit_known(self, item: WorkItem, step: Step, outcome: Mapping[str, Any]) -> None:
        """End an item whose outcome stands."""
        counts = [StageCount(stage=step.name, hits=outcome["samples"] - outcome["dropped"])]
        results.commit(
            self._database,
            Results(version_id=item.version_id, counts=counts),
            finished=item,
            owner=self._owner,
            children=self._flow.following(item),
            now_s=self._now_s(),
        )
        self._on_counts(item, counts)

    def _rows(
        self, version: DatasetVersion, before: Sequence[Step], step: Step, names: dict[int, str], seen: Hash
    ) -> Iterator[BarrierRow]:
        for walked in self._walk.samples(version, before, values_of=step.inputs):
            names[walked.ordinal] = walked.sample_id
            _add(seen, walked, step)
            yield BarrierRow(
                ordinal=walked.ordinal,
                sample_id=walked.sample_id,
                inputs=[walked.values[name].data for name in step.inputs],
            )


class Hash(Protocol):
    """A digest that grows."""

    def update(self, data: bytes, /) -> None:
        """Take further bytes."""
        ...


def _add(seen: Hash, walked: Walked, step: Step) -> None:
    inputs = [walked.outputs[name].digest if name in walked.outputs else name for name in step.inputs]
    seen.update(digest_value([walked.ordinal, walked.sample_id, inputs]).encode())


def _action(key: str, version: DatasetVersion, step: Step, outcome: Mapping[str, Any]) -> Action:
    """Return the action of a barrier: what it looked at, and how many it dropped."""
    value = canonical_json(outcome)
    return Action(
        key=key,
        operation=step.operation.name,
        inputs=(version.digest,),
        output=digest_bytes(value),
        value=value.decode(),
    )
