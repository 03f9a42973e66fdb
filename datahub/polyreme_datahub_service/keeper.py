"""Keeps a run's stored data: processed before ranks read it, reprocessed when it is gone, its damage reported at once.

Ranks map what they read, so a file that is deleted harms no rank until one starts: by then it is there again. Bytes
that changed are found by the rank that reads them; its note is what is reported here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from polyreme_api.clock import Clock
from polyreme_api.data_report import DataState
from polyreme_api.errors import DataDamagedError, EnvironmentFailedError, PolyremeError
from polyreme_api.job import TrainingJob
from polyreme_api.store import StoreFailedError
from polyreme_api.urls import is_bucket
from polyreme_datahub.hub import list_datasets
from polyreme_datahub.stored_data import StoredData, look
from polyreme_datahub_service.controller import Prepared
from polyreme_datahub_service.home import DataHome
from polyreme_datahub_service.reporter import Reporter
from polyreme_datahub_service.worker_process import DataWork

LOOK_EVERY_S = 1.0
BUCKET_LOOK_EVERY_S = 10.0
"""Time between looks into a bucket, where each costs requests; its shards are looked at before ranks start only."""
REMAKES_MAX = 3
"""Times that one command makes missing data again."""
QUICK_RECORDS_MAX = 10_000
"""Records of a run whose ranks start while its data is processed; ranks of a larger one wait for its data."""
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
        reporter: Reports to the operator, which admits the job when its data is ready.
        made: Protects the versions that the data was made from, and returns what was made; called in a thread.
    """

    def __init__(
        self,
        work: DataWork,
        *,
        objects_url: str,
        job: TrainingJob,
        clock: Clock,
        report: Callable[[str], None],
        reporter: Reporter,
        made: Callable[[], Prepared],
    ) -> None:
        self._work, self._objects_url, self._job = work, objects_url, job
        self._reporter, self._made = reporter, made
        self._clock, self._report = clock, report
        self._in_bucket = is_bucket(objects_url)
        self._reported: set[tuple[str, str]] = set()
        self._remakes = 0

    async def restore(self) -> None:
        """Reprocess the data before ranks start, where an earlier run had them and they are damaged or gone.

        Raises:
            PolyremeError: If that fails.
        """
        seen = await self._look()
        if not seen.whole and await self._reporter.state() is DataState.PROCESSED:
            await self._reporter.report(DataState.MISSING)
        if (seen.processed or seen.notes) and not seen.whole:
            self._tell(f"{_words(seen)}; checking and recreating it before the ranks start")
            await self._make_again()

    async def run(self) -> None:
        """Process the data, then keep it until cancelled.

        Raises:
            PolyremeError: If it can't be processed or reprocessed.
        """
        await self._process()
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
                await self._reporter.report(DataState.MISSING, _words(seen))
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

    async def _process(self) -> None:
        """Process the data, and report it as ready; data that an earlier command processed stays ready meanwhile."""
        following = None
        state = await self._reporter.state()
        if state is not DataState.PROCESSED:
            if state is not DataState.READABLE:
                await self._reporter.report(DataState.PROCESSING)
            following = asyncio.create_task(self._reporter.follow())
        try:
            await self._work.run()
        except PolyremeError as error:
            state = DataState.FAILED if isinstance(error, EnvironmentFailedError) else DataState.REFUSED
            await self._reporter.report(state, str(error))
            raise
        finally:
            if following is not None:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        await self._report_made()

    async def _report_made(self) -> None:
        made = await asyncio.to_thread(self._made)
        await self._reporter.report(DataState.PROCESSED, made.message, plan=made.plan)

    async def _make_again(self) -> None:
        await self._work.run()
        seen = await self._look()
        if not seen.processed or seen.missing:
            raise DataDamagedError(f"stored data could not be recreated: {_words(seen)}")
        await self._report_made()

    async def _look(self, *, shards: bool = True) -> StoredData:
        job = self._job
        return await asyncio.to_thread(look, self._objects_url, job.spec, job=job.metadata.uid, shards=shards)

    def _tell(self, words: str) -> None:
        _log.warning("%s", words)
        self._report(words)


def is_quick(home: DataHome, job: TrainingJob) -> bool:
    """Tell whether a run's data is processed in so short a time that its ranks may start meanwhile."""
    names = {source.dataset.partition("@")[0] for source in job.spec.data.sources}
    if job.spec.evaluation is not None:
        names |= {held_out.dataset.partition("@")[0] for held_out in job.spec.evaluation.sets}
    known = {dataset.name: dataset.records for dataset in list_datasets(home.registry_url)}
    return sum(known.get(name, QUICK_RECORDS_MAX + 1) for name in names) <= QUICK_RECORDS_MAX


def _words(seen: StoredData) -> str:
    if not seen.processed and not seen.notes:
        return "stored data is missing: the plan object of this job"
    if seen.missing:
        more = f" and {len(seen.missing) - NAMED_MAX} more" if len(seen.missing) > NAMED_MAX else ""
        return f"stored data is missing or cut short: {', '.join(seen.missing[:NAMED_MAX])}{more}"
    more = f" (and {len(seen.notes) - 1} more)" if len(seen.notes) > 1 else ""
    return f"{seen.notes[0].error}{more}"
