"""What kopf tells becomes a watch: nothing twice, nothing lost without a word, and a bounded number kept."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from polyreme_cluster.port import GoneError, Manifest
from polyreme_operator.kopf_feed import Feed

FOREVER_S = 3600.0


def job(name: str, version: int) -> Manifest:
    return {"kind": "TrainingJob", "metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}}


async def take(feed: Feed, version: int, count: int) -> list[tuple[str, str, int]]:
    """Follow from a version and take so many events."""
    taken: list[tuple[str, str, int]] = []
    until = asyncio.get_running_loop().create_future()
    async for event in feed.follow(version, until=until):
        taken.append((event.type.value, event.object["metadata"]["name"], int(event.resource_version)))
        if len(taken) == count:
            break
    return taken


def run(story: Callable[[Feed], Awaitable[Any]], *, events_max: int = 100) -> None:
    async def told() -> None:
        async with asyncio.timeout(60):
            await story(Feed("TrainingJob", events_max=events_max))

    asyncio.run(told())


def test_what_came_before_the_watch_and_is_newer_than_the_list_is_not_lost() -> None:
    async def story(feed: Feed) -> None:
        feed.put(None, job("a", 3))
        feed.put("ADDED", job("b", 7))
        feed.put("DELETED", job("a", 9))
        assert await take(feed, 5, 2) == [("ADDED", "b", 7), ("DELETED", "a", 9)]

    run(story)


def test_two_watches_see_what_comes_in_the_order_in_which_it_came() -> None:
    async def story(feed: Feed) -> None:
        watches = [asyncio.ensure_future(take(feed, 0, 3)) for _ in range(2)]
        for number in range(1, 4):
            await asyncio.sleep(0)
            feed.put("MODIFIED", job("a", number))
        expected = [("MODIFIED", "a", number) for number in range(1, 4)]
        assert await asyncio.gather(*watches) == [expected, expected]

    run(story)


def test_a_watch_that_is_too_slow_must_list() -> None:
    async def story(feed: Feed) -> None:
        follow = feed.follow(0, until=asyncio.get_running_loop().create_future())
        feed.put("ADDED", job("a", 1))
        await anext(follow)
        for number in range(2, 20):
            feed.put("MODIFIED", job("a", number))
        with pytest.raises(GoneError, match="dropped unread"):
            await anext(follow)
        with pytest.raises(GoneError, match="were dropped"):
            await take(feed, 5, 1)
        assert await take(feed, 18, 1) == [("MODIFIED", "a", 19)]

    run(story, events_max=4)


def test_a_second_list_of_kopf_ends_a_watch_once_after_its_events() -> None:
    async def story(feed: Feed) -> None:
        until = asyncio.get_running_loop().create_future()
        for name in ("a", "b", "c"):
            feed.put(None, job(name, 3))
        feed.put("ADDED", job("d", 4))
        follow = feed.follow(4, until=until)
        first = asyncio.ensure_future(anext(follow))
        await asyncio.sleep(0)
        feed.put(None, job("a", 3))
        feed.put(None, job("d", 6))
        assert (await first).object["metadata"]["name"] == "d"
        with pytest.raises(GoneError, match="kopf listed again"):
            await anext(follow)
        again = feed.follow(6, until=until)
        following = asyncio.ensure_future(anext(again))
        await asyncio.sleep(0)
        feed.put(None, job("c", 3))
        feed.put("ADDED", job("e", 7))
        assert (await following).object["metadata"]["name"] == "e"
        waiting = asyncio.ensure_future(anext(again))
        await asyncio.sleep(0)
        assert not waiting.done()
        feed.put(None, job("e", 7))
        assert (await waiting).object["metadata"]["name"] == "e"
        with pytest.raises(GoneError, match="kopf listed again"):
            await anext(again)

    run(story)


def test_an_object_that_was_deleted_and_comes_again_is_no_second_list() -> None:
    async def story(feed: Feed) -> None:
        feed.put(None, job("a", 3))
        feed.put("DELETED", job("a", 4))
        feed.put("ADDED", job("a", 5))
        feed.put("MODIFIED", job("a", 6))
        assert [version for _, _, version in await take(feed, 3, 3)] == [4, 5, 6]
        waiting = asyncio.ensure_future(take(feed, 6, 1))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()

    run(story)


def test_time_ends_a_quiet_watch() -> None:
    async def story(feed: Feed) -> None:
        until = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(anext(feed.follow(0, until=until)))
        await asyncio.sleep(0)
        until.set_result(None)
        with pytest.raises(GoneError, match="a periodic list is due"):
            await waiting

    run(story)
