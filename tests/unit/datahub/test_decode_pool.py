"""Threads that decode samples: the same packs, the same errors at the same packs, bounded work, no threads left."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from polyreme_api.environment import DATA_THREADS
from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import SampleDamagedError
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.open import THREADS_MAX, decode_threads
from polyreme_datahub.loader.order.slots import Slot
from polyreme_datahub.loader.sample.documents import DECODE_BYTES_MIN, DecodePool, Document, ReadsAhead
from polyreme_datahub.loader.sample.reader import DecodeRoom, decoded_bytes
from polyreme_datahub.loader.source import PackedSource
from polyreme_datahub.objects import store_folder
from tests.unit.datahub.jobs import Home, make_spec, picture, record, write_jsonl

SAMPLES = 24
STEPS = range(1, 7)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("set")
    for number in range(SAMPLES):
        (folder / f"{number}.png").write_bytes(picture(112 + 28 * (number % 3), 112, seed=number))
    home = Home(tmp_path_factory.mktemp("home"))
    home.register("mine", write_jsonl(folder, [record(f"r{at}", [f"{at}.png"]) for at in range(SAMPLES)]))
    home.process(SPEC)
    return home


SPEC = make_spec(["mine"], sequence_tokens=128)
HOLES = make_spec(["mine"], sequence_tokens=128, on_damage="Placeholder")


def opened(home: Home, threads: int, monkeypatch: pytest.MonkeyPatch, *, holes: bool = False) -> PackedSource:
    monkeypatch.setenv(DATA_THREADS, str(threads))
    return job_packs.open_source(home.objects, HOLES if holes else SPEC)


def read_all(source: PackedSource) -> list[tuple[list[str], int, bytes, bytes, list[int]]]:
    batches = [source.packs(step, first=first, count=2) for step in STEPS for first in (0, 2)]
    return [
        (
            list(batch.sample_ids),
            batch.unmasked_tokens,
            np.asarray(batch.tokens_T).tobytes(),
            np.asarray(batch.patches_PC).tobytes(),
            list(batch.lost_images),
        )
        for batch in batches
    ]


def decoding() -> int:
    return sum(thread.name.startswith("decode") for thread in threading.enumerate())


def test_packs_are_the_same_with_any_number_of_threads_which_end_with_the_source(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = opened(home, 1, monkeypatch)
    assert all(alone._indexes[0].size_of(at) > DECODE_BYTES_MIN for at in range(SAMPLES))
    expected = read_all(alone)
    assert decoding() == 0
    for threads in (2, 5):
        source = opened(home, threads, monkeypatch)
        images = range(len(source.grids(1, first=0, count=1)[0]))
        np.testing.assert_array_equal(source.patches(1, pack=0, images=images), alone.patches(1, pack=0, images=images))
        assert read_all(source) == expected
        assert 1 < decoding() <= threads
        child = os.fork()
        if child == 0:
            source._documents._kept.clear()
            os._exit(0 if read_all(source) == expected else 1)
        assert os.waitpid(child, 0)[1] == 0
        del source
        gc.collect()
        until_s = time.monotonic() + 60
        while decoding() and time.monotonic() < until_s:
            time.sleep(0.01)
        assert decoding() == 0


def test_a_damaged_sample_stops_the_packs_that_hold_it_and_no_others(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_all(opened(home, 1, monkeypatch))
    index = opened(home, 1, monkeypatch)._indexes[0]
    shard, start, size, _ = index._range(7)
    path = store_folder(home.objects) / blob_key(shard)
    sound = path.read_bytes()
    path.write_bytes(sound[: start + size // 2] + b"\0" * 64 + sound[start + size // 2 + 64 :])
    name = index.sample_id(7)
    try:
        threaded, alone = (opened(home, threads, monkeypatch) for threads in (4, 1))
        errors = set()
        for at, (step, first) in enumerate((step, first) for step in STEPS for first in (0, 2)):
            if name in whole[at][0]:
                for source in (alone, threaded):
                    with pytest.raises(SampleDamagedError) as raised:
                        source.packs(step, first=first, count=2)
                    errors.add(raised.value.message)
            else:
                assert list(threaded.packs(step, first=first, count=2).sample_ids) == whole[at][0]
        assert len(errors) == 1
        threaded, alone = (opened(home, threads, monkeypatch, holes=True) for threads in (4, 1))
        found = read_all(threaded)
        assert found == read_all(alone)
        assert any(f"placeholder:{name}" in ids for ids, *_ in found)
        assert threaded._documents._reported == alone._documents._reported == 1
    finally:
        path.write_bytes(sound)


def test_reads_start_in_order_a_bounded_number_ahead_and_none_after_a_cancel() -> None:
    started: list[int] = []

    def start(read: Callable[[], int]) -> Future[int]:
        future: Future[int] = Future()
        started.append(read())
        return future

    reads: ReadsAhead[int, int] = ReadsAhead(start, {at: partial(int, at) for at in range(10)}, ahead=3)
    assert started == [0, 1, 2]
    assert reads.take(99) is None
    assert reads.take(0) is not None
    assert reads.take(0) is None
    assert started == [0, 1, 2, 3]
    reads.cancel()
    assert reads.take(1) is None
    assert started == [0, 1, 2, 3]


def test_images_that_are_decoded_at_once_fit_and_a_larger_one_is_alone() -> None:
    room = DecodeRoom(100)
    lock, held, most = threading.Lock(), [0], [0]

    def read(size: int) -> int:
        with room.hold(size):
            with lock:
                held[0] += size
                most[0] = max(most[0], held[0])
                assert held[0] <= 100 or held[0] == size
            time.sleep(0.001)
            with lock:
                held[0] -= size
        return size

    sizes = dict(enumerate([40, 60, 30, 500, 10, 90] * 10))
    with DecodePool(6).reading({at: partial(read, size) for at, size in sizes.items()}) as reading:
        taken = [reading.take(at) for at in sizes]
        assert [future.result() for future in taken if future is not None] == list(sizes.values())
    assert most[0] == 500


def test_memory_of_an_image_follows_from_its_header(
    home: Home, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    index = opened(home, 1, monkeypatch)._indexes[0]
    sizes = {decoded_bytes(index.encoded(at)) for at in range(SAMPLES)}
    assert sizes == {8 * 112 * width for width in (112, 140, 168)}


def test_the_number_of_threads_is_a_share_of_the_processors_or_what_the_environment_says() -> None:
    cores = len(os.sched_getaffinity(0))
    assert decode_threads({}, processes=1) == min(cores, THREADS_MAX)
    assert decode_threads({}, processes=1000) == 1
    assert decode_threads({DATA_THREADS: "3"}, processes=1000) == 3
    for value in ("0", "65", "two", "-1"):
        with pytest.raises(InvalidConfigError, match=f"no number from 1 to 64: {DATA_THREADS}='{value}'"):
            decode_threads({DATA_THREADS: value}, processes=1)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_closed_source_begins_no_more_reads(home: Home, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is under way ends with the samples that are being read; it does not take the rest."""
    source, begun, go_on = opened(home, threads, monkeypatch), threading.Semaphore(0), threading.Event()
    reads: list[Slot] = []
    read = source._documents._read

    def slow(slot: Slot) -> Document:
        reads.append(slot)
        begun.release()
        assert go_on.wait(60)
        return read(slot)

    monkeypatch.setattr(source._documents, "_read", slow)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(source.packs, 1, first=0, count=4)
        for _ in range(threads):
            assert begun.acquire(timeout=60)
        source.close()
        go_on.set()
        with pytest.raises((RefusedError, CancelledError)):
            asked.result(60)
    assert len(reads) == threads
    with pytest.raises(RefusedError, match="the source was closed"):
        source.packs(2, first=0, count=1)
