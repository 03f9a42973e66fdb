"""A copy in host memory is used for exactly the checkpoint that it is of, and for nothing else."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from polyreme.launcher.copies import PREFIX, CopiesFolder
from polyreme_api.marker import CommitMarker
from polyreme_api.store import Data, ObjectStore
from polyreme_trainer.checkpoint import hostcopy
from polyreme_trainer.checkpoint.hostcopy import HostCopies
from polyreme_trainer.checkpoint.load import load_checkpoint, read_marker
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
    monkeypatch.setattr(hostcopy, "FREE_SHARE_MIN", 0.0)  # this folder is on a disk, which may be full
    (tmp_path / "memory").mkdir()
    return HostCopies(tmp_path / "memory", rank=3)


def test_a_committed_save_is_taken_from_memory_and_storage_is_not_read(
    root: ObjectStore, group: dist.ProcessGroup, copies: HostCopies, tmp_path: Path
) -> None:
    with writer_of(root, group, copies=copies) as writer:
        for step, seed in ((5, 2), (10, 1)):
            writer.start(make_content(seed), step=step, loader={})
            writer.wait()
    name = "a000001-s00000010"
    held = make_content(7)
    fresh = HostCopies(tmp_path / "memory", rank=3)
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
        writer.start(make_content(1), step=5, loader={})
        writer.wait()
        writer.start(make_content(2), step=10, loader={})
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
    assert not restored(HostCopies(tmp_path / "memory", rank=2), marker())


def test_a_flipped_bit_in_memory_is_named_and_storage_is_read(
    copies: HostCopies, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copies.keep(make_content(1), marker())
    with (tmp_path / "memory" / "rank-3.copy").open("r+b") as file:
        file.seek(777)
        byte = file.read(1)[0]
        file.seek(777)
        file.write(bytes([byte ^ 16]))
    assert not restored(copies, marker())
    assert "copy in host memory is damaged, storage is read: bytes from 0: expected crc32" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"marker": 1, "layout": 2, "blocks": []}'])
def test_a_record_that_was_half_written_is_no_copy(copies: HostCopies, tmp_path: Path, text: str) -> None:
    copies.keep(make_content(1), marker())
    (tmp_path / "memory" / "rank-3.json").write_text(text)
    assert not restored(copies, marker())


def test_a_process_that_dies_while_it_copies_leaves_no_copy(
    copies: HostCopies, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copies.keep(make_content(1), marker(1, 5))

    def die(_view: memoryview) -> tuple[int, ...]:
        raise KeyboardInterrupt

    monkeypatch.setattr(hostcopy, "checksums", die)
    with pytest.raises(KeyboardInterrupt):
        copies.keep(make_content(2), marker(1, 10))
    monkeypatch.undo()
    assert list((tmp_path / "memory").glob("*.json")) == [], "no record stands beside bytes that are not its own"
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
    monkeypatch.setattr(hostcopy, "FREE_SHARE_MIN", 0.25)
    usage = shutil.disk_usage(tmp_path)._replace(total=40_000, free=20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with caplog.at_level(logging.WARNING), writer_of(root, group, copies=copies) as writer:
        for step in (5, 10):
            writer.start(make_content(1), step=step, loader={})
            writer.wait()
    assert caplog.text.count("no copy is kept in host memory") == 1
    assert "has 20000 bytes free of 40000, the copy takes 12160, rule 25% stay free" in caplog.text
    assert list((tmp_path / "memory").iterdir()) == []
    assert not restored(copies, read_marker(root, "a000001-s00000010"))


def test_a_folder_goes_with_its_launcher_and_with_the_next_one_if_it_was_killed(tmp_path: Path) -> None:
    mine = CopiesFolder(tmp_path)
    mine.open()
    assert mine.path is not None
    (mine.path / "rank-0.copy").write_bytes(b"1")
    script = (
        "import os, signal, sys; from pathlib import Path; from polyreme.launcher.copies import CopiesFolder\n"
        "folder = CopiesFolder(Path(sys.argv[1])); folder.open(); (folder.path / 'rank-0.copy').write_bytes(b'1')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert len(list(tmp_path.glob(f"{PREFIX}*"))) == 2, "its own and the killed one's"
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / "owner").touch()
    os.utime(left, (1.0, 1.0))
    late = CopiesFolder(tmp_path)
    late.open()
    assert late.path is not None
    assert set(tmp_path.glob(f"{PREFIX}*")) == {mine.path, late.path}, "the living one's is left alone"
    for folder in (mine, late):
        folder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_such_memory_has_no_folder(tmp_path: Path) -> None:
    folder = CopiesFolder(tmp_path / "none")
    folder.open()
    assert folder.path is None
    folder.close()


def test_a_copy_that_is_dropped_gives_its_memory_back(copies: HostCopies, tmp_path: Path) -> None:
    copies.keep(make_content(1), marker())
    copies.drop()
    assert list((tmp_path / "memory").iterdir()) == []
    copies.keep(make_content(1), marker())
    assert restored(copies, marker())
