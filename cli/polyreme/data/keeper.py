"""Keeps a run's stored data: processed before ranks read it, made again when it is gone, its damage reported at once.

Ranks map what they read, so a file that is deleted harms nobody until a rank starts: by then it is there again. Bytes
that changed are found by the rank that reads them; its note is what is reported here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from urllib.parse import urlsplit

from polyreme.data.worker_process import DataWork
from polyreme_api.clock import Clock
from polyreme_api.errors import DataDamagedError
from polyreme_api.job import TrainingJob
from polyreme_api.store import StoreFailedError
from polyreme_datahub.stored_data import StoredData, look

LOOK_EVERY_S = 1.0
BUCKET_LOOK_EVERY_S = 10.0
"""Time between looks into a bucket, where each costs requests; its shards are looked at before ranks start only."""
REMAKES_MAX = 3
"""Times that one command makes missing data again."""
NAMED_MAX = 3
"""Damaged or missing objects that one sentence names."""

_log = logging.getLogger(__name__)


class DataKeeper:
    """The stored data of one job.

    Args:
        work: Processes the data.
        objects_url: The object store.
        job: The job, with its UID.
        clock: Clock.
        report: Called with each sentence about damage, for the person who watches and for the report.
    """

    def __init__(
        self, work: DataWork, *, objects_url: str, job: TrainingJob, clock: Clock, report: Callable[[str], None]
    ) -> None:
        self._work, self._objects_url, self._job = work, objects_url, job
        self._clock, self._report = clock, report
        self._in_bucket = urlsplit(objects_url).scheme == "s3"
        self._reported: set[tuple[str, str]] = set()
        self._remakes = 0

    async def mend(self) -> None:
        """Make the data again before ranks start, where an earlier run had them and they are damaged or gone.

        Raises:
            PolyremeError: If that fails.
        """
        seen = await self._look()
        if seen.processed and not seen.whole:
            self._tell(f"{_words(seen)}; checking and recreating it before the ranks start")
            await self._make_again()

    async def run(self) -> None:
        """Process the data, then keep it until cancelled.

        Raises:
            PolyremeError: If it can't be processed, or not be made again.
        """
        await self._work.run()
        while True:
            await self._clock.sleep(BUCKET_LOOK_EVERY_S if self._in_bucket else LOOK_EVERY_S)
            try:
                seen = await self._look(shards=not self._in_bucket)
            except StoreFailedError as error:
                _log.warning("can't look at the stored data, trying again: %s", error)
                continue
            self.report_new(seen)
            if (not seen.processed or seen.missing) and self._remakes < REMAKES_MAX:
                self._remakes += 1
                self._tell(f"{_words(seen)}; recreating it (try {self._remakes} of {REMAKES_MAX})")
                await self._make_again()

    async def last_look(self) -> None:
        """Report what ranks have found since the last look."""
        try:
            self.report_new(await self._look(shards=not self._in_bucket))
        except StoreFailedError as error:
            _log.warning("can't look at the stored data: %s", error)

    def report_new(self, seen: StoredData) -> None:
        """Report damage that has not been reported yet."""
        new = [note for note in seen.notes if (note.index, note.error) not in self._reported]
        self._reported |= {(note.index, note.error) for note in new}
        for note in new[:NAMED_MAX]:
            self._tell(f"{note.error} (data.onDamage: {self._job.spec.data.on_damage})")
        if len(new) > NAMED_MAX:
            self._tell(f"stored data is damaged: {len(new) - NAMED_MAX} more samples; polyreme data show lists them")

    async def _make_again(self) -> None:
        await self._work.run()
        seen = await self._look()
        if not seen.processed or seen.missing:
            raise DataDamagedError(f"stored data could not be recreated: {_words(seen)}")

    async def _look(self, *, shards: bool = True) -> StoredData:
        job = self._job
        return await asyncio.to_thread(look, self._objects_url, job.spec, job=job.metadata.uid, shards=shards)

    def _tell(self, words: str) -> None:
        _log.warning("%s", words)
        self._report(words)


def _words(seen: StoredData) -> str:
    if not seen.processed:
        return "stored data is missing: the plan object of this job"
    if seen.missing:
        more = f" and {len(seen.missing) - NAMED_MAX} more" if len(seen.missing) > NAMED_MAX else ""
        return f"stored data is missing or cut short: {', '.join(seen.missing[:NAMED_MAX])}{more}"
    more = f" (and {len(seen.notes) - 1} more)" if len(seen.notes) > 1 else ""
    return f"{seen.notes[0].error}{more}"
