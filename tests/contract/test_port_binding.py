"""ClusterPort: pods are given to nodes once, by the UID that was seen; roles and cluster-wide kinds are served."""

import asyncio
from pathlib import Path

import pytest

from polyreme_cluster.port import ConflictError, InvalidObjectError, Manifest, NotFoundError, WatchEventType
from tests.contract.adapters import ADAPTERS, Harness, Opener, run
from tests.contract.manifests import config, owned_by, pod, ref, uid, version
from tests.contract.test_port_objects import until_gone

pytestmark = pytest.mark.parametrize("opener", ADAPTERS.values(), ids=ADAPTERS.keys())


def unbound(name: str = "pod") -> Manifest:
    """A pod that no scheduler of the cluster looks at."""
    manifest = pod(name, node=None)
    return {**manifest, "spec": {**manifest["spec"], "schedulerName": "polyreme"}}


def test_a_bound_pod_has_its_node_and_says_that_it_is_scheduled(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(unbound())
        await harness.cluster.bind(ref(created), uid=uid(created), node="node-7")
        bound = await harness.cluster.get(ref(created))
        assert bound["spec"]["nodeName"] == "node-7"
        assert {c["type"]: c["status"] for c in bound["status"]["conditions"]} == {"PodScheduled": "True"}
        assert int(version(bound)) > int(version(created))
        assert bound["metadata"]["generation"] == created["metadata"]["generation"]
        assert bound["status"]["phase"] == "Pending"

    run(opener, tmp_path, story)


def test_a_watch_shows_the_binding(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(unbound())
        events = harness.cluster.watch("Pod", resource_version=version(created))
        await harness.cluster.bind(ref(created), uid=uid(created), node="node-7")
        event = await anext(events)
        assert (event.type, event.object["spec"]["nodeName"]) == (WatchEventType.MODIFIED, "node-7")

    run(opener, tmp_path, story)


def test_a_pod_is_bound_once_and_stays_where_it_is(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(unbound())
        await harness.cluster.bind(ref(created), uid=uid(created), node="node-1")
        first = await harness.cluster.get(ref(created))
        for node in ("node-1", "node-2"):
            with pytest.raises(ConflictError):
                await harness.cluster.bind(ref(created), uid=uid(created), node=node)
        assert await harness.cluster.get(ref(created)) == first

    run(opener, tmp_path, story)


def test_of_many_binders_one_wins(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(unbound())
        nodes = [f"node-{at}" for at in range(8)]
        calls = [harness.cluster.bind(ref(created), uid=uid(created), node=node) for node in nodes]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(result, ConflictError) for result in results) == 7
        winner = nodes[results.index(None)]
        assert (await harness.cluster.get(ref(created)))["spec"]["nodeName"] == winner

    run(opener, tmp_path, story)


def test_a_pod_that_took_the_name_of_another_is_not_bound_for_it(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        first = await harness.cluster.create(unbound())
        await harness.cluster.delete(ref(first), uid=uid(first))
        with pytest.raises(NotFoundError):
            await harness.cluster.bind(ref(first), uid=uid(first), node="node-1")
        second = await harness.cluster.create(unbound())
        with pytest.raises(ConflictError):
            await harness.cluster.bind(ref(second), uid=uid(first), node="node-1")
        assert await harness.cluster.get(ref(second)) == second

    run(opener, tmp_path, story)


def test_neither_a_gated_pod_nor_one_that_is_being_deleted_is_bound(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        gated = unbound("gated")
        gated["spec"]["schedulingGates"] = [{"name": "polyreme.dev/gate"}]
        kept = unbound("kept")
        kept["metadata"]["finalizers"] = ["polyreme.dev/test"]
        for manifest in (gated, kept):
            created = await harness.cluster.create(manifest)
            if manifest is kept:
                await harness.cluster.delete(ref(created), uid=uid(created))
            with pytest.raises(ConflictError):
                await harness.cluster.bind(ref(created), uid=uid(created), node="node-1")
            assert "nodeName" not in (await harness.cluster.get(ref(created)))["spec"]
        await harness.cluster.patch(ref(kept), {"metadata": {"finalizers": None}})

    run(opener, tmp_path, story)


def test_a_binding_names_a_pod_and_a_node(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(unbound())
        with pytest.raises(InvalidObjectError):
            await harness.cluster.bind(ref(created), uid=uid(created), node="")
        other = await harness.cluster.create(config())
        with pytest.raises(InvalidObjectError):
            await harness.cluster.bind(ref(other), uid=uid(other), node="node-1")

    run(opener, tmp_path, story)


def test_roles_are_written_and_go_with_their_owner(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        owner = await harness.cluster.create(config("owner"))
        metadata = {"name": "launcher", "namespace": "default", **owned_by(owner)}
        rules = [{"apiGroups": ["polyreme.dev"], "resources": ["trainingjobs"], "verbs": ["get"]}]
        group = "rbac.authorization.k8s.io"
        role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": rules}
        binding = {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "launcher"},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": "default"}],
        }
        created = [await harness.cluster.create(manifest) for manifest in (role, binding)]
        assert (await harness.cluster.get(ref(created[0])))["rules"] == rules
        assert (await harness.cluster.list("RoleBinding", namespace="default")).items == [created[1]]
        await harness.cluster.delete(ref(owner), uid=uid(owner))
        await until_gone(harness, *created)

    run(opener, tmp_path, story)


def test_an_eviction_deletes_the_pod_of_that_uid_and_no_other_kind(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created, other = await harness.cluster.create(unbound()), await harness.cluster.create(config())
        with pytest.raises(ConflictError):
            await harness.cluster.evict(ref(created), uid="00000000-0000-0000-0000-000000000000")
        await harness.cluster.evict(ref(created), uid=uid(created))
        await until_gone(harness, created)
        with pytest.raises(NotFoundError):
            await harness.cluster.evict(ref(created), uid=uid(created))
        with pytest.raises(InvalidObjectError):
            await harness.cluster.evict(ref(other), uid=uid(other))

    run(opener, tmp_path, story)
