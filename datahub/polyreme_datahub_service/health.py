"""Health of the data pipeline's servers: checked by a thread, reported in one sentence at a bounded rate.

A wrong address or a server that is away ends no process: it stays, is not ready, and works again when they answer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from polyreme_api.errors import EnvironmentFailedError, PolyremeError
from polyreme_api.job import TrainingJob
from polyreme_datahub_service.controller import Preparation, Prepared

GOOD_CHECK_S = 30.0
"""Time between two checks while everything answers."""
RETRY_S = 2.0
"""Time from a failed check to the next one; doubled with each."""
RETRY_MAX_S = 15.0
LOG_EVERY_S = 60.0
"""Shortest time between two lines about the same trouble."""
POLL_S = 0.2
TROUBLE_EVERY_S = 2.0
FIRST_CHECK_S = 120.0
"""Longest time that work waits for the first check."""

_log = logging.getLogger(__name__)


class Checks(Protocol):
    """Asks the servers."""

    def check(self) -> None:
        """Raise the PolyremeError of the first that is wrong or away."""
        ...


class Health:
    """State of the servers. Its attributes may be read by any thread.

    Args:
        checks: Asks them.
        steady_s: A clock that never jumps [s].
        on_recovered: Called by the checking thread when all answer again.
    """

    def __init__(
        self, checks: Checks, *, steady_s: Callable[[], float], on_recovered: Callable[[], None] = lambda: None
    ) -> None:
        self._checks, self._steady_s, self._on_recovered = checks, steady_s, on_recovered
        self.trouble = ""
        """What is wrong, in one sentence; empty if all answered."""
        self._checked = threading.Event()
        self._logged: tuple[str, float] = ("", 0.0)

    @property
    def ready(self) -> bool:
        """Whether all servers answered when they were asked last."""
        return self._checked.is_set() and not self.trouble

    @property
    def checked(self) -> bool:
        """Whether the servers were asked once."""
        return self._checked.is_set()

    def wait_checked(self) -> None:
        """Wait until the servers were asked once."""
        self._checked.wait(FIRST_CHECK_S)

    def run(self, stopped: threading.Event) -> None:
        """Check until stopped."""
        wait_s = RETRY_S
        while not stopped.is_set():
            good = self.check()
            wait_s = RETRY_S if good else min(RETRY_MAX_S, wait_s * 2)
            stopped.wait(GOOD_CHECK_S if good else wait_s / 2)

    def check(self) -> bool:
        """Ask the servers once; return whether all answered."""
        try:
            self._checks.check()
        except PolyremeError as error:
            self.note(str(error))
        except Exception as error:  # noqa: BLE001 - it is reported, and the next check follows
            _log.exception("a check of the servers raised an error")
            self.note(f"{type(error).__name__}: {error}")
        else:
            was, self.trouble = self.trouble, ""
            self._checked.set()
            if was:
                _log.info("the servers of the data pipeline answer again")
                self._on_recovered()
            return True
        self._checked.set()
        return False

    def note(self, trouble: str) -> None:
        """Take what is wrong, and log it: at once if it is new, else now and then."""
        self.trouble = trouble
        said, at_s = self._logged
        now_s = self._steady_s()
        if trouble != said or now_s - at_s >= LOG_EVERY_S:
            _log.warning("not ready: %s", trouble)
            self._logged = trouble, now_s


class GuardedPreparation:
    """A preparation that begins nothing while servers are away: jobs wait with the reason instead.

    So a fault of the service is never treated as a verdict on a job's data. A job that is at work meanwhile
    waits, and shows the trouble beside its progress.

    Args:
        preparation: Prepares the data.
        health: State of the servers.
        held_up: Returns what holds up jobs at work for another reason; empty for nothing.
    """

    def __init__(self, preparation: Preparation, health: Health, *, held_up: Callable[[], str] = lambda: "") -> None:
        self._preparation, self._health, self._held_up = preparation, health, held_up

    async def prepare(self, job: TrainingJob, progress: Callable[[Mapping[str, Any]], None]) -> Prepared:
        """Process the data of a job; raises EnvironmentFailedError with the trouble while there is one."""
        for _ in range(int(FIRST_CHECK_S / POLL_S)):
            if self._health.checked:
                break
            await asyncio.sleep(POLL_S)
        self._refuse()
        watching = asyncio.create_task(self._watch(progress))
        try:
            return await self._preparation.prepare(job, progress)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def is_whole(self, job: TrainingJob) -> bool:
        """Tell whether the processed data of a job is still there."""
        self._refuse()
        return await self._preparation.is_whole(job)

    async def kept(self) -> set[str]:
        """Return the UIDs of jobs that something is kept for."""
        self._refuse()
        return await self._preparation.kept()

    async def forget(self, uid: str) -> None:
        """Release what is kept for a job."""
        await self._preparation.forget(uid)

    async def _watch(self, progress: Callable[[Mapping[str, Any]], None]) -> None:
        """Report what holds up the job, and its end."""
        said = ""
        while True:
            trouble = self._health.trouble or self._held_up()
            if trouble != said:
                progress({"trouble": trouble})
                said = trouble
            await asyncio.sleep(TROUBLE_EVERY_S)

    def _refuse(self) -> None:
        if self._health.trouble:
            raise EnvironmentFailedError(self._health.trouble)
