"""ClusterPort: lists in pages, watches that resume, and history that is gone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polyreme_cluster.port import GoneError, ListPage, Manifest, WatchEvent, WatchEventType
from tests.contract.adapters import ADAPTERS, Harness, Opener, run
from tests.contract.manifests import config, lease, pod, ref, uid, version

pytestmark = pytest.mark.parametrize("opener", ADAPTERS.values(), ids=ADAPTERS.keys())


def names(page: ListPage) -> list[str]:
    return [item["metadata"]["name"] for item in page.items]


async def take(events: AsyncIterator[WatchEvent], count: int) -> list[tuple[str, str]]:
    """Take so many events that are no bookmarks, as (type, name)."""
    taken: list[tuple[str, str]] = []
    while len(taken) < count:
        event = await anext(events)
        if event.type is not WatchEventType.BOOKMARK:
            taken.append((event.type.value, event.object["metadata"]["name"]))
    return taken


def test_a_list_is_ordered_and_by_kind_and_namespace(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        for name in ("c", "a", "b"):
            await harness.cluster.create(lease(name))
        await harness.cluster.create(config("other-kind"))
        assert names(await harness.cluster.list("Lease", namespace="default")) == ["a", "b", "c"]
        assert names(await harness.cluster.list("Lease", namespace="elsewhere")) == []

    run(opener, tmp_path, story)


def test_all_pages_show_the_state_of_the_first(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        leases = [await harness.cluster.create(lease(f"l{i}")) for i in range(5)]
        first = await harness.cluster.list("Lease", limit=2)
        assert names(first) == ["l0", "l1"]
        await harness.cluster.create(lease("l9"))
        await harness.cluster.delete(ref(leases[3]), uid=uid(leases[3]))
        second = await harness.cluster.list("Lease", limit=2, continue_=first.continue_)
        third = await harness.cluster.list("Lease", limit=2, continue_=second.continue_)
        assert names(second) + names(third) == ["l2", "l3", "l4"]
        assert third.continue_ is None
        assert first.resource_version == second.resource_version == third.resource_version
        events = harness.cluster.watch("Lease", resource_version=third.resource_version)
        assert await take(events, 2) == [("ADDED", "l9"), ("DELETED", "l3")]

    run(opener, tmp_path, story)


def test_an_expired_continue_token_is_gone(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        for i in range(3):
            await harness.cluster.create(lease(f"l{i}"))
        first = await harness.cluster.list("Lease", limit=1)
        await harness.forget_history()
        with pytest.raises(GoneError):
            await harness.cluster.list("Lease", limit=1, continue_=first.continue_)

    run(opener, tmp_path, story)


def test_a_watch_shows_every_change_behind_a_list_in_order(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        page = await harness.cluster.list("ConfigMap")
        events = harness.cluster.watch("ConfigMap", resource_version=page.resource_version)
        created = await harness.cluster.create(config("x"))
        patched = await harness.cluster.patch(ref(created), {"data": {"a": "1"}})
        await harness.cluster.create(lease("unseen"))
        await harness.cluster.delete(ref(created), uid=uid(created))
        seen = [await anext(events) for _ in range(3)]
        assert [event.type for event in seen] == ["ADDED", "MODIFIED", "DELETED"]
        assert seen[0].object == created
        assert seen[1].object == patched
        versions = [int(event.resource_version) for event in seen]
        assert versions == sorted(set(versions))
        assert seen[2].object["data"] == {"a": "1"}

    run(opener, tmp_path, story)


def test_a_watch_resumes_after_a_disconnect_without_loss_or_repeat(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        page = await harness.cluster.list("Lease")
        first = harness.cluster.watch("Lease", resource_version=page.resource_version)
        await harness.cluster.create(lease("a"))
        event = await anext(first)
        await close(first)
        await harness.cluster.create(lease("b"))
        await harness.cluster.create(lease("c"))
        second = harness.cluster.watch("Lease", resource_version=event.resource_version)
        assert await take(second, 2) == [("ADDED", "b"), ("ADDED", "c")]

    run(opener, tmp_path, story)


def test_a_watch_waits_for_what_has_not_happened_yet(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        page = await harness.cluster.list("Lease")
        events = harness.cluster.watch("Lease", resource_version=page.resource_version)
        waiting = asyncio.ensure_future(take(events, 1))
        await asyncio.sleep(0)
        assert not waiting.done()
        await harness.cluster.create(lease("late"))
        assert await waiting == [("ADDED", "late")]

    run(opener, tmp_path, story)


def test_a_watch_from_forgotten_history_is_gone_and_a_new_list_mends_it(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        before = await harness.cluster.list("Lease")
        created: list[Manifest] = [await harness.cluster.create(lease(f"l{i}")) for i in range(3)]
        await harness.forget_history()
        with pytest.raises(GoneError):
            await anext(harness.cluster.watch("Lease", resource_version=before.resource_version))
        page = await harness.cluster.list("Lease")
        assert list(page.items) == created
        events = harness.cluster.watch("Lease", resource_version=page.resource_version)
        await harness.cluster.create(lease("after"))
        assert await take(events, 1) == [("ADDED", "after")]

    run(opener, tmp_path, story)


def test_two_watches_see_the_same_and_own_what_they_see(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        page = await harness.cluster.list("ConfigMap")
        one, two = (harness.cluster.watch("ConfigMap", resource_version=page.resource_version) for _ in range(2))
        created = await harness.cluster.create(config(data={"a": "1"}))
        first = (await anext(one)).object
        first["data"]["a"] = "changed by a watcher"
        assert (await anext(two)).object == created

    run(opener, tmp_path, story)


def test_a_watch_shows_a_pod_being_deleted_before_it_goes(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(pod())
        events = harness.cluster.watch("Pod", resource_version=version(created))
        await harness.cluster.delete(ref(created), uid=uid(created))
        marked = await anext(events)
        assert marked.type is WatchEventType.MODIFIED
        assert marked.object["metadata"]["deletionTimestamp"]
        await harness.cluster.delete(ref(created), uid=uid(created), grace_period_s=0)
        assert await take(events, 2) == [("MODIFIED", "pod"), ("DELETED", "pod")]

    run(opener, tmp_path, story)


async def close(events: AsyncIterator[WatchEvent]) -> None:
    """Break a watch."""
    if hasattr(events, "aclose"):
        with contextlib.suppress(Exception):
            await events.aclose()
