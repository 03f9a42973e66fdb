"""The machine fails a run: a disk fills up, a store goes away. Code 7, what to fix, nothing left, and it continues."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.polyreme_home import Ended, PolyremeHome, Serving, all_end
from tests.e2e.small_jobs import STORE_LOST_AT_ONCE, small

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

ENVIRONMENT = 7
DATASET = "sample/digits-1"
DISK_MEBIBYTES = 96
FREE_BYTES = 3 * 2**19
"""Enough to begin a run, not enough for its data."""
FILE_BYTES_MIN = 8_192
EVERY_FIVE = {"checkpoint": {"everySteps": 5, "keep": 2}}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[PolyremeHome]:
    """A home on a disk of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEBIBYTES}m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("a file system can't be mounted here")
    home = PolyremeHome(disk, outputs=tmp_path)
    try:
        yield home
    finally:
        home.close()
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def fill(folder: Path) -> Path:
    """Leave no byte free."""
    path = folder / "filler"
    with path.open("ab", buffering=0) as file:
        for size in (2**20, 2**12, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue
    return path


def ends_with_the_environment(serving: Serving, tree: list[psutil.Process]) -> Ended:
    """Wait for the end that a failed machine brings about."""
    ended = serving.end()
    assert ended.code == ENVIRONMENT, ended.said
    assert "run the same command again to continue" in ended.said
    assert "Traceback" not in ended.said
    assert all_end(tree), "something was left running"
    return ended


def goes_on(home: PolyremeHome, job: Path, *, steps: int) -> None:
    """The next call of the same command brings the run to its success."""
    again = home.start(job).end()
    assert again.code == 0, again.said
    assert (again.item["state"], again.item["step"]) == ("Succeeded", steps)
    assert len(home.losses(job.stem)) == steps


def test_a_disk_that_fills_up_while_it_trains(small_disk: PolyremeHome) -> None:
    steps = 60
    job = small_disk.write_job("full", **small(DATASET, steps=steps, **EVERY_FIVE, **STORE_LOST_AT_ONCE))
    serving = small_disk.start(job)
    serving.until(lambda: serving.committed(1), "a checkpoint is committed")
    # Held still, or a fast machine trains the last steps while the disk fills.
    with serving.held(attempt=1, steps=1, of=steps):
        tree = serving.tree()
        filler = fill(small_disk.path)
    said = ends_with_the_environment(serving, tree).said
    assert "No space left on device" in said or "can't be written" in said
    filler.unlink()
    goes_on(small_disk, job, steps=steps)


@pytest.mark.soak
def test_a_disk_that_is_full_when_data_is_processed(small_disk: PolyremeHome) -> None:
    job = small_disk.write_job("full-at-first", **small(DATASET, **STORE_LOST_AT_ONCE))
    filler = fill(small_disk.path)
    os.truncate(filler, filler.stat().st_size - FREE_BYTES)
    serving = small_disk.start(job)
    ends_with_the_environment(serving, serving.tree())
    filler.unlink()
    goes_on(small_disk, job, steps=2)


def test_an_object_store_that_goes_away_under_a_run(tmp_path: Path) -> None:
    with contextlib.closing(PolyremeHome(tmp_path)) as home:
        _lose_the_store(home, tmp_path)


def _lose_the_store(home: PolyremeHome, folder: Path) -> None:
    objects = home.path / "data" / "objects"
    job = home.write_job("lost", **small(DATASET, **STORE_LOST_AT_ONCE))
    serving = home.start(job)
    serving.until(serving.run.journal_file.exists, "the run has begun")
    kept = objects.rename(folder / "objects")
    objects.write_text("no folder")
    try:
        ended = ends_with_the_environment(serving, serving.tree())
        assert "data can't be processed" in ended.said or "Not a directory" in ended.said
    finally:
        objects.unlink()
        kept.rename(objects)
    goes_on(home, job, steps=2)


@pytest.mark.soak
def test_a_journal_that_can_not_be_written(home: PolyremeHome) -> None:
    steps = 60
    job = home.write_job("unwritten", **small(DATASET, steps=steps, **EVERY_FIVE))
    serving = home.start(job)
    with serving.held(attempt=1, steps=2, of=steps):
        tree = serving.tree()
        # Of its open files, the journal alone is that long.
        size_bytes = serving.run.journal_file.stat().st_size
        assert size_bytes > FILE_BYTES_MIN
        resource.prlimit(serving.process.pid, resource.RLIMIT_FSIZE, (size_bytes, size_bytes))
    ended = ends_with_the_environment(serving, tree)
    assert "File too large" in ended.said
    goes_on(home, job, steps=steps)


def test_two_runs_at_once_share_a_machine(home: PolyremeHome) -> None:
    servings = [home.start(home.write_job(name, **small(DATASET))) for name in ("one-of-two", "other-of-two")]
    ended = [serving.end() for serving in servings]
    assert [each.code for each in ended] == [0, 0], [each.said for each in ended]
    assert home.losses("one-of-two") == home.losses("other-of-two")
