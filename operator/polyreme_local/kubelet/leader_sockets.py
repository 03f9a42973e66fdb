"""Listening sockets of the jobs' leaders: held by the host, so that an address outlives a leader."""

from __future__ import annotations

import socket
from collections.abc import Collection

from polyreme_local.kubelet.container import LOOPBACK

BACKLOG = 512


class LeaderSockets:
    """One socket a job, shared by all nodes of this host: workers on one find the leader on another."""

    def __init__(self) -> None:
        self._sockets: dict[str, socket.socket] = {}
        self._users: dict[str, set[str]] = {}

    def of(self, job_uid: str, *, node: str) -> socket.socket:
        """Return the job's socket: bound once, by the system's choice, so that no port is ever chosen twice."""
        if job_uid not in self._sockets:
            self._sockets[job_uid] = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        self._users.setdefault(job_uid, set()).add(node)
        return self._sockets[job_uid]

    def keep(self, job_uids: Collection[str], *, node: str) -> None:
        """Close the sockets of jobs that no node needs any more; ``job_uids`` are those that this one still does."""
        for uid in [uid for uid, users in self._users.items() if node in users and uid not in job_uids]:
            self._users[uid].discard(node)
            if not self._users[uid]:
                del self._users[uid]
                self._sockets.pop(uid).close()
