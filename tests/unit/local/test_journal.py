"""The journal: what a write returned for survives, what a crash tore is cut off, nothing is guessed."""

import asyncio
import json
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.errors import EnvironmentFailedError, RefusedError
from polyreme_cluster.port import KINDS, GoneError, Manifest, ServerError
from polyreme_local.api_server import journal as journal_module
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.journal import open_store
from polyreme_local.api_server.journal_file import JournalContent, read_journal
from polyreme_local.api_server.store import Store
from tests.contract.adapters import ManualClock, uids
from tests.contract.manifests import config, lease, owned_by, ref, uid

Story = Callable[[EmbeddedCluster, Store], Coroutine[Any, Any, Any]]


def with_store(path: Path, story: Story) -> Any:
    async def told() -> Any:
        opened = open_store(path, clock=ManualClock(), run_token="token", new_uid=uids(), validators={})
        async with opened as (store, durable):
            return await story(EmbeddedCluster(store, durable=durable), store)

    return asyncio.run(told())


def contents(store: Store) -> list[Manifest]:
    return [record.copy() for kind in KINDS for record in store.records(kind)]


async def some_writes(cluster: EmbeddedCluster, store: Store) -> tuple[list[Manifest], int]:
    owner = await cluster.create(config("owner", data={"text": "ü\n{}"}))
    await cluster.create(lease("owned", **owned_by(owner)))
    kept = await cluster.create(lease("kept"))
    await cluster.patch(ref(kept), {"spec": {"holderIdentity": "b"}})
    await cluster.delete(ref(owner), uid=uid(owner))
    return contents(store), store.version


async def look(cluster: EmbeddedCluster, store: Store) -> tuple[list[Manifest], int]:
    return contents(store), store.version


def test_a_reopened_store_is_the_same_and_goes_on_counting(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    before = with_store(path, some_writes)
    assert with_store(path, look) == before
    assert [manifest["metadata"]["name"] for manifest in before[0]] == ["kept"]


def test_a_watch_cannot_resume_over_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    _, version = with_store(path, some_writes)

    async def story(cluster: EmbeddedCluster, store: Store) -> None:
        for old in (str(version - 1), str(version + 10)):
            with pytest.raises(GoneError):
                await anext(cluster.watch("Lease", resource_version=old))

    with_store(path, story)


def test_any_torn_tail_gives_the_state_before_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with_store(path, some_writes)
    data = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(data) if byte == 0x0A]
    for cut in (*range(ends[0], len(data), 41), *range(len(data) - 30, len(data))):
        path.write_bytes(data[:cut])
        whole = max(end for end in ends if end <= cut)
        torn = read_journal(path)
        assert (torn.size_bytes, torn.torn_bytes) == (whole, cut - whole)
        path.write_bytes(data[:whole])
        assert read_journal(path).manifests == torn.manifests


def test_a_store_goes_on_behind_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with_store(path, some_writes)
    path.write_bytes(path.read_bytes()[:-7])

    async def story(cluster: EmbeddedCluster, store: Store) -> list[Manifest]:
        await cluster.create(lease("later"))
        return contents(store)

    assert with_store(path, look)[0] != []
    after = with_store(path, story)
    assert with_store(path, look)[0] == after


def test_a_damaged_journal_is_recovered_from_its_good_lines_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with_store(path, some_writes)
    before = read_journal(path)
    data = bytearray(path.read_bytes())
    data[data.index(b"owner")] ^= 1
    path.write_bytes(data)
    seen: list[JournalContent] = []

    def recover(content: JournalContent) -> list[Manifest]:
        seen.append(content)
        return [*content.manifests]

    async def opened() -> list[Manifest]:
        opening = open_store(path, clock=ManualClock(), run_token="t", validators={}, recover=recover)
        async with opening as (store, _):
            return [record.manifest for kind in KINDS for record in store.records(kind)]

    kept = asyncio.run(opened())
    assert [content.damaged_lines for content in seen] == [1]
    assert {manifest["metadata"]["name"] for manifest in kept} <= {one["metadata"]["name"] for one in before.manifests}
    assert kept
    assert (tmp_path / "journal.damaged").read_bytes() == bytes(data)
    assert not read_journal(path).damaged
    asyncio.run(opened())
    assert len(seen) == 1, "what was recovered is whole"


@pytest.mark.parametrize("at", [0, 12])
def test_a_journal_without_a_good_line_is_damaged_and_not_new(tmp_path: Path, at: int) -> None:
    path = tmp_path / "journal"
    with_store(path, look)
    path.write_bytes(b"x" * at + b"\n" if at else b"\n")
    assert read_journal(path).damaged


def test_damage_before_good_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with_store(path, some_writes)
    data = bytearray(path.read_bytes())
    data[data.index(b"owner")] ^= 1
    path.write_bytes(data)
    with pytest.raises(EnvironmentFailedError, match="is damaged, bad lines: 1"):
        with_store(path, look)


def test_a_journal_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    text = json.dumps({"format": 99}).encode()
    path.write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    with pytest.raises(EnvironmentFailedError, match="format 99"):
        with_store(path, look)


def test_compaction_keeps_the_state_and_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "COMPACT_LINES_MIN", 40)
    path = tmp_path / "journal"

    async def story(cluster: EmbeddedCluster, store: Store) -> tuple[list[Manifest], int]:
        generator = random.Random(7)
        names = [f"n{i}" for i in range(6)]
        for _ in range(300):
            name = generator.choice(names)
            known = [record for record in store.records("ConfigMap") if record.name == name]
            if not known:
                await cluster.create(config(name))
            elif generator.random() < 0.2:
                await cluster.delete(ref(known[0].manifest), uid=known[0].uid)
            else:
                await cluster.patch(ref(known[0].manifest), {"data": {"x": str(generator.random())}})
        return contents(store), store.version

    before = with_store(path, story)
    assert len(path.read_bytes().splitlines()) < 100
    assert with_store(path, look) == before


def test_two_processes_never_serve_one_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    code = (
        "import asyncio, sys; from pathlib import Path; sys.path.insert(0, '.')\n"
        "from tests.unit.local.test_journal import with_store, look\n"
        f"with_store(Path({str(path)!r}), look)\n"
    )

    async def story(cluster: EmbeddedCluster, store: Store) -> None:
        with pytest.raises(RefusedError, match="another process"):
            async with open_store(path, clock=ManualClock(), run_token="other"):
                pass
        other = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert "RefusedError" in other.stderr

    with_store(path, story)
    with_store(path, look)


def test_many_writers_share_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    real = os.fdatasync

    def counted(file: int) -> None:
        syncs.append(file)
        real(file)

    monkeypatch.setattr(os, "fdatasync", counted)

    async def story(cluster: EmbeddedCluster, store: Store) -> None:
        await asyncio.gather(*(cluster.create(lease(f"l{i}")) for i in range(100)))

    with_store(tmp_path / "journal", story)
    assert 1 <= len(syncs) <= 3


def test_a_full_disk_stops_every_later_write_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    failures: list[EnvironmentFailedError] = []

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    async def told() -> None:
        opened = open_store(
            path, clock=ManualClock(), run_token="t", new_uid=uids(), validators={}, on_failure=failures.append
        )
        async with opened as (store, durable):
            cluster = EmbeddedCluster(store, durable=durable)
            await cluster.create(lease("before"))
            monkeypatch.setattr(os, "fdatasync", full)
            for name in ("during", "after"):
                with pytest.raises(ServerError):
                    await cluster.create(lease(name))
            monkeypatch.undo()
            assert [record.name for record in store.records("Lease")] == ["before", "during"]

    asyncio.run(told())
    assert len(failures) == 1
    assert "No space left" in str(failures[0])
