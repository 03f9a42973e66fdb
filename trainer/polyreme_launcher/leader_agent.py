"""The part of index 0's launcher that leads: the leader's machine, job watch, followers, Lease, resume points."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from polyreme_api.history import ResumePoint
from polyreme_launcher.api_client import ApiClient
from polyreme_launcher.exit_message import short_sentence
from polyreme_launcher.job_watch import watch_attempts
from polyreme_launcher.lease import LeaseKeeper
from polyreme_launcher.peers import BACKLOG, LeaderServer
from polyreme_launcher.protocol import leader as machine
from polyreme_launcher.protocol.follower import Tick
from polyreme_launcher.protocol.messages import Message
from polyreme_launcher.resume import fix_resume
from polyreme_system.addresses import is_loopback, listen, split_address

if TYPE_CHECKING:
    from polyreme_api.job import TrainingJobSpec

RESUME_TRIES_MAX = 5
RESUME_RETRY_S = 1.0
FLUSH_S = 2.0


class LeaderAgent:
    """Runs the leader's machine.

    Args:
        pod: The pod's environment.
        environment: All variables, for the optional ones.
        launcher: Name of this process.
        secret: Secret of the job.
        clock: Clock.
        to_own_follower: Takes the leader's messages to index 0.
        on_fail: Called with an error that the launcher cannot survive.
        on_schedule: Takes ``spec.data.schedule`` as JSON, whenever it has changed.
        serve_checks: Called with a listening socket, its address and the request, to let pairs of a check meet there.
    """

    def __init__(
        self,
        *,
        pod: PodEnvironment,
        environment: Mapping[str, str],
        launcher: str,
        secret: bytes,
        clock: Clock,
        to_own_follower: Callable[[Message], None],
        on_fail: Callable[[PolyremeError], None],
        on_schedule: Callable[[str], None],
        serve_checks: Callable[[socket.socket, str, machine.MeetForChecks], None],
    ) -> None:
        self._serve_checks = serve_checks
        self._pod, self._launcher = pod, launcher
        self._clock = clock
        self._to_own_follower = to_own_follower
        self._on_fail = on_fail
        self._on_schedule = on_schedule
        self._inherited = environment.get(names.LEADER_FD)
        self._objects_url = environment.get(names.OBJECTS_URL)
        self._state = machine.LeaderState(replacement=pod.replacement)
        self._api = ApiClient(url=pod.api_url, token_file=Path(pod.token_file), namespace=pod.namespace)
        self._lease = LeaseKeeper(
            self._api,
            namespace=pod.namespace,
            job=pod.job,
            job_uid=pod.job_uid,
            holder=pod.pod,
            key=secret,
            clock=clock,
            on_written=lambda record: self.feed(machine.LeaseWritten(record=record)),
            on_lost=lambda: self.feed(machine.Fenced()),
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

    async def start(self) -> None:
        """Listen, connect, watch.

        Raises:
            EnvironmentFailedError: If the leader's port is not available.
        """
        await self._api.open()
        await self._server.start(self._listener())
        self._spawn(self._lease.run())
        self._spawn(self._watch())
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
                on_schedule=self._on_schedule,
            )
        except PolyremeError as error:
            self._on_fail(error)

    async def _fix_resume(self, attempt: int) -> None:
        point = await self._resume_point(attempt)
        if point is None:
            return
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

    async def _resume_point(self, attempt: int) -> ResumePoint | None:
        from polyreme_api.job import parse_job
        from polyreme_datahub.objects import open_store

        view = self._state.attempt
        spec = None if view is None or view.number != attempt else parse_job(json.loads(view.job_json)).spec
        entries_of = functools.partial(self._entries_of, spec)
        fix = functools.partial(fix_resume, attempt=attempt, by=self._launcher, spec=spec, entries_of=entries_of)
        last = ""
        for _ in range(RESUME_TRIES_MAX):
            try:
                store, now_s = open_store(self._pod.checkpoint_url), self._clock.now_s()
                point = await asyncio.to_thread(fix, store, now_s=now_s)
            except (RefusedError, InvalidConfigError) as error:
                self._refuse(attempt, str(error), ExitCode.USAGE)
                return None
            except (PolyremeError, OSError) as error:
                last = str(error)
                print(f"resume point of attempt {attempt} is not fixed: {last}", file=sys.stderr)
                await self._clock.sleep(RESUME_RETRY_S)
            else:
                if point is None:
                    print(f"attempt {attempt} had a leader before, which may have released it", file=sys.stderr)
                    self.feed(machine.Fenced(attempt=attempt))
                return point
        self._refuse(attempt, f"checkpoint root failed {RESUME_TRIES_MAX} times: {last}", ExitCode.ENVIRONMENT)
        return None

    def _entries_of(self, spec: TrainingJobSpec | None, state: Mapping[str, Any]) -> int | None:
        """Return how many entries of the schedule the loader knew that saved a state; None if its data is not there."""
        from polyreme_datahub.loader.open import entries_of_state

        if spec is None or not self._objects_url:
            return None
        try:
            return entries_of_state(self._objects_url, spec, state, job=self._pod.job_uid)
        except PolyremeError as error:
            print(f"the schedule of a checkpoint is not known: {error}", file=sys.stderr)
            return None

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

    def _listener(self) -> socket.socket:
        if self._inherited:
            return socket.socket(fileno=os.dup(int(self._inherited)))
        host, port = split_address(self._pod.leader_address)
        try:
            return listen(host if is_loopback(host) else "", port, backlog=BACKLOG)
        except OSError as error:
            raise EnvironmentFailedError(
                f"leader can't listen on port {port}: {error.strerror}", field=names.LEADER_ADDRESS
            ) from error

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fail(EnvironmentFailedError(f"leader's task failed: {type(error).__name__}: {error}"))
