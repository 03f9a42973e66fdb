"""Writes what jobs learn about nodes as conditions of these nodes: checks before training, starts of pods, slow ranks.

``polyreme.dev/PreCheck`` is a cache: its time says until when the node counts as checked. ``polyreme.dev/PodStart``
counts pods that the node rejected, did not start or did not end, ``polyreme.dev/SlowRank`` slow ranks of jobs that ask
for it. The health of nodes reads them as any other sign. A mark that is lost with this process is written by the next
checks, from the job's record of failed nodes, or from the next progress record.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from polyreme_api.clock import Clock
from polyreme_api.job.status import FailedNode
from polyreme_api.node_report import (
    CONDITION_POD_START,
    CONDITION_PRE_CHECK,
    CONDITION_SLOW_RANK,
    NodeEvent,
    decode,
    encode,
)
from polyreme_api.times import rfc3339
from polyreme_cluster.port import (
    STATUS_SUBRESOURCE,
    ClusterPort,
    ConflictError,
    InvalidObjectError,
    NotFoundError,
    ObjectRef,
    PortError,
)
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.reconcile.observe import current_record
from polyreme_operator.reconcile.rank_reports import sentence
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.reasons import Cause, ConditionType
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView

JOBS_MAX = 1_024
"""Marks that wait, by what they are about; of more the oldest are dropped."""
KNOWN_MAX = 16_384
TRIES_MAX = 3
RETRY_S = 0.5
CHECK_PASSED, STARTED, EVEN = "PreCheckPassed", "PodStarted", "RanksEven"
EVEN_STEPS = 100
"""Steps that an attempt must have trained before a node without a slow rank counts as well again."""
COUNTED_S = 3_600.0
"""A failure that comes so long after the last one is counted from 1 again."""
_Key: TypeAlias = tuple[str | int, ...]
_log = logging.getLogger(__name__)


_CODES: Mapping[str, str] = {
    Cause.POD_REJECTED: "PodRejected",
    Cause.POD_FAILED: "PodNotStarted",
    Cause.START_TIMED_OUT: "PodNotStarted",
    Cause.POD_STUCK: "PodStuck",
}
"""Code in the fault table, by the cause for which a job remembers a node."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a job says about a node."""

    condition: str
    failed: bool
    reason: str
    message: str = ""
    at_s: float | None = None
    """When it failed, or when what shows it healthy began; None: failures of this kind are not counted."""


def check_marks(snapshot: JobSnapshot) -> dict[str, Mark]:
    """Return the marks of an attempt's nodes by its checks; none until these are done."""
    record, attempt = current_record(snapshot), snapshot.job.attempt
    report = None if record is None else record.pre_check
    if attempt is None or report is None or not report.done:
        return {}
    nodes = attempt.placement.node_by_index()
    marks: dict[str, Mark] = {}
    for first, count in report.passed:
        for name in nodes[first : first + count]:
            marks[name] = Mark(condition=CONDITION_PRE_CHECK, failed=False, reason=CHECK_PASSED)
    for each in report.failed:
        if each.index < len(nodes):
            marks[nodes[each.index]] = Mark(
                condition=CONDITION_PRE_CHECK, failed=True, reason=each.reason, message=each.message
            )
    return marks


def slow_marks(snapshot: JobSnapshot) -> dict[str, Mark]:
    """Return the marks of an attempt's nodes by its slow ranks, if its job reports them to nodes."""
    spec, record, attempt = snapshot.job.spec, current_record(snapshot), snapshot.job.attempt
    if spec is None or record is None or attempt is None or spec.health.stragglers.action != "Report":
        return {}
    nodes, marks = attempt.placement.node_by_index(), {}
    for each in record.stragglers:
        index = each.ranks[0] // attempt.devices
        if not each.group and index < len(nodes):
            words = f"job {snapshot.job.namespace}/{snapshot.job.name}: {sentence(attempt, each)}"
            marks[nodes[index]] = Mark(
                condition=CONDITION_SLOW_RANK,
                failed=True,
                reason="SlowRank",
                message=words,
                at_s=record.updated_at_s,
            )
    if record.step >= (record.resumed_from_step or 0) + EVEN_STEPS:
        even = Mark(condition=CONDITION_SLOW_RANK, failed=False, reason=EVEN)
        slow = {name for name in nodes if (node := snapshot.nodes.get(name)) is not None and node.slow_rank}
        marks |= dict.fromkeys(slow - marks.keys(), even)
    return marks


def start_mark(job: JobView, failed: FailedNode) -> Mark | None:
    """Return the mark of a node on which a job's pod did not start or end; None if the node is not to blame."""
    code = _CODES.get(failed.cause)
    if code is None:
        return None
    sentence = f"worker {failed.index} of job {job.namespace}/{job.name}: {failed.cause}"
    return Mark(
        condition=CONDITION_POD_START,
        failed=True,
        reason=code,
        message=sentence,
        at_s=parse_time_or(failed.at, 0.0),
    )


def with_condition(conditions: list[dict[str, Any]], mark: Mark, *, at: str) -> list[dict[str, Any]]:
    """Return a node's conditions with the mark; its transition time changes only with its truth."""
    before = next((each for each in conditions if each.get("type") == mark.condition), {})
    status, message = "True" if mark.failed else "False", mark.message
    events = decode(str(before.get("message") or ""))[0] if before.get("status") == "True" else ()
    if not mark.failed and mark.at_s is not None and any(mark.at_s < each.last_s for each in events):
        # A pod that ran before a failure says nothing against it.
        return conditions
    if mark.failed and mark.at_s is not None:
        message = encode(message, _counted(events, mark.reason, mark.at_s))
        if message == encode(mark.message, events):
            return conditions
    condition = {
        "type": mark.condition,
        "status": status,
        "reason": mark.reason,
        "message": message,
        "lastHeartbeatTime": at,
        "lastTransitionTime": before.get("lastTransitionTime", at) if before.get("status") == status else at,
    }
    return [*(each for each in conditions if each.get("type") != mark.condition), condition]


def _counted(events: Sequence[NodeEvent], code: str, at_s: float) -> list[NodeEvent]:
    """Return the events after one more, the newest first; one that was counted, or is too old, changes nothing."""
    known = next((each for each in events if each.code == code), None)
    if known is not None and at_s <= known.last_s:
        return list(events)
    lately = known is not None and at_s - known.last_s < COUNTED_S
    count = known.count + 1 if known is not None and lately else 1
    newest = NodeEvent(code=code, count=count, last_s=math.ceil(at_s))
    return [newest, *(each for each in events if each.code != code)]


class NodeMarks:
    """Task of the operator that marks nodes.

    Args:
        port: The cluster.
        clock: Clock.
        cache: What is known of the cluster.
        note: Called with the effects of each change.
    """

    def __init__(self, port: ClusterPort, clock: Clock, cache: ClusterCache, note: Callable[[Changes], None]) -> None:
        self._port, self._clock, self._cache, self._note = port, clock, cache, note
        self._waiting: OrderedDict[_Key, Mapping[str, Mark]] = OrderedDict()
        self._known: OrderedDict[_Key, None] = OrderedDict()
        """What was taken."""
        self._wake = asyncio.Event()
        self._refused = False

    def look(self, snapshot: JobSnapshot) -> None:
        """Take the marks of a job's nodes, each once."""
        job, attempt = snapshot.job, snapshot.job.attempt
        for failed in job.status.failed_nodes:
            mark = start_mark(job, failed)
            self._take((job.uid, failed.node, failed.at), {} if mark is None else {failed.node: mark})
        if attempt is None:
            return
        if attempt.pre_checks is not None:
            self._take((job.uid, CONDITION_PRE_CHECK, attempt.number), check_marks(snapshot))
        for name, mark in slow_marks(snapshot).items():
            of_node = (job.uid, CONDITION_SLOW_RANK, attempt.number, name)
            if mark.failed:
                self._known.pop((*of_node, ""), None)  # its ranks may be even again later
            self._take((*of_node, mark.message), {name: mark})
        started, ready = (job.uid, CONDITION_POD_START, attempt.number), job.status.condition(ConditionType.PODS_READY)
        if started not in self._known and ready is not None and ready.status == "True":
            self._known[started] = None
            began_s = parse_time_or(ready.last_transition_time, 0.0)
            mark = Mark(condition=CONDITION_POD_START, failed=False, reason=STARTED, at_s=began_s)
            healed = {node.name: mark for node in snapshot.nodes.values() if node.start_failed}
            self._take((*started, "healed"), healed)

    def _take(self, key: _Key, marks: Mapping[str, Mark]) -> None:
        if not marks or key in self._known:
            return
        self._known[key] = None
        self._waiting[key] = marks
        for kept, most in ((self._known, KNOWN_MAX), (self._waiting, JOBS_MAX)):
            while len(kept) > most:
                kept.popitem(last=False)
        self._wake.set()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            _, marks = self._waiting.popitem(last=False)
            # Bad nodes first: other jobs avoid them.
            for name, mark in sorted(marks.items(), key=lambda item: not item[1].failed):
                await self._mark(ObjectRef(kind="Node", name=name), mark)

    async def _mark(self, ref: ObjectRef, mark: Mark) -> None:
        """Write one mark; after some tries it is given up."""
        for _ in range(TRIES_MAX):
            try:
                node = await self._port.get(ref)
                now_s = self._clock.now_s()
                known = list((node.get("status") or {}).get("conditions") or ())
                conditions = with_condition(known, mark, at=rfc3339(now_s))
                if conditions is known:
                    return
                # The whole list, which a merge replaces: the version guards what others write meanwhile.
                result = await self._port.patch(
                    ref,
                    {"status": {"conditions": conditions}},
                    resource_version=node["metadata"]["resourceVersion"],
                    subresource=STATUS_SUBRESOURCE,
                )
            except ConflictError:
                continue
            except NotFoundError:
                return
            except InvalidObjectError as error:
                if not self._refused:
                    _log.warning("nodes can't be marked, so what jobs learn about them is lost: %s", error)
                self._refused = True
                return
            except PortError as error:
                _log.warning("what a job learned about node %s can't be written to it: %s", ref.name, error)
                await self._clock.sleep(RETRY_S)
                continue
            self._note(self._cache.put(result, now_s=now_s))
            return
