"""Leader election by a Lease: the holder renews it while it works, and a contender takes it when renewals stop.

As in client-go, no replica trusts another's clock: a contender counts from its last observed change of the Lease, the
holder from before it sent its last confirmed renewal. The holder stops after two thirds of the lease duration, so two
replicas lead at once only if one clock runs 1.5 times as fast as the other. A replica that was suspended asks before
each write whether it still leads; if it is suspended in the middle of one, the write's precondition protects what
changed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable
from enum import StrEnum

from polyreme_api.clock import Clock
from polyreme_api.times import rfc3339
from polyreme_cluster.port import (
    AlreadyExistsError,
    ClusterPort,
    ConflictError,
    Manifest,
    NotFoundError,
    ObjectRef,
    PortError,
)

LEASE_NAME = "polyreme-operator"
LEASE_S = 15.0
"""Time without a renewal after which a Lease may be taken."""
RENEW_S = 2.0
DEADLINE_RATIO = 2 / 3
"""Share of the lease duration after which a holder that could not renew it stops."""
TRIES_A_DEADLINE = 2
"""Renewal attempts within the deadline if the API server answers none of them."""
JITTER_RATIO = 0.2
EXPIRY_LOOK_S = 0.001
"""Shortest wait for the end of a Lease."""
ROUNDS_MAX = 2
"""Reads and writes of one attempt: after a conflict it reads once and writes again."""

_log = logging.getLogger(__name__)


class Move(StrEnum):
    """Action on the Lease."""

    CREATE = "create"
    TAKE = "take"
    RENEW = "renew"
    WAIT = "wait"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The Lease at one version."""

    version: str
    holder: str
    duration_s: float
    transitions: int
    acquired: str
    renewed: str
    since_s: float
    """When this replica first saw this content, by its own steady clock."""


def observe(manifest: Manifest, known: Seen | None, *, at_s: float) -> Seen:
    """Parse a Lease; unchanged content keeps its observation time."""
    spec = manifest.get("spec") or {}
    seen = Seen(
        version=str(manifest["metadata"]["resourceVersion"]),
        holder=spec.get("holderIdentity") or "",
        duration_s=float(spec.get("leaseDurationSeconds") or LEASE_S),
        transitions=int(spec.get("leaseTransitions") or 0),
        acquired=spec.get("acquireTime") or "",
        renewed=spec.get("renewTime") or "",
        since_s=at_s,
    )
    if known is None or dataclasses.replace(known, version=seen.version, since_s=at_s) != seen:
        return seen
    return dataclasses.replace(seen, since_s=known.since_s)


def decide(seen: Seen | None, *, identity: str, now_s: float) -> Move:
    """Decide the next action of a replica.

    Args:
        seen: The Lease, None if there is none.
        identity: Who asks.
        now_s: The asker's steady clock.
    """
    if seen is None:
        return Move.CREATE
    if seen.holder == identity:
        return Move.RENEW
    if not seen.holder or now_s >= seen.since_s + seen.duration_s:
        return Move.TAKE
    return Move.WAIT


def lease_spec(move: Move, seen: Seen | None, *, identity: str, lease_s: float, now: str) -> Manifest:
    """Return the spec that an action writes."""
    keeps = move is Move.RENEW and seen is not None
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": round(lease_s),
        "acquireTime": seen.acquired if keeps and seen is not None and seen.acquired else now,
        "renewTime": now,
        "leaseTransitions": 0 if seen is None else seen.transitions + (not keeps),
    }


async def lead(
    port: ClusterPort,
    clock: Clock,
    *,
    identity: str,
    namespace: str,
    rng: random.Random,
    run: Callable[[Callable[[], bool]], Awaitable[None]],
    lease_s: float = LEASE_S,
    renew_s: float = RENEW_S,
    name: str = LEASE_NAME,
) -> None:
    """Run ``run`` whenever this replica holds the Lease; return when ``run`` returns.

    Args:
        port: The cluster.
        clock: Time of waits; only its steady time decides.
        identity: Name of this replica; no other process has it.
        namespace: Where the Lease lies.
        rng: Jitter of waits.
        run: The work; cancelled when the Lease is lost, or this is. It gets what tells whether this replica leads now.
        lease_s: Silence after which others may take the Lease.
        renew_s: Time between renewals.
        name: Name of the Lease.
    """
    ref = ObjectRef(kind="Lease", namespace=namespace, name=name)
    candidate = _Candidate(port, clock, rng, identity=identity, ref=ref, lease_s=lease_s, renew_s=renew_s)
    while True:
        await candidate.acquire()
        _log.info("leading as %s", identity)
        work = asyncio.ensure_future(run(candidate.leads))
        try:
            await candidate.keep(work)
        finally:
            work.cancel()
            await asyncio.wait({work})
            await candidate.release()
        if not work.cancelled():
            return work.result()
        _log.warning("no longer leading as %s", identity)


class _Candidate:
    def __init__(
        self,
        port: ClusterPort,
        clock: Clock,
        rng: random.Random,
        *,
        identity: str,
        ref: ObjectRef,
        lease_s: float,
        renew_s: float,
    ) -> None:
        self._port, self._clock, self._rng = port, clock, rng
        self._identity, self._lease_s, self._renew_s = identity, lease_s, renew_s
        self._deadline_s = lease_s * DEADLINE_RATIO
        self._ref = ref
        self._seen: Seen | None = None
        self._sure = False
        """Whether ``_seen`` is the result of our last write, so that the next one needs no read."""
        self._until_s = float("-inf")
        self._said = ""

    async def acquire(self) -> None:
        """Wait until this replica leads."""
        while not self.leads():
            await self._try()
            if not self.leads():
                await self._clock.sleep(self._patience_s())

    async def keep(self, work: asyncio.Future[None]) -> None:
        """Renew until the work ends or the Lease is lost."""
        helpers = [asyncio.ensure_future(self._renew()), asyncio.ensure_future(self._expire())]
        try:
            await asyncio.wait({work, *helpers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)
        for helper in helpers:
            if not helper.cancelled():
                helper.result()

    async def release(self) -> None:
        """Release the Lease if this replica holds it, so that the next one need not wait."""
        self._until_s = float("-inf")
        try:
            async with asyncio.timeout(self._deadline_s / TRIES_A_DEADLINE):
                for _ in range(ROUNDS_MAX):
                    if await self._let_go():
                        break
        except (PortError, TimeoutError) as error:
            _log.info("the Lease was not released and will expire: %s", str(error) or "no answer in time")
        self._sure = False

    async def _let_go(self) -> bool:
        if not self._sure:
            await self._read()
        seen, self._sure = self._seen, False
        if seen is None or seen.holder != self._identity:
            return True
        spec = {"holderIdentity": "", "renewTime": rfc3339(self._clock.now_s()), "leaseDurationSeconds": 1}
        try:
            await self._port.patch(self._ref, {"spec": spec}, resource_version=seen.version)
        except ConflictError:
            # A renewal of our own was in flight at the release.
            return False
        return True

    def leads(self) -> bool:
        """Tell whether the Lease is this replica's for certain."""
        return self._clock.steady_s() < self._until_s

    def _patience_s(self) -> float:
        """Return the time until the next attempt: often enough to see renewals, at the latest at its expiry."""
        poll_s = self._renew_s * (1 + JITTER_RATIO * self._rng.random())
        if self._seen is None or not self._seen.holder:
            return poll_s
        left_s = self._seen.since_s + self._seen.duration_s - self._clock.steady_s()
        return min(poll_s, left_s) if left_s > 0 else poll_s

    async def _renew(self) -> None:
        """Renew until another replica holds the Lease."""
        while True:
            await self._clock.sleep(self._renew_s)
            await self._try()
            if self._seen is not None and self._seen.holder != self._identity:
                return

    async def _expire(self) -> None:
        while self.leads():
            # What is left may be too little to move a clock on.
            await self._clock.sleep(max(EXPIRY_LOOK_S, self._until_s - self._clock.steady_s()))

    async def _try(self) -> None:
        """Read and write once; failures are retried later."""
        try:
            async with asyncio.timeout(self._deadline_s / TRIES_A_DEADLINE):
                await self._once()
            self._said = ""
        except (PortError, TimeoutError) as error:
            self._sure = False
            said = str(error) or "no answer in time"
            if said != self._said:
                _log.warning("can't read or write %s, retrying: %s", self._ref, said)
            self._said = said

    async def _once(self) -> None:
        for _ in range(ROUNDS_MAX):
            if not self._sure:
                await self._read()
            move = decide(self._seen, identity=self._identity, now_s=self._clock.steady_s())
            if move is Move.WAIT:
                return
            try:
                await self._write(move)
            except (ConflictError, AlreadyExistsError):
                # Another replica was faster, or an earlier write of ours was applied after its timeout.
                continue
            return

    async def _read(self) -> None:
        try:
            manifest = await self._port.get(self._ref)
        except NotFoundError:
            # The Lease was deleted; its holder does not know yet and keeps its remaining time.
            if decide(self._seen, identity=self._identity, now_s=self._clock.steady_s()) is not Move.WAIT:
                self._seen = None
        else:
            self._seen = observe(manifest, self._seen, at_s=self._clock.steady_s())

    async def _write(self, move: Move) -> None:
        sent_s, self._sure = self._clock.steady_s(), False
        now = rfc3339(self._clock.now_s())
        spec = lease_spec(move, self._seen, identity=self._identity, lease_s=self._lease_s, now=now)
        if self._seen is None:
            metadata = {"name": self._ref.name, "namespace": self._ref.namespace}
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
            try:
                result = await self._port.create(lease)
            except NotFoundError as error:
                raise NotFoundError(
                    f"{error}; create the namespace (kubectl create namespace {self._ref.namespace}), or choose "
                    "another with --namespace"
                ) from error
        else:
            result = await self._port.patch(self._ref, {"spec": spec}, resource_version=self._seen.version)
        self._seen = observe(result, None, at_s=self._clock.steady_s())
        self._sure = True
        self._until_s = sent_s + self._deadline_s
