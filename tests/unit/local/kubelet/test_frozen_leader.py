"""A leader that is frozen and wakes late: its followers leave it, and nothing that it says counts any more."""

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from polyreme_launcher.peers import FollowerLink, LeaderServer
from polyreme_launcher.protocol.handshake import FollowerIdentity
from polyreme_launcher.protocol.messages import Beat
from polyreme_system.clock import SystemClock
from tests.processes import wake
from tests.unit.local.kubelet.stack import Stack, lives

pytestmark = pytest.mark.slow


def test_a_frozen_leader_that_wakes_after_its_replacement_is_fenced(tmp_path: Path) -> None:
    async def story() -> None:
        async with Stack(tmp_path, replicas=2).running() as stack:
            await stack.submit()
            await stack.until_training(1)
            old = stack.processes(0)
            frozen = [old["launcher"], old["fork_server"], stack.rank_pid(0, attempt=1)]
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            # Its node is lost, the operator believes: a second leader beside the frozen one.
            await stack.create_pod(0, replacement=1)
            await stack.attempt(2, replacements={0: 1})
            born = stack.pod_directory(0, 1) / "born-0.a2"
            await stack.until(born.exists, "the replacement runs the next attempt")
            await stack.until(lambda: (r := stack.record()) and r.replacement == 1, "the Lease is its")

            writers: set[tuple[int, int]] = set()
            for pid in frozen:
                wake(pid)

            def ended() -> bool:
                record = stack.record()
                assert record is not None
                writers.add((record.attempt, record.replacement))
                return not any(map(lives, frozen))

            await stack.until(ended, "the woken leader and its ranks have ended")
            assert writers == {(2, 1)}, "nothing of the past was written over the present"
            pod = stack.pod(0)
            assert pod is not None
            await stack.until(lambda: stack.pod(0)["status"]["phase"] == "Failed", "its pod has ended")  # type: ignore[index]
            other = stack.pod_directory(1) / "born-1.a2"
            await stack.until(other.exists, "the other pod runs the next attempt")
            stack.write_script("finish")
            await stack.until(lambda: (r := stack.record()) and r.outcome == "Succeeded", "the present succeeds")

    asyncio.run(story())


async def test_a_follower_leaves_a_leader_that_falls_silent(tmp_path: Path) -> None:
    secret, told = secrets.token_bytes(32), list[str]()
    listener = socket.create_server(("127.0.0.1", 0))
    server = LeaderServer(
        job_uid="u",
        secret=secret,
        on_connected=lambda index, _: server.send(index, Beat()),
        on_lost=lambda *_: None,
        on_message=lambda *_: None,
    )
    await server.start(listener)
    link = FollowerLink(
        address=f"127.0.0.1:{listener.getsockname()[1]}",
        identity=FollowerIdentity(job_uid="u", index=1, replacement=0, secret=secret),
        clock=SystemClock(),
        on_connected=lambda: told.append("connected"),
        on_lost=lambda: told.append("lost"),
        on_message=lambda message: told.append(type(message).__name__),
        silence_max_s=0.2,
    )
    task = asyncio.create_task(link.run())
    async with asyncio.timeout(20):
        while told.count("connected") < 3 or ("Beat", "lost") not in itertools.pairwise(told):
            await asyncio.sleep(0.01)
    # A busy machine may be silent for longer than that before the Beat comes.
    assert [each for each in told if each != "Beat"][:4] == ["connected", "lost", "connected", "lost"]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await server.close()


def test_follower_finds_the_leader_beside_the_pod_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's name still resolves to a pod that its node does not end; its process may be stopped for good."""

    async def story() -> None:
        secret, told = secrets.token_bytes(32), []
        stuck = socket.create_server(("127.0.0.1", 0))
        port = stuck.getsockname()[1]
        server = LeaderServer(
            job_uid="u",
            secret=secret,
            on_connected=lambda index, _: server.send(index, Beat()),
            on_lost=lambda *_: None,
            on_message=lambda *_: None,
        )
        await server.start(socket.create_server(("127.0.0.2", port)))
        both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", port)) for last in (1, 2)]
        loop = asyncio.get_running_loop()
        monkeypatch.setattr("polyreme_launcher.peers.GREETING_S", 0.3)
        with monkeypatch.context() as resolved:
            known = loop.getaddrinfo

            async def look_up(host: str, *arguments: Any, **options: Any) -> Any:
                return both if host == "leader" else await known(host, *arguments, **options)

            resolved.setattr(loop, "getaddrinfo", look_up)
            link = FollowerLink(
                address=f"leader:{port}",
                identity=FollowerIdentity(job_uid="u", index=1, replacement=0, secret=secret),
                clock=SystemClock(),
                on_connected=lambda: told.append("connected"),
                on_lost=lambda: None,
                on_message=lambda message: told.append(type(message).__name__),
            )
            task = asyncio.create_task(link.run())
            async with asyncio.timeout(20):
                while "Beat" not in told:
                    await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await server.close()
        stuck.close()

    asyncio.run(story())


@pytest.mark.parametrize("greeting", [b"x" * 3_000_000, b"[" * 4000 + b"\n", b"{}\n", b'{"nonce": "\\ud800"}\n'])
async def test_a_strangers_greeting_costs_its_connection_and_nothing_else(greeting: bytes) -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    listener = socket.create_server(("127.0.0.1", 0))
    server = LeaderServer(
        job_uid="u",
        secret=b"s",
        on_connected=lambda *_: complaints.append("connected"),
        on_lost=lambda *_: None,
        on_message=lambda *_: None,
    )
    await server.start(listener)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    async with asyncio.timeout(20):
        await reader.readline()
        writer.write(greeting)
        # What comes after its end is refused: reading says so, or writing.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            assert await reader.read() == b""
    writer.close()
    await server.close()
    assert complaints == []
