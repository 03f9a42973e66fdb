"""An embedded cluster with its journal: opened, recovered, closed as one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from polyreme_operator.adapters.embedded.cluster import EmbeddedCluster
from polyreme_operator.adapters.embedded.journal import Journal
from polyreme_operator.adapters.embedded.rules import Validator
from polyreme_operator.adapters.embedded.schema import check_job
from polyreme_operator.adapters.embedded.store import HISTORY_CHANGES, Store
from polyreme_operator.port import KINDS


class DurableCluster:
    """Whatever a write of ``cluster`` returned for is on disk.

    Args:
        path: The journal.
        new_uid: Makes UIDs.
        now_s: Wall time.
        run_token: Random text of this host's life.
        validators: Schema checks by kind; the default checks TrainingJobs.
        history_changes: Least number of changes kept for watches, by kind.

    Raises:
        RefusedError: If another process serves the journal.
        EnvironmentFailedError: If it is damaged, or can't be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        new_uid: Callable[[], str],
        now_s: Callable[[], float],
        run_token: str,
        validators: Mapping[str, Validator] | None = None,
        history_changes: int = HISTORY_CHANGES,
    ) -> None:
        holder = {"pid": os.getpid(), "startedAt": now_s(), "runToken": run_token}
        self.journal = Journal(path, holder=holder)
        self.store = Store(
            new_uid=new_uid,
            now_s=now_s,
            validators={"TrainingJob": check_job} if validators is None else validators,
            history_changes=history_changes,
            on_change=self.journal.append,
        )
        content = self.journal.content
        self.store.restore(content.manifests, version=content.version)
        self.journal.compact_from(lambda: (record for kind in KINDS for record in self.store.records(kind)))
        self.cluster = EmbeddedCluster(self.store, durable=self.journal.durable)

    async def close(self) -> None:
        """Sync and give up the lock."""
        await self.journal.close()
