"""Carries out repairs that the records of nodes ask for: creates, reads and stops their Jobs, and empties nodes.

The health worker decides and writes the record; this worker only follows what is stored. It never creates a Job for a
record that it has not just read from the API server, so an older leader can't begin a repair that has moved on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from polyreme_api.clock import Clock
from polyreme_cluster.port import (
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
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.health import repair
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.policy import PolicyView
from polyreme_operator.health.record import HEALTH, Leave, NodeState, Record, Repair, RepairPhase, parse
from polyreme_operator.health.repair import JobSight
from polyreme_operator.health.status import breaker_of
from polyreme_operator.settings import Settings
from polyreme_operator.types.actions import EmitEvent

LOOK_S = 2.0
"""How often the Jobs of repairs under way are read."""
NODES_MAX = 16
"""Nodes that are served at a time."""
EVICT_FIRST_S = 5.0
EVICT_MAX_S = 300.0
"""Pause after an eviction that a budget refuses; it doubles up to this."""
EVICT_TRIES_MAX = 12
"""Evictions of a node that are refused in a row, about 40 minutes; after them a person must free it."""
PODS_MAX = 256
"""Pods of one node that are evicted in one round."""
_JOBS = frozenset({RepairPhase.REPAIR, RepairPhase.CHECK, RepairPhase.STOP})
_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Case:
    """A node that is repaired, or waits for it."""

    node: HealthNode
    record: Record
    policy: PolicyView | None
    sight: JobSight | None = None
    others: int | None = None
    refused: int = 0
    evict_at_s: float = 0.0
    told: str = ""


class RepairWorker:
    """Task of the operator that runs the hooks.

    Args:
        port: The cluster.
        clock: Time of retries.
        cache: What is known of the cluster.
        settings: Settings of the installation.
        emit: Queues an event.
        look: Has nodes decided again.
    """

    def __init__(
        self,
        port: ClusterPort,
        clock: Clock,
        cache: ClusterCache,
        settings: Settings,
        *,
        emit: Callable[[EmitEvent], None],
        look: Callable[[], None],
    ) -> None:
        self._port, self._clock, self._cache, self._settings = port, clock, cache, settings
        self._emit, self._look = emit, look
        self._cases: dict[str, _Case] = {}
        self._slots = asyncio.Semaphore(NODES_MAX)

    def saw(self, node: HealthNode, record: Record | None, policy: PolicyView | None) -> None:
        """Note the stored state of a node."""
        hooks = self._settings.repairs and policy is not None and bool(policy.hooks)
        if record is None or not (record.repair is not None or (hooks and record.state is NodeState.REPAIRING)):
            self._cases.pop(node.name, None)
            return
        case = self._cases.setdefault(node.name, _Case(node, record, policy))
        case.node, case.record, case.policy = node, record, policy

    def gone(self, name: str) -> None:
        """Note that a node is deleted."""
        self._cases.pop(name, None)

    def sight(self, name: str) -> JobSight | None:
        """Return what was last read of the Job of a node's repair."""
        case = self._cases.get(name)
        return None if case is None else case.sight

    def others(self, name: str) -> int | None:
        """Return how many pods of others a repair of a node would end; None if they have not been counted."""
        case = self._cases.get(name)
        return None if case is None else case.others

    async def run(self) -> None:
        """Follow the records until cancelled."""
        while True:
            await self._clock.sleep(LOOK_S)
            try:
                await asyncio.gather(*(self._serve_one(name) for name in sorted(self._cases)))
            except Exception:  # noqa: BLE001 - no error about one node may end the repairs of all
                _log.exception("following the repairs of nodes raised an error")

    async def _serve_one(self, name: str) -> None:
        async with self._slots:
            case = self._cases.get(name)
            if case is None:
                return
            before = (case.sight, case.others)
            try:
                await self._serve(case)
            except PortError as error:
                _log.info("the repair of node %s is looked at again: %s", name, error)
            if (case.sight, case.others) != before:
                self._cache.health.touch(name)
                self._look()

    async def _serve(self, case: _Case) -> None:
        under_way = case.record.repair
        if under_way is None or under_way.phase not in _JOBS:
            case.sight, case.others = None, None
            if under_way is None or under_way.phase is RepairPhase.WAIT:
                await self._empty(case)
            return
        sight = await self._read(under_way)
        if under_way.phase is RepairPhase.STOP:
            if sight.uid:
                await self._delete(under_way, sight)
        elif not sight.uid and not under_way.uid:
            left = await self._left_over(case.node.name, under_way)
            why = "" if left else await self._create(case, under_way)
            sight = dataclasses.replace(sight, message=why, left=left)
        case.sight = sight

    # ---------------------------------------------------------------------------------------------------------- jobs

    def _ref(self, under_way: Repair) -> ObjectRef:
        return ObjectRef(kind="Job", namespace=self._settings.repairs_namespace, name=under_way.job)

    async def _read(self, under_way: Repair) -> JobSight:
        try:
            return repair.job_sight(await self._port.get(self._ref(under_way)))
        except NotFoundError:
            return JobSight(name=under_way.job)

    async def _delete(self, under_way: Repair, sight: JobSight) -> None:
        try:
            await self._port.delete(self._ref(under_way), uid=sight.uid)
        except (NotFoundError, ConflictError):
            return

    async def _left_over(self, node: str, under_way: Repair) -> str:
        """Return the name of another Job that still repairs the node; empty if there is none."""
        found = [""]
        async for page in pages_of(self._port, "Job", namespace=self._settings.repairs_namespace):
            found += [str(job["metadata"]["name"]) for job in page.items if repair.runs_on(job, node)]
        return max(name for name in found if name != under_way.job)

    async def _create(self, case: _Case, under_way: Repair) -> str:
        """Create the Job of a repair; return why it was not, empty if it was."""
        policy = case.policy
        if policy is None or breaker_of(policy.status).latched:
            return "the breaker is latched, or the policy is gone"
        if not await self._is_current(case.node.name, under_way):
            return "its record has changed"
        name = repair.template_of(policy, under_way)
        try:
            ref = ObjectRef(kind="PodTemplate", namespace=self._settings.repairs_namespace, name=name)
            template = await self._port.get(ref)
            job = repair.job_of(
                template,
                case.record,
                under_way,
                policy,
                node=case.node.name,
                namespace=self._settings.repairs_namespace,
            )
            await self._port.create(job)
        except AlreadyExistsError:
            return ""
        except NotFoundError:
            return self._tell(case, f"there is no PodTemplate {self._settings.repairs_namespace}/{name}; create it")
        except InvalidObjectError as error:
            return self._tell(case, f"the Job of PodTemplate {name} is refused: {error}"[:512])
        return ""

    async def _is_current(self, node: str, under_way: Repair) -> bool:
        """Tell whether the node still asks for this repair, and is out of service."""
        try:
            stored = await self._port.get(ObjectRef(kind="Node", name=node))
        except NotFoundError:
            return False
        record, _ = parse((stored["metadata"].get("annotations") or {}).get(HEALTH))
        taints = (stored.get("spec") or {}).get("taints") or ()
        tainted = any(taint.get("key") == HEALTH for taint in taints)
        return record is not None and record.repair == under_way and tainted

    def _tell(self, case: _Case, why: str) -> str:
        """Report once why a repair can't begin."""
        if case.told != why:
            case.told = why
            ref = ObjectRef(kind="Node", name=case.node.name)
            key = f"blocked-{int(self._clock.now_s())}"
            self._emit(
                EmitEvent(ref=ref, uid=case.node.uid, reason="NodeRepairBlocked", message=why, warning=True, key=key)
            )
        return why

    # ---------------------------------------------------------------------------------------------------------- pods

    async def _empty(self, case: _Case) -> None:
        """Count the pods of others on a node, and ask the Eviction API to move them."""
        refs = self._cache.pods.others_on(case.node.name)
        case.others = len(refs)
        now_s = self._clock.now_s()
        wanted = case.record.state is NodeState.REPAIRING and case.record.leave is not Leave.STAY
        if not refs:
            case.refused, case.evict_at_s = 0, 0.0
        if not refs or not wanted or not self._may_empty(case) or now_s < case.evict_at_s:
            return
        if case.refused >= EVICT_TRIES_MAX:
            named = ", ".join(f"{ref.namespace}/{ref.name}" for ref in refs[:3])
            self._tell(case, f"{len(refs)} pods can't be evicted ({named}); a person must move them before the repair")
            return
        left = [ref for ref in refs[:PODS_MAX] if not await self._evict(ref)]
        case.refused = case.refused + 1 if left else 0
        case.evict_at_s = now_s + min(EVICT_MAX_S, EVICT_FIRST_S * 2.0**case.refused)

    def _may_empty(self, case: _Case) -> bool:
        """Tell whether a repair of the node could begin if it were empty."""
        policy = case.policy
        if policy is None or not policy.enforce or case.node.claimed or breaker_of(policy.status).latched:
            return False
        return case.record.repair is not None or bool(repair.first_action(policy, case.record))

    async def _evict(self, ref: ObjectRef) -> bool:
        """Ask for the eviction of one pod; tell whether it leaves."""
        try:
            pod: Manifest = await self._port.get(ref)
            if pod["metadata"].get("deletionTimestamp"):
                return True
            await self._port.evict(ref, uid=pod["metadata"]["uid"])
        except (NotFoundError, ConflictError):
            return True
        except (TooManyRequestsError, InvalidObjectError) as error:
            _log.info("pod %s can't be evicted: %s", ref, error)
            return False
        return True
