"""The installation's key: made once, the same for all replicas, kept in place, never replaced if it can't be read."""

import asyncio
import base64
import random
from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.labels import INSTALLATION_KEY_NAME
from polyreme_api.signed_progress import KEY_BYTES, job_key, key_id
from polyreme_cluster.port import InvalidObjectError, Manifest, ObjectRef, PortError, PortTimeoutError
from polyreme_operator.installation_key import RESTORE_EVERY_S, InstallationKey, keys_of
from polyreme_operator.settings import Settings
from polyreme_operator.types.job_keys import JobKeys
from tests.unit.operator.operator_stories import Story, play

REF = ObjectRef(kind="Secret", namespace="polyreme-system", name=INSTALLATION_KEY_NAME)


def key_of(story: Story, seed: int) -> InstallationKey:
    return InstallationKey(story.cluster, story.clock, Settings(), entropy=random.Random(seed).randbytes)


def secret(**data: bytes) -> Manifest:
    encoded = {name: base64.b64encode(value).decode() for name, value in data.items()}
    return {"kind": "Secret", "metadata": {"name": REF.name, "namespace": REF.namespace}, "data": encoded}


def test_replicas_that_start_together_have_one_key() -> None:
    async def told(story: Story) -> None:
        found = await asyncio.gather(*(key_of(story, seed).read() for seed in range(3)))
        assert len({keys.of_job("u") for keys in found}) == 1
        assert (await key_of(story, 7).read()).ids == found[0].ids

    play(told)


def test_a_creation_that_lands_though_it_timed_out_is_the_key() -> None:
    async def told(story: Story) -> None:
        tries = 0

        def late(verb: str, ref: ObjectRef, body: Manifest) -> PortError | None:
            nonlocal tries
            tries += 1
            if tries == 1:
                story.store.create(body)
            return PortTimeoutError("timeout") if tries == 1 else None

        story.cluster.refuses = late
        keys = await key_of(story, 1).read()
        assert keys.ids == keys_of(story.store.get(REF)).ids
        assert tries == 1

    play(told)


def test_a_key_that_is_deleted_while_an_operator_leads_comes_back_as_it_was() -> None:
    async def told(story: Story) -> None:
        async with story.operator():
            await asyncio.sleep(1.0)
            before = story.store.get(REF)["data"]
            story.delete("Secret", REF.name, namespace=REF.namespace)
            await asyncio.sleep(RESTORE_EVERY_S + 1.0)
            assert story.store.get(REF)["data"] == before

    play(told)


def test_an_operator_that_may_not_read_the_key_ends_before_it_writes_anything() -> None:
    async def told(story: Story) -> None:
        story.node()
        story.job("j")
        story.cluster.refuses = lambda verb, ref, body: InvalidObjectError(f"{verb} of {ref} refused: 403 Forbidden")
        with pytest.raises(AssertionError):
            async with story.operator() as operator:
                await asyncio.wait({operator})
        with pytest.raises(InvalidObjectError, match=f"{REF} refused"):
            operator.result()
        assert story.cluster.writes == [("create", REF)]

    play(told)


@pytest.mark.parametrize("data", [{}, {"key": b"short"}, {"key": bytes(KEY_BYTES), "previous": b"short"}])
def test_a_secret_that_holds_no_key_is_refused_by_its_entry(data: dict[str, bytes]) -> None:
    with pytest.raises(InvalidConfigError, match="is no key of the installation") as refused:
        keys_of(secret(**data))
    assert refused.value.field in {"data.key", "data.previous"}
    assert "short" not in str(refused.value)


def test_after_a_rotation_new_gangs_have_the_new_key_and_the_earlier_one_is_known() -> None:
    new, old = bytes(KEY_BYTES), b"\1" * KEY_BYTES
    keys = keys_of(secret(key=new, previous=old))
    assert keys.ids == (key_id(new), key_id(old))
    assert keys.of_job("u") == (job_key(new, "u"), job_key(old, "u"))
    assert keys.secret("u", key_id(old)) == job_key(old, "u")


def test_keys_of_jobs_and_ids_show_nothing_of_one_another() -> None:
    keys: dict[str, Any] = {uid: JobKeys(bytes(KEY_BYTES)).of_job(uid) for uid in ("a", "b", "")}
    assert len({*keys.values()}) == len(keys)
    assert all(key_id(bytes(KEY_BYTES)) not in key.hex() for (key,) in keys.values())
