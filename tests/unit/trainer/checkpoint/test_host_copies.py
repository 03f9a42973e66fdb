"""A copy in host memory is used for exactly its own checkpoint, and for nothing else."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from polyreme_api.commit_marker import CommitMarker
from polyreme_api.store import Data, ObjectStore
from polyreme_launcher.shared_copies import MEMORY, CopyFiles
from polyreme_trainer.checkpoint import host_copy
from polyreme_trainer.checkpoint.host_copy import HostCopies
from polyreme_trainer.checkpoint.load import load_checkpoint, read_marker
from polyreme_trainer.checkpoint.save import AfterStep
from tests.roots import marker
from tests.unit.datahub.stores import PassingStore
from tests.unit.trainer.checkpoint.conftest import equal, make_content, writer_of


class NoPieces(PassingStore):
    """Gives markers and refuses to give tensors."""

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        raise AssertionError(f"{key} was read")


def restored(copies: HostCopies, of: CommitMarker, **size: int) -> bool:
    held = make_content(7, **size)
    taken = copies.restore(held, of)
    assert equal(held, make_content(1 if taken else 7, **size)), "all of it, or nothing"
    return taken


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostCopies:
    monkeypatch.setattr(host_copy, "FREE_SHARE_MIN", 0.0)  # this folder is on a disk, which may be full
    return in_folder(tmp_path)


def in_folder(folder: Path, rank: int = 3) -> HostCopies:
    """A rank's copy in files that a test can look at."""
    data, record = (os.open(folder / f"rank-{rank}.{end}", os.O_RDWR | os.O_CREAT) for end in ("copy", "json"))
    return HostCopies(data, record)


def kept_bytes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(folder.glob("rank-3.*"))]


def test_a_committed_save_is_taken_from_memory_and_storage_is_not_read(
    root: ObjectStore, group: dist.ProcessGroup, copies: HostCopies, tmp_path: Path
) -> None:
    with writer_of(root, group, copies=copies) as writer:
        for step, seed in ((5, 2), (10, 1)):
            writer.start(make_content(seed), step=step, after=AfterStep(loader={}))
            writer.wait()
    name = "a000001-s00000010"
    held = make_content(7)
    fresh = in_folder(tmp_path)
    load_checkpoint(held, read_marker(root, name), NoPieces(root), name, group=group, copies=fresh)
    assert equal(held, make_content(1))


def test_a_save_that_failed_leaves_the_copy_of_the_one_before(
    root: ObjectStore, group: dist.ProcessGroup, copies: HostCopies
) -> None:
    class Full(PassingStore):
        def put(self, key: str, data: Data) -> None:
            if "s00000010" in key:
                raise OSError(28, "no space left on device")
            super().put(key, data)

    with writer_of(Full(root), group, copies=copies) as writer:
        writer.start(make_content(1), step=5, after=AfterStep(loader={}))
        writer.wait()
        writer.start(make_content(2), step=10, after=AfterStep(loader={}))
        writer.wait(failures_max=2)
    assert restored(copies, read_marker(root, "a000001-s00000005"))


def test_only_the_very_same_marker_is_taken(copies: HostCopies) -> None:
    copies.keep(make_content(1), marker(1, 5))
    assert restored(copies, marker(1, 5))
    for other in (marker(1, 6), marker(2, 5), marker(1, 5, committed_at_s=1.5), marker(1, 5, loader={"seed": 2})):
        assert not restored(copies, other)


def test_another_layout_or_another_rank_reads_storage(copies: HostCopies, tmp_path: Path) -> None:
    copies.keep(make_content(1), marker())
    assert not restored(copies, marker(), rows=12)
    assert not restored(copies, marker(), place=1, parts=2)
    assert not restored(in_folder(tmp_path, rank=2), marker())


def test_a_flipped_bit_in_memory_is_named_and_storage_is_read(
    copies: HostCopies, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies.keep(make_content(1), marker())
    with (tmp_path / "rank-3.copy").open("r+b") as file:
        file.seek(777)
        byte = file.read(1)[0]
        file.seek(777)
        file.write(bytes([byte ^ 16]))
    assert not restored(copies, marker())
    assert "copy in host memory is damaged, reading storage instead: bytes from 0: expected crc32" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"marker": 1, "layout": 2, "blocks": []}'])
def test_a_record_that_was_half_written_is_no_copy(copies: HostCopies, tmp_path: Path, text: str) -> None:
    copies.keep(make_content(1), marker())
    (tmp_path / "rank-3.json").write_text(text)
    assert not restored(copies, marker())


def test_a_process_that_dies_while_it_copies_leaves_no_copy(
    copies: HostCopies, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copies.keep(make_content(1), marker(1, 5))

    def die(_view: memoryview) -> tuple[int, ...]:
        raise KeyboardInterrupt

    monkeypatch.setattr(host_copy, "checksums", die)
    with pytest.raises(KeyboardInterrupt):
        copies.keep(make_content(2), marker(1, 10))
    monkeypatch.undo()
    assert kept_bytes(tmp_path)[1] == 0, "no record stands beside bytes that are not its own"
    assert not restored(copies, marker(1, 5))
    assert not restored(copies, marker(1, 10))


def test_where_memory_is_short_no_copy_is_kept_and_the_save_is_good(
    root: ObjectStore,
    group: dist.ProcessGroup,
    copies: HostCopies,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(host_copy, "FREE_SHARE_MIN", 0.25)
    usage = os.statvfs_result((4096, 1, 40_000, 20_000, 20_000, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda _file: usage)
    with caplog.at_level(logging.WARNING), writer_of(root, group, copies=copies) as writer:
        for step in (5, 10):
            writer.start(make_content(1), step=step, after=AfterStep(loader={}))
            writer.wait()
    assert caplog.text.count("no copy is kept in host memory") == 1
    assert "has 20000 bytes free of 40000, the copy takes 12160, expected 25% to stay free" in caplog.text
    assert kept_bytes(tmp_path) == [0, 0]
    assert not restored(copies, read_marker(root, "a000001-s00000010"))


def test_the_memory_of_a_launcher_goes_with_it_also_when_it_is_killed() -> None:
    script = (
        "import os, sys, time; from polyreme_launcher.shared_copies import MEMORY, CopyFiles; files = CopyFiles()\n"
        "data, record = files.of(0); os.write(data, b'x'); assert files.of(0) == (data, record) != files.of(1)\n"
        "print(os.fstat(data).st_nlink, flush=True); time.sleep(60)"
    )
    before = set(MEMORY.iterdir())
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"0\n", "no name"
        launcher.kill()
    assert not [path for path in set(MEMORY.iterdir()) - before if path.name.startswith("polyreme")]


def test_a_machine_without_such_memory_keeps_no_copies(tmp_path: Path) -> None:
    files = CopyFiles(tmp_path / "none")
    assert files.of(0) is None
    files.close()


def test_a_copy_that_is_dropped_gives_its_memory_back(copies: HostCopies, tmp_path: Path) -> None:
    copies.keep(make_content(1), marker())
    copies.drop()
    assert kept_bytes(tmp_path) == [0, 0]
    copies.keep(make_content(1), marker())
    assert restored(copies, marker())
