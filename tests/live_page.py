"""Waits for a server, and for what an open page of the console shows after its cluster was away."""

import asyncio
import contextlib

from aiohttp import ClientConnectorError, ClientSession, StreamReader

READY_S = 60.0


async def until_back(events: StreamReader, words: str) -> None:
    """Read until an event shows this; each before it says that the cluster does not answer, and why just then."""
    while words not in (event := (await events.readuntil(b"\n\n")).decode()):
        assert "does not answer" in event


async def until_ready(session: ClientSession, url: str) -> None:
    """Wait until a server answers."""
    async with asyncio.timeout(READY_S):
        while True:
            with contextlib.suppress(ClientConnectorError):
                async with session.get(url) as response:
                    assert response.status == 200
                    return
            await asyncio.sleep(0.1)
