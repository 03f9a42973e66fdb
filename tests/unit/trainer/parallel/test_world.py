"""The groups of a world: what ends them, how long exchanges may take, and ranks that do not meet."""

from __future__ import annotations

import datetime
import logging
import os
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.exit_codes import ExitCode
from polyreme_planner.layout import Layout
from polyreme_trainer.checkpoint import save
from polyreme_trainer.checkpoint.retention import Rule
from polyreme_trainer.parallel import world
from polyreme_trainer.parallel.world import CONTROL_TIMEOUT_S, RankSettings, open_world


def settings(*, ranks: int = 1, rank: int = 0, **more: Any) -> RankSettings:
    """A rank at an address of its own; others than the first find it closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        descriptor = server.detach() if rank == 0 else None
    return RankSettings(rank=rank, world=ranks, attempt=1, master_port=port, master_fd=descriptor, **more)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How groups were ended, in turn."""
    seen: list[str] = []
    abort, leave = distributed_c10d._abort_process_group, dist.destroy_process_group

    def aborted() -> None:
        seen.append("abort")
        abort()

    def left() -> None:
        seen.append("leave")
        leave()

    monkeypatch.setattr(distributed_c10d, "_abort_process_group", aborted)
    monkeypatch.setattr(dist, "destroy_process_group", left)
    return seen


def test_groups_are_left_after_a_run_and_aborted_after_an_error(ended: list[str]) -> None:
    with open_world(settings(), Layout()):
        pass
    with pytest.raises(ZeroDivisionError), open_world(settings(), Layout()):
        raise ZeroDivisionError
    assert ended == ["leave", "abort"]
    assert not dist.is_initialized()


def test_error_while_aborting_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    abort = distributed_c10d._abort_process_group

    def fails() -> None:
        abort()
        raise RuntimeError("NCCL is gone")

    monkeypatch.setattr(distributed_c10d, "_abort_process_group", fails)
    with pytest.raises(ZeroDivisionError), open_world(settings(), Layout()):
        raise ZeroDivisionError


def limit_of(group: dist.ProcessGroup) -> datetime.timedelta:
    limit: datetime.timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return limit


def test_first_step_and_control_group_have_limits_of_their_own() -> None:
    given = settings(first_step_timeout_s=500.0, collective_timeout_s=90.0)
    with open_world(given, Layout()) as opened:
        meshes = opened.meshes
        assert limit_of(meshes.control_group).total_seconds() == CONTROL_TIMEOUT_S
        assert limit_of(meshes.world_group).total_seconds() == 500.0
        meshes.communicators.limit(given.collective_timeout_s)
        assert limit_of(meshes.world_group).total_seconds() == 90.0
        assert limit_of(meshes.control_group).total_seconds() == CONTROL_TIMEOUT_S


def test_rank_that_cannot_reach_the_first_one_says_so_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert world.CONNECT_S_MAX + world.CONNECT_TRY_S <= 60.0
    monkeypatch.setattr(world, "CONNECT_S_MAX", 0.02)
    monkeypatch.setattr(world, "CONNECT_POLL_S", 0.01)
    there = settings(ranks=2, rank=1)
    with (
        pytest.raises(EnvironmentFailedError, match=r"rendezvous failed: rank 1 of 2 at .*: \[Errno \d+\] ") as failed,
        open_world(there, Layout(dp=2)),
    ):
        pass
    assert failed.value.exit_code == ExitCode.ENVIRONMENT


def test_ranks_that_do_not_come_are_counted() -> None:
    alone = settings(ranks=3, rendezvous_timeout_s=0.01)
    words = r"rank 0 of 3 at .*: 1 of 3 ranks are here after 0.01 s"
    with pytest.raises(EnvironmentFailedError, match=words), open_world(alone, Layout(dp=3)):
        pass


FIRST_RANK = """
import os, sys
from polyreme_api.errors import PolyremeError
from polyreme_trainer.parallel import world
world.CONNECT_S_MAX = world.CONNECT_TRY_S = 1.0
port, descriptor = map(int, sys.argv[1:])
try:
    world._meet(world.RankSettings(
        rank=0, world=2, attempt=1, master_port=port, master_fd=descriptor, device_type="cuda"
    ))
except PolyremeError as error:
    print(error, file=sys.stderr)
    os._exit(error.exit_code)  # as the fork server ends a rank
"""


@pytest.mark.timeout(60)
def test_rank_that_comes_and_answers_no_other_is_found_at_once_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo connects at the first exchange there, so to open the group proves nothing."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, descriptor = server.getsockname()[1], server.fileno()
        command = [sys.executable, "-c", FIRST_RANK, str(port), str(descriptor)]
        first = subprocess.Popen(command, pass_fds=[descriptor], stderr=subprocess.PIPE, text=True)
    monkeypatch.setattr(dist, "all_reduce", lambda _: None)
    world._meet(RankSettings(rank=1, world=2, attempt=1, master_port=port, device_type="cuda"))
    try:
        _, words = first.communicate()
    finally:
        first.kill()
        dist.destroy_process_group()
    assert first.returncode == ExitCode.ENVIRONMENT
    assert words.count("\n") == 1
    assert "failed: rank 0 of 2" in words


def test_opening_that_never_ends_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may wait for a peer while it opens a communicator, where no other limit counts."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(world, "_meet", lambda _: None)

    def opens(*_: Any) -> None:
        while not codes:
            threading.Event().wait(0.01)
        raise ZeroDivisionError

    monkeypatch.setattr(world, "open_meshes", opens)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    short = settings(first_step_timeout_s=0.01)
    with pytest.raises(ZeroDivisionError), open_world(short, Layout()):
        pass
    assert codes == [ExitCode.ENVIRONMENT]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Devices that threads take, with the third one current."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    return taken


def test_saving_thread_has_the_device_of_its_rank(devices: list[int]) -> None:
    identity = save.Identity(store=None, attempt=1, shape=None, plan_hash="", rule=Rule(kept=1))  # type: ignore[arg-type]
    writer = save.CheckpointWriter(identity, group=None, now_s=lambda: 0.0, committed=lambda _: None)  # type: ignore[arg-type]
    with writer:
        writer._executor.submit(int).result()
    assert devices == [3]
