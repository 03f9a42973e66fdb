"""Runs the steps of a chain on samples, in one resource-limited child process at a time.

Verdicts. An operation's BadRecordError and Dropped are final. What ends a child or fails unforeseen is tried a second
time, and only the second failure is a verdict: for ``memory``, ``time`` and ``crash`` alone in a fresh child; for
``operation`` (an unforeseen exception) alone in the same one. A result of a wrong type, or too large, is final.

A child that something outside has killed (SIGKILL, SIGTERM, a lowered limit) is replaced, and its samples are tried
again: no sample ever gets a verdict for that. ``RESTARTS_MAX`` such deaths without one outcome between them are an
``EnvironmentFailedError``.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_datahub.operations.declare import find_operation
from polyreme_datahub.operations.values import Value
from polyreme_datahub.sandbox.outcomes import read_outcomes
from polyreme_datahub.sandbox.process import ChildEnded, ChildProcess, Death
from polyreme_datahub.sandbox.tasks import (
    MEMORY,
    OPERATION,
    TIME,
    Limits,
    SampleOutcome,
    SampleTask,
    SandboxStep,
    StepMade,
    StepVerdict,
)

START_S_MAX = 120.0
"""From the start of a child until it is ready: imports on a busy machine."""
RESTARTS_MAX = 8
"""Deaths by something outside, one after the other."""
GROUPS_MAX = 4
FLIGHT_BYTES_MAX = 64 * 2**20
GROUP_BYTES_MAX = 16 * 2**20
"""Groups and bytes that are sent ahead, so that the child never waits for its next sample; bytes of one group of an
operation with batches, whose decoded images are in memory together."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    tasks: Sequence[SampleTask]
    tried: bool = False
    """Whether its one sample has failed unforeseen before."""

    @property
    def size_bytes(self) -> int:
        return sum(len(data) for data in _blobs_of(self.tasks).values())


class Sandbox:
    """A chain's child process. Use it from one thread: the child ends with the thread that started it."""

    def __init__(
        self,
        steps: Sequence[SandboxStep],
        limits: Limits | None = None,
        *,
        shared: Mapping[str, Value] | None = None,
        now_s: Callable[[], float] = time.monotonic,  # noqa: TID251 - the shell's default
    ) -> None:
        """Take a chain; the first sample starts the child.

        Args:
            steps: The steps, each after those whose values it takes.
            limits: What one sample may use.
            shared: Values that are the same for all samples, sent once.
            now_s: Clock of the limit on wall time.
        """
        self._steps = tuple(steps)
        self._limits = limits or Limits()
        self._shared = dict(shared or {})
        self._now_s = now_s
        self._batch = max(find_operation(step.operation).batch for step in self._steps)
        self._child: ChildProcess | None = None
        self._deaths = 0
        self.granted: Mapping[str, bool] = {}
        """What the kernel let the last child give up: ``unprivileged``, ``no_new_privileges``, ``system_calls``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()
            self._child = None

    @property
    def pid(self) -> int | None:
        """Number of the child process, while there is one."""
        return None if self._child is None else self._child.pid

    def run(self, samples: Iterable[SampleTask]) -> Iterator[SampleOutcome]:
        """Run the steps on samples. Outcomes come one for each sample, mostly in order.

        Raises:
            EnvironmentFailedError: If children can't be started, or are killed from outside again and again.
            InvalidConfigError: If an operation can't be imported.
        """
        source = iter(samples)
        waiting: deque[_Group] = deque()
        flight: deque[_Group] = deque()
        try:
            while self._fill(source, waiting, flight):
                yield from self._next(waiting, flight)
        finally:
            if flight:
                self.close()

    def _fill(self, source: Iterator[SampleTask], waiting: deque[_Group], flight: deque[_Group]) -> bool:
        """Send groups ahead; tell whether there is anything in flight."""
        size_bytes = sum(group.size_bytes for group in flight)
        while len(flight) < GROUPS_MAX and (not flight or size_bytes < FLIGHT_BYTES_MAX):
            group = waiting.popleft() if waiting else self._pull(source)
            if group is None:
                break
            self._send(group)
            flight.append(group)
            size_bytes += group.size_bytes
        return bool(flight)

    def _pull(self, source: Iterator[SampleTask]) -> _Group | None:
        """Take as many samples as one call of an operation may have, but not more than may be held at once."""
        tasks: list[SampleTask] = []
        size_bytes = 0
        while len(tasks) < self._batch and size_bytes < GROUP_BYTES_MAX:
            task = next(source, None)
            if task is None:
                break
            tasks.append(task)
            size_bytes += _Group([task]).size_bytes
        return _Group(tasks) if tasks else None

    def _next(self, waiting: deque[_Group], flight: deque[_Group]) -> Iterator[SampleOutcome]:
        """Wait for the first group in flight; a child that ends is judged and replaced."""
        group = flight[0]
        try:
            outcomes, unforeseen = self._await(group)
        except ChildEnded as ended:
            flight.popleft()
            waiting.extendleft(reversed(flight))
            flight.clear()
            self.close()
            if ended.death.rule is None:
                waiting.appendleft(group)
                self._count_death(ended.death)
                return
            for task in group.tasks:
                yield self._judge(task)
            return
        flight.popleft()
        for task, outcome in zip(group.tasks, outcomes, strict=True):
            rule = unforeseen.get(outcome.key)
            if rule is None or (group.tried and rule == OPERATION):
                yield outcome
            elif rule == OPERATION:
                waiting.append(_Group([task], tried=True))
            else:
                waiting.extendleft(reversed(flight))
                flight.clear()
                self.close()
                yield self._judge(task)

    def _judge(self, task: SampleTask) -> SampleOutcome:
        """Run one sample alone; if it fails unforeseen in a fresh child, that is its verdict."""
        while True:
            fresh = self._child is None or not self._child.used
            group = _Group([task])
            self._send(group)
            step = 0
            try:
                outcomes, unforeseen = self._await(group)
            except ChildEnded as ended:
                if self._child is not None:
                    step = self._child.step
                self.close()
                if ended.death.rule is None:
                    self._count_death(ended.death)
                elif fresh:
                    return self._verdict(task, step, ended.death)
                continue
            if not unforeseen or fresh:
                return outcomes[0]
            self.close()

    def _verdict(self, task: SampleTask, step: int, death: Death) -> SampleOutcome:
        """Make the verdict on the step in which two children ended, after what the steps before it make."""
        due = self._due(task)
        noted = self._steps[min(step, len(self._steps) - 1)].name
        name = noted if noted in due else due[0]
        limits = self._limits
        message = {
            TIME: f"{name} {death.how}, expected at most {limits.wall_s:g} s and {limits.cpu_s} s of CPU",
            MEMORY: f"{name} {death.how}, expected at most {limits.memory_bytes} bytes",
        }.get(str(death.rule), f"{name} ended its process, which {death.how}")
        verdict = StepVerdict(step=name, rule=str(death.rule), message=message)
        before = due[: due.index(name)]
        if not before:
            return SampleOutcome(key=task.key, steps=(verdict,))
        outcome = self._judge(dataclasses.replace(task, steps=tuple(before)))
        if not isinstance(outcome.steps[-1], StepMade):
            return outcome
        return SampleOutcome(key=task.key, steps=(*outcome.steps, verdict))

    def _await(self, group: _Group) -> tuple[list[SampleOutcome], dict[str, str]]:
        """Wait for a group's outcomes. Only time spent waiting here counts: a slow consumer costs no sample its time.

        Raises:
            ChildEnded: If the child died, or is over the limit of time.
        """
        assert self._child is not None
        waited_s, limit_s = 0.0, self._limits.wall_s * len(group.tasks)
        while True:
            start_s = self._now_s()
            frame = self._child.receive(wait_s=limit_s - waited_s)
            if frame is not None:
                break
            waited_s += self._now_s() - start_s
            if waited_s >= limit_s:
                raise ChildEnded(Death(TIME, "took too long"))
        known = [{**self._shared, **task.values} for task in group.tasks]
        keys = [task.key for task in group.tasks]
        outcomes, unforeseen, outside = read_outcomes(frame, keys, known, [self._due(task) for task in group.tasks])
        if outside:
            raise ChildEnded(Death(None, "has a lower memory limit than it was started with"))
        self._deaths = 0
        self._child.used = True
        return outcomes, unforeseen

    def _due(self, task: SampleTask) -> list[str]:
        """Return the names of the steps that a sample is sent for."""
        names = [step.name for step in self._steps]
        return [name for name in names if name not in task.values and (task.steps is None or name in task.steps)]

    def _send(self, group: _Group) -> None:
        if self._child is None:
            self._start()
        assert self._child is not None
        tasks = [{"key": task.key, "values": _header(task.values), "steps": task.steps} for task in group.tasks]
        self._child.send_tasks(tasks, _blobs_of(group.tasks))

    def _start(self) -> None:
        while self._child is None:
            output_bytes_max = self._limits.output_bytes * self._batch
            child = ChildProcess(output_bytes_max=output_bytes_max, confined=self._limits.confine)
            try:
                self._greet(child)
                self._child = child
            except ChildEnded as ended:
                self._count_death(ended.death)
            finally:
                if self._child is None:
                    child.close()

    def _greet(self, child: ChildProcess) -> None:
        """Send the chain to a new child and wait until it has imported it.

        Raises:
            ChildEnded: If it dies first.
        """
        shared = {digest: blob.data for value in self._shared.values() for digest, blob in value.blobs.items()}
        limits = dataclasses.asdict(self._limits)
        steps = [dataclasses.asdict(step) for step in self._steps]
        child.send({"steps": steps, "limits": limits, "shared": _header(self._shared)}, shared)
        until_s = self._now_s() + START_S_MAX
        while (frame := child.receive(wait_s=until_s - self._now_s())) is None:
            if self._now_s() >= until_s:
                raise EnvironmentFailedError(f"sandbox child was not ready within {START_S_MAX:g} s")
        header = frame[0]
        if "failed" in header:
            error = InvalidConfigError if header.get("refused") is True else EnvironmentFailedError
            raise error(f"sandbox child can't start: {header['failed']}")
        self.granted = {str(name): bool(value) for name, value in header["ready"].items()}

    def _count_death(self, death: Death) -> None:
        self._deaths += 1
        if self._deaths >= RESTARTS_MAX:
            self._give_up(death)

    def _give_up(self, death: Death) -> NoReturn:
        raise EnvironmentFailedError(
            f"sandbox child {death.how} {self._deaths} times in a row, killed by something other than its own limits; "
            "free memory on this machine, or run fewer workers"
        )


def _header(values: Mapping[str, Value]) -> dict[str, Any]:
    return {name: {"data": value.data, "blobs": list(value.blobs)} for name, value in values.items()}


def _blobs_of(tasks: Sequence[SampleTask]) -> dict[str, bytes]:
    values = (value for task in tasks for value in task.values.values())
    return {digest: blob.data for value in values for digest, blob in value.blobs.items()}
