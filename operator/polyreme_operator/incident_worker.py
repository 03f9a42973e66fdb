"""Writes the history of nodes that were out of service, behind the worker that decides about them.

The health worker reports each record that it sees and never waits. The node's annotation is the truth: what it shows
and the history lacks is written when the operator starts, and after each list of the incidents.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from polyreme_api import labels
from polyreme_api.clock import Clock
from polyreme_api.incident import JOBS_MAX
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
    pages_of,
)
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.health.facts import Note, Step
from polyreme_operator.health.incidents import (
    FAULT_TABLE,
    Incident,
    Kept,
    Sight,
    concerns,
    parse_incident,
    replayed,
    surplus,
    time_of,
)
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.record import Record, parse
from polyreme_operator.reconcile.incident_cost import JobFacts, was_moved, with_costs, with_entries
from polyreme_operator.reconcile.observe import current_record
from polyreme_operator.settings import Settings
from polyreme_operator.types.observer import Observer
from polyreme_operator.types.views import JobView
from polyreme_operator.work_queue import WorkQueue

QUEUE_MAX = 2_000
"""Nodes with sights that are not written yet; further ones are dropped, counted, and found by the next list."""
SIGHTS_MAX = 32
"""Sights of one node that are not written yet; beyond them the newest replaces the one before it."""
BATCH_S = 1.0
"""Time from a sight to its write, so that taints and moves go first and several sights are one write."""
PACE_S = 0.02
"""Pause after each node whose incidents were written."""
COST_LOOK_S = 2.0
COST_LOOK_MAX_S = 30.0
"""How often it is checked whether a job trains again; it doubles."""
_log = logging.getLogger(__name__)


class IncidentWorker:
    """Task of the operator that keeps the NodeIncidents.

    Args:
        port: The cluster.
        clock: Time of steps.
        cache: What is known of the cluster.
        settings: Settings of the installation.
        observer: Receives reports, for metrics.
        synced: Tells whether every kind has been listed.
    """

    def __init__(
        self,
        port: ClusterPort,
        clock: Clock,
        cache: ClusterCache,
        settings: Settings,
        *,
        observer: Observer,
        synced: Callable[[], bool],
    ) -> None:
        self._port, self._clock, self._cache, self._settings = port, clock, cache, settings
        self._observer, self._synced = observer, synced
        self._queue = WorkQueue(clock.now_s, processing_max=1, backoff_s=settings.backoff_s)
        self._wake = asyncio.Event()
        self._last: dict[str, Record | None] = {}
        """Record of each node that was seen last."""
        self._sights: dict[str, list[Sight]] = {}
        """Sights that are not written yet, by node."""
        self._found: dict[str, dict[str, Incident]] = {}
        """By node, the incidents that are open or whose costs are not known."""
        self._kept: dict[str, Kept] = {}
        """Every incident, by name."""
        self._look_s: dict[str, float] = {}
        self._listed_s: float | None = None

    # ------------------------------------------------------------------------------------------ from the health worker

    def saw(
        self,
        node: HealthNode,
        record: Record | None,
        *,
        before: Record | None = None,
        notes: tuple[Note, ...] = (),
        step: Step | None = None,
    ) -> None:
        """Note a record as it is stored; call it with every record, it ignores what it knows.

        Args:
            node: The node with this record.
            record: The record.
            before: The record that was replaced, if the caller knows.
            notes: What the decision said.
            step: The decision.
        """
        out = record is not None and record.state.is_out
        if node.tainted and not out:
            # A taint that has no record yet, or one that can't be read: the next decision writes it.
            return
        if out and not node.tainted:
            # Its release is not on record yet.
            self._last[node.name] = record
            return
        before = before or self._last.get(node.name)
        if not notes and before == record and node.name in self._last:
            return
        self._last[node.name] = record
        if not (concerns(before) or concerns(record) or node.name in self._found):
            return
        worst = None if step is None else step.gravest
        rule = "" if worst is None else worst.rule or FAULT_TABLE
        at_s, hardware = self._clock.now_s(), node.hardware or node.uid
        self._put(
            Sight(
                node=node.name,
                at_s=at_s,
                record=record,
                before=before,
                notes=notes,
                hardware=hardware,
                rule=rule,
            )
        )

    def gone(self, name: str) -> None:
        """Note that a node was deleted."""
        before = self._last.pop(name, None)
        if concerns(before) or name in self._found:
            self._put(Sight(node=name, at_s=self._clock.now_s(), before=before, gone=True))

    def _put(self, sight: Sight) -> None:
        waiting = self._sights.get(sight.node)
        if waiting is None:
            if len(self._sights) >= QUEUE_MAX:
                self._observer.on_incident_dropped()
                return
            waiting = self._sights.setdefault(sight.node, [])
        if len(waiting) >= SIGHTS_MAX:
            waiting.pop()
            self._observer.on_incident_dropped()
        waiting.append(sight)
        self._queue.add_at(sight.node, self._clock.now_s() + BATCH_S)
        self._wake.set()

    # ----------------------------------------------------------------------------------------------------- its own task

    async def run(self) -> None:
        """Write until cancelled."""
        failures = 0
        while True:
            self._wake.clear()
            try:
                if self._synced():
                    await self._list_if_due()
                    failures = 0
                    await self._write_due()
            except PortError as error:
                failures += 1
                wait_s = self._settings.backoff_s(failures)
                _log.info("the history of nodes is read again in %.2f s: %s", wait_s, error)
            except Exception:  # noqa: BLE001 - the history must not stop the operator
                failures += 1
                _log.exception("writing the history of nodes raised an error")
            if failures:
                await self._clock.sleep(self._settings.backoff_s(failures))
                continue
            try:
                async with asyncio.timeout(self._wait_s()):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _wait_s(self) -> float:
        now_s = self._clock.now_s()
        due_s, until_s = self._queue.next_due_s(), [now_s + self._settings.idle_s]
        if due_s is not None:
            until_s.append(due_s)
        if not self._synced():
            until_s.append(now_s + BATCH_S)
        return max(0.001, min(until_s) - now_s)

    async def _list_if_due(self) -> None:
        now_s = self._clock.now_s()
        if self._listed_s is not None and now_s - self._listed_s < self._settings.relist_s:
            return
        found: list[Manifest] = []
        async for page in pages_of(self._port, labels.KIND_INCIDENT):
            found.extend(page.items)
        self._listed_s = now_s
        self._kept.clear()
        self._found.clear()
        for manifest in found:
            self._book(manifest)
        self._resync()

    def _book(self, manifest: Manifest, *, whole: bool = False) -> None:
        """Keep what is needed of a stored incident; the whole of it if it is open, or asked for."""
        incident = parse_incident(manifest)
        if incident is None:
            return
        node, ended_s = incident.spec.node, None if incident.is_open else time_of(incident.status.ended_at)
        self._kept[incident.name] = Kept(name=incident.name, node=node, uid=incident.uid, ended_s=ended_s)
        of_node = self._found.setdefault(node, {})
        of_node.pop(incident.name, None)
        if whole or incident.is_open or incident.waits:
            of_node[incident.name] = incident
        if not of_node:
            del self._found[node]

    def _forget(self, name: str, node: str) -> None:
        self._kept.pop(name, None)
        of_node = self._found.get(node, {})
        of_node.pop(name, None)
        if not of_node:
            self._found.pop(node, None)

    def _resync(self) -> None:
        """Queue the nodes whose record and history may differ."""
        nodes = self._cache.health.nodes
        for name in sorted({*self._found, *self._cache.health.tainted}):
            node = nodes.get(name)
            if node is None:
                self._put(Sight(node=name, at_s=self._clock.now_s(), gone=True))
                continue
            record, _ = parse(node.annotation)
            if node.tainted == (record is not None and record.state.is_out):
                at_s, hardware = self._clock.now_s(), node.hardware or node.uid
                before = self._last.get(name)
                self._last[name] = record
                self._put(Sight(node=name, at_s=at_s, record=record, before=before, hardware=hardware))

    async def _write_due(self) -> None:
        for due in self._queue.due():
            self._queue.add(due)
        while (name := self._queue.get()) is not None:
            try:
                wrote = await self._write(name)
                self._queue.forget(name)
                if wrote:
                    await self._clock.sleep(PACE_S)
            except PortError as error:
                delay_s = self._queue.retry_delay_s(name)
                _log.info("the history of node %s is written again in %.2f s: %s", name, delay_s, error)
                self._queue.add_at(name, self._clock.now_s() + delay_s)
            finally:
                self._queue.done(name)

    async def _write(self, name: str) -> bool:
        """Bring the incidents of one node up to date; tell whether anything was written."""
        sights = list(self._sights.get(name, ()))
        after = await self._replayed(name, sights)
        known = dict(self._found.get(name, {}))
        wrote = False
        for incident in self._with_jobs(name, after):
            if incident != known.get(incident.name):
                await self._store(incident)
                wrote = True
            elif not incident.is_open and not incident.waits:
                self._found.get(name, {}).pop(incident.name, None)
        left = self._sights.get(name, [])[len(sights) :]
        if left:
            self._sights[name] = left
            self._queue.add_at(name, self._clock.now_s() + BATCH_S)
        else:
            self._sights.pop(name, None)
        self._remind(name)
        return wrote

    async def _replayed(self, name: str, sights: list[Sight]) -> dict[str, Incident]:
        """Return the incidents of a node after some sights; those that have ended before are read again."""
        after = replayed(self._found.get(name, {}), sights)
        missing = [each.name for each in after.values() if not each.uid and each.name in self._kept]
        for each in missing:
            try:
                self._book(await self._port.get(ObjectRef(kind=labels.KIND_INCIDENT, name=each)), whole=True)
            except NotFoundError:
                self._forget(each, name)
        return replayed(self._found.get(name, {}), sights) if missing else after

    def _with_jobs(self, name: str, incidents: dict[str, Incident]) -> list[Incident]:
        """Return the incidents of a node with their jobs, those that are over first, to keep open ones unique."""
        now_s, record = self._clock.now_s(), self._last.get(name)
        found = []
        for each in sorted(incidents.values(), key=lambda each: (each.is_open, each.since_s)):
            incident = each
            if incident.is_open and record is not None and record.state.is_out:
                incident = with_entries(incident, self._jobs_of(incident))
            known = {}
            for entry in incident.status.jobs:
                snapshot = None if entry.outcome else self._cache.snapshot(entry.uid, now_s=now_s)
                if snapshot is not None:
                    known[entry.uid] = JobFacts(job=snapshot.job, progress=current_record(snapshot))
            found.append(with_costs(incident, known, record, now_s))
        return found

    def _jobs_of(self, incident: Incident) -> list[JobView]:
        """Return the jobs that have workers on a node, or were moved from it before this was written."""
        jobs, node = self._cache.jobs.views, incident.spec.node
        found = [jobs[uid] for uid in sorted(self._cache.ledger.jobs_on(node)) if uid in jobs]
        if not incident.uid:
            there = {job.uid for job in found}
            others = (jobs[uid] for uid in sorted(jobs.keys() - there) if jobs[uid].status.restart_records)
            found.extend(job for job in others if was_moved(job, node, incident.since_s))
        return found[:JOBS_MAX]

    def _remind(self, name: str) -> None:
        """Look again while the cost of a job is not known."""
        incidents = self._found.get(name, {})
        if not any(incident.waits for incident in incidents.values()):
            self._look_s.pop(name, None)
            return
        look_s = self._look_s.get(name, COST_LOOK_S)
        self._look_s[name] = min(COST_LOOK_MAX_S, 2.0 * look_s)
        self._queue.add_at(name, self._clock.now_s() + look_s)

    # ------------------------------------------------------------------------------------------------------------ write

    async def _store(self, incident: Incident) -> None:
        """Create an incident, or write its status.

        Raises:
            PortError: If it was not stored; if it has changed, it was read again.
        """
        ref = ObjectRef(kind=labels.KIND_INCIDENT, name=incident.name)
        try:
            if not incident.uid:
                if not await self._make_room(incident.spec.node):
                    self._observer.on_incident_dropped()
                    return
                created = await self._port.create(incident.manifest())
                self._book(created)
                version = created["metadata"]["resourceVersion"]
            else:
                version = incident.resource_version
            stored = await self._port.patch(
                ref, incident.status_patch(), resource_version=version, subresource=STATUS_SUBRESOURCE
            )
        except (AlreadyExistsError, ConflictError):
            self._book(await self._port.get(ref), whole=True)
            raise
        except NotFoundError:
            self._forget(incident.name, incident.spec.node)
            if incident.is_open:
                raise
            return
        except InvalidObjectError as error:
            _log.warning("the API server refuses %s: %s", ref, error)
            self._observer.on_incident_dropped()
            return
        before = self._found.get(incident.spec.node, {}).get(incident.name)
        lost_s = incident.status.lost_seconds - (0 if before is None else before.status.lost_seconds)
        self._book(stored)
        if lost_s > 0:
            self._observer.on_incident_cost(incident.spec.fault_class, float(lost_s))

    async def _make_room(self, node: str) -> bool:
        """Delete the oldest ended incidents beyond the limits; tell whether there is room for one more of a node."""
        settings = self._settings
        excess = surplus(
            self._kept.values(), node=node, of_node=settings.incidents_per_node, of_all=settings.incidents_max
        )
        if excess is None:
            return False
        for each in excess:
            try:
                await self._port.delete(ObjectRef(kind=labels.KIND_INCIDENT, name=each.name), uid=each.uid)
            except (NotFoundError, ConflictError):
                _log.debug("incident %s is gone already", each.name)
            self._forget(each.name, each.node)
        return True
