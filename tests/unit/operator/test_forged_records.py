"""What another account writes on a job's Lease changes nothing: only newer records that its leader signed count."""

import asyncio
import base64
import dataclasses
import json
import random
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_api.progress import ProgressRecord
from polyreme_api.signed_progress import KEY_BYTES, ProgressSigner, job_key
from polyreme_cluster.port import Manifest, ObjectRef, WatchEvent, WatchEventType
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.reconcile.observe import REFUSED_S
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.settings import Settings
from polyreme_operator.types.job_keys import JobKeys
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, job_manifest, owner_reference
from tests.unit.operator.operator_stories import NAMESPACE, Story, play
from tests.unit.operator.test_operator_identity import lease_manifest

SUCCESS = {"phase": "Done", "outcome": "Succeeded", "step": 600}
FAILURE = {"exits": [{"rank": 0, "signal": 9}], "step": 600}
FAULTS = {"Unsigned", "Forged", "Replayed"}
STEP_S = 2.0


class Training:
    """A job of one worker that trains, and what is written on its Lease."""

    def __init__(self, story: Story, name: str = "j") -> None:
        self._story, self.name = story, name
        story.node(f"node-of-{name}")
        self.uid = story.job(name, health={"heartbeatTimeoutSeconds": 10})
        self.step = 0

    @property
    def lease(self) -> ObjectRef:
        return ObjectRef(kind="Lease", namespace=NAMESPACE, name=labels.job_object_name(self.name, self.uid))

    async def train(self, renewals: int = 3) -> None:
        """Let the leader report some steps."""
        while not self._story.status(self.name).get("attempt") or not self._story.objects("Pod"):
            await asyncio.sleep(STEP_S)
        for _ in range(renewals):
            self._story.runs()
            self.step += 10
            self._story.reports(self.name, self.uid, step=self.step)
            await asyncio.sleep(STEP_S)

    def said(self) -> dict[str, str]:
        """Return the record that is on the Lease, with its signature."""
        annotations: dict[str, str] = self._story.store.get(self.lease)["metadata"]["annotations"]
        return {name: annotations[name] for name in (labels.ANNOTATION_PROGRESS, labels.ANNOTATION_SIGNATURE)}

    def write(self, annotations: dict[str, str | None]) -> None:
        """Patch the Lease, as every account with the right may."""
        self._story.store.change(self.lease, {"metadata": {"annotations": annotations}})

    def record(self, **fields: Any) -> ProgressRecord:
        """Return a record of the attempt that the job is in."""
        attempt = self._story.status(self.name)["attempt"]
        runs = attempt["replacements"]
        own = {"attempt": attempt["number"], "replacement": runs[0][0] if runs else 0, "released": True, "joined": 1}
        return ProgressRecord.model_validate({**own, **fields})

    def key(self) -> bytes:
        """Return the key that the job's pods have."""
        secret = self._story.store.get(ObjectRef(kind="Secret", namespace=NAMESPACE, name=self.lease.name))
        return base64.b64decode(secret["data"][labels.SECRET_KEY])


def refusals(story: Story) -> dict[str, float]:
    """Return how many records were refused, by fault."""
    (family,) = (each for each in story.metrics.registry.collect() if each.name.endswith("progress_records_refused"))
    return {each.labels["fault"]: each.value for each in family.samples if each.name.endswith("_total")}


def warnings(story: Story) -> list[Manifest]:
    return [event for event in story.objects("Event") if event["reason"] == "RecordRefused"]


def unsigned(job: Training, other: Training, fields: dict[str, Any]) -> dict[str, str | None]:
    del other
    return {labels.ANNOTATION_PROGRESS: job.record(**fields).model_dump_json(by_alias=True), **NO_SIGNATURE}


def under_the_old_signature(job: Training, other: Training, fields: dict[str, Any]) -> dict[str, str | None]:
    """The record that is there, with other values and a larger number."""
    del other
    said = json.loads(job.said()[labels.ANNOTATION_PROGRESS])
    changed = job.record(**fields, sequence=said["sequence"] + 100)
    return {labels.ANNOTATION_PROGRESS: changed.model_dump_json(by_alias=True)}


def with_the_key_of_another_job(job: Training, other: Training, fields: dict[str, Any]) -> dict[str, str | None]:
    record = job.record(**fields).model_copy(update={"sequence": 10_000})
    return {**ProgressSigner(other.key(), job.uid).annotations(record, at_s=1.0)}


def as_another_job_said_it(job: Training, other: Training, fields: dict[str, Any]) -> dict[str, str | None]:
    return {**ProgressSigner(other.key(), other.uid).annotations(job.record(**fields), at_s=1.0)}


def with_a_key_that_anybody_has(job: Training, other: Training, fields: dict[str, Any]) -> dict[str, str | None]:
    del other
    return {**ProgressSigner(job_key(b"", job.uid), job.uid).annotations(job.record(**fields), at_s=1.0)}


def no_record_at_all(job: Training, other: Training, fields: dict[str, Any]) -> dict[str, str | None]:
    del job, other, fields
    return {labels.ANNOTATION_PROGRESS: None, labels.ANNOTATION_SIGNATURE: None}


NO_SIGNATURE: dict[str, str | None] = {labels.ANNOTATION_SIGNATURE: None}
FORGERIES = [
    (unsigned, "Unsigned"),
    (no_record_at_all, "Unsigned"),
    (under_the_old_signature, "Forged"),
    (with_the_key_of_another_job, "Forged"),
    (as_another_job_said_it, "Forged"),
    (with_a_key_that_anybody_has, "Forged"),
]


@pytest.mark.parametrize("fields", [SUCCESS, FAILURE], ids=["success", "failure"])
@pytest.mark.parametrize(("forge", "fault"), FORGERIES, ids=lambda given: getattr(given, "__name__", given))
def test_a_forged_record_changes_nothing_and_is_counted(forge: Any, fault: str, fields: dict[str, Any]) -> None:
    async def told(story: Story) -> None:
        job, other = Training(story), Training(story, "other")
        async with story.operator():
            await other.train()
            await job.train()
            before = story.status("j")
            for _ in range(5):
                job.write(forge(job, other, fields))
                await asyncio.sleep(STEP_S / 5)
            assert story.status("j") == before
            await job.train()
            assert story.status("j")["attempt"] == before["attempt"]
            assert story.condition("j", "Running")[1] == "Training"
            assert refusals(story).keys() == {fault}
            assert refusals(story)[fault] >= 1
            assert len(warnings(story)) == 1, "one event, however often"
            (event,) = warnings(story)
            assert (event["type"], event["involvedObject"]["uid"]) == ("Warning", job.uid)

    play(told)


@pytest.mark.parametrize("owner", [None, "u-idj", "other"])
def test_a_job_keeps_its_lease_when_another_account_removes_or_changes_its_owner(owner: str | None) -> None:
    async def told(story: Story) -> None:
        job, other = Training(story), Training(story, "other")
        async with story.operator():
            await other.train()
            await job.train()
        before = story.status("j")
        uid = {"other": other.uid}.get(owner or "", owner)
        references = [] if uid is None else [owner_reference("j") | {"uid": uid}]
        for _ in range(2):
            async with story.operator():
                await asyncio.sleep(STEP_S)
                patch = {"ownerReferences": references, "labels": None, "annotations": unsigned(job, other, FAILURE)}
                story.store.change(job.lease, {"metadata": patch})
                await asyncio.sleep(2 * REFUSED_S)
                await job.train()
                assert story.status("j")["attempt"] == before["attempt"]
                assert story.condition("j", "Running")[1] == "Training"

    play(told)


def test_a_lease_out_of_the_watchs_sight_is_found_again_by_its_name_and_is_as_it_was() -> None:
    """An API server tells a watch of a label that an object without the label is deleted, at the object's version."""
    keys = JobKeys(bytes(KEY_BYTES))
    cache, owner = ClusterCache(keys=keys), dataclasses.replace(job(), key_ids=keys.ids)
    cache.put(job_manifest(status=admitted(owner).status), now_s=NOW_S)
    record = ProgressRecord(attempt=1, released=True, joined=2, step=7)
    said = ProgressSigner(keys.of_job(owner.uid)[0], owner.uid).annotations(record, at_s=1.0)
    manifest = lease_manifest(resourceVersion="2", annotations=said)
    cache.put(manifest, now_s=NOW_S)
    before = cache.leases.by_job[owner.uid]
    stripped = lease_manifest(resourceVersion="3", annotations={}, labels={}, ownerReferences=[])
    cache.apply(WatchEvent(type=WatchEventType.DELETED, object=stripped), now_s=NOW_S + 1)
    assert cache.leases.by_job == {}
    cache.put(stripped, now_s=NOW_S + 2)
    assert cache.leases.by_job == {}, "a late event of what is deleted brings nothing back"
    cache.put(stripped, now_s=NOW_S + 2, reread=True)
    assert cache.leases.by_job[owner.uid] == dataclasses.replace(before, resource_version="3")
    cache.put({**manifest, "metadata": {**manifest["metadata"], "resourceVersion": "4"}}, now_s=NOW_S + 3)
    assert cache.leases.by_job[owner.uid] == dataclasses.replace(before, resource_version="4"), "no heartbeat"


def test_a_record_that_is_written_again_changes_nothing_and_is_counted() -> None:
    """Also one of an earlier attempt, and of the same one before its ranks were released."""

    async def told(story: Story) -> None:
        job = Training(story)
        async with story.operator():
            await job.train(1)
            story.reports("j", job.uid, step=0, released=False, joined=0, phase="Starting")
            waiting = job.said()
            await asyncio.sleep(STEP_S)
            await job.train()
            running = job.said()
            story.reports("j", job.uid, **{**FAILURE, "step": job.step})
            failed = job.said()
            await asyncio.sleep(STEP_S)
            await job.train()
            before = story.status("j")
            assert before["attempt"]["number"] == 2
            for old in (waiting, running, failed):
                job.write({**old})
                await asyncio.sleep(STEP_S)
            assert story.status("j") == before
            assert refusals(story) == {"Replayed": 3}
            assert len(warnings(story)) == 1

    play(told)


@pytest.mark.parametrize("touch", ["renewTime", "label"])
def test_the_newest_record_written_again_is_no_heartbeat(touch: str) -> None:
    async def told(story: Story) -> None:
        job = Training(story)
        async with story.operator():
            await job.train()
            newest = job.said()
            for number in range(20):
                if touch == "label":
                    # Out of the operator's sight and back: its watch selects Leases by this label.
                    manifest = story.store.get(job.lease)
                    story.delete("Lease", job.lease.name)
                    kept = {name: manifest["metadata"][name] for name in ("name", "namespace", "labels")}
                    kept |= {name: manifest["metadata"][name] for name in ("ownerReferences", "annotations")}
                    story.store.create({**manifest, "metadata": kept})
                else:
                    job.write({**newest, "example.com/touched": str(number)})
                await asyncio.sleep(1.0)
            assert story.status("j")["restartRecords"][0]["cause"] == "LeaderSilent"

    play(told)


@pytest.mark.parametrize("which", ["an earlier attempt", "the same attempt"])
def test_an_operator_that_starts_believes_no_record_that_is_older_than_the_status(which: str) -> None:
    async def told(story: Story) -> None:
        job = Training(story)
        async with story.operator():
            await job.train(1)
            story.reports("j", job.uid, step=0, released=False, joined=0, phase="Starting")
            old = job.said()
            await asyncio.sleep(STEP_S)
            if which == "an earlier attempt":
                story.reports("j", job.uid, step=5, exits=[{"rank": 0, "signal": 9}])
                await asyncio.sleep(STEP_S)
            await job.train()
            before = story.status("j")
            assert before["progressSequence"] > 0
        job.write({**old})
        async with story.operator():
            await asyncio.sleep(3 * STEP_S)
            after = story.status("j")
            for name in ("attempt", "step", "progressSequence", "lastCheckpoint", "restarts"):
                assert after.get(name) == before.get(name), name
            await job.train()
            assert story.condition("j", "Running")[1] == "Training"
            assert story.status("j")["attempt"] == before["attempt"]
            job.write({**old})
            await asyncio.sleep(STEP_S)
            assert refusals(story) == {"Replayed": 1}

    play(told)


def test_records_of_an_attempt_of_an_older_operator_count_until_its_gang_is_replaced() -> None:
    """The status says that its pods can't sign; an unsigned record of another attempt says nothing."""

    async def told(story: Story) -> None:
        job = Training(story)
        async with story.operator():
            await job.train()
        status = story.status("j")
        attempt = {**status["attempt"], "keyId": ""}
        story.store.patch(story.ref("j"), {"status": {"attempt": attempt}}, subresource="status")
        async with story.operator():
            await job.train()
            assert labels.ANNOTATION_PROGRESS in job.said()
            assert story.status("j")["attempt"] == attempt
            pod = ObjectRef.of(story.objects("Pod")[0])
            story.store.delete(pod, uid=None, grace_period_s=0)
            await asyncio.sleep(STEP_S)
            await job.train()
            after = story.status("j")["attempt"]
            assert (after["number"], after["keyId"]) == (attempt["number"] + 1, status["attempt"]["keyId"])
            job.write(unsigned(job, job, SUCCESS))
            await asyncio.sleep(STEP_S)
            assert story.condition("j", "Succeeded")[0] != "True"

    play(told)


def test_an_installation_with_another_key_starts_the_gang_again_and_ends_nothing() -> None:
    async def told(story: Story) -> None:
        job = Training(story)
        async with story.operator():
            await job.train()
        before = story.status("j")
        story.delete("Secret", labels.INSTALLATION_KEY_NAME, namespace="polyreme-system")
        job.write({**job.said(), "example.com/touched": "x"})
        story.entropy = random.Random(3).randbytes
        async with story.operator():
            await asyncio.sleep(STEP_S)
            story.runs()
            await asyncio.sleep(STEP_S)
            story.leaders.forget(job.uid)
            await job.train()
            after = story.status("j")
            assert (after["restartRecords"][0]["cause"], after["restartRecords"][0]["counts"]) == ("KeyLost", False)
            assert after["attempt"]["keyId"] != before["attempt"]["keyId"]
            assert story.condition("j", "Running")[1] == "Training"
            assert refusals(story) == {}

    play(told, Settings(defaults=PodDefaults(launcher_rbac=True)))
