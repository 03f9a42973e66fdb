"""The environment contract: what a pod tells its launcher, and what a launcher tells its ranks.

The rank's part holds the names that torchrun sets, so a container without our launcher runs by the same contract.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyreme_api.errors import InvalidConfigError

POD = "POLYREME_POD"
JOB = "POLYREME_JOB"
NAMESPACE = "POLYREME_NAMESPACE"
JOB_UID = "POLYREME_JOB_UID"
INDEX = "POLYREME_INDEX"
REPLACEMENT = "POLYREME_REPLACEMENT"
REPLICAS = "POLYREME_REPLICAS"
DEVICES = "POLYREME_DEVICES"
LEADER_ADDRESS = "POLYREME_LEADER_ADDRESS"
API_URL = "POLYREME_API_URL"
TOKEN_FILE = "POLYREME_TOKEN_FILE"
SECRET_FILE = "POLYREME_SECRET_FILE"
POD_DIRECTORY = "POLYREME_POD_DIRECTORY"
"""Folder for logs and the files that ranks read; the launcher's own."""
LEADER_FD = "POLYREME_LEADER_FD"
"""Optional: listening socket for the leader, inherited from the kubelet, so that no port is chosen twice."""
HOST_FD = "POLYREME_HOST_FD"
"""Optional: read end of a pipe whose other end the kubelet holds; its end means that the kubelet has died."""

ATTEMPT = "POLYREME_ATTEMPT"
JOB_FILE = "POLYREME_JOB_FILE"
PLAN_FILE = "POLYREME_PLAN_FILE"
PLAN = "POLYREME_PLAN"
"""The plan as JSON, for containers that bring their own training."""
CHECKPOINT_URL = "POLYREME_CHECKPOINT_URL"
RESUME_FROM = "POLYREME_RESUME_FROM"
PROGRESS_FD = "POLYREME_PROGRESS_FD"
MASTER_FD = "POLYREME_MASTER_FD"
ERROR_FD = "POLYREME_ERROR_FD"
"""Optional: pipe that takes the one sentence by which a rank says why it ends."""
CHECK = "POLYREME_CHECK"
"""Set for a process that checks its node instead of training: what it shall check, as JSON."""
CHECK_FAULT = "POLYREME_CHECK_FAULT"
"""Optional, for tests: the fault that checks find on this node: ``slow``, ``wrong``, ``hangs`` or ``slow-network``."""
COPY_DATA_FD = "POLYREME_COPY_DATA_FD"
COPY_RECORD_FD = "POLYREME_COPY_RECORD_FD"
"""Optional: files in memory (descriptors) for a copy of the rank's newest checkpoint, and for what it is a copy of."""
PAGE_FD = "POLYREME_PAGE_FD"
"""Optional: a page of memory (descriptor) on which the rank records what it does, for its launcher."""
PRINT_RANK_LOGS = "POLYREME_PRINT_RANK_LOGS"
"""Optional: ``on`` (default) prints each line of a rank to its pod's standard output; ``off`` keeps files alone."""
DATABASE_URL = "POLYREME_DATABASE_URL"
"""Optional: the metadata registry, without a password: libpq reads that from ``PGPASSWORD``."""
TOPICS_URL = "POLYREME_TOPICS_URL"
"""Optional: the topics of the data pipeline."""
OBJECTS_URL = "POLYREME_OBJECTS_URL"
"""The object store; credentials for a bucket have variables of their own (``AWS_...``)."""
EXPORT_URL = "POLYREME_EXPORT_URL"
SERVE_TOKEN = "POLYREME_SERVE_TOKEN"
"""Optional: what clients of ``polyreme serve`` must bring."""
CACHE_DIRECTORY = "POLYREME_CACHE_DIRECTORY"
"""Optional: folder of the local copies of what ranks read from a bucket."""
CACHE_BYTES = "POLYREME_CACHE_BYTES"
"""Optional: most bytes of those copies."""
DATA_ENGINE = "POLYREME_DATA_ENGINE"
"""Optional: ``on`` for one process that prepares the packs of a pod's ranks; ``off`` (default): each reads its own."""
DATA_ENGINE_BYTES = "POLYREME_DATA_ENGINE_BYTES"
"""Optional: most bytes of packs that the data engine has prepared."""
DATA_THREADS = "POLYREME_DATA_THREADS"
"""Optional: threads of a process that decode images; default: its share of the processors, at most 8; 1: no other."""
DATA_ENGINE_FD = "POLYREME_DATA_ENGINE_FD"
"""Optional: descriptor by which a rank connects to the data engine of its pod."""

RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"
NODE_RANK = "NODE_RANK"
NNODES = "NNODES"
NPROC_PER_NODE = "NPROC_PER_NODE"

RENDEZVOUS_PORT = 29_500
"""Port of rank 0's rendezvous in containers that bring their own training."""
LEADER_PORT = 29_400
"""Port of the leader's launcher in a cluster; on one machine the kubelet chooses one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodEnvironment:
    """What a pod tells its launcher."""

    pod: str
    job: str
    namespace: str
    job_uid: str
    index: int
    replacement: int
    replicas: int
    devices: int
    leader_address: str
    api_url: str
    token_file: str
    secret_file: str
    pod_directory: str
    checkpoint_url: str

    @classmethod
    def parse(cls, environment: Mapping[str, str]) -> PodEnvironment:
        """Read the contract.

        Raises:
            InvalidConfigError: Naming the variable that is missing or no number.
        """
        return cls(
            **{name: _text(environment, variable) for name, variable in _POD_TEXTS.items()},  # type: ignore[arg-type]
            **{name: _number(environment, variable) for name, variable in _POD_NUMBERS.items()},  # type: ignore[arg-type]
        )

    def render(self) -> dict[str, str]:
        """Write the contract as variables."""
        names = {**_POD_TEXTS, **_POD_NUMBERS}
        return {variable: str(getattr(self, name)) for name, variable in names.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """What a launcher tells a rank."""

    rank: int
    local_rank: int
    world_size: int
    attempt: int
    master_address: str
    master_port: int
    master_fd: int | None
    """Listening socket for the rendezvous store, on rank 0 only."""
    progress_fd: int | None
    """Pipe for progress records, on rank 0 only."""
    job_file: str
    plan_file: str
    checkpoint_url: str
    resume_from: str | None

    @classmethod
    def parse(cls, environment: Mapping[str, str]) -> RankEnvironment:
        """Read the contract.

        Raises:
            InvalidConfigError: Naming the variable that is missing or no number.
        """
        return cls(
            rank=_number(environment, RANK),
            local_rank=_number(environment, LOCAL_RANK),
            world_size=_number(environment, WORLD_SIZE),
            attempt=_number(environment, ATTEMPT),
            master_address=_text(environment, MASTER_ADDR),
            master_port=_number(environment, MASTER_PORT),
            master_fd=_number(environment, MASTER_FD) if environment.get(MASTER_FD) else None,
            progress_fd=_number(environment, PROGRESS_FD) if environment.get(PROGRESS_FD) else None,
            job_file=_text(environment, JOB_FILE),
            plan_file=_text(environment, PLAN_FILE),
            checkpoint_url=_text(environment, CHECKPOINT_URL),
            resume_from=environment.get(RESUME_FROM) or None,
        )

    def render(self) -> dict[str, str]:
        """Write the contract as variables."""
        variables = {
            RANK: str(self.rank),
            LOCAL_RANK: str(self.local_rank),
            WORLD_SIZE: str(self.world_size),
            ATTEMPT: str(self.attempt),
            MASTER_ADDR: self.master_address,
            MASTER_PORT: str(self.master_port),
            JOB_FILE: self.job_file,
            PLAN_FILE: self.plan_file,
            CHECKPOINT_URL: self.checkpoint_url,
            RESUME_FROM: self.resume_from or "",
        }
        if self.master_fd is not None:
            variables[MASTER_FD] = str(self.master_fd)
        if self.progress_fd is not None:
            variables[PROGRESS_FD] = str(self.progress_fd)
        return variables


_POD_TEXTS = {
    "pod": POD,
    "job": JOB,
    "namespace": NAMESPACE,
    "job_uid": JOB_UID,
    "leader_address": LEADER_ADDRESS,
    "api_url": API_URL,
    "token_file": TOKEN_FILE,
    "secret_file": SECRET_FILE,
    "pod_directory": POD_DIRECTORY,
    "checkpoint_url": CHECKPOINT_URL,
}
_POD_NUMBERS = {"index": INDEX, "replacement": REPLACEMENT, "replicas": REPLICAS, "devices": DEVICES}


def is_on(environment: Mapping[str, str], variable: str, *, default: bool) -> bool:
    """Return whether a variable that is ``on`` or ``off`` is on; not set or empty: the default.

    Raises:
        InvalidConfigError: If it has another value.
    """
    value = environment.get(variable) or ("on" if default else "off")
    if value not in {"on", "off"}:
        raise InvalidConfigError(f"environment variable is neither on nor off: {variable}={value!r}", field=variable)
    return value == "on"


def _text(environment: Mapping[str, str], variable: str) -> str:
    value = environment.get(variable)
    if not value:
        raise InvalidConfigError(f"environment variable missing: {variable} is not set", field=variable)
    return value


def _number(environment: Mapping[str, str], variable: str) -> int:
    value = _text(environment, variable)
    if not value.isascii() or not value.isdigit():
        raise InvalidConfigError(f"environment variable is no whole number: {variable}={value!r}", field=variable)
    return int(value)
