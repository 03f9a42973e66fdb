"""Parts of bundles: read in order, few requests, no byte twice, each checked against its digest."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import pytest

from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.digests import blob_key, digest_bytes
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.lakehouse import (
    BUNDLE_BYTES_MAX,
    GAP_BYTES_MAX,
    READ_BYTES_MAX,
    READS_MAX,
    Artifact,
    Lakehouse,
    joined_ranges,
)
from polyreme_datahub.objects import open_store
from tests.unit.datahub.stores import CountingStore

JPEGS = 1500
JPEG_BYTES = 57_000
RECORD_BYTES = 600


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(open_store(f"file://{tmp_path}/objects", sleep=lambda _: None))


def test_images_in_any_order_cost_at_most_a_twentieth_more_than_their_bytes(store: CountingStore) -> None:
    draw = random.Random(1)
    lakehouse = Lakehouse(store)
    parts = (
        draw.randbytes(size) for _ in range(JPEGS) for size in (RECORD_BYTES, JPEG_BYTES + draw.randrange(-500, 500))
    )
    artifacts = [artifact for artifact in lakehouse.put_parts(parts) if artifact.length > RECORD_BYTES]
    draw.shuffle(artifacts)
    asked = sum(artifact.length for artifact in artifacts)
    assert asked > 85e6
    store.requests = store.bytes = 0
    tracemalloc.start()
    seen = 0
    for digest, data in lakehouse.read_parts(artifacts):
        assert digest_bytes(data) == digest
        seen += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == JPEGS
    assert store.bytes <= 1.05 * asked
    assert store.requests <= asked / READ_BYTES_MAX * 1.1 + asked / BUNDLE_BYTES_MAX + 1
    assert 1 < store.together_max <= READS_MAX
    assert peak < (2 * READS_MAX + 2) * READ_BYTES_MAX


def test_parts_far_apart_are_requests_of_their_own_and_near_ones_are_joined() -> None:
    def part(start: int, length: int, blob: str = "a") -> Artifact:
        return Artifact(digest=f"{blob}{start}", blob=blob, start=start, length=length)

    near, far = part(10 + GAP_BYTES_MAX, 5), part(16 + 2 * GAP_BYTES_MAX, 5)
    groups = list(joined_ranges([far, part(0, 10, "b"), near, part(0, 10), part(0, READ_BYTES_MAX + 1, "c")]))
    assert [[found.digest for found in group] for group in groups] == [
        ["a0", near.digest],
        [far.digest],
        ["b0"],
        ["c0"],
    ]


def test_parts_that_were_changed_cut_or_lost_are_named(store: CountingStore) -> None:
    lakehouse = Lakehouse(store)
    first, second = lakehouse.put_parts([b"first", b"second"])
    wanted = {part.digest: part for part in (first, second)}
    assert lakehouse.get_parts(wanted) == {first.digest: b"first", second.digest: b"second"}
    key = blob_key(first.blob)
    store.put(key, b"firstSecond")
    assert lakehouse.get_parts({first.digest: first}) == {first.digest: b"first"}
    with pytest.raises(IndexDamagedError, match=f"bytes 5 to 11 of {key} have digest"):
        lakehouse.get_parts(wanted)
    store.put(key, b"firstsec")
    with pytest.raises(IndexDamagedError, match=second.digest):
        lakehouse.get_parts(wanted)
    store.delete(key)
    with pytest.raises(ObjectNotFoundError, match=key):
        lakehouse.get_parts(wanted)
