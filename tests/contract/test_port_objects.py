"""ClusterPort: create, get, patch by compare-and-swap, delete, ownership."""

import asyncio
from pathlib import Path

import pytest

from polyreme_cluster.port import (
    AlreadyExistsError,
    ConflictError,
    InvalidObjectError,
    Manifest,
    NotFoundError,
    ObjectRef,
)
from tests.contract.adapters import ADAPTERS, Harness, Opener, run
from tests.contract.manifests import config, job, lease, owned_by, pod, ref, service, uid, version

pytestmark = pytest.mark.parametrize("opener", ADAPTERS.values(), ids=ADAPTERS.keys())


def test_a_created_object_has_what_the_server_sets(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(lease())
        metadata = created["metadata"]
        assert uid(created)
        assert version(created)
        assert metadata["creationTimestamp"].endswith("Z")
        assert await harness.cluster.get(ref(created)) == created

    run(opener, tmp_path, story)


def test_a_caller_owns_what_it_hands_in_and_what_it_is_handed(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        labels = {"a": "1"}
        given = config(labels=labels, annotations=labels)
        created = await harness.cluster.create(given)
        labels["a"] = created["metadata"]["labels"]["a"] = "2"
        assert created["metadata"]["annotations"]["a"] == "1"
        assert (await harness.cluster.get(ref(created)))["metadata"]["labels"] == {"a": "1"}

    run(opener, tmp_path, story)


def test_a_name_is_taken_once(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(config(data={"who": "first"}))
        with pytest.raises(AlreadyExistsError):
            await harness.cluster.create(config(data={"who": "second"}))
        assert (await harness.cluster.get(ref(created)))["data"] == {"who": "first"}

    run(opener, tmp_path, story)


def test_a_dry_run_checks_and_stores_nothing(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        said = await harness.cluster.create(config(data={"who": "first"}), dry_run=True)
        assert uid(said)
        assert "resourceVersion" not in said["metadata"]
        with pytest.raises(NotFoundError):
            await harness.cluster.get(ref(said))
        await harness.cluster.create(config())
        with pytest.raises(AlreadyExistsError):
            await harness.cluster.create(config(), dry_run=True)
        with pytest.raises(InvalidObjectError):
            await harness.cluster.create(config("UPPER"), dry_run=True)

    run(opener, tmp_path, story)


@pytest.mark.parametrize("name", ["", "UPPER", "-x", "a" * 254, "a_b"])
def test_a_bad_name_is_refused(opener: Opener, tmp_path: Path, name: str) -> None:
    async def story(harness: Harness) -> None:
        with pytest.raises(InvalidObjectError):
            await harness.cluster.create(config(name))

    run(opener, tmp_path, story)


def test_what_does_not_exist_is_not_found(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        missing = ObjectRef(kind="Lease", namespace="default", name="missing")
        with pytest.raises(NotFoundError):
            await harness.cluster.get(missing)
        with pytest.raises(NotFoundError):
            await harness.cluster.patch(missing, {"spec": {}})
        with pytest.raises(NotFoundError):
            await harness.cluster.delete(missing, uid="none")

    run(opener, tmp_path, story)


def test_a_merge_patch_sets_merges_and_removes(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(config(data={"keep": "1", "change": "1", "drop": "1"}))
        patched = await harness.cluster.patch(ref(created), {"data": {"change": "2", "drop": None, "new": "3"}})
        assert patched["data"] == {"keep": "1", "change": "2", "new": "3"}
        assert await harness.cluster.get(ref(created)) == patched

    run(opener, tmp_path, story)


def test_a_patch_at_an_old_version_changes_nothing(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(config())
        first = await harness.cluster.patch(ref(created), {"data": {"a": "1"}}, resource_version=version(created))
        with pytest.raises(ConflictError):
            await harness.cluster.patch(ref(created), {"data": {"a": "2"}}, resource_version=version(created))
        assert await harness.cluster.get(ref(created)) == first

    run(opener, tmp_path, story)


def test_of_many_writers_at_one_version_one_wins(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(config())
        writes = [
            harness.cluster.patch(ref(created), {"data": {"winner": str(i)}}, resource_version=version(created))
            for i in range(8)
        ]
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert sum(isinstance(result, dict) for result in results) == 1
        assert sum(isinstance(result, ConflictError) for result in results) == 7

    run(opener, tmp_path, story)


def test_a_patch_that_changes_nothing_keeps_the_version(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(config(data={"a": "1"}))
        assert version(await harness.cluster.patch(ref(created), {"data": {"a": "1"}})) == version(created)

    run(opener, tmp_path, story)


def test_a_patch_cannot_change_an_objects_identity(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(lease())
        with pytest.raises(InvalidObjectError):
            await harness.cluster.patch(ref(created), {"metadata": {"uid": "another"}})
        assert uid(await harness.cluster.get(ref(created))) == uid(created)

    run(opener, tmp_path, story)


def test_status_and_spec_are_written_apart(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(job())
        wide = {"status": {"readyReplicas": 1}, "spec": {"suspend": True}, "metadata": {"labels": {"sneaked": "in"}}}
        written = await harness.cluster.patch(ref(created), wide, subresource="status")
        assert written["status"]["readyReplicas"] == 1
        assert written["spec"] == created["spec"]
        assert "sneaked" not in (written["metadata"].get("labels") or {})
        own = {"status": {"readyReplicas": 9}, "metadata": {"labels": {"by": "object"}}}
        after = await harness.cluster.patch(ref(created), own)
        assert after["status"]["readyReplicas"] == 1
        assert after["metadata"]["labels"]["by"] == "object"

    run(opener, tmp_path, story)


def test_the_status_of_a_pod_takes_its_labels_along_but_not_its_spec(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(pod())
        wide = {
            "status": {"phase": "Running", "message": "by status"},
            "spec": {"nodeName": "another"},
            "metadata": {"labels": {"came": "along"}},
        }
        written = await harness.cluster.patch(ref(created), wide, subresource="status")
        assert (written["status"]["phase"], written["status"]["message"]) == ("Running", "by status")
        assert written["spec"]["nodeName"] == "node-1"
        assert written["metadata"]["labels"] == {"came": "along"}
        after = await harness.cluster.patch(ref(created), {"status": {"message": "by object"}})
        assert after["status"]["message"] == "by status"

    run(opener, tmp_path, story)


def test_generation_counts_changes_of_the_specification(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(job())
        seen = [created]
        for patch, subresource in (
            ({"metadata": {"labels": {"a": "b"}}}, None),
            ({"status": {"readyReplicas": 1}}, "status"),
            ({"spec": {"suspend": True}}, None),
        ):
            seen.append(await harness.cluster.patch(ref(created), patch, subresource=subresource))
        assert [manifest["metadata"]["generation"] for manifest in seen] == [1, 1, 1, 2]

    run(opener, tmp_path, story)


def test_a_new_object_comes_without_a_version(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        with pytest.raises(InvalidObjectError):
            await harness.cluster.create(lease(resourceVersion="5"))

    run(opener, tmp_path, story)


@pytest.mark.parametrize(
    "large",
    [{"metadata": {"annotations": {"a": "x" * 262_144}}}, {"data": {"a": "x" * 1_048_577}}],
    ids=["annotations", "data"],
)
def test_what_is_too_large_is_refused(opener: Opener, tmp_path: Path, large: Manifest) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(config())
        with pytest.raises(InvalidObjectError):
            await harness.cluster.patch(ref(created), large)
        other = config("other")
        with pytest.raises(InvalidObjectError):
            await harness.cluster.create({**other, **large, "metadata": other["metadata"] | large.get("metadata", {})})

    run(opener, tmp_path, story)


def test_a_kind_without_status_has_no_status_subresource(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(config())
        with pytest.raises((InvalidObjectError, NotFoundError)):
            await harness.cluster.patch(ref(created), {"status": {}}, subresource="status")

    run(opener, tmp_path, story)


def test_delete_needs_the_right_uid_and_version(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(lease())
        with pytest.raises(ConflictError):
            await harness.cluster.delete(ref(created), uid="another")
        with pytest.raises(ConflictError):
            await harness.cluster.delete(ref(created), uid=uid(created), resource_version="1234567")
        await harness.cluster.delete(ref(created), uid=uid(created), resource_version=version(created))
        with pytest.raises(NotFoundError):
            await harness.cluster.get(ref(created))

    run(opener, tmp_path, story)


def test_a_name_that_is_used_again_gets_another_uid(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        first = await harness.cluster.create(lease())
        await harness.cluster.delete(ref(first), uid=uid(first))
        second = await harness.cluster.create(lease())
        assert uid(second) != uid(first)
        assert int(version(second)) > int(version(first))
        with pytest.raises(ConflictError):
            await harness.cluster.delete(ref(second), uid=uid(first))

    run(opener, tmp_path, story)


def test_a_bound_pod_waits_for_its_kubelet_and_keeps_its_name(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(pod(grace_s=20))
        await harness.cluster.patch(ref(created), {"status": {"phase": "Running"}}, subresource="status")
        await harness.cluster.delete(ref(created), uid=uid(created))
        marked = await harness.cluster.get(ref(created))
        assert marked["metadata"]["deletionTimestamp"]
        assert marked["metadata"]["deletionGracePeriodSeconds"] == 20
        with pytest.raises(AlreadyExistsError):
            await harness.cluster.create(pod())
        await harness.cluster.delete(ref(created), uid=uid(created), grace_period_s=0)
        with pytest.raises(NotFoundError):
            await harness.cluster.get(ref(created))

    run(opener, tmp_path, story)


def test_a_second_delete_may_shorten_the_grace_but_not_lengthen_it(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(pod())
        graces = []
        for grace_s in (20, 5, 60):
            await harness.cluster.delete(ref(created), uid=uid(created), grace_period_s=grace_s)
            graces.append((await harness.cluster.get(ref(created)))["metadata"]["deletionGracePeriodSeconds"])
        assert graces == [20, 5, 5]

    run(opener, tmp_path, story)


def test_a_pod_that_ends_while_it_is_deleted_stays_until_its_kubelet_says_so(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(pod())
        await harness.cluster.delete(ref(created), uid=uid(created))
        await harness.cluster.patch(ref(created), {"status": {"phase": "Failed"}}, subresource="status")
        await harness.cluster.delete(ref(created), uid=uid(created))
        assert (await harness.cluster.get(ref(created)))["status"]["phase"] == "Failed"
        await harness.cluster.delete(ref(created), uid=uid(created), grace_period_s=0)
        with pytest.raises(NotFoundError):
            await harness.cluster.get(ref(created))

    run(opener, tmp_path, story)


def test_a_pod_that_no_node_has_goes_at_once(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(pod(node=None))
        await harness.cluster.delete(ref(created), uid=uid(created))
        with pytest.raises(NotFoundError):
            await harness.cluster.get(ref(created))

    run(opener, tmp_path, story)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_an_ended_pod_goes_at_once(opener: Opener, tmp_path: Path, phase: str) -> None:
    async def story(harness: Harness) -> None:
        created = await harness.cluster.create(pod())
        await harness.cluster.patch(ref(created), {"status": {"phase": phase}}, subresource="status")
        await harness.cluster.delete(ref(created), uid=uid(created))
        with pytest.raises(NotFoundError):
            await harness.cluster.get(ref(created))

    run(opener, tmp_path, story)


def test_what_an_object_owns_goes_behind_it(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        owner = await harness.cluster.create(config("owner"))
        child = await harness.cluster.create(service(**owned_by(owner)))
        grandchild = await harness.cluster.create(lease(**owned_by(child)))
        stranger = await harness.cluster.create(lease("stranger"))
        await harness.cluster.delete(ref(owner), uid=uid(owner))
        await until_gone(harness, child, grandchild)
        assert await harness.cluster.get(ref(stranger)) == stranger

    run(opener, tmp_path, story)


def test_what_is_created_for_an_owner_that_is_gone_goes_too(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        owner = await harness.cluster.create(config("owner"))
        await harness.cluster.delete(ref(owner), uid=uid(owner))
        await until_gone(harness, await harness.cluster.create(lease(**owned_by(owner))))

    run(opener, tmp_path, story)


def test_an_object_with_another_live_owner_stays(opener: Opener, tmp_path: Path) -> None:
    async def story(harness: Harness) -> None:
        owners = [await harness.cluster.create(config(name)) for name in ("one", "two")]
        references = [reference for owner in owners for reference in owned_by(owner)["ownerReferences"]]
        shared = await harness.cluster.create(lease(ownerReferences=references))
        await harness.cluster.delete(ref(owners[0]), uid=uid(owners[0]))
        await asyncio.sleep(0)
        assert uid(await harness.cluster.get(ref(shared))) == uid(shared)
        await harness.cluster.delete(ref(owners[1]), uid=uid(owners[1]))
        await until_gone(harness, shared)

    run(opener, tmp_path, story)


async def until_gone(harness: Harness, *manifests: Manifest) -> None:
    """Wait for the garbage collector."""
    for manifest in manifests:
        while True:
            try:
                await harness.cluster.get(ref(manifest))
            except NotFoundError:
                break
            await asyncio.sleep(0.01)
