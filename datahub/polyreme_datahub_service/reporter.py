"""Writes reports on data into the annotation of their job: by compare-and-swap, only on change, at a bounded rate."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import Any

from polyreme_api.clock import Clock
from polyreme_api.data_report import (
    ANNOTATION_DATA,
    BLOCKS_OPERATION,
    MESSAGE_CHARACTERS_MAX,
    OPERATIONS_MAX,
    DataReport,
    DataState,
    OperationProgress,
    data_digest,
    progress_words,
    read_report,
)
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import parse_job
from polyreme_cluster.port import ClusterPort, ConflictError, Manifest, NotFoundError, ObjectRef, PortError

PROGRESS_EVERY_S = 2.0
"""Shortest time between two reports of progress on one job; a new state is reported at once."""
WRITE_TRIES_MAX = 10

_log = logging.getLogger(__name__)


class OutdatedError(Exception):
    """The job is gone, or asks for other data now: nothing was reported."""


class Reporter:
    """Reports on the data of one job.

    Args:
        cluster: The cluster.
        clock: Clock.
        ref: The job.
        uid: Its UID.
        about: Digest of the data part of the spec that is being prepared.
    """

    def __init__(self, cluster: ClusterPort, clock: Clock, *, ref: ObjectRef, uid: str, about: str) -> None:
        self._cluster, self._clock = cluster, clock
        self._ref, self._uid, self._about = ref, uid, about
        self._progress: dict[str, OperationProgress] = {}
        self._trouble = ""
        self._readable = False
        self._changed = asyncio.Event()

    async def state(self) -> DataState | None:
        """Return what is reported about this data now.

        Raises:
            PortError: If the cluster does not answer.
        """
        try:
            manifest = await self._cluster.get(self._ref)
        except NotFoundError:
            return None
        report, _ = read_report(manifest["metadata"].get("annotations"))
        return report.state if report is not None and report.about == self._about else None

    def note(self, line: Mapping[str, Any]) -> None:
        """Take a progress line of the data pipeline, or what holds it up (``trouble``); ``follow`` reports it."""
        if "trouble" in line:
            self._trouble = str(line["trouble"])
            self._changed.set()
            return
        name = str(line.get("operation") or line.get("stage") or "")[:63]
        if not name or (name not in self._progress and len(self._progress) >= OPERATIONS_MAX):
            return
        done, total = max(0, int(line["done"])), max(0, int(line["total"]))
        self._readable |= name == BLOCKS_OPERATION and done > 0
        self._progress[name] = OperationProgress(operation=name, done=done, total=total)
        self._changed.set()

    async def follow(self) -> None:
        """Report progress until cancelled; a report that fails is dropped, since the next one replaces it."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                state = DataState.READABLE if self._readable else DataState.PROCESSING
                await self.report(state, self._words())
            except (PortError, OutdatedError) as error:
                _log.info("progress of %s is not reported: %s", self._ref, error)
            await self._clock.sleep(PROGRESS_EVERY_S)

    def _words(self) -> str:
        """Return the message while data is processed: none, unless something holds it up, or ranks can begin."""
        words = progress_words(tuple(self._progress.values()))
        if blocks := self._progress.get(BLOCKS_OPERATION):
            words = f"{blocks.done:,} of {blocks.total:,} blocks can be trained on"
        if not self._trouble:
            return words if self._readable else ""
        return f"{words}; {self._trouble}" if words else self._trouble

    async def report(self, state: DataState, message: str = "", *, plan: str = "") -> Manifest:
        """Report a state, with the progress so far while data is processed; return the job as it is then.

        Raises:
            OutdatedError: If the job is gone, or its data spec is another.
            PortError: If the cluster does not take it.
        """
        processing = state in {DataState.PROCESSING, DataState.READABLE}
        report = DataReport(
            state=state,
            about=self._about,
            progress=tuple(self._progress.values()) if processing else (),
            message=message[:MESSAGE_CHARACTERS_MAX],
            plan=plan,
        )
        return await self._write(report.to_annotation())

    async def _write(self, text: str) -> Manifest:
        for tried in itertools.count(1):
            try:
                manifest = await self._cluster.get(self._ref)
                if not self._is_current(manifest):
                    raise OutdatedError("the job asks for other data now")
                metadata = manifest["metadata"]
                if (metadata.get("annotations") or {}).get(ANNOTATION_DATA) == text:
                    return manifest
                patch = {"metadata": {"annotations": {ANNOTATION_DATA: text}}}
                return await self._cluster.patch(self._ref, patch, resource_version=metadata["resourceVersion"])
            except NotFoundError as error:
                raise OutdatedError("the job is gone") from error
            except ConflictError:
                # The operator has written its status meanwhile.
                if tried == WRITE_TRIES_MAX:
                    raise
        raise AssertionError("unreachable")

    def _is_current(self, manifest: Manifest) -> bool:
        if manifest["metadata"]["uid"] != self._uid:
            return False
        try:
            return data_digest(parse_job({**manifest, "status": {}}).spec) == self._about
        except InvalidConfigError:
            return False
