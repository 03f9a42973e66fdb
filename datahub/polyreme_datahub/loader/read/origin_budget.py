"""Holds one process to its share of the job's budget at the bucket (``spec.data.originBudget``).

Every request of the process passes here, retries too, and waits until its share has room for it. The lease is renewed
by the request that finds it due; a data engine, which may have nothing to ask for while others wait for a share, also
renews it when its launcher asks how it does.

The table of leases of a job is in its object store: each generation is an object, created if absent. Old generations
are removed, so a process that slept may create one that others made and removed long ago. A process that created a
generation therefore looks whether there is a newer one: the newest is always there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping

from polyreme_api.errors import EnvironmentFailedError, PolyremeError
from polyreme_api.job.data import BUDGET_BYTES_MIN, BUDGET_REQUESTS_MIN
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.store import ObjectExistsError, ObjectNotFoundError, ObjectStore, StoreFailedError
from polyreme_datahub.loader.read.budget_rules import (
    GROWN_AFTER_S,
    NOTHING,
    Lease,
    Pace,
    Rate,
    Table,
    grows_late,
    renewed,
    usable,
)
from polyreme_datahub.object_rules import Sleep
from polyreme_datahub.objects import PACED, BucketStore, open_store

RETRIED_EVERY_S = 1.0
"""Time after which a process that has no share, or could not renew its lease, tries to again."""
TRIES_MAX = 16
"""Tries of one renewal, while other processes renew theirs."""
WAIT_MAX_S = 300.0
LOG_AFTER_S = 5.0
BESIDE_ENGINES = 0.1
"""Part of the budget that is for the ranks of pods with engines."""
UNNAMED = "unnamed"
"""In place of the id of a job that has none."""
FOLDER = "budgets"
KEPT = 3
"""Generations that are kept: another process may just be reading the second newest."""
DIGITS = 12
"""Of a generation's number: keys have its order."""
READ_TRIES_MAX = 8
"""Looks for the newest generation while others replace it."""

_log = logging.getLogger(__name__)


class LeaseTable:
    """The leases of one job.

    Args:
        store: Where they lie.
        job: The job's id.
    """

    def __init__(self, store: ObjectStore, job: str) -> None:
        self._store, self._folder = store, f"{FOLDER}/{job}/"

    def newest(self) -> Table:
        """Read the newest generation.

        Raises:
            StoreFailedError: If the store stays away, or others replace the table faster than it can be read.
        """
        for _ in range(READ_TRIES_MAX):
            keys = self._keys()
            if not keys:
                return Table()
            try:
                return _parsed(self._store.get(keys[-1]), keys[-1])
            except ObjectNotFoundError:
                continue
        raise StoreFailedError(f"leases below {self._folder} changed {READ_TRIES_MAX} times while they were read")

    def replace(self, table: Table) -> bool:
        """Write the generation that follows the newest; False: another process wrote one before.

        Raises:
            StoreFailedError: If the store stays away.
        """
        key = f"{self._folder}{table.generation:0{DIGITS}d}.json"
        try:
            self._store.put_if_absent(key, json.dumps(dataclasses.asdict(table)).encode())
        except ObjectExistsError:
            return False
        keys = self._keys()
        if keys[-1] != key:
            self._store.delete(key)
            return False
        for old in keys[: -1 - KEPT]:
            self._store.delete(old)
        return True

    def _keys(self) -> list[str]:
        return [info.key for info in self._store.list(self._folder)]


def _parsed(data: bytes, key: str) -> Table:
    try:
        value = json.loads(data)
        leases = tuple(
            Lease(
                holder=str(each["holder"]),
                process=str(each["process"]),
                wanted=_rate(each["wanted"]),
                share=_rate(each["share"]),
                until_s=float(each["until_s"]),
            )
            for each in value["leases"]
        )
        return Table(generation=int(value["generation"]), leases=leases, shrunk_s=float(value["shrunk_s"]))
    except (ValueError, KeyError, TypeError) as error:
        raise StoreFailedError(f"leases at {key} can't be read ({error!r}); delete the folder {FOLDER}") from error


def _rate(value: Mapping[str, float]) -> Rate:
    return Rate(float(value["requests"]), float(value["bytes"]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """How a process knows the time, and waits."""

    now_s: Callable[[], float] = time.time  # noqa: TID251 - the shell's default
    """The time of day [s]."""
    steady_s: Callable[[], float] = time.monotonic  # noqa: TID251 - the shell's default
    """A clock that never jumps [s]."""
    sleep: Sleep = time.sleep  # noqa: TID251 - the shell's default


class OriginBudget:
    """One process' share; its threads share it.

    Args:
        table: The job's leases.
        budget: Of the job.
        wanted: What this process wants of it.
        holder: Name of this process, which its successor has too; None: it has no successor.
        clocks: Of this machine.
    """

    def __init__(
        self,
        table: LeaseTable,
        budget: Rate,
        *,
        wanted: Rate,
        holder: str | None = None,
        clocks: Clocks | None = None,
    ) -> None:
        self._table, self._budget, self._wanted = table, budget, wanted
        self._process = uuid.uuid4().hex
        self._holder = holder or self._process
        self._clocks = clocks or Clocks()
        self._lock = threading.Lock()
        self._pace = Pace()
        self._lease: Lease | None = None
        self._before, self._grown_s = NOTHING, float("-inf")
        self._due_s = float("-inf")
        self._tending = threading.Semaphore()
        self.admitted_count = 0
        """Requests that were admitted, and renewals: as long as it rises, nothing is stuck."""

    @contextlib.contextmanager
    def admitted(self, size_bytes: int) -> Iterator[int]:
        """Wait until a request may be sent; gives the bytes that it may ask for, at most those wanted.

        Raises:
            EnvironmentFailedError: If it waited for ``WAIT_MAX_S``, or another process has taken this one's place.
            StoreFailedError: If the process has no lease, and the store stays away.
        """
        may, number = self._admit(size_bytes)
        try:
            yield may
        finally:
            with self._lock:
                self._pace.end(number, now_s=self._clocks.steady_s())

    def refused(self) -> None:
        """Note that the server refused a request because it has too many."""
        with self._lock:
            self._pace.refused(self._clocks.steady_s())

    def tend(self) -> None:
        """Have the lease renewed if there is one and it is time to; returns at once, and may be called often."""
        if self._lease is None or self._clocks.steady_s() < self._due_s or not self._tending.acquire(blocking=False):
            return
        threading.Thread(target=self._tend, name="budget-lease").start()

    def _tend(self) -> None:
        try:
            with self._lock:
                self._share()
        except PolyremeError as error:
            # The next request meets it too, and reports it to its caller.
            _log.warning("%s", error.message)
        finally:
            self._tending.release()

    def _admit(self, size_bytes: int) -> tuple[int, int]:
        begun_s, logged = self._clocks.steady_s(), False
        while True:
            with self._lock:
                share = self._share()
                may = min(size_bytes, self._pace.largest(share))
                wait_s = self._pace.wait_s(share, may, now_s=self._clocks.steady_s())
                if wait_s <= 0.0:
                    self.admitted_count += 1
                    return may, self._pace.begin(may)
            waited_s = self._clocks.steady_s() - begun_s
            if waited_s >= WAIT_MAX_S:
                raise EnvironmentFailedError(
                    f"a request to the bucket waited {waited_s:.0f} s for its share of the job's budget, at most "
                    f"{WAIT_MAX_S:g}: {self._said(share)}",
                    field="spec.data.originBudget",
                )
            if waited_s >= LOG_AFTER_S and not logged:
                logged = True
                _log.warning("waiting for the job's budget at its bucket: %s", self._said(share))
            self._clocks.sleep(min(wait_s, RETRIED_EVERY_S))

    def _said(self, share: Rate) -> str:
        return (
            f"{self._holder} may send {share.requests:.1f} requests and {share.bytes:,.0f} bytes a second of "
            f"{self._budget.requests:g} and {self._budget.bytes:,.0f}, and uses {self._pace.factor:.0%} of that"
        )

    def _share(self) -> Rate:
        """Return what may be asked for now; renews the lease when it is time to."""
        if self._clocks.steady_s() >= self._due_s:
            self._renew()
        share = usable(self._lease, now_s=self._clocks.now_s())
        return share if self._clocks.steady_s() >= self._grown_s else share.least(self._before)

    def _renew(self) -> None:
        self._due_s = self._clocks.steady_s() + RETRIED_EVERY_S
        self.admitted_count += 1
        try:
            self._try_to_renew()
        except StoreFailedError as error:
            if usable(self._lease, now_s=self._clocks.now_s()) == NOTHING:
                raise
            _log.warning("the lease of a share of the job's budget was not renewed: %s", error.message)

    def _try_to_renew(self) -> None:
        for tried in range(TRIES_MAX):
            table = self._table.newest()
            found = table.of(self._holder)
            if self._lease is not None and found is not None and found.process != self._process:
                raise EnvironmentFailedError(
                    f"another process reads the job's data as {self._holder}, and has this one's share of "
                    "spec.data.originBudget; this one was replaced",
                    field="spec.data.originBudget",
                )
            now_s = self._clocks.now_s()
            after = renewed(
                table,
                self._holder,
                process=self._process,
                budget=self._budget,
                wanted=self._wanted,
                now_s=now_s,
            )
            if after is None:
                return
            if self._table.replace(after):
                self._take(after, late=grows_late(after, now_s=now_s))
                return
            # Of those that met, each waits for another time.
            self._clocks.sleep(0.02 * (1 + int(self._process[tried % len(self._process)], 16)))

    def _take(self, table: Table, *, late: bool) -> None:
        lease = table.of(self._holder)
        assert lease is not None
        if late:
            self._before = usable(self._lease, now_s=self._clocks.now_s())
            self._grown_s = self._clocks.steady_s() + GROWN_AFTER_S
        self._lease = lease
        if usable(lease, now_s=self._clocks.now_s()).requests >= 1.0:
            self._due_s = self._clocks.steady_s() + table.renewed_every_s


class Reader(enum.Enum):
    """What reads a job's data."""

    ENGINE = "engine"
    """Reads for all ranks of its pod."""
    RANK_WITH_ENGINE = "rank with engine"
    """Reads held-out samples only."""
    RANK = "rank"
    """Reads for itself; so do readers outside of the job."""


def origin_budget(
    url: str, spec: TrainingJobSpec, *, job: str, reader: Reader = Reader.RANK, holder: str | None = None
) -> OriginBudget | None:
    """Return this process' share of a job's budget; None: the job has none, or its data lie in no bucket.

    Args:
        url: Of the object store.
        spec: Of the job.
        job: The job's id.
        reader: What this process is.
        holder: Name of this process, which its successor has too; None: it has no successor.
    """
    given = spec.data.origin_budget
    if given is None:
        return None
    store = open_store(url, patience=PACED)
    if not isinstance(store, BucketStore):
        return None
    budget = Rate(given.requests_per_second, given.bytes_per_second)
    wanted = wanted_by(reader, budget, pods=spec.workers.replicas, devices=spec.workers.devices)
    return OriginBudget(LeaseTable(store, job or UNNAMED), budget, wanted=wanted, holder=holder)


def wanted_by(reader: Reader, budget: Rate, *, pods: int, devices: int) -> Rate:
    """Return what one process wants of a budget: what all of a job want fits, so that none waits for a share."""
    ranks = pods * devices
    if reader is Reader.RANK:
        return budget * (1.0 / ranks)
    beside = (budget * (BESIDE_ENGINES / ranks)).most(Rate(BUDGET_REQUESTS_MIN, BUDGET_BYTES_MIN))
    return beside if reader is Reader.RANK_WITH_ENGINE else (budget - beside * ranks) * (1.0 / pods)
