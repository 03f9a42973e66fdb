"""Samples are counted by where their bytes came from, and a data engine says so now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.engine.server import FIRST_SAID_S, SAID_EVERY_S, ReadTeller
from polyreme_datahub.loader.read.blob_files import CopiedBlobs
from polyreme_datahub.loader.read.shard_files import ReadCounts, Tier
from polyreme_datahub.objects import open_store
from tests.unit.datahub.jobs import Home, digits, make_spec

pytestmark = pytest.mark.slow


def test_reads_are_counted_by_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    home.register("one", digits(1, pages=40))
    spec = make_spec(["one"], packs_per_step=1)
    home.process(spec, "uid")
    blobs = CopiedBlobs(open_store(home.objects), tmp_path / "copies", bytes_max=1 << 30)
    monkeypatch.setattr("polyreme_datahub.loader.open.blob_files", lambda _, gate: blobs)
    source = job_packs.open_source(home.objects, spec, job="uid")
    monkeypatch.setattr(blobs, "local", lambda *_, make: None)
    count = len(source.packs(1, first=0, count=1).sample_ids)
    assert source.reads.samples == {Tier.BUCKET: count}
    source.packs(1, first=0, count=1)
    assert source.reads.samples == {Tier.BUCKET: count, Tier.MEMORY: count}
    assert source.reads.fetched_bytes > 0
    assert (
        f"{2 * count} samples read: 50.0 % from memory, 0.0 % from local files, 50.0 % from" in source.reads.sentence()
    )
    whole = job_packs.open_source(home.objects, spec, job="uid")
    monkeypatch.undo()
    whole = job_packs.open_source(home.objects, spec, job="uid")
    whole.packs(1, first=0, count=1)
    assert whole.reads.samples == {Tier.FILES: count}


def test_it_is_said_after_a_minute_and_then_every_ten() -> None:
    now_s, said = [100.0], list[str]()
    counts = ReadCounts()
    teller = ReadTeller(counts, said.append, lambda: now_s[0])
    counts.add(Tier.FILES)
    for step_s, lines in ((FIRST_SAID_S - 1.0, 0), (1.0, 1), (SAID_EVERY_S - 1.0, 1), (1.0, 2)):
        now_s[0] += step_s
        teller.tell_if_due()
        teller.tell_if_due()
        assert len(said) == lines
    assert said[0].startswith("1 samples read: 0.0 % from memory, 100.0 % from local files")
