"""The part of index 0's launcher that leads: the leader's machine, job watch, followers, Lease, resume points."""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from polyreme_api import environment as names
from polyreme_api.clock import Clock
from polyreme_api.environment import PodEnvironment
from polyreme_api.errors import (
    EnvironmentFailedError,
    InvalidConfigError,
    PolyremeError,
    RefusedError,
)
from polyreme_api.exit_codes import ExitCode
from polyreme_api.progress import ProgressRecord
from polyreme_launcher.api_client import ApiClient
from polyreme_launcher.exit_message import short_sentence
from polyreme_launcher.fence_watch import FenceWatch
from polyreme_launcher.job_watch import watch_attempts
from polyreme_launcher.lease import LeaseKeeper
from polyreme_launcher.mixture_leader import write_changes
from polyreme_launcher.peers import BACKLOG, LeaderServer
from polyreme_launcher.protocol import leader as machine
from polyreme_launcher.protocol.follower import Tick
from polyreme_launcher.protocol.messages import Message
from polyreme_launcher.resume import ResumeFixer
from polyreme_system.addresses import is_loopback, listen, split_address

FLUSH_S = 2.0


class LeaderAgent:
    """Runs the leader's machine.

    Args:
        pod: The pod's environment.
        secret: Secret of the job.
        clock: Clock.
        resume: Fixes resume points.
        to_own_follower: Takes the leader's messages to index 0.
        on_fail: Called with an error that the launcher cannot survive.
        serve_checks: Called with a listening socket, its address and the request, to let pairs of a check meet there.
    """

    def __init__(
        self,
        *,
        pod: PodEnvironment,
        secret: bytes,
        clock: Clock,
        resume: ResumeFixer,
        to_own_follower: Callable[[Message], None],
        on_fail: Callable[[PolyremeError], None],
        serve_checks: Callable[[socket.socket, str, machine.MeetForChecks], None],
    ) -> None:
        self._serve_checks = serve_checks
        self._pod, self._clock, self._resume = pod, clock, resume
        self._to_own_follower = to_own_follower
        self._on_fail = on_fail
        self._state = machine.LeaderState(replacement=pod.replacement)
        self._api = ApiClient(url=pod.api_url, token_file=Path(pod.token_file), namespace=pod.namespace)
        self.fence = FenceWatch(
            pod.checkpoint_url,
            clock=clock,
            on_fenced=lambda attempt: self.feed(machine.Fenced(attempt=attempt)),
        )
        self._lease = LeaseKeeper(
            self._api,
            pod=pod,
            key=secret,
            clock=clock,
            on_written=self._on_lease_written,
            on_lost=lambda: self.feed(machine.Fenced()),
            now_s=self.fence.now_s,
        )
        self._server = LeaderServer(
            job_uid=pod.job_uid,
            secret=secret,
            on_connected=lambda index, number: self.feed(machine.PeerConnected(index=index, replacement=number)),
            on_lost=lambda index, number: self.feed(machine.PeerLost(index=index, replacement=number)),
            on_message=self._on_message,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self.master: socket.socket | None = None
        """Listening socket for the ranks' rendezvous of the newest attempt."""

    async def start(self, listener: socket.socket) -> None:
        """Accept followers on a bound socket, connect, watch."""
        await self._api.open()
        await self._server.start(listener)
        self._spawn(self._lease.run())
        self._spawn(self._watch())
        self._spawn(self.fence.run())
        self.feed(machine.PeerConnected(index=0, replacement=self._pod.replacement))

    async def close(self) -> None:
        """Write pending records, then close."""
        await self._lease.flush(timeout_s=FLUSH_S)
        for task in self._tasks:
            task.cancel()
        await self._server.close()
        await self._api.close()

    def from_own_follower(self, message: Message) -> None:
        """Take a message of index 0's follower."""
        self._on_message(0, self._pod.replacement, message)

    def feed(self, event: machine.LeaderEvent) -> None:
        """Step the machine and apply its effects."""
        self._state, effects = machine.LeaderMachine.step(self._state, event, self._clock.steady_s())
        for effect in effects:
            self._apply(effect)

    def tick(self) -> None:
        """Let time pass."""
        self.feed(Tick())

    def _on_lease_written(self, record: ProgressRecord, began_s: float) -> None:
        self.fence.confirm(record.attempt, began_s)
        self.feed(machine.LeaseWritten(record=record))

    def _on_message(self, index: int, replacement: int, message: Message) -> None:
        self.feed(machine.FromPeer(index=index, replacement=replacement, message=message))

    def _apply(self, effect: machine.LeaderEffect) -> None:
        match effect:
            case machine.SendTo(index=index, message=message):
                self._send(index, message)
            case machine.Broadcast(message=message):
                for index in self._state.peers:
                    self._send(index, message)
            case machine.DropPeer(index=index, replacement=replacement):
                self._server.drop(index, replacement)
            case machine.FixResume(attempt=attempt):
                self._spawn(self._fix_resume(attempt))
            case machine.MeetForChecks():
                # After the present effects, since the answer is an event.
                asyncio.get_running_loop().call_soon(self._meet_for_checks, effect)
            case machine.RenewLease(record=record):
                self._lease.put(record)
            case _:
                raise AssertionError(effect)

    def _send(self, index: int, message: Message) -> None:
        if index == 0:
            # After the present effects, as a message over the wire would be.
            asyncio.get_running_loop().call_soon(self._to_own_follower, message)
        else:
            self._server.send(index, message)

    async def _watch(self) -> None:
        try:
            await watch_attempts(
                self._api,
                job=self._pod.job,
                uid=self._pod.job_uid,
                clock=self._clock,
                on_attempt=lambda attempt: self.feed(machine.JobChanged(attempt=attempt)),
                on_refused=lambda number, why: self.feed(machine.AttemptRefused(attempt=number, message=why)),
                on_changes=functools.partial(write_changes, Path(self._pod.pod_directory)),
            )
        except PolyremeError as error:
            self._on_fail(error)

    async def _fix_resume(self, attempt: int) -> None:
        self.fence.end()
        view = self._state.attempt
        view = view if view is not None and view.number == attempt else None
        try:
            point = await self._resume.fix(attempt, None if view is None else view.job_json)
        except (RefusedError, InvalidConfigError) as error:
            self._refuse(attempt, str(error), ExitCode.USAGE)
            return
        except EnvironmentFailedError as error:
            self._refuse(attempt, str(error), ExitCode.ENVIRONMENT)
            return
        if point is None:
            print(f"attempt {attempt} had a leader before, which may have released it", file=sys.stderr)
            self.feed(machine.Fenced(attempt=attempt))
            return
        self.fence.begin(attempt)
        try:
            address, port = self._listen_for_ranks()
        except OSError as error:
            self._refuse(attempt, f"rendezvous can't listen: {error.strerror}", ExitCode.ENVIRONMENT)
            return
        self.feed(
            machine.ResumeFixed(
                attempt=attempt,
                resume_from=point.resume_from,
                step=point.step,
                master_address=address,
                master_port=port,
            )
        )
        if view is not None:
            # After the release: ranks do not wait for it.
            await self._resume.record(view.job_json, view.plan_json)

    def _refuse(self, attempt: int, why: str, code: ExitCode) -> None:
        print(f"attempt {attempt} is refused: {why}", file=sys.stderr)
        self.feed(machine.AttemptRefused(attempt=attempt, message=short_sentence(why), code=int(code)))

    def _meet_for_checks(self, request: machine.MeetForChecks) -> None:
        address, port = "", 0
        try:
            listener, address = self._listen()
        except OSError as error:
            print(f"pairs of workers can't be checked: {error.strerror}", file=sys.stderr)
        else:
            with listener:
                port = listener.getsockname()[1]
                self._serve_checks(listener, address, request)
        self.feed(machine.ChecksMeet(attempt=request.attempt, serial=request.serial, address=address, port=port))

    def _listen(self) -> tuple[socket.socket, str]:
        """Open a listening socket that the other workers reach."""
        host, _ = split_address(self._pod.leader_address)
        return listen(host if is_loopback(host) else "", 0, backlog=BACKLOG), host

    def _listen_for_ranks(self) -> tuple[str, int]:
        """Open the rendezvous' listening socket here, so that no other process can have its port."""
        if self.master is not None:
            self.master.close()
        self.master, host = self._listen()
        return host, self.master.getsockname()[1]

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fail(EnvironmentFailedError(f"leader's task failed: {type(error).__name__}: {error}"))


def leader_listener(pod: PodEnvironment, inherited: str | None) -> socket.socket:
    """Open the socket at which followers find the leader.

    Args:
        pod: The leader's pod.
        inherited: Descriptor of a socket that already listens, where the host holds one.

    Raises:
        EnvironmentFailedError: If the leader's port is not available.
    """
    if inherited:
        return socket.socket(fileno=os.dup(int(inherited)))
    host, port = split_address(pod.leader_address)
    try:
        return listen(host if is_loopback(host) else "", port, backlog=BACKLOG)
    except OSError as error:
        raise EnvironmentFailedError(
            f"leader can't listen on port {port}: {error.strerror}", field=names.LEADER_ADDRESS
        ) from error
