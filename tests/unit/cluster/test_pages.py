"""Lists in pages: all of them are read, and one that does not end is an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from polyreme_cluster import port
from polyreme_cluster.port import ListPage, ServerError, pages_of


class Pages:
    """A cluster whose list has so many pages, with an object each."""

    def __init__(self, count: int) -> None:
        self._count = count

    async def list(self, kind: str, *, continue_: str | None, **_: Any) -> ListPage:
        number = int(continue_ or 0)
        more = str(number + 1) if number + 1 < self._count else None
        return ListPage(items=[{"kind": kind, "number": number}], resource_version="7", continue_=more)


async def read(cluster: Any) -> list[int]:
    return [item["number"] async for page in pages_of(cluster, "Node") for item in page.items]


def test_all_pages_of_a_list_are_read() -> None:
    assert asyncio.run(read(Pages(3))) == [0, 1, 2]
    assert asyncio.run(read(Pages(1))) == [0]


def test_a_list_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "PAGES_MAX", 3)
    assert asyncio.run(read(Pages(3))) == [0, 1, 2]
    with pytest.raises(ServerError, match="list of Node does not end: 3 pages"):
        asyncio.run(read(Pages(4)))
