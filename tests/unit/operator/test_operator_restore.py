"""A cluster that was restored from a backup has lower resource versions: its states count, not those from before."""

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

from polyreme_api import labels
from polyreme_cluster.forwarding_port import ForwardingPort
from polyreme_cluster.port import ClusterPort, GoneError, ListPage, Manifest, ObjectRef, WatchEvent
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.kopf_feed import Feed
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, job_manifest
from tests.unit.operator.operator_stage import Stage

JOB = ObjectRef(kind=labels.KIND_JOB, namespace="default", name="j")
AHEAD = 1_000_000


class Restored(ForwardingPort):
    """A cluster whose resource versions are ahead of what they are after its restore."""

    def __init__(self, cluster: ClusterPort) -> None:
        super().__init__(cluster)
        self._ahead = AHEAD
        self._restored = asyncio.Event()

    def restore(self) -> None:
        self._ahead = 0
        self._restored.set()

    def _told(self, manifest: Manifest) -> Manifest:
        shown = copy.deepcopy(manifest)
        shown["metadata"]["resourceVersion"] = str(int(shown["metadata"]["resourceVersion"]) + self._ahead)
        return shown

    def _asked(self, version: str | None) -> str | None:
        return None if version is None else str(int(version) - self._ahead)

    async def list(self, kind: str, **options: Any) -> ListPage:
        page = await super().list(kind, **options)
        version = str(int(page.resource_version) + self._ahead)
        items = [self._told(item) for item in page.items]
        return ListPage(items=items, resource_version=version, continue_=page.continue_)

    async def watch(
        self, kind: str, *, resource_version: str, namespace: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        if int(resource_version) > AHEAD and not self._ahead:
            raise GoneError("Too large resource version")
        version = self._asked(resource_version) or ""
        events = super().watch(kind, resource_version=version, namespace=namespace)
        ended = asyncio.ensure_future(self._restored.wait())
        ends = {ended} if self._ahead else set()
        step: asyncio.Future[WatchEvent] | None = None
        try:
            while True:
                step = asyncio.ensure_future(anext(events))
                await asyncio.wait({step, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    return
                event = step.result()
                yield WatchEvent(type=event.type, object=self._told(event.object))
        finally:
            left = [future for future in (step, ended) if future is not None]
            for future in left:
                future.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def get(self, ref: ObjectRef) -> Manifest:
        return self._told(await super().get(ref))

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        return self._told(await super().create(manifest, dry_run=dry_run))

    async def patch(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Manifest:
        version = self._asked(resource_version)
        return self._told(await super().patch(ref, merge_patch, resource_version=version, subresource=subresource))

    async def delete(
        self, ref: ObjectRef, *, uid: str, resource_version: str | None = None, grace_period_s: int | None = None
    ) -> None:
        version = self._asked(resource_version)
        await super().delete(ref, uid=uid, resource_version=version, grace_period_s=grace_period_s)


def test_what_happens_after_a_restore_is_noticed() -> None:
    stage = Stage()
    store = stage.cluster
    cluster = stage.cluster = Restored(store)
    stage.add_nodes(1)

    async def story() -> None:
        uid = stage.add_job("holds")
        await asyncio.sleep(2.0)
        await stage.report("holds", uid, attempt=1, phase="Training", step=5)
        stage.add_job("waits")
        await asyncio.sleep(2.0)
        assert stage.condition("waits", "Queued")["status"] == "True"
        cluster.restore()
        await asyncio.sleep(2.0)
        await store.patch(
            ObjectRef(kind=labels.KIND_JOB, namespace="default", name="holds"), {"spec": {"suspend": True}}
        )
        await asyncio.sleep(1.0)
        await stage.report("holds", uid, attempt=1, phase="Training", step=9, outcome="Stopped")
        await asyncio.sleep(60.0)
        assert stage.condition("holds", "Suspended")["status"] == "True"

    stage.run(story)


def known(version: int) -> ClusterCache:
    model = ClusterCache()
    model.put(job_manifest(version=version, generation=3, status=admitted(job()).status), now_s=NOW_S)
    return model


def suspended(model: ClusterCache) -> bool:
    view = model.job("uid-j")
    assert view is not None
    assert view.spec is not None
    return view.spec.suspend


def test_a_list_that_shows_an_older_state_than_it_must_tells_of_a_restore() -> None:
    model = known(100)
    changes = model.put(job_manifest(version=80, generation=3, suspend=True), now_s=NOW_S, listed_at=120)
    assert changes.jobs == {"uid-j"}
    assert suspended(model)
    # Also what comes next, at versions that once belonged to other states.
    model.put(job_manifest(version=100, generation=4), now_s=NOW_S)
    assert not suspended(model)


def test_a_list_that_was_made_before_the_newest_state_tells_of_none() -> None:
    model = known(100)
    assert not model.put(job_manifest(version=80, generation=3, suspend=True), now_s=NOW_S, listed_at=90).jobs
    assert not suspended(model)


def test_an_event_with_a_lower_version_is_late() -> None:
    model = known(100)
    assert not model.put(job_manifest(version=80, generation=3, suspend=True), now_s=NOW_S).jobs
    assert not suspended(model)


def test_an_object_that_the_backup_lacks_is_gone() -> None:
    model = known(100)
    model.void_versions("listed at 90")
    assert model.forget_unlisted(labels.KIND_JOB, set(), version=90).jobs == {"uid-j"}
    assert model.job("uid-j") is None


async def test_events_from_before_a_restore_are_dropped() -> None:
    def event(version: int) -> Manifest:
        return {"kind": labels.KIND_JOB, "metadata": {"name": "j", "uid": "uid-j", "resourceVersion": str(version)}}

    feed = Feed(labels.KIND_JOB, events_max=2)
    for version in (100, 101, 102):
        feed.put("MODIFIED", event(version))
    assert feed.newest == 102
    feed.void()
    feed.put("MODIFIED", event(60))
    until: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    found = await anext(feed.follow(50, until=until))
    assert found.resource_version == "60"
