"""The newest batch of intents, and which of its jobs need no cancellation any more."""

from __future__ import annotations

import logging

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.cache.jobs import JobIndex, is_ours
from polyreme_operator.cache.kinds import Kind
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.intents import Intents, assume_all
from polyreme_operator.types.parse import parse_intents_object

_log = logging.getLogger(__name__)


class IntentIndex(Kind):
    """Intents of the scheduler: one ConfigMap."""

    def __init__(self, jobs: JobIndex) -> None:
        self.settled: set[str] = set()
        """Jobs whose intended write can't be applied any more, whatever their status says."""
        self._jobs, self._intents, self._exists = jobs, Intents(known=False), False
        jobs.when_removed(self.settled.discard)

    def is_others(self, ref: ObjectRef, manifest: Manifest) -> bool:
        """Tell whether a ConfigMap holds something else."""
        del manifest
        return ref.name != labels.INTENTS_NAME

    def put(self, ref: ObjectRef, manifest: Manifest, now_s: float) -> Changes:
        """Take a batch."""
        del ref, now_s
        self._exists = True
        intents = parse_intents_object(manifest)
        if intents is not None:
            self._replace(intents)
        return Changes(asks=intents is not None)

    def put_unreadable(self, ref: ObjectRef, manifest: Manifest, why: str) -> Changes:
        """Forget the batch: it is unknown what was intended."""
        del manifest, why
        changes = self.remove(ref)
        self._exists = True
        return changes

    def remove(self, ref: ObjectRef) -> Changes:
        """Forget the batch, since its object is missing."""
        if not self._exists or self.is_others(ref, {}):
            return Changes()
        _log.warning("%s is missing: every unfinished admission is cancelled before the next one", ref)
        self._exists = False
        self._replace(Intents(known=False))
        return Changes(asks=True)

    def assumed(self) -> Intents:
        """Return the batch. While it is unknown, every unfinished job counts as an entry from now on."""
        self._intents = assume_all(self._intents, (job for job in self._jobs.views.values() if is_ours(job)))
        return self._intents

    def settle(self, uid: str) -> None:
        """Note that a job's intended write can't be applied any more: a later write was accepted, or it was refused."""
        self.settled.add(uid)

    def is_intended(self, uid: str) -> bool:
        """Tell whether the batch names a job whose outcome is not settled."""
        return uid not in self.settled and any(entry.uid == uid for entry in self._intents.entries)

    def _replace(self, intents: Intents) -> None:
        self._intents = intents
        self.settled.clear()
