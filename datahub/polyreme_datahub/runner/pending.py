"""Results of a worker for some ordinals that are not committed yet."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from polyreme_datahub.digests import action_key, digest_bytes, digest_value
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.lakehouse import Artifact
from polyreme_datahub.operations.values import Value
from polyreme_datahub.recipes.recipe import INGEST, Chain, Step
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.rows import VALUE_BYTES_MAX, Action, Drop, Letter, OperationCount, Results, SampleRow
from polyreme_datahub.runner.resolution import Keys, Output, Sample, letter_key
from polyreme_datahub.runner.stored import Stored
from polyreme_datahub.sandbox.tasks import SampleOutcome, StepMade, StepVerdict


@dataclasses.dataclass(slots=True)
class Pending:
    """The work on some ordinals: what was made of them and not committed."""

    chain: Chain
    version: DatasetVersion
    keys: Keys
    ends: Collection[str] = ()
    """Keys of the letters and drops that there were before."""
    samples: list[SampleRow] = dataclasses.field(default_factory=list)
    actions: list[Action] = dataclasses.field(default_factory=list)
    letters: list[Letter] = dataclasses.field(default_factory=list)
    drops: list[Drop] = dataclasses.field(default_factory=list)
    parts: dict[str, bytes] = dataclasses.field(default_factory=dict)
    counts: dict[str, OperationCount] = dataclasses.field(default_factory=dict)
    reused: set[str] = dataclasses.field(default_factory=set)
    """Digests of stored bytes that were found and not made."""
    stored: Collection[str] = ()
    """Digests of raw bytes that this worker has stored before."""
    remakes: bool = False
    """Whether everything is recomputed, known or not: stored bytes of it are lost."""

    @property
    def size_bytes(self) -> int:
        """Bytes that are held."""
        return sum(map(len, self.parts.values()))

    def count(self, name: str, *, hits: int = 0, misses: int = 0, dead: int = 0, dropped: int = 0) -> None:
        """Count outcomes of an operation."""
        more = OperationCount(operation=name, hits=hits, misses=misses, dead=dead, dropped=dropped)
        self.counts[name] = self.counts[name] + more if name in self.counts else more

    def refuse(self, sample: Sample, error: BadRecordError, *, sample_id: str) -> None:
        """Note that a record breaks a rule of its source."""
        sample.ended = INGEST
        self.letters.append(
            Letter(
                key=digest_value([INGEST, self.version.digest, sample.ordinal]),
                operation=INGEST,
                ordinal=sample.ordinal,
                sample_id=sample_id,
                rule=error.rule,
                error=error.message,
            )
        )
        self.count(INGEST, dead=1)

    def take(self, sample: Sample, outcome: SampleOutcome) -> None:
        """Note what the sandbox made of a sample."""
        steps = {step.name: step for step in self.chain.upto}
        for end in outcome.steps:
            if isinstance(end, StepMade):
                self._made(sample, steps[end.step], end.value)
                continue
            action = self.keys.key_of(sample, steps[end.step])
            assert action is not None, "a step that ran has its inputs"
            sample.ended = end.step
            key, name = letter_key(action, sample.ordinal), sample.sample_id
            if isinstance(end, StepVerdict):
                self.letters.append(
                    Letter(
                        key=key,
                        operation=end.step,
                        ordinal=sample.ordinal,
                        sample_id=name,
                        rule=end.rule,
                        error=end.message,
                    )
                )
                self.count(end.step, dead=1)
            else:
                self.drops.append(
                    Drop(key=key, operation=end.step, ordinal=sample.ordinal, sample_id=name, reason=end.reason)
                )
                self.count(end.step, dropped=1)

    def _made(self, sample: Sample, step: Step, value: Value) -> None:
        stored = Stored.of(value.data, value.blobs)
        data = stored.to_bytes()
        digest = digest_bytes(data)
        inputs = self.keys.inputs_of(sample, step)
        assert inputs is not None, "a step that ran has its inputs"
        small = len(data) <= VALUE_BYTES_MAX
        if not small:
            self.parts[digest] = data
        for name in value.new:
            self.parts[name] = value.blobs[name].data
        key = action_key(step.prefix, ":".join(inputs))
        inline = data.decode() if small else None
        self.actions.append(Action(key=key, operation=step.operation.name, inputs=inputs, output=digest, value=inline))
        sample.outputs[step.name] = Output(digest, value=stored if small else None)
        self.count(step.name, misses=1)

    def results(self, artifacts: Sequence[Artifact], *, finished: bool) -> Results:
        """Return the rows to commit, once the bytes are stored."""
        return Results(
            version_id=self.version.id,
            samples=tuple(self.samples),
            artifacts=artifacts,
            actions=tuple(self.actions),
            letters=tuple(self.letters),
            drops=tuple(self.drops),
            counts=tuple(self.counts.values()),
            reused=sorted(self.reused) if finished else (),
        )

    def clear(self) -> None:
        """Forget what is committed."""
        for part in (self.samples, self.actions, self.letters, self.drops):
            part.clear()
        self.parts.clear()
        self.counts.clear()
