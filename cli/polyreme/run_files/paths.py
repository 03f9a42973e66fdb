"""Paths of polyreme's files on one machine: the home, and a folder for each run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from polyreme_api import environment as names
from polyreme_datahub_service.home import DataHome

PREVIOUS_SUFFIX = ".previous"
"""A run that ``--fresh`` replaced lies beside its successor under this suffix; only the last one is kept."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Files of one run."""

    path: Path
    namespace: str
    name: str
    checkpoints: Path
    """The default checkpoint root; beside the run's folder, since checkpoints are never owned by a run."""

    lock_file: Path
    """Held by the process that serves the run."""

    @property
    def identity_file(self) -> Path:
        """Who this run is and which process serves it."""
        return self.path / "run.json"

    @property
    def state_file(self) -> Path:
        """The job's last known status, written by the serving process for those who only look."""
        return self.path / "state.json"

    @property
    def job_file(self) -> Path:
        """The job as it was applied."""
        return self.path / "job.yaml"

    @property
    def journal_file(self) -> Path:
        """The embedded cluster's journal."""
        return self.path / "cluster.journal"

    @property
    def pods(self) -> Path:
        """A folder for each pod: logs, token, files for ranks."""
        return self.path / "pods"

    @property
    def export(self) -> Path:
        """The default folder of the exported model."""
        return self.path / "export"

    @property
    def report(self) -> Path:
        """Folder of the report."""
        return self.path / "report"

    @property
    def data_report(self) -> Path:
        """What the data pipeline did for this run."""
        return self.path / "data.json"

    @property
    def host_log(self) -> Path:
        """Log of the serving process: operator and kubelet."""
        return self.path / "host.log"

    @property
    def data_log(self) -> Path:
        """Log of the data pipeline's process."""
        return self.path / "data.log"

    @property
    def exists(self) -> bool:
        """Whether a run lies here; its journal shows that, too, where run.json is lost."""
        return self.identity_file.exists() or self.journal_file.exists()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Home(DataHome):
    """The root of everything."""

    @property
    def cache(self) -> Path:
        """Folder of the ranks' local copies of what lies in a bucket, unless the environment names another."""
        return Path(os.environ.get(names.CACHE_DIRECTORY) or self.path / "cache")

    @property
    def checkpoint_root(self) -> Path:
        """Folder of the default checkpoint roots, by namespace and name of the job."""
        return self.path / "checkpoints"

    def run(self, namespace: str, name: str) -> RunDirectory:
        """Return a run's folder, whether it exists or not."""
        return RunDirectory(
            path=self.path / "runs" / namespace / name,
            namespace=namespace,
            name=name,
            checkpoints=self.checkpoint_root / namespace / name,
            lock_file=self.path / "locks" / f"{namespace}.{name}.lock",
        )

    def runs(self) -> Iterator[RunDirectory]:
        """Yield the runs that exist, by namespace and name."""
        for folder in sorted((self.path / "runs").glob("*/*")):
            run = self.run(folder.parent.name, folder.name)
            if run.exists and not folder.name.endswith(PREVIOUS_SUFFIX):
                yield run
