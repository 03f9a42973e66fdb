"""What an open page of the console shows while its cluster is away, and after it is back."""

from aiohttp import StreamReader


async def until_back(events: StreamReader, words: str) -> None:
    """Read until an event shows this; each before it says that the cluster does not answer, and why just then."""
    while words not in (event := (await events.readuntil(b"\n\n")).decode()):
        assert "does not answer" in event
