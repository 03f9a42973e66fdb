"""Trackers that follow a run while it trains, each by a thread of its own: none can stop the run or slow it down."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from polyreme.run_files.paths import RunDirectory
from polyreme.tracking.feed import WAITS_S, Feed
from polyreme.tracking.history import SettledSteps, tracked_run
from polyreme.tracking.registry import Target
from polyreme_api.job import TrainingJob
from polyreme_system.files import read_json

POLL_S = 5.0
PAUSE_MAX_S = 300.0
"""Longest time between two tries while a tracker fails."""
END_S = 15.0
"""Longest wait for the last steps after the run's end."""

_log = logging.getLogger(__name__)


class _Follower:
    """Sends the settled steps of a run to one tracker; warns once when the tracker fails."""

    def __init__(self, target: Target, run: RunDirectory, job: TrainingJob, warn: Callable[[str], None]) -> None:
        self._target = target
        self._run = run
        self._job = job
        self._warn = warn
        self._warned = False
        self._ended = threading.Event()
        self._steps = SettledSteps(run, job)
        self._feed = Feed(target.tracker, self._ended.wait)
        # A daemon: a request that is not answered must not hold the process.
        self._thread = threading.Thread(target=self._follow, name=f"track-{target.kind}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ask for the last steps."""
        self._ended.set()

    def wait(self, limit_s: float) -> None:
        """Wait for the last steps, but no longer than a limit."""
        self._thread.join(max(0.0, limit_s))
        if self._thread.is_alive():
            self._fail(f"no answer within {END_S:g} s")

    def _follow(self) -> None:
        pause_s = POLL_S
        while not self._ended.wait(pause_s):
            pause_s = POLL_S if self._try(WAITS_S) else min(pause_s * 2, PAUSE_MAX_S)
        self._try(())
        self._target.tracker.close()

    def _try(self, waits_s: Sequence[float]) -> bool:
        """Send what is new; return whether that was possible."""
        try:
            known = read_json(self._run.state_file) or {}
            points = self._steps.read(finished=bool(known.get("finished")))
            if points:
                state = str(known.get("state", "Running"))
                run = tracked_run(self._run, self._job, state=state, attempts=self._steps.attempts)
                self._feed.send(run, points, waits_s=waits_s)
                self._steps.forget(points[-1].step)
        except Exception as error:  # noqa: BLE001 (whatever it is, the run continues)
            _log.warning("tracker %s failed: %s", self._target.kind, error)
            self._fail(str(error))
            return False
        return True

    def _fail(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"{self._target.kind} gets no steps: {why}; the run is not affected, and polyreme runs export "
                f"{self._run.name} sends what is missing"
            )


@contextlib.contextmanager
def following(
    targets: Sequence[Target], run: RunDirectory, job: TrainingJob, warn: Callable[[str], None]
) -> Iterator[None]:
    """Follow a run inside the block; after it, wait a bounded time for the last steps.

    Args:
        targets: Where to send steps.
        run: The run, whose identity is written.
        job: Its job.
        warn: Shows a sentence to the person; called from other threads.
    """
    followers = [_Follower(target, run, job, warn) for target in targets]
    try:
        yield
    finally:
        for follower in followers:
            follower.end()
        deadline_s = time.monotonic() + END_S
        for follower in followers:
            follower.wait(deadline_s - time.monotonic())
