"""Known outputs of some samples, and the steps left to run. Pure apart from the lookups that it is given.

The key of a step's action is made of the digests of its inputs' outputs. So a step that changed costs the steps that
read it, and none of them when its output is the same as before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from polyreme_datahub.digests import action_key, digest_value
from polyreme_datahub.operations.declare import RECORD
from polyreme_datahub.recipes.recipe import Step
from polyreme_datahub.runner.stored import Stored


class Output:
    """What a step made of a sample."""

    __slots__ = ("_text", "_value", "digest")

    def __init__(self, digest: str, *, text: str | None = None, value: Stored | None = None) -> None:
        """Take the value, or its text, where it is small enough to lie in the registry."""
        self.digest = digest
        self._text, self._value = text, value

    @property
    def value(self) -> Stored | None:
        """The value where it lies in the registry; read at its first use, since most are never looked at."""
        if self._value is None and self._text is not None:
            self._value = Stored.from_bytes(self._text)
        return self._value


@dataclasses.dataclass(slots=True, kw_only=True)
class Sample:
    """One sample on its way through the steps."""

    ordinal: int
    sample_id: str = ""
    record: str = ""
    """Digest of the record; empty: not read from the source yet."""
    outputs: dict[str, Output] = dataclasses.field(default_factory=dict)
    ended: str = ""
    """Name of the step that ended it, by a verdict or a filter; empty: it continues."""
    missing: list[Step] = dataclasses.field(default_factory=list)
    """Steps left to run, in order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """Makes the keys of actions over one version."""

    version: str
    """Digest of the version."""
    constants: Mapping[str, str]
    """Digests of the inputs that are the same for every sample."""

    def inputs_of(self, sample: Sample, step: Step) -> tuple[str, ...] | None:
        """Return the digests of a step's inputs, or None while one is not known."""
        digests = [self._input(sample, name) for name in step.inputs]
        return tuple(digests) if all(digests) else None

    def key_of(self, sample: Sample, step: Step) -> str | None:
        """Return the key of a step's action, or None while an input is not known."""
        inputs = self.inputs_of(sample, step)
        return None if inputs is None else action_key(step.prefix, ":".join(inputs))

    def of_barrier(self, step: Step, before: Sequence[Step]) -> str:
        """Return the key of a barrier: it looks at what all steps before it made of the whole version."""
        return action_key(
            step.prefix, digest_value([self.version, [one.prefix for one in before], dict(self.constants)])
        )

    def _input(self, sample: Sample, name: str) -> str:
        if name == RECORD:
            return sample.record
        if name in self.constants:
            return self.constants[name]
        found = sample.outputs.get(name)
        return found.digest if found is not None else ""


PROBE = 8
"""Samples that run through a changed step alone, to see whether its output changed."""
Outputs = Callable[[Collection[str]], Mapping[str, Output]]
"""Looks up the outputs of actions by their keys."""


def letter_key(action: str, ordinal: int) -> str:
    """Key of a sample's dead letter or drop: two samples may share an input, and each has its own."""
    return digest_value([action, ordinal])


def resolve(
    samples: Sequence[Sample], steps: Sequence[Step], keys: Keys, *, outputs_of: Outputs, ends: Collection[str]
) -> dict[str, int]:
    """Find what is known of samples, and set ``missing`` and ``ended``.

    Args:
        samples: The samples; what they have of outputs is kept.
        steps: The steps to look at, in order.
        keys: Makes keys.
        outputs_of: Looks up outputs.
        ends: Keys of the dead letters and of the dropped samples there are (``letter_key``).

    Returns:
        How many outputs each step had.
    """
    hits = {step.name: 0 for step in steps}
    for sample in samples:
        sample.missing = []
    for at, step in enumerate(steps):
        if step.operation.barrier:
            barrier = keys.of_barrier(step, steps[:at])
            for sample in samples:
                if not sample.ended and letter_key(barrier, sample.ordinal) in ends:
                    sample.ended = step.name
            continue
        going = [sample for sample in samples if not sample.ended]
        wanted = {sample.ordinal: keys.key_of(sample, step) for sample in going if step.name not in sample.outputs}
        found = outputs_of({key for key in wanted.values() if key is not None})
        for sample in going:
            if step.name in sample.outputs:
                hits[step.name] += 1
                continue
            key = wanted[sample.ordinal]
            if key is not None and key in found:
                sample.outputs[step.name] = found[key]
                hits[step.name] += 1
            elif key is not None and letter_key(key, sample.ordinal) in ends:
                sample.ended = step.name
            else:
                sample.missing.append(step)
    for sample in samples:
        if sample.ended:
            sample.missing = []
    return hits


def next_wave(samples: Sequence[Sample], *, probed: bool, hits: int) -> list[Sample]:
    """Choose which samples run now, and shorten their ``missing`` to the steps that run.

    A changed step may give the output that it gave before, and then nothing after it has to run. So a few samples run
    through their first missing step alone. Where a look then finds outputs of the steps after it, all samples continue
    step by step; where it finds none, they run through all of their steps in one go, and no image is decoded twice.

    Args:
        samples: Samples with ``missing`` steps.
        probed: Whether some have run alone.
        hits: Outputs that the look after it found.
    """
    if not probed:
        some = [sample for sample in samples if len(sample.missing) > 1][:PROBE]
        wave = some or list(samples)
    else:
        wave = list(samples)
    if not probed or hits:
        for sample in wave:
            sample.missing = sample.missing[:1]
    return wave
