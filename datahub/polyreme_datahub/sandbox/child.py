"""The child of a sandbox: reads groups of samples, runs the steps on each, answers in the same order.

Started with nothing but two pipes and a page of shared memory, in which it notes the step that it is in.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.digests import canonical_json
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.declare import NoParameters, Operation, find_operation
from polyreme_datahub.operations.values import Blob, Dropped, Value
from polyreme_datahub.sandbox.confine import allow_cpu, confine, memory_limit_was_lowered
from polyreme_datahub.sandbox.frames import READ_BYTES, Frame, encode_frame, read_frame
from polyreme_datahub.sandbox.tasks import MEMORY, OPERATION, OUTPUT, TYPE

INPUT_BYTES_MAX = 8 * 2**30
MESSAGE_CHARACTERS_MAX = 2000
STATUS = struct.Struct("<I")
"""Number of the step in hand, in shared memory: it is read after this process has died."""
EXIT_MEMORY, EXIT_OUTSIDE = 77, 78
"""Exit codes: out of memory between two steps; the same, under a limit that others have set."""
JSON_BYTES_MAX = 64 * 2**20
"""Of one step's output."""
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    name: str
    operation: Operation
    inputs: tuple[str, ...]
    parameters: Any


@dataclasses.dataclass(slots=True, kw_only=True)
class _Sample:
    key: str
    values: dict[str, Value]
    steps: frozenset[str] | None
    ends: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    new: dict[str, bytes] = dataclasses.field(default_factory=dict)
    ended: bool = False
    size_bytes: int = 0

    def is_due(self, step: str) -> bool:
        """Tell whether a step is to be run on it."""
        asked = self.steps is None or step in self.steps
        return asked and not self.ended and step not in self.values

    def end(self, step: _Step, **how: Any) -> None:
        self.ends.append({"step": step.name, **how})
        self.ended = True


class Child:
    """Runs the steps of a chain."""

    def __init__(self, steps: Sequence[_Step], *, shared: Mapping[str, Value], output_bytes: int, status: mmap.mmap):
        self._steps = steps
        self._shared = shared
        self._output_bytes = output_bytes
        self._status = status
        self.memory_limit = 0

    def run(self, group: Sequence[Mapping[str, Any]], blobs: Mapping[str, Blob]) -> list[_Sample]:
        """Run all steps on a group of samples."""
        samples = [
            _Sample(
                key=task["key"],
                values={**self._shared, **decode_values(task["values"], blobs)},
                steps=None if task["steps"] is None else frozenset(task["steps"]),
            )
            for task in group
        ]
        for at, step in enumerate(self._steps):
            STATUS.pack_into(self._status, 0, at)
            todo = [sample for sample in samples if sample.is_due(step.name)]
            if todo and step.operation.batch > 1:
                self._run_batch(step, todo)
            else:
                for sample in todo:
                    self._run_one(step, sample)
        return samples

    def _run_one(self, step: _Step, sample: _Sample) -> None:
        try:
            made = step.operation.call([sample.values[name] for name in step.inputs], step.parameters)
        except (BadRecordError, Dropped) as decision:
            made = decision
        except BaseException as error:  # noqa: BLE001 - the sample's verdict, whatever an operation raises
            self._fail(step, sample, error)
            return
        self._take(step, sample, made)

    def _run_batch(self, step: _Step, samples: Sequence[_Sample]) -> None:
        columns = [[sample.values[name] for sample in samples] for name in step.inputs]
        try:
            made = step.operation.call(columns, step.parameters)
        except BaseException as error:  # noqa: BLE001 - the same; each sample is tried alone after it
            for sample in samples:
                self._fail(step, sample, error)
            return
        if not isinstance(made, list) or len(made) != len(samples):
            seen = f"{len(made)} results" if isinstance(made, list) else f"a {type(made).__name__}"
            for sample in samples:
                message = f"operation {step.operation.name} returned {seen} for a batch of {len(samples)}"
                sample.end(step, rule=TYPE, message=f"{message}, expected a list with one for each sample")
            return
        for sample, one in zip(samples, made, strict=True):
            self._take(step, sample, one)

    def _take(self, step: _Step, sample: _Sample, made: Any) -> None:
        if isinstance(made, BadRecordError):
            sample.end(step, rule=str(made.rule), message=clean(made.message))
            return
        if isinstance(made, Dropped):
            sample.end(step, dropped=clean(made.reason))
            return
        try:
            value, encoded = check_value(made, sample.values)
        except TypeError as error:
            sample.end(step, rule=TYPE, message=clean(f"operation {step.operation.name} returned {error}"))
            return
        except MemoryError as error:
            self._fail(step, sample, error)
            return
        sample.size_bytes += len(encoded) + sum(len(value.blobs[digest].data) for digest in value.new)
        if sample.size_bytes > self._output_bytes or len(encoded) > JSON_BYTES_MAX:
            message = (
                f"outputs are too large: {sample.size_bytes} bytes so far, {len(encoded)} of JSON in this step, "
                f"expected at most {self._output_bytes} and {JSON_BYTES_MAX}"
            )
            sample.end(step, rule=OUTPUT, message=message)
            return
        sample.new |= {digest: value.blobs[digest].data for digest in value.new}
        kept = [digest for digest in value.blobs if digest not in value.new]
        sample.ends.append({"step": step.name, "data": value.data, "new": sorted(value.new), "kept": kept})
        sample.values[step.name] = value

    def _fail(self, step: _Step, sample: _Sample, error: BaseException) -> None:
        rule = MEMORY if isinstance(error, MemoryError) else OPERATION
        outside = rule == MEMORY and memory_limit_was_lowered(self.memory_limit)
        message = f"{step.operation.name} failed: {type(error).__name__}: {error}"
        sample.end(step, rule=rule, message=clean(message), unforeseen=True, outside=outside)


def check_value(made: Any, known: Mapping[str, Value]) -> tuple[Value, bytes]:
    """Check what an operation returned; return it with its JSON as another process would read it.

    Raises:
        TypeError: If it is not a value: the message reads on after "returned".
    """
    if not isinstance(made, Value):
        raise TypeError(f"a {type(made).__name__}, expected a Value")
    if not isinstance(made.data, Mapping):
        raise TypeError(f"a value whose data is a {type(made.data).__name__}, expected an object")
    try:
        encoded = canonical_json(made.data)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"data that is not JSON: {error}") from error
    for digest, blob in made.blobs.items():
        if type(blob) is not Blob or blob.digest != digest or type(blob.data) is not bytes:
            raise TypeError(f"a blob {digest!r} that is not a Blob of that digest")
    if lost := sorted(made.new - made.blobs.keys()):
        raise TypeError(f"a new blob that is not among its blobs: {lost[0]}")
    stored = {digest for value in known.values() for digest in value.blobs}
    if lost := sorted(made.blobs.keys() - made.new - stored):
        raise TypeError(f"a blob that is neither new nor one of its inputs': {lost[0]}")
    return Value(data=json.loads(encoded), blobs=made.blobs, new=frozenset(made.new)), encoded


def clean(message: str) -> str:
    """Make a message the same in every run: without addresses of objects, and of bounded length."""
    return ADDRESS.sub("", message)[:MESSAGE_CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()


def decode_values(values: Mapping[str, Any], blobs: Mapping[str, Blob]) -> dict[str, Value]:
    """Rebuild values from a header and the blobs of its frame; blobs that were not sent are left out."""
    return {
        name: Value(data=value["data"], blobs={d: blobs[d] for d in value["blobs"] if d in blobs})
        for name, value in values.items()
    }


def receive(descriptor: int) -> Frame | None:
    """Read a frame; None at the end of the pipe."""
    reader = read_frame(bytes_max=INPUT_BYTES_MAX)
    needed = next(reader)
    while True:
        pieces: list[bytes] = []
        while needed:
            piece = os.read(descriptor, min(needed, READ_BYTES))
            if not piece:
                return None
            pieces.append(piece)
            needed -= len(piece)
        try:
            needed = reader.send(pieces)
        except StopIteration as end:
            frame: Frame = end.value
            return frame


def send(descriptor: int, header: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
    """Write a frame."""
    for data in encode_frame(header, blobs):
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]


def main(tasks: int, outcomes: int, status: int, parent: int) -> None:
    """Serve until the pipe of tasks ends."""
    first = receive(tasks)
    if first is None:
        return
    header, raw = first
    page = mmap.mmap(status, mmap.PAGESIZE)
    limits = header["limits"]
    try:
        steps = [_open_step(step) for step in header["steps"]]
        shared = decode_values(header["shared"], {digest: Blob(data, digest=digest) for digest, data in raw.items()})
        child = Child(steps, shared=shared, output_bytes=limits["output_bytes"], status=page)
        granted, child.memory_limit = confine(
            parent=parent,
            memory_bytes=limits["memory_bytes"],
            files=limits["files"],
            system_calls=limits["confine"],
        )
    except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises it
        refused = isinstance(error, InvalidConfigError)
        message = str(error) if refused else f"{type(error).__name__}: {error}"
        send(outcomes, {"failed": clean(message), "refused": refused}, {})
        return
    send(outcomes, {"ready": granted}, {})
    del header, raw, first
    try:
        _serve(child, tasks, outcomes, cpu_s=limits["cpu_s"])
    except MemoryError:
        os._exit(EXIT_OUTSIDE if memory_limit_was_lowered(child.memory_limit) else EXIT_MEMORY)


def _serve(child: Child, tasks: int, outcomes: int, *, cpu_s: int) -> None:
    kept: dict[str, bytes] = {}
    while (frame := receive(tasks)) is not None:
        group, raw = frame[0]["tasks"], frame[1]
        raw |= {digest: kept[digest] for digest in frame[0]["known"]}
        kept = {digest: raw[digest] for digest in frame[0]["keep"]}
        allow_cpu(cpu_s * len(group))
        samples = child.run(group, {digest: Blob(data, digest=digest) for digest, data in raw.items()})
        made = {digest: data for sample in samples for digest, data in sample.new.items()}
        send(outcomes, {"outcomes": [{"key": sample.key, "steps": sample.ends} for sample in samples]}, made)
        del frame, group, raw, samples, made  # before the next sample is read


def _open_step(step: Mapping[str, Any]) -> _Step:
    operation = find_operation(step["operation"])
    values = dict(step["parameters"])
    if operation.parameters is not NoParameters:
        for field in dataclasses.fields(operation.parameters):  # JSON has no tuples
            if isinstance(values.get(field.name), list):
                values[field.name] = tuple(values[field.name])
    return _Step(
        name=step["name"],
        operation=operation,
        inputs=tuple(step["inputs"]),
        parameters=operation.parameters(**values),
    )
