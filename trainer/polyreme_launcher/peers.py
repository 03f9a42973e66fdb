"""Leader and followers over TCP: mutual authentication, then lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import secrets
import socket
from collections.abc import Callable

from polyreme_api.clock import Clock
from polyreme_api.errors import InvalidConfigError
from polyreme_launcher.protocol.follower import LEADER_SILENCE_MAX_S
from polyreme_launcher.protocol.handshake import (
    GREETING_BYTES_MAX,
    NONCE_BYTES,
    FollowerIdentity,
    Hello,
    check_hello,
    decode_hello,
    encode_hello,
    leader_proof,
)
from polyreme_launcher.protocol.messages import LINE_BYTES_MAX, Message, decode, encode
from polyreme_system.addresses import split_address

GREETING_S = 5.0
"""Longest greeting; a peer that sends more is not a launcher of ours."""
CLOSE_S = 1.0
BACKLOG = 512
"""Connections that may wait to be accepted: a whole gang comes at once."""
GREETINGS_MAX = 256
"""Connections that may be in the greeting at a time."""
RECONNECT_FIRST_S = 0.05
RECONNECT_MAX_S = 2.0
WRITE_BUFFER_BYTES_MAX = 8 << 20
"""Most unread data of a peer; one with more is dropped and connects again."""

_Broken = (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, InvalidConfigError, TimeoutError)


class LeaderServer:
    """Accepts followers and passes on the messages of authenticated ones.

    Args:
        job_uid: UID of the job.
        secret: Secret of the job.
        on_connected: Called with index and replacement of an authenticated follower.
        on_lost: Called when its connection breaks; not for one that a newer connection of the same index displaced.
        on_message: Called with index, replacement and message.
    """

    def __init__(
        self,
        *,
        job_uid: str,
        secret: bytes,
        on_connected: Callable[[int, int], None],
        on_lost: Callable[[int, int], None],
        on_message: Callable[[int, int, Message], None],
    ) -> None:
        self._job_uid = job_uid
        self._secret = secret
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._on_message = on_message
        self._peers: dict[int, tuple[int, asyncio.StreamWriter]] = {}
        self._greeting = asyncio.Semaphore(GREETINGS_MAX)
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket) -> None:
        """Accept on a bound socket."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=LINE_BYTES_MAX, backlog=BACKLOG)

    async def close(self) -> None:
        """Stop accepting and close every connection."""
        if self._server is not None:
            self._server.close()
        writers = [writer for _, writer in self._peers.values()]
        for writer in writers:
            writer.close()
        # Messages that were queued are still sent.
        with contextlib.suppress(*_Broken):
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)

    def send(self, index: int, message: Message) -> None:
        """Send a message to a follower; it is dropped if the follower is not connected."""
        peer = self._peers.get(index)
        if peer is None:
            return
        _, writer = peer
        if writer.transport.get_write_buffer_size() > WRITE_BUFFER_BYTES_MAX:
            writer.transport.abort()
            return
        writer.write(encode(message))

    def drop(self, index: int, replacement: int) -> None:
        """Close a follower's connection."""
        peer = self._peers.get(index)
        if peer is not None and peer[0] == replacement:
            peer[1].close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._greeting, asyncio.timeout(GREETING_S):
                hello = await self._greet(reader, writer)
        except _Broken:
            writer.close()
            return
        if hello is None or hello.index == 0:
            # Index 0 is the leader's own follower, and never comes over the wire.
            writer.close()
            return
        await self._serve(hello, reader, writer)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello | None:
        nonce = secrets.token_hex(NONCE_BYTES)
        writer.write(json.dumps({"nonce": nonce}).encode() + b"\n")
        line = await reader.readuntil(b"\n")
        if len(line) > GREETING_BYTES_MAX:
            return None
        hello = decode_hello(line)
        if not check_hello(self._secret, hello, job_uid=self._job_uid, leader_nonce=nonce):
            return None
        proof = leader_proof(self._secret, job_uid=self._job_uid, leader_nonce=nonce, follower_nonce=hello.nonce)
        writer.write(json.dumps({"proof": proof}).encode() + b"\n")
        return hello

    async def _serve(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = self._peers.get(hello.index)
        if before is not None and before[0] > hello.replacement:
            writer.close()
            return
        self._peers[hello.index] = (hello.replacement, writer)
        if before is not None:
            before[1].close()
        self._on_connected(hello.index, hello.replacement)
        try:
            while line := await reader.readuntil(b"\n"):
                if self._peers.get(hello.index) != (hello.replacement, writer):
                    return
                self._on_message(hello.index, hello.replacement, decode(line))
        except _Broken:
            pass
        finally:
            writer.close()
            if self._peers.get(hello.index) == (hello.replacement, writer):
                del self._peers[hello.index]
                self._on_lost(hello.index, hello.replacement)


class FollowerLink:
    """Keeps a connection to the present leader.

    Args:
        address: ``host:port``; the name is resolved again for every connection.
        identity: The follower, and the job's secret.
        clock: Clock.
        on_connected: Called when the leader has authenticated itself.
        on_lost: Called when the connection breaks.
        on_message: Called for every message.
        silence_max_s: A connection that is silent for so long is closed.
    """

    def __init__(
        self,
        *,
        address: str,
        identity: FollowerIdentity,
        clock: Clock,
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
        on_message: Callable[[Message], None],
        silence_max_s: float = LEADER_SILENCE_MAX_S,
    ) -> None:
        self._silence_max_s = silence_max_s
        self._host, self._port = split_address(address)
        self._identity = identity
        self._clock = clock
        self._tries = 0
        """Connections that brought no message."""
        self._on_connected, self._on_lost, self._on_message = on_connected, on_lost, on_message
        self._writer: asyncio.StreamWriter | None = None

    def send(self, message: Message) -> None:
        """Send a message to the leader; it is dropped if there is no connection."""
        if self._writer is not None:
            self._writer.write(encode(message))

    async def run(self) -> None:
        """Connect, read until the connection breaks, connect again."""
        delay_s = RECONNECT_FIRST_S
        while True:
            if await self._connect():
                # Reconnect quickly only to a leader that sends messages: one that drops us has no place for us.
                delay_s = RECONNECT_FIRST_S
            else:
                self._tries += 1
            await self._clock.sleep(delay_s)
            delay_s = min(2 * delay_s, RECONNECT_MAX_S)

    async def _connect(self) -> bool:
        """Hold one connection until it breaks or falls silent; return whether the leader sent a message on it."""
        writer: asyncio.StreamWriter | None = None
        proven = heard = False
        try:
            async with asyncio.timeout(GREETING_S):
                host = await self._next_address()
                reader, writer = await asyncio.open_connection(host, self._port, limit=LINE_BYTES_MAX)
                proven = await self._greet(reader, writer)
            if not proven:
                return False
            self._writer = writer
            self._on_connected()
            while line := await self._next_line(reader):
                heard = True
                self._on_message(decode(line))
        except _Broken:
            pass
        finally:
            self._writer = None
            if writer is not None:
                # Not only closed: a frozen leader would never take what is still unsent.
                writer.transport.abort()
                with contextlib.suppress(*_Broken):
                    await writer.wait_closed()
            if proven:
                self._on_lost()
        return heard

    async def _next_address(self) -> str:
        """Return one of the leader's addresses, another after each failure.

        While the pod of an earlier leader can't be ended by its node, the name leads to that pod as well.
        """
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        addresses = sorted({str(entry[4][0]) for entry in found})
        return addresses[self._tries % len(addresses)]

    async def _next_line(self, reader: asyncio.StreamReader) -> bytes:
        # The connection itself never reports the end of a leader that is frozen, or whose node is lost.
        async with asyncio.timeout(self._silence_max_s):
            return await reader.readuntil(b"\n")

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        leader_nonce, nonce = str(_field(await reader.readuntil(b"\n"), "nonce")), secrets.token_hex(NONCE_BYTES)
        writer.write(encode_hello(self._identity.hello(leader_nonce=leader_nonce, nonce=nonce)))
        answer = str(_field(await reader.readuntil(b"\n"), "proof"))
        expected = leader_proof(
            self._identity.secret,
            job_uid=self._identity.job_uid,
            leader_nonce=leader_nonce,
            follower_nonce=nonce,
        )
        return hmac.compare_digest(answer.encode(errors="replace"), expected.encode())


def _field(line: bytes, name: str) -> object:
    if not line or len(line) > GREETING_BYTES_MAX:
        raise InvalidConfigError("leader's greeting is too long or missing")
    try:
        return json.loads(line)[name]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidConfigError(f"leader's greeting has no {name}") from error
