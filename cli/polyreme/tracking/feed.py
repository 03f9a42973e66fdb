"""Sends a tracker what it lacks: safe to repeat, whatever failed before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from polyreme.tracking.port import Point, TrackedRun, Tracker
from polyreme_api.errors import EnvironmentFailedError, PolyremeError, RetryableError

WAITS_S = (1.0, 2.0, 4.0)
"""Pauses between tries."""


class Feed:
    """One tracker, and what it is known to hold."""

    def __init__(self, tracker: Tracker, pause: Callable[[float], object]) -> None:
        self._tracker = tracker
        self._pause = pause
        self._known: dict[str, int] | None = None
        """Last step by name; None: ask the tracker."""
        self._described: TrackedRun | None = None

    def send(self, run: TrackedRun, points: Sequence[Point], *, waits_s: Sequence[float] = WAITS_S) -> int:
        """Send the points that the tracker lacks; return the number of steps.

        Raises:
            EnvironmentFailedError: If the tracker does not answer, after all tries.
        """
        for wait_s in (*waits_s, None):
            try:
                return self._send(run, points)
            except PolyremeError as error:
                # What was stored before the error is not known: ask again.
                self._known = self._described = None
                if not isinstance(error, RetryableError):
                    raise
                if wait_s is None:
                    raise EnvironmentFailedError(error.message, field=error.field) from error
                self._pause(wait_s)
        raise AssertionError("the last try returns or raises")

    def _send(self, run: TrackedRun, points: Sequence[Point]) -> int:
        if self._known is None:
            self._known = dict(self._tracker.open(run))
        lacking = list(_lacking(points, self._known))
        if lacking:
            self._tracker.write(lacking)
            for point in lacking:
                self._known |= dict.fromkeys(point.values, point.step)
        if run != self._described:
            self._tracker.describe(run)
            self._described = run
        return len({point.step for point in lacking})


def _lacking(points: Sequence[Point], known: Mapping[str, int]) -> Iterator[Point]:
    for point in points:
        values = {name: value for name, value in point.values.items() if point.step > known.get(name, 0)}
        if values:
            yield dataclasses.replace(point, values=values)
