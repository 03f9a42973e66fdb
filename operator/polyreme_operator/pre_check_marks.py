"""Writes what checks before training found as the condition ``polyreme.dev/PreCheck`` of each node.

The condition is the cache: its time says until when the node counts as checked, and the health of nodes reads it as
any other sign. A mark that is lost with this process is written by the next checks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from polyreme_api.clock import Clock
from polyreme_api.node_report import CONDITION_PRE_CHECK
from polyreme_api.times import rfc3339
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.port import (
    STATUS_SUBRESOURCE,
    ClusterPort,
    ConflictError,
    InvalidObjectError,
    NotFoundError,
    ObjectRef,
    PortError,
)
from polyreme_operator.reconcile.observe import current_record
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.snapshot import JobSnapshot

JOBS_MAX = 1_024
"""Jobs whose marks wait; of more the oldest are dropped, and their nodes are checked again."""
KNOWN_MAX = 16_384
TRIES_MAX = 3
RETRY_S = 0.5
PASSED = "PreCheckPassed"
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What the checks say about a node."""

    failed: bool
    reason: str = PASSED
    message: str = ""


def marks_of(snapshot: JobSnapshot) -> dict[str, Mark]:
    """Return the marks of an attempt's nodes; none until its checks are done."""
    record, attempt = current_record(snapshot), snapshot.job.attempt
    report = None if record is None else record.pre_check
    if attempt is None or report is None or not report.done:
        return {}
    nodes = attempt.placement.node_by_index()
    marks: dict[str, Mark] = {}
    for first, count in report.passed:
        for name in nodes[first : first + count]:
            marks[name] = Mark(failed=False)
    for each in report.failed:
        if each.index < len(nodes):
            marks[nodes[each.index]] = Mark(failed=True, reason=each.reason, message=each.message)
    return marks


def with_condition(conditions: list[dict[str, Any]], mark: Mark, *, at: str) -> list[dict[str, Any]]:
    """Return a node's conditions with the mark; its transition time changes only with its truth."""
    before = next((each for each in conditions if each.get("type") == CONDITION_PRE_CHECK), {})
    status = "True" if mark.failed else "False"
    condition = {
        "type": CONDITION_PRE_CHECK,
        "status": status,
        "reason": mark.reason,
        "message": mark.message,
        "lastHeartbeatTime": at,
        "lastTransitionTime": before.get("lastTransitionTime", at) if before.get("status") == status else at,
    }
    return [*(each for each in conditions if each.get("type") != CONDITION_PRE_CHECK), condition]


class PreCheckMarks:
    """Task of the operator that marks nodes.

    Args:
        port: The cluster.
        clock: Clock.
        cache: What is known of the cluster.
        note: Called with the effects of each change.
    """

    def __init__(self, port: ClusterPort, clock: Clock, cache: ClusterCache, note: Callable[[Changes], None]) -> None:
        self._port, self._clock, self._cache, self._note = port, clock, cache, note
        self._waiting: OrderedDict[tuple[str, int], Mapping[str, Mark]] = OrderedDict()
        self._known: OrderedDict[tuple[str, int], None] = OrderedDict()
        """Attempts whose marks were taken."""
        self._wake = asyncio.Event()
        self._refused = False

    def look(self, snapshot: JobSnapshot) -> None:
        """Take the marks of an attempt whose checks are done, once."""
        attempt = snapshot.job.attempt
        if attempt is None or attempt.pre_checks is None:
            return
        key = (snapshot.job.uid, attempt.number)
        if key in self._known or not (marks := marks_of(snapshot)):
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
        """Write one mark; after some tries it is given up, and the node is checked again."""
        for _ in range(TRIES_MAX):
            try:
                node = await self._port.get(ref)
                now_s = self._clock.now_s()
                conditions = with_condition(
                    list((node.get("status") or {}).get("conditions") or ()), mark, at=rfc3339(now_s)
                )
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
                    _log.warning("nodes can't be marked, so each attempt checks them again: %s", error)
                self._refused = True
                return
            except PortError as error:
                _log.warning("the check of node %s can't be written to it: %s", ref.name, error)
                await self._clock.sleep(RETRY_S)
                continue
            self._note(self._cache.put(result, now_s=now_s))
            return
