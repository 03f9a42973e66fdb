"""The loader while its bucket is in trouble: the right samples, or one clear error in time, and never other bytes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from polyreme_api.environment import CACHE_DIRECTORY
from polyreme_api.job.data import BUDGET_BYTES_MIN, BUDGET_REQUESTS_MIN, OriginBudget
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.store import StoreFailedError
from polyreme_datahub import hub
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.read import blob_files
from polyreme_datahub.loader.source import PackedSource
from polyreme_datahub.objects import SAMPLES, Patience, open_store
from tests.services.cut_proxy import CutProxy
from tests.unit.datahub.jobs import digits, make_spec

pytestmark = [pytest.mark.services, pytest.mark.slow]
SPEC = make_spec(["one"])
BUDGET = OriginBudget(requests_per_second=2 * BUDGET_REQUESTS_MIN, bytes_per_second=2 * BUDGET_BYTES_MIN)
BUDGETED = SPEC.model_copy(update={"data": SPEC.data.model_copy(update={"origin_budget": BUDGET})})
SHORT = Patience(request_s=1, retries_s=1, tries_s=1, tries_max=SAMPLES.tries_max)
STORM_S = 4.0


@pytest.fixture
def proxy(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CutProxy]:
    """Processed data in a bucket, whose server is reached through a proxy from here on."""
    registry = f"sqlite:///{tmp_path}/registry.sqlite"
    hub.register(registry, bucket, "one", digits(1, pages=40))
    hub.process(SPEC, registry_url=registry, objects_url=bucket)
    server = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv(CACHE_DIRECTORY, str(tmp_path / "copies"))
    with CutProxy(("127.0.0.1", 0), (str(server.hostname), int(server.port or 0))) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{between.address[1]}")
        yield between


def opened(bucket: str) -> PackedSource:
    return job_packs.open_source(bucket, SPEC)


def read(source: PackedSource) -> bytes:
    batches = [source.packs(step, first=0, count=4) for step in range(1, 8)]
    return b"".join(
        np.asarray(getattr(batch, name)).tobytes() for batch in batches for name in ("tokens_T", "patches_PC")
    )


def refuse(proxy: CutProxy) -> None:
    proxy.refusing = True


def say_nothing(proxy: CutProxy) -> None:
    proxy.silent = True


def test_a_rank_has_an_answer_or_an_error_within_a_minute() -> None:
    assert SAMPLES.worst_s <= 60


@pytest.mark.parametrize("trouble", [refuse, say_nothing])
def test_a_server_that_stays_away_is_one_clear_error(
    bucket: str, proxy: CutProxy, monkeypatch: pytest.MonkeyPatch, trouble: Callable[[CutProxy], None]
) -> None:
    monkeypatch.setattr(blob_files, "SAMPLES", SHORT)
    source = opened(bucket)
    trouble(proxy)
    proxy.cut()
    with pytest.raises(
        StoreFailedError, match=r"object store s3://.* failed at blobs/sha256/.* after \d+ tries in \d+ s"
    ):
        read(source)
    proxy.cut()


@pytest.mark.parametrize("spec", [SPEC, BUDGETED], ids=["without limit", "within a budget"])
def test_a_storm_of_refusals_and_cut_connections_that_ends_changes_no_sample(
    bucket: str, proxy: CutProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: TrainingJobSpec
) -> None:
    expected = read(opened(bucket))
    monkeypatch.setenv(CACHE_DIRECTORY, str(tmp_path / "others"))
    source = job_packs.open_source(bucket, spec)
    refuse(proxy)
    proxy.cut()

    def end() -> None:
        proxy.refusing = False

    storm = threading.Timer(STORM_S, end)
    storm.start()
    try:
        assert read(source) == expected
    finally:
        storm.join()
    assert proxy.refusals > 0


@pytest.mark.parametrize(
    "change",
    [lambda data: data[: len(data) // 2], lambda data: data[:600] + bytes(len(data) - 600)],
    ids=["cut", "other"],
)
def test_a_shard_that_was_cut_or_changed_in_the_bucket_is_never_trained_on(
    bucket: str, proxy: CutProxy, change: Callable[[bytes], bytes]
) -> None:
    source = opened(bucket)
    store = open_store(bucket)
    for index in source._indexes:
        for digest in index.manifest.sample_shards:
            store.put(blob_key(digest), change(store.get(blob_key(digest))))
    with pytest.raises(IndexDamagedError):
        read(source)
