"""Requests about incidents and repairs of nodes. None of them is waited for by a taint."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from polyreme_api import labels
from polyreme_cluster.port import (
    STATUS_SUBRESOURCE,
    AlreadyExistsError,
    ClusterPort,
    ConflictError,
    InvalidObjectError,
    Manifest,
    NotFoundError,
    ObjectRef,
    PortError,
    TooManyRequestsError,
    pages_of,
)
from polyreme_operator.cached_cluster import CachedCluster
from polyreme_operator.health.record import HEALTH, Repair, RepairPhase, parse
from polyreme_operator.health.repair import JobSight, job_sight, runs_on
from polyreme_operator.health_decision.repairs import LOOK_S
from polyreme_operator.health_decision.snapshot import Batch, IncidentWrite, RepairWrite
from polyreme_operator.health_observer import HealthObserver
from polyreme_operator.settings import Settings
from polyreme_operator.types.observer import Observer

T = TypeVar("T")
PACE_S = 0.02
"""Pause after each incident that was written."""
_log = logging.getLogger(__name__)


class HealthRequests:
    """Stores incidents, one after another, and does what repairs need, one thing at a time for each node.

    Args:
        cluster: The cluster.
        known: Takes what is read.
        settings: Settings of the installation.
        observer: Receives reports, for metrics.
        again: Has a node decided again at a time.
    """

    def __init__(
        self,
        cluster: CachedCluster,
        known: HealthObserver,
        settings: Settings,
        observer: Observer,
        *,
        again: Callable[[str, float], None],
    ) -> None:
        self._port, self._clock, self._known, self._settings = cluster.port, cluster.clock, known, settings
        self._observer, self._again = observer, again
        self.skipped: set[str] = set()
        """Nodes that were decided about without their history."""
        self._repairing: set[str] = set()
        self._failures = 0
        self._history_at_s, self._listed_s = 0.0, float("-inf")
        """From when on incidents may be written, and when they were listed last."""

    def ready(self) -> bool:
        """Tell whether the incidents are known, and none is being written."""
        return self._listed_s > -math.inf and self._clock.now_s() >= self._history_at_s

    def due(self, batch: Batch) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield what is to be done beside the next decisions."""
        now_s = self._clock.now_s()
        if now_s >= self._history_at_s and (batch.incidents or now_s >= self._listed_s + self._settings.relist_s):
            self._history_at_s = math.inf
            yield self._write_history(batch.incidents)
        for write in batch.repairs:
            if write.node not in self._repairing:
                self._repairing.add(write.node)
                yield self._repair(write)

    async def _tried(self, request: Awaitable[T], what: str) -> T | None:
        """Return what a request returned; None if it failed, which stops nothing else."""
        try:
            return await request
        except Exception as error:  # noqa: BLE001 - incidents and repairs must not stop the taints
            _log.info("%s failed: %s", what, error, exc_info=not isinstance(error, PortError))
            return None

    async def _write_history(self, writes: Sequence[IncidentWrite]) -> None:
        names, failed = {write.incident.spec.node for write in writes}, False
        if self._listed_s == -math.inf:
            # What was decided before is compared with what is stored, which names the nodes.
            self.skipped.clear()
        if self._clock.now_s() >= self._listed_s + self._settings.relist_s:
            listed = await self._tried(self._list(), "listing the incidents of nodes")
            names, failed = names | (listed or set()), listed is None
        for write in writes:
            failed |= await self._tried(self._store(write), f"writing {write.incident.name}") is None
            await self._clock.sleep(PACE_S)
        self._failures = self._failures + 1 if failed else 0
        self._history_at_s = self._clock.now_s() + (self._settings.backoff_s(self._failures) if failed else 0.0)
        for name in names | self.skipped:
            self._again(name, self._history_at_s)
        self.skipped.clear()

    async def _list(self) -> set[str]:
        """List the incidents; return the nodes whose record and history may differ."""
        found = [each async for page in pages_of(self._port, labels.KIND_INCIDENT) for each in page.items]
        self._listed_s = self._clock.now_s()
        return self._known.list_incidents(found)

    async def _store(self, write: IncidentWrite) -> bool:
        """Create an incident or write its status; where it has changed, read it again."""
        port, known, incident = self._port, self._known, write.incident
        ref = ObjectRef(kind=labels.KIND_INCIDENT, name=incident.name)
        try:
            if not write.fits:
                raise InvalidObjectError("there is no room")
            for each in write.deletes:
                with contextlib.suppress(NotFoundError, ConflictError):
                    await port.delete(ObjectRef(kind=ref.kind, name=each.name), uid=each.uid)
                known.remove_incident(each.name, each.node)
            version = incident.resource_version
            if not incident.uid:
                created = await port.create(incident.manifest())
                known.put_incident(created)
                version = created["metadata"]["resourceVersion"]
            status = incident.status_patch()
            stored = await port.patch(ref, status, resource_version=version, subresource=STATUS_SUBRESOURCE)
            if (lost_s := known.put_incident(stored)) > 0:
                self._observer.on_incident_cost(incident.spec.fault_class, float(lost_s))
        except (AlreadyExistsError, ConflictError):
            known.put_incident(await port.get(ref))
        except NotFoundError:
            known.remove_incident(incident.name, incident.spec.node)
        except InvalidObjectError as error:
            _log.warning("%s is not written: %s", ref, error)
            known.refused.add(incident.name)
            self._observer.on_incident_dropped()
        return True

    async def _repair(self, write: RepairWrite) -> None:
        now_s = self._clock.now_s()
        known = await self._tried(self._carry_out(write, now_s), f"repairing node {write.node}")
        self._repairing.discard(write.node)
        if known is None:
            self._known.jobs.pop(write.node, None)
        if known is not False:
            self._again(write.node, now_s + LOOK_S if known is None else now_s)

    async def _carry_out(self, write: RepairWrite, now_s: float) -> bool:
        """Do one thing for the repair of a node; tell whether more is known of it now."""
        port, known, name, namespace = self._port, self._known, write.node, self._settings.repairs_namespace
        if write.look is not None:
            known.jobs[name] = await _read_job(port, write, write.look, namespace=namespace, now_s=now_s)
        elif write.create is not None:
            try:
                found = job_sight(await port.create(write.create))
            except InvalidObjectError as error:
                why = f"the Job of PodTemplate {write.template} is refused: {error}"[:512]
                found = JobSight(name=write.create["metadata"]["name"], message=why)
            known.jobs[name] = dataclasses.replace(found, at_s=now_s)
        elif write.delete is not None:
            with contextlib.suppress(NotFoundError, ConflictError):
                job = ObjectRef(kind="Job", namespace=namespace, name=write.delete.name)
                await port.delete(job, uid=write.delete.uid)
            return False
        else:
            left = [ref for ref in write.evict if not await _evict(port, ref)]
            known.evictions[name] = (known.evictions.get(name, (0, 0.0))[0] + 1 if left else 0, now_s)
        return True


async def _read_job(
    port: ClusterPort, write: RepairWrite, under_way: Repair, *, namespace: str, now_s: float
) -> JobSight:
    """Read the Job of a repair; if it does not exist yet, what is needed to create it, and the node last."""
    job = await _get(port, ObjectRef(kind="Job", namespace=namespace, name=under_way.job))
    found = JobSight(name=under_way.job) if job is None else job_sight(job)
    if job is None and under_way.phase is not RepairPhase.STOP and not under_way.uid:
        left = [""]
        async for page in pages_of(port, "Job", namespace=namespace):
            left += [str(each["metadata"]["name"]) for each in page.items if runs_on(each, write.node)]
        ref = ObjectRef(kind="PodTemplate", namespace=namespace, name=write.template)
        template = await _get(port, ref) if write.template else None
        asked = await _asks(port, write.node, under_way)
        others = max(name for name in left if name != under_way.job)
        found = dataclasses.replace(found, left=others, template=template, asked=asked)
    return dataclasses.replace(found, at_s=now_s)


async def _asks(port: ClusterPort, node: str, under_way: Repair) -> bool:
    """Tell whether a node still asks for a repair, and is out of service."""
    stored = await _get(port, ObjectRef(kind="Node", name=node)) or {"metadata": {}}
    record, _ = parse((stored["metadata"].get("annotations") or {}).get(HEALTH))
    taints = (stored.get("spec") or {}).get("taints") or ()
    tainted = any(taint.get("key") == HEALTH for taint in taints)
    return record is not None and record.repair == under_way and tainted


async def _evict(port: ClusterPort, ref: ObjectRef) -> bool:
    """Ask for the eviction of one pod; tell whether it leaves."""
    try:
        pod = await _get(port, ref)
        if pod is not None and not pod["metadata"].get("deletionTimestamp"):
            await port.evict(ref, uid=pod["metadata"]["uid"])
    except (TooManyRequestsError, InvalidObjectError) as error:
        _log.info("pod %s can't be evicted: %s", ref, error)
        return False
    except (NotFoundError, ConflictError):
        return True
    return True


async def _get(port: ClusterPort, ref: ObjectRef) -> Manifest | None:
    try:
        return await port.get(ref)
    except NotFoundError:
        return None
