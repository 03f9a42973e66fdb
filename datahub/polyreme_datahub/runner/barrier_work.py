"""The work of a barrier: one look over all samples of a version, which names those that are dropped."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from polyreme_datahub.digests import canonical_json, digest_bytes, digest_value
from polyreme_datahub.recipes.recipe import Chain, Step
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.rows import Action, Drop, OperationCount, Results
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.context import OnCounts, RunContext
from polyreme_datahub.runner.flow import Flow
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
        context: What work needs of its process.
        flow: The flow.
        on_counts: Called after the commit with what it added.
    """

    def __init__(self, context: RunContext, flow: Flow, on_counts: OnCounts) -> None:
        self._context, self._flow, self._on_counts = context, flow, on_counts
        self._walk = Walk(context.database, context.lakehouse, constants=flow.recipe.constants)

    def do(self, item: WorkItem) -> None:
        """Do a barrier.

        Raises:
            EnvironmentFailedError: If store or registry stay away; the barrier is still due.
        """
        chain, version = self._flow.chain(item.operation), self._flow.versions[item.version_id]
        key = Keys(version.digest, self._flow.recipe.constants).of_barrier(chain.steps[0], chain.before)
        known = results.outputs_of(self._context.database, [key]).get(key)
        outcome = None if known is None or known.value is None else json.loads(known.value)
        if outcome is not None and outcome == self._outcome_now(version, chain, key):
            count = OperationCount(operation=chain.name, hits=outcome["samples"] - outcome["dropped"])
            made = Results(version_id=version.id, counts=[count])
        else:
            made = self._decide(version, chain, key)
        self._context.finish(item, made, children=self._flow.following(item), on_counts=self._on_counts)

    def _decide(self, version: DatasetVersion, chain: Chain, key: str) -> Results:
        step, names, seen = chain.steps[0], dict[int, str](), hashlib.sha256()
        dropped = step.operation.call([self._rows(version, chain, names, seen)], step.parameters)
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
        value = canonical_json({"samples": len(names), "dropped": len(drops), "inputs": seen.hexdigest()})
        action = Action(
            key=key,
            operation=step.operation.name,
            inputs=(version.digest,),
            output=digest_bytes(value),
            value=value.decode(),
        )
        count = OperationCount(operation=step.name, misses=len(names) - len(drops), dropped=len(drops))
        return Results(version_id=version.id, drops=drops, counts=[count], actions=[action])

    def _outcome_now(self, version: DatasetVersion, chain: Chain, key: str) -> dict[str, Any]:
        """Return the outcome of an earlier decision if it was about the samples of now, and its drops are noted."""
        seen, ordinals = hashlib.sha256(), set[int]()
        for walked in self._walk.samples(version, chain.before, values_of=()):
            ordinals.add(walked.ordinal)
            _add(seen, walked, chain.steps[0])
        drops = results.drops_between(self._context.database, version.id, first=0, count=version.records)
        dropped = {drop.ordinal for drop in drops if drop.key == letter_key(key, drop.ordinal)} & ordinals
        return {"samples": len(ordinals), "dropped": len(dropped), "inputs": seen.hexdigest()}

    def _rows(self, version: DatasetVersion, chain: Chain, names: dict[int, str], seen: Hash) -> Iterator[BarrierRow]:
        inputs = chain.steps[0].inputs
        for walked in self._walk.samples(version, chain.before, values_of=inputs):
            names[walked.ordinal] = walked.sample_id
            _add(seen, walked, chain.steps[0])
            yield BarrierRow(
                ordinal=walked.ordinal,
                sample_id=walked.sample_id,
                inputs=[walked.values[name].data for name in inputs],
            )


class Hash(Protocol):
    """A digest that grows."""

    def update(self, data: bytes, /) -> None:
        """Take further bytes."""
        ...


def _add(seen: Hash, walked: Walked, step: Step) -> None:
    inputs = [walked.outputs[name].digest if name in walked.outputs else name for name in step.inputs]
    seen.update(digest_value([walked.ordinal, walked.sample_id, inputs]).encode())
