"""Decides when which conditions are written to the node: changes soon, heartbeats rarely, never faster than a limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from polyreme_agent.frames import TYPES
from polyreme_agent.ledger import Condition
from polyreme_api.node_report import CONDITION_AGENT, CONDITIONS

HEARTBEAT_S: Final = 60.0
SILENT_S: Final = 30.0
"""How long the reader may be silent before nothing that it said is known to hold."""
BURST: Final = 10.0
"""Writes that may follow each other at once."""
WRITES_PER_S: Final = 0.2
BACKOFF_S: Final = 1.0
BACKOFF_MAX_S: Final = 60.0


class Publisher:
    """What has been written, and what is to be written next.

    Args:
        now_s: A clock that never goes back.
    """

    def __init__(self, now_s: float) -> None:
        self._latest: dict[str, Condition] = {}
        self._heard_s = now_s
        self._written: dict[str, Condition] = {}
        self._statuses: dict[str, str] = {}
        """As the API server has them."""
        self._beat_s: float | None = None
        self._tokens, self._filled_s = BURST, now_s
        self._failures, self._retry_s = 0, 0.0

    def report(self, conditions: Sequence[Condition], now_s: float) -> None:
        """Take in a report of the reader."""
        self._latest, self._heard_s = {each.type: each for each in conditions}, now_s

    def due_s(self, now_s: float) -> float:
        """Return when to look next."""
        times = [self._heard_s + SILENT_S, (self._beat_s or now_s) + HEARTBEAT_S]
        if self._changed(now_s) or self._beat_s is None:
            times.append(now_s + max(0.0, (1.0 - self._token_count(now_s)) / WRITES_PER_S))
        times = [each for each in times if each > now_s or not self._is_silent(now_s)] or [now_s + SILENT_S]
        return max(self._retry_s, min(times))

    def next(self, now_s: float) -> tuple[Condition, ...]:
        """Return what is to be written now; empty: nothing."""
        if now_s < self._retry_s or self._token_count(now_s) < 1.0:
            return ()
        changed = self._changed(now_s)
        beats = self._beat_s is None or now_s - self._beat_s >= HEARTBEAT_S
        if not changed and not beats:
            return ()
        self._tokens, self._filled_s = self._token_count(now_s) - 1.0, now_s
        heartbeat = self._wanted(now_s).get(CONDITION_AGENT)
        others = [each for each in changed if each.type != CONDITION_AGENT]
        return (*others, heartbeat) if heartbeat is not None else tuple(others)

    def body(self, conditions: Sequence[Condition], wall_s: float) -> dict[str, Any]:
        """Return the patch that writes conditions; their order and those of others stay as they are."""
        at = datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        entries = []
        for each in conditions:
            entry = {
                "type": each.type,
                "status": each.status,
                "reason": each.reason,
                "message": each.message,
                "lastHeartbeatTime": at,
            }
            # Before the first answer it is not known whether the status changes; then the stored time stays.
            if self._beat_s is not None and self._statuses.get(each.type) != each.status:
                entry["lastTransitionTime"] = at
            entries.append(entry)
        return {"status": {"conditions": entries}}

    def succeeded(self, conditions: Sequence[Condition], stored: Mapping[str, str], now_s: float) -> None:
        """Note a write, and the statuses by type that the API server answered with."""
        self._written.update((each.type, each) for each in conditions)
        self._statuses = {kind: status for kind, status in stored.items() if kind in TYPES}
        self._beat_s, self._failures, self._retry_s = now_s, 0, 0.0

    def failed(self, now_s: float, jitter: float) -> float:
        """Note a write that failed, and return how long to wait.

        Args:
            now_s: The clock.
            jitter: A random number from 0 to 1.
        """
        self._failures += 1
        wait_s = min(BACKOFF_MAX_S, BACKOFF_S * 2.0 ** min(self._failures - 1, 10)) * (0.5 + 0.5 * jitter)
        self._retry_s = now_s + wait_s
        return wait_s

    def _is_silent(self, now_s: float) -> bool:
        return now_s - self._heard_s >= SILENT_S

    def _wanted(self, now_s: float) -> dict[str, Condition]:
        if self._beat_s is None:
            kind = CONDITION_AGENT
            starting = Condition(type=kind, status="Unknown", reason="Starting", message="The agent has just started.")
            return {kind: starting}
        if not self._is_silent(now_s):
            return self._latest
        message = f"The reader has been silent for {SILENT_S:.0f} s or more: look at its container's log."
        return {
            kind: Condition(type=kind, status="Unknown", reason="ReaderSilent", message=message)
            for kind in (*CONDITIONS, CONDITION_AGENT)
        }

    def _changed(self, now_s: float) -> list[Condition]:
        return [each for kind, each in self._wanted(now_s).items() if self._written.get(kind) != each]

    def _token_count(self, now_s: float) -> float:
        return min(BURST, self._tokens + max(0.0, now_s - self._filled_s) * WRITES_PER_S)
