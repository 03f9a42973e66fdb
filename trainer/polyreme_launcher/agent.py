"""The launcher's I/O shell: owns the follower's machine, the ranks' parent and, on index 0, the leader."""

from __future__ import annotations

import asyncio
import contextlib
import functools
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
from polyreme_api.environment import PodEnvironment, RankEnvironment
from polyreme_api.errors import PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_launcher.check_children import CheckProcesses
from polyreme_launcher.data_engine import DataEngine
from polyreme_launcher.exit_message import short_sentence
from polyreme_launcher.leader_agent import LeaderAgent
from polyreme_launcher.memory_kills import MemoryKills
from polyreme_launcher.mixture_leader import SCHEDULE_FILE
from polyreme_launcher.peers import FollowerLink
from polyreme_launcher.pod_logs import PodLogs
from polyreme_launcher.proc_stats import SAMPLE_INTERVAL_S, ProcessSampler
from polyreme_launcher.progress_pipe import ProgressPipe
from polyreme_launcher.protocol import follower as machine
from polyreme_launcher.protocol import leader as leader_machine
from polyreme_launcher.protocol.messages import Message
from polyreme_launcher.rank_processes import ALLOCATOR, RankParent
from polyreme_launcher.shared_copies import CopyFiles
from polyreme_launcher.urls import checkpoint_folder
from polyreme_system.addresses import is_loopback
from polyreme_system.files import write_atomically

TICK_S = 0.5
PROCESSES_FILE = "processes.json"
LAUNCHER_NAME_BYTES = 8
GRACE_S = 25.0
"""How long ranks may take to checkpoint after SIGTERM: less than the pod's own grace of 30 s."""
_NOT_FOR_RANKS = {names.LEADER_FD, names.HOST_FD, names.TOKEN_FILE, names.SECRET_FILE}
"""Descriptors that only the launcher has, and variables that only it may read."""
_RANK_SIGNALS = {machine.RankSignal.CHECKPOINT: signal.SIGUSR1, machine.RankSignal.STOP: signal.SIGTERM}


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
        self._directory = Path(self._pod.pod_directory)
        self._job_file, self._plan_file = self._directory / "job.json", self._directory / "plan.json"
        self._state = machine.FollowerState(
            index=self._pod.index,
            replacement=self._pod.replacement,
            devices=self._pod.devices,
            launcher=secrets.token_hex(LAUNCHER_NAME_BYTES),
        )
        self._logs = PodLogs(pod=self._pod, environment=environment, clock=clock)
        self._ranks = RankParent(
            environment=environment, on_exit=self._on_rank_exit, on_forked=self._record_processes, on_fail=self._fail
        )
        variables = {name: value for name, value in environment.items() if name not in _NOT_FOR_RANKS}
        self._checks = CheckProcesses(
            self._ranks,
            self._logs,
            pod=self._pod,
            environment=variables,
            folder=checkpoint_folder(self._pod.checkpoint_url) or self._directory,
            on_checked=lambda check, report: self._feed(
                machine.CheckEnded(attempt=check.attempt, serial=check.serial, report=report)
            ),
        )
        self._leader_agent: LeaderAgent | None = None
        self._link: FollowerLink | None = None
        self._pipe: ProgressPipe | None = None
        self._ended: asyncio.Future[int] | None = None
        self._host_ended = self._succeeded = False
        self._copies = CopyFiles()
        self._memory_kills = MemoryKills()
        self._data_engine: DataEngine | None = None
        if names.is_on(environment, names.DATA_ENGINE, default=False):
            self._data_engine = DataEngine(directory=self._directory, environment={**ALLOCATOR, **variables})

    async def run(self) -> int:
        """Launch until there is nothing left to do; return the exit code."""
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, self._feed, machine.StopRequested(grace_s=GRACE_S))
        if inherited := self._environment.get(names.HOST_FD):
            call_at_end(int(inherited), self._on_host_end)
        self._ranks.start()
        if self._data_engine is not None:
            # It imports what it needs while the ranks' parent does; an error is one of the attempt that finds none.
            with contextlib.suppress(OSError):
                self._data_engine.begin_attempt()
        tasks: list[asyncio.Task[None]] = []
        try:
            tasks.append(loop.create_task(self._tick()))
            await self._meet(tasks)
            return await self._ended
        finally:
            for task in tasks:
                task.cancel()
            if self._leader_agent is not None:
                await self._leader_agent.close()
            if self._data_engine is not None:
                self._data_engine.close()
            await self._ranks.close()
            self._copies.close()
            self._logs.close(succeeded=self._succeeded, wait=not self._host_ended)

    async def _meet(self, tasks: list[asyncio.Task[None]]) -> None:
        """Become the leader, or connect to it."""
        if self._pod.index == 0:
            self._leader_agent = LeaderAgent(
                pod=self._pod,
                environment=self._environment,
                launcher=self._state.launcher,
                secret=self._secret,
                clock=self._clock,
                to_own_follower=self._on_message,
                on_fail=self._fail,
                on_schedule=functools.partial(write_schedule, self._directory / SCHEDULE_FILE),
                serve_checks=self._serve_checks,
            )
            await self._leader_agent.start()
            self._feed(machine.LeaderConnected())
            return
        self._link = FollowerLink(
            address=self._pod.leader_address,
            job_uid=self._pod.job_uid,
            index=self._pod.index,
            replacement=self._pod.replacement,
            secret=self._secret,
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
                self._ranks.end_if_stopped(self._clock.steady_s() - sampled_s)
                sampled_s = self._clock.steady_s()
                self._feed(sampler.sample(self._ranks.living))
            self._feed(machine.Tick())
            if self._leader_agent is not None:
                self._leader_agent.tick()

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
        if rank == 0 and self._pipe is not None:
            # Its last messages are handled before its exit.
            self._pipe.drain()
            self._pipe.close()
            self._pipe = None
        how = f"signal {number}" if code is None else f"code {code}"
        message = short_sentence(error)
        if number == signal.SIGKILL and not message:
            message = self._memory_kills.explain()
        print(f"rank {rank} of attempt {attempt} ended: {how}{': ' if message else ''}{message}", file=sys.stderr)
        self._feed(machine.RankExited(attempt=attempt, rank=rank, code=code, signal=number, message=message))

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
                self._fork(effect)
            case machine.KillRanks():
                self._ranks.kill()
            case machine.SignalRanks(signal=asked):
                self._ranks.signal(_RANK_SIGNALS[asked])
            case machine.ExitProcess(code=code):
                self._end(code)

    def _fork(self, effect: machine.ForkRanks) -> None:
        """Fork the ranks; one that can't be forked is reported as failed by the machine."""
        attempt, begun = effect.directive.attempt, 0
        try:
            write_atomically(self._job_file, effect.directive.job_json, durable=False)
            write_atomically(self._plan_file, effect.directive.plan_json, durable=False)
            if self._data_engine is not None:
                self._data_engine.begin_attempt()
            # Of the attempt, not of this pod: a pod outlives a change of the gang's size.
            plan = json.loads(effect.directive.plan_json)
            for rank in self._state.ranks:
                self._fork_rank(effect, rank, world_size=plan["replicas"] * plan["devices"])
                begun += 1
        except OSError as error:
            message = f"rank can't be started: {error}"
            for rank in self._state.ranks[begun:]:
                asyncio.get_running_loop().call_soon(
                    self._on_rank_exit, attempt, rank, int(ExitCode.ENVIRONMENT), None, message
                )

    def _fork_rank(self, effect: machine.ForkRanks, rank: int, *, world_size: int) -> None:
        directive, release = effect.directive, effect.release
        described = RankEnvironment(
            rank=rank,
            local_rank=rank - self._state.ranks.start,
            world_size=world_size,
            attempt=directive.attempt,
            master_address=release.master_address,
            master_port=release.master_port,
            master_fd=None,
            progress_fd=None,
            job_file=str(self._job_file),
            plan_file=str(self._plan_file),
            checkpoint_url=self._pod.checkpoint_url,
            resume_from=release.resume_from,
        )
        own = {name: value for name, value in self._environment.items() if name not in _NOT_FOR_RANKS}
        variables = {**own, **described.render(), "OMP_NUM_THREADS": "1"}
        if is_loopback(release.master_address):
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        with self._logs.open(directive.attempt, rank) as output:
            self._ranks.fork(
                attempt=directive.attempt,
                rank=rank,
                environment=variables,
                output=output,
                descriptors=self._descriptors(rank),
            )
        if rank == 0 and self._pipe is not None:
            self._pipe.handed_over()

    def _descriptors(self, rank: int) -> dict[str, int]:
        files = self._copies.of(rank)
        found = {} if files is None else {names.COPY_DATA_FD: files[0], names.COPY_RECORD_FD: files[1]}
        if self._data_engine is not None and self._data_engine.descriptor is not None:
            found[names.DATA_ENGINE_FD] = self._data_engine.descriptor
        if rank != 0 or self._leader_agent is None or self._leader_agent.master is None:
            return found
        self._pipe = ProgressPipe(
            lambda record: (
                self._leader_agent.feed(leader_machine.ProgressFromRank(record=record)) if self._leader_agent else None
            )
        )
        leading = {names.MASTER_FD: self._leader_agent.master.fileno(), names.PROGRESS_FD: self._pipe.write_descriptor}
        return found | leading

    def _record_processes(self) -> None:
        write_pids(self._directory / PROCESSES_FILE, self._ranks, self._data_engine)

    def _on_host_end(self) -> None:
        """End at once with the kubelet: needed where no kernel kills orphans."""
        self._host_ended = True
        self._ranks.kill()
        self._end(int(ExitCode.ENVIRONMENT))

    def _fail(self, error: PolyremeError) -> None:
        print(f"launcher failed: {error}", file=sys.stderr)
        self._end(int(error.exit_code))

    def _end(self, code: int) -> None:
        if self._ended is not None and not self._ended.done():
            # A pod that was asked to stop ends with 0 too.
            self._succeeded = code == ExitCode.OK and self._state.kill_at_s is None
            self._ended.set_result(code)


def write_schedule(path: Path, schedule_json: str) -> None:
    """Write the schedule down for rank 0; what can't be written takes effect with the next attempt."""
    try:
        write_atomically(path, schedule_json, durable=False)
    except OSError as error:
        print(f"changes of data.schedule can't be passed to the ranks: {error}", file=sys.stderr)


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
