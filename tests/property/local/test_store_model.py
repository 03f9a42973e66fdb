"""The store against a model of a few lines: random writes, then what lists, gets and watches say."""

import asyncio
import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from polyreme_cluster.port import AlreadyExistsError, ConflictError, GoneError, Manifest, NotFoundError, ObjectRef
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.record import merge
from polyreme_local.api_server.store import Store
from tests.contract.manifests import config, ref, uid, version

NAMES = st.sampled_from(["a", "b", "c"])
DATA = st.dictionaries(st.sampled_from(["x", "y"]), st.one_of(st.none(), st.sampled_from(["1", "2"])), max_size=2)


class StoreAgainstModel(RuleBasedStateMachine):
    """Writes to both; the watch since the beginning must replay to the store's state."""

    def __init__(self) -> None:
        super().__init__()
        counter = itertools.count(1)
        self.store = Store(new_uid=lambda: f"u{next(counter)}", now_s=lambda: 0.0, history_changes=1000)
        self.model: dict[str, Manifest] = {}
        self.versions: list[int] = [0]

    def reference(self, name: str) -> ObjectRef:
        return ObjectRef(kind="ConfigMap", namespace="default", name=name)

    @rule(name=NAMES, data=DATA)
    def create(self, name: str, data: dict[str, str | None]) -> None:
        given = config(name, data={key: value for key, value in data.items() if value is not None})
        try:
            created = self.store.create(given)
        except AlreadyExistsError:
            assert name in self.model
            return
        assert name not in self.model
        self.took(created)

    @rule(name=NAMES, data=DATA, at=st.sampled_from(["now", "old", "none"]))
    def patch(self, name: str, data: dict[str, str | None], at: str) -> None:
        known = self.model.get(name)
        expected = {"now": version(known) if known else "1", "old": "0", "none": None}[at]
        try:
            result = self.store.patch(self.reference(name), {"data": data}, resource_version=expected)
        except NotFoundError:
            assert known is None
            return
        except ConflictError:
            assert at == "old"
            return
        assert known is not None
        assert at != "old"
        assert result["data"] == merge(known["data"], data)
        if result["data"] == known["data"]:
            assert result == known
        else:
            self.took(result)

    @rule(name=NAMES, right=st.booleans())
    def delete(self, name: str, right: bool) -> None:
        known = self.model.get(name)
        try:
            self.store.delete(self.reference(name), uid=uid(known) if known and right else "wrong")
        except NotFoundError:
            assert known is None
            return
        except ConflictError:
            assert not right
            return
        assert right
        del self.model[name]
        self.versions.append(self.store.version)

    def took(self, manifest: Manifest) -> None:
        assert int(version(manifest)) == self.store.version > self.versions[-1]
        self.model[manifest["metadata"]["name"]] = manifest
        self.versions.append(self.store.version)

    @invariant()
    def the_list_is_the_model(self) -> None:
        page = self.store.list("ConfigMap")
        assert list(page.items) == [self.model[name] for name in sorted(self.model)]
        assert page.resource_version == str(self.versions[-1])

    @invariant()
    def pages_are_the_list(self) -> None:
        paged: list[Any] = []
        token = None
        while True:
            page = self.store.list("ConfigMap", limit=1, continue_=token)
            paged += page.items
            token = page.continue_
            if token is None:
                break
        assert paged == list(self.store.list("ConfigMap").items)

    @invariant()
    def a_watch_replays_to_the_model_and_resumes_anywhere(self) -> None:
        changes = self.store.history("ConfigMap").after(0, limit=10_000)
        replayed: dict[str, Manifest] = {}
        for change in changes:
            if change.type == "DELETED":
                del replayed[change.record.name]
            else:
                replayed[change.record.name] = change.record.copy()
        assert replayed == self.model
        for middle in self.versions[:: max(1, len(self.versions) // 3)]:
            rest = self.store.history("ConfigMap").after(middle, limit=10_000)
            assert [change.version for change in rest] == [seen for seen in self.versions if seen > middle]


StoreAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestStoreAgainstModel = StoreAgainstModel.TestCase


def test_bounded_history_says_gone_exactly_where_something_is_missing() -> None:
    counter = itertools.count(1)
    store = Store(new_uid=lambda: f"u{next(counter)}", now_s=lambda: 0.0, history_changes=5)
    created = store.create(config())
    for i in range(40):
        store.patch(ref(created), {"data": {"n": str(i)}})
        history = store.history("ConfigMap")
        for since in range(store.version + 1):
            try:
                changes = history.after(since, limit=100)
            except GoneError:
                assert since < history.forgotten
                continue
            assert [change.version for change in changes] == list(range(since + 1, store.version + 1))
        assert store.version - history.forgotten >= min(5, store.version)


async def test_a_quiet_watch_gets_bookmarks() -> None:
    counter = itertools.count(1)
    store = Store(new_uid=lambda: f"u{next(counter)}", now_s=lambda: 0.0)
    cluster = EmbeddedCluster(store)
    waiting = asyncio.ensure_future(anext(cluster.watch("Lease", resource_version="0")))
    await asyncio.sleep(0)
    created = store.create(config())
    for i in range(2_000):
        store.patch(ref(created), {"data": {"n": str(i)}})
    bookmark = await asyncio.wait_for(waiting, 5)
    assert bookmark.type == "BOOKMARK"
    assert int(bookmark.resource_version) >= 1_000
