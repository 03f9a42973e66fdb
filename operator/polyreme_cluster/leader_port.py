"""A cluster that only a leader may change: a process that was stopped notices before it writes, not after.

Work is cancelled when its leadership has expired, but a process that continues after a stop (SIGSTOP, a suspended
machine) may run the work first: it would decide by a view that is as old as the stop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from polyreme_cluster.forwarding_port import Call, ForwardingPort
from polyreme_cluster.port import ClusterPort, NotLeadingError

READS = frozenset({"list", "get"})

_Answer = TypeVar("_Answer")


class LeaderPort(ForwardingPort):
    """``ClusterPort`` that refuses writes of a process that does not lead.

    Args:
        port: The port that it wraps.
        leads: Tells whether this process leads now.
    """

    def __init__(self, port: ClusterPort, leads: Callable[[], bool]) -> None:
        super().__init__(port)
        self._leads = leads

    async def _forward(self, call: Call, act: Callable[[], Awaitable[_Answer]]) -> _Answer:
        if call.verb not in READS and not self._leads():
            raise NotLeadingError(f"{call.ref}: {call.verb} was not sent, since this replica no longer leads")
        return await act()
