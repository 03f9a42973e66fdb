"""A process that does not lead any more reads, and writes nothing."""

from collections.abc import Awaitable

import pytest

from polyreme_cluster.leader_port import LeaderPort
from polyreme_cluster.port import NotLeadingError, ObjectRef
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store

POD = ObjectRef(kind="Pod", namespace="team", name="p")
MANIFEST = {"apiVersion": "v1", "kind": "Pod", "metadata": {"namespace": "team", "name": "p"}, "spec": {}}


async def test_every_write_is_refused_before_it_is_sent_and_reads_go_on() -> None:
    store = Store(new_uid=iter(map(str, range(100))).__next__, now_s=lambda: 0.0)
    leading = [True]
    port = LeaderPort(EmbeddedCluster(store), lambda: leading[0])

    def writes(uid: str) -> list[Awaitable[object]]:
        return [
            port.create({**MANIFEST, "metadata": {"namespace": "team", "name": "other"}}),
            port.patch(POD, {"metadata": {"labels": {"a": "b"}}}),
            port.bind(POD, uid=uid, node="n"),
            port.evict(POD, uid=uid),
            port.delete(POD, uid=uid),
        ]

    before = await port.create(MANIFEST)
    leading[0] = False
    for write in writes(before["metadata"]["uid"]):
        with pytest.raises(NotLeadingError, match="no longer leads"):
            await write
    assert await port.get(POD) == before
    assert list((await port.list("Pod")).items) == [before]
