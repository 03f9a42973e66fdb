"""The launcher's I/O shell: owns the follower's machine, the ranks' parent and, on index 0, the leader."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from polyreme_api import environment as names
from polyreme_api.clock import Clock
from polyreme_api.environment import PodEnvironment
from polyreme_api.errors import PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.progress import ProgressRecord
from polyreme_launcher.check_children import CheckProcesses
from polyreme_launcher.data_engine import DataEngine
from polyreme_launcher.exit_message import short_sentence
from polyreme_launcher.leader_agent import LeaderAgent, leader_listener
from polyreme_launcher.memory_kills import MemoryKills
from polyreme_launcher.peers import FollowerLink
from polyreme_launcher.pod_logs import PodLogs
from polyreme_launcher.proc_stats import SAMPLE_INTERVAL_S, ProcessSampler
from polyreme_launcher.protocol import follower as machine
from polyreme_launcher.protocol import leader as leader_machine
from polyreme_launcher.protocol.handshake import FollowerIdentity
from polyreme_launcher.protocol.hang_evidence import not_ended
from polyreme_launcher.protocol.messages import Message
from polyreme_launcher.rank_processes import ALLOCATOR, RankParent, with_torch_settings
from polyreme_launcher.rank_starter import RankStarter
from polyreme_launcher.resume import ResumeFixer
from polyreme_launcher.urls import checkpoint_folder
from polyreme_system.files import write_atomically

TICK_S = 0.5
PROCESSES_FILE = "processes.json"
LAUNCHER_NAME_BYTES = 8
GRACE_S = 25.0
"""How long ranks may take to checkpoint after SIGTERM: less than the pod's own grace of 30 s."""
_NOT_FOR_RANKS = {names.LEADER_FD, names.HOST_FD, names.TOKEN_FILE, names.SECRET_FILE}
"""Descriptors that only the launcher has, and variables that only it may read."""
_RANK_SIGNALS = {
    machine.RankSignal.CHECKPOINT: signal.SIGUSR1,
    machine.RankSignal.STOP: signal.SIGTERM,
    machine.RankSignal.STACKS: signal.SIGUSR2,
}


class Launcher:
    """One pod's launcher.

    Args:
        environment: The pod's variables.
        clock: Clock.
    """

    def __init__(self, *, environment: Mapping[str, str], clock: Clock) -> None:
        self._environment = dict(environment)
        self._clock = clock
        self._pod = PodEnvironment.parse(environment)
        self._secret = Path(self._pod.secret_file).read_bytes()
        directory = Path(self._pod.pod_directory)
        self._state = machine.FollowerState(
            index=self._pod.index,
            replacement=self._pod.replacement,
            devices=self._pod.devices,
            launcher=secrets.token_hex(LAUNCHER_NAME_BYTES),
        )
        self._logs = PodLogs(pod=self._pod, environment=environment, clock=clock)
        # Of the fork server too: libraries read some variables when they are loaded.
        environment = with_torch_settings(environment, directory)
        self._parent = RankParent(
            environment=environment, on_exit=self._on_rank_exit, on_forked=self._record_processes, on_fail=self._fail
        )
        variables = {name: value for name, value in environment.items() if name not in _NOT_FOR_RANKS}
        self._checks = CheckProcesses(
            self._parent,
            self._logs,
            pod=self._pod,
            environment=variables,
            folder=checkpoint_folder(self._pod.checkpoint_url) or directory,
            on_checked=lambda check, report: self._feed(
                machine.CheckEnded(attempt=check.attempt, serial=check.serial, report=report)
            ),
        )
        self._leader_agent: LeaderAgent | None = None
        self._link: FollowerLink | None = None
        self._ended: asyncio.Future[int] | None = None
        self._host_ended = False
        self._memory_kills = MemoryKills()
        self._data_engine: DataEngine | None = None
        if names.is_on(environment, names.DATA_ENGINE, default=False):
            self._data_engine = DataEngine(directory=directory, environment={**ALLOCATOR, **variables})
        self._ranks = RankStarter(
            self._parent,
            self._logs,
            pod=self._pod,
            environment=variables,
            data_engine=self._data_engine,
            on_progress=self._on_progress,
            on_not_started=self._on_rank_exit,
        )

    async def run(self) -> int:
        """Launch until there is nothing left to do; return the exit code."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self._feed, machine.StopRequested(grace_s=GRACE_S))
        if inherited := self._environment.get(names.HOST_FD):
            call_at_end(int(inherited), self._on_host_end)
        self._parent.start()
        if self._data_engine is not None:
            # It imports what it needs while the ranks' parent does; an error is one of the attempt that finds none.
            with contextlib.suppress(OSError):
                self._data_engine.begin_attempt()
        tasks: list[asyncio.Task[None]] = []
        succeeded = False
        try:
            tasks.append(loop.create_task(self._tick()))
            await self._meet(tasks)
            code = await self._ended
            # A pod that was asked to stop ends with 0 too.
            succeeded = code == ExitCode.OK and self._state.kill_at_s is None
            return code
        finally:
            for task in tasks:
                task.cancel()
            if self._leader_agent is not None:
                await self._leader_agent.close()
            if self._data_engine is not None:
                self._data_engine.close()
            await self._parent.close()
            self._ranks.close()
            self._logs.close(succeeded=succeeded, wait=not self._host_ended)

    async def _meet(self, tasks: list[asyncio.Task[None]]) -> None:
        """Become the leader, or connect to it."""
        if self._pod.index == 0:
            self._leader_agent = LeaderAgent(
                pod=self._pod,
                secret=self._secret,
                clock=self._clock,
                resume=ResumeFixer(
                    self._pod,
                    by=self._state.launcher,
                    objects_url=self._environment.get(names.OBJECTS_URL),
                    clock=self._clock,
                ),
                to_own_follower=self._on_message,
                on_fail=self._fail,
                serve_checks=self._serve_checks,
            )
            await self._leader_agent.start(leader_listener(self._pod, self._environment.get(names.LEADER_FD)))
            self._feed(machine.LeaderConnected())
            return
        self._link = FollowerLink(
            address=self._pod.leader_address,
            identity=FollowerIdentity(
                job_uid=self._pod.job_uid,
                index=self._pod.index,
                replacement=self._pod.replacement,
                secret=self._secret,
            ),
            clock=self._clock,
            on_connected=lambda: self._feed(machine.LeaderConnected()),
            on_lost=lambda: self._feed(machine.LeaderLost()),
            on_message=self._on_message,
        )
        tasks.append(asyncio.get_running_loop().create_task(self._link.run()))

    async def _tick(self) -> None:
        sampler, sampled_s = ProcessSampler(), self._clock.steady_s()
        while True:
            begun_s = self._clock.steady_s()
            await self._clock.sleep(TICK_S)
            if self._data_engine is not None:
                self._data_engine.tick(self._clock.steady_s() - begun_s)
            if self._clock.steady_s() - sampled_s >= SAMPLE_INTERVAL_S:
                self._parent.end_if_stopped(self._clock.steady_s() - sampled_s)
                sampled_s = self._clock.steady_s()
                states = sampler.sample(self._parent.living, self._ranks.pages())
                self._parent.end_finished(not_ended(states))
                self._feed(machine.RanksSampled(states=states))
            self._feed(machine.Tick())
            if self._leader_agent is not None:
                self._leader_agent.tick()
                self._ranks.limit(self._leader_agent.fence.until_ns)

    def _on_message(self, message: Message) -> None:
        self._feed(machine.FromLeader(message=message))

    def _serve_checks(self, listener: socket.socket, address: str, request: leader_machine.MeetForChecks) -> None:
        self._checks.serve(
            listener, attempt=request.attempt, serial=request.serial, seconds=request.seconds, address=address
        )

    def _on_rank_exit(self, attempt: int, rank: int, code: int | None, number: int | None, error: str) -> None:
        self._logs.ended(attempt, rank, failed=code != ExitCode.OK)
        if rank < 0:
            self._checks.on_exit(attempt, rank, code, number, error)
            return
        self._ranks.ended(rank)
        how = f"signal {number}" if code is None else f"code {code}"
        message = short_sentence(error)
        if number == signal.SIGKILL and not message:
            message = self._memory_kills.explain()
        print(f"rank {rank} of attempt {attempt} ended: {how}{': ' if message else ''}{message}", file=sys.stderr)
        self._feed(machine.RankExited(attempt=attempt, rank=rank, code=code, signal=number, message=message))

    def _on_progress(self, record: ProgressRecord) -> None:
        if self._leader_agent is not None:
            self._leader_agent.feed(leader_machine.ProgressFromRank(record=record))

    def _feed(self, event: machine.FollowerEvent) -> None:
        self._state, effects = machine.FollowerMachine.step(self._state, event, self._clock.steady_s())
        for effect in effects:
            self._apply(effect)

    def _apply(self, effect: machine.FollowerEffect) -> None:
        match effect:
            case machine.SendToLeader(message=message):
                if self._leader_agent is not None:
                    asyncio.get_running_loop().call_soon(self._leader_agent.from_own_follower, message)
                elif self._link is not None:
                    self._link.send(message)
            case machine.RunCheck(check=check):
                self._checks.run(check)
            case machine.StopChecks():
                self._checks.stop()
            case machine.ForkRanks():
                master = None if self._leader_agent is None else self._leader_agent.master
                self._ranks.start(effect, self._state.ranks, master=master)
            case machine.KillRanks():
                self._parent.kill()
            case machine.SignalRanks(signal=asked):
                self._parent.signal(_RANK_SIGNALS[asked])
            case machine.ExitProcess(code=code):
                self._end(code)

    def _record_processes(self) -> None:
        write_pids(Path(self._pod.pod_directory) / PROCESSES_FILE, self._parent, self._data_engine)

    def _on_host_end(self) -> None:
        """End at once with the kubelet: needed where no kernel kills orphans."""
        self._host_ended = True
        self._parent.kill()
        self._end(int(ExitCode.ENVIRONMENT))

    def _fail(self, error: PolyremeError) -> None:
        print(f"launcher failed: {error}", file=sys.stderr)
        self._end(int(error.exit_code))

    def _end(self, code: int) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(code)


def write_pids(path: Path, ranks: RankParent, engine: DataEngine | None) -> None:
    """Record the pids of all processes, for people and for tests that hurt one."""
    pids = {str(rank): pid for rank, pid in sorted(ranks.pids.items())}
    processes: dict[str, object] = {"launcher": os.getpid(), "fork_server": ranks.fork_server_pid, "ranks": pids}
    if engine is not None:
        processes["data-engine"] = engine.pid
    with contextlib.suppress(OSError):
        write_atomically(path, json.dumps(processes), durable=False)


def call_at_end(descriptor: int, on_end: Callable[[], None]) -> None:
    """Have the running loop call something when the other end of a pipe closes."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(descriptor, 1):
                loop.remove_reader(descriptor)
                on_end()

    loop.add_reader(descriptor, read)
