"""A version is the content of its files: listed when it is registered, checked whenever a file is read."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyreme_datahub import hub
from polyreme_datahub.errors import BadRecordError, IndexDamagedError, SourceInvalidError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.recipes.recipe import build_recipe
from polyreme_datahub.registry.collection import collect
from polyreme_datahub.registry.datasets import DatasetVersion, find_version
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.sources import chunks, describe, external_sort, found, listed, listing, records, text_files
from polyreme_datahub.sources.files import describe_folder
from polyreme_datahub.sources.open import open_source
from polyreme_datahub.sources.types import Source
from tests.unit.datahub.jobs import Home, make_spec, picture, record, write_jsonl
from tests.unit.datahub.listed_sources import described


class Library(Home):
    """A home, and what is registered there."""

    def add(self, path: Path, name: str = "mine") -> DatasetVersion:
        self.register(name, path)
        database = open_database(self.registry)
        try:
            return find_version(database, name)
        finally:
            database.close()

    def open(self, version: DatasetVersion) -> Source:
        return open_source(version.source, Lakehouse(open_store(self.objects)))


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "home")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "set", 4)


def make_folder(folder: Path, count: int) -> Path:
    folder.mkdir()
    for at in range(count):
        (folder / f"{at}.png").write_bytes(picture(8, 8, seed=at))
        (folder / f"{at}.txt").write_text(f"Picture {at}.")
    return folder


def make_lines(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("a", "b", "mask"):
        (folder / f"{name}.png").write_bytes(picture(8, 8, seed=ord(name[0])))
    lines = [record("a", ["a.png"], masks=["mask.png"]), record("b", ["b.png", "a.png"]), record("gone", ["gone.png"])]
    return write_jsonl(folder, lines)


def rule_of(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(BadRecordError) as bad:
        call()
    return bad.value.rule, bad.value.message


@pytest.mark.parametrize("kind", ["folder", "lines"])
def test_a_version_is_its_content_and_not_its_place_or_times(library: Library, tmp_path: Path, kind: str) -> None:
    path = make_lines(tmp_path / "set") if kind == "lines" else make_folder(tmp_path / "set", 3)
    first = library.add(path)
    for file in (tmp_path / "set").iterdir():
        os.utime(file, ns=(1, 1))
    assert library.add(path) == first
    moved = tmp_path / "moved"
    shutil.move(tmp_path / "set", moved)
    again = library.add(moved / path.relative_to(tmp_path / "set"))
    assert (again.number, again.digest) == (1, first.digest)
    assert library.open(again).read(0).sample_id == library.open(again).record_id(0).replace("line-1", "a")
    images = sorted(moved.glob("*.png"))
    images[-1].write_bytes(picture(8, 8, seed=99))
    assert library.add(moved / path.relative_to(tmp_path / "set")).number == 2


def test_what_is_read_is_what_was_listed(library: Library, tmp_path: Path) -> None:
    source = library.open(library.add(make_lines(tmp_path / "set")))
    read = source.read(1)
    assert [read.sample_id, *read.blobs] == ["b", picture(8, 8, seed=ord("b")), picture(8, 8, seed=ord("a"))]
    assert len(source.read(0).blobs) == 2
    assert rule_of(lambda: source.read(2)) == ("file", "file can't be read: 'gone.png', No such file or directory")


def instead(path: Path, put: Callable[[], object]) -> None:
    path.unlink()
    put()


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda path: path.write_bytes(picture(8, 8, seed=77)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "one bit": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "gone": lambda path: path.unlink(),
    "a folder": lambda path: instead(path, path.mkdir),
    "a pipe": lambda path: instead(path, lambda: os.mkfifo(path)),
    "a link outside": lambda path: instead(path, lambda: path.symlink_to("/etc/passwd")),
}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", ["1.png", "1.txt"])
def test_a_file_that_changed_since_is_named_with_what_to_do(
    library: Library, folder: Path, name: str, how: str
) -> None:
    source = library.open(library.add(folder))
    CHANGES[how](folder / name)
    with pytest.raises(SourceInvalidError, match=rf"file changed since it was registered: .*{name}, .*; register the"):
        source.read(1)
    assert source.read(0).sample_id == "0.png"


def test_a_line_that_changed_since_is_named_and_the_others_are_read(library: Library, tmp_path: Path) -> None:
    path = make_lines(tmp_path / "set")
    source = library.open(library.add(path))
    path.write_bytes(path.read_bytes().replace(b"What is a?", b"What is A?"))
    with pytest.raises(SourceInvalidError, match=r"data.jsonl, its bytes at byte 0 are others"):
        source.read(0)
    assert source.read(1).sample_id == "b"


def test_a_run_over_a_changed_file_ends_and_says_so(library: Library, folder: Path) -> None:
    library.add(folder)
    (folder / "2.png").write_bytes(picture(8, 8, seed=77))
    with pytest.raises(SourceInvalidError, match=r"2\.png"):
        library.process(make_spec(["mine"]))


def test_images_that_are_not_read_are_listed_and_counted(library: Library, folder: Path) -> None:
    (folder / "photo.HEIC").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (folder / "photo.txt").write_text("A photo.")
    (folder / "alone.txt").write_text("Nothing.")
    (folder / "bare.jpg").write_bytes(picture(8, 8, kind="JPEG"))
    version = library.add(folder)
    assert version.records == 6
    assert found.sentence(version.source["found"]) == (
        "5 images, 1 text without image, 1 image without text that will be a dead letter, "
        "1 HEIC file that will be a dead letter"
    )
    part = library.process(make_spec(["mine"])).datasets[0]
    assert {(one.sample_id, one.rule) for one in part.dead_letters} == {
        ("bare.jpg", "file"),
        ("photo.HEIC", "image-format"),
    }
    assert any("HEIC" in one.error for one in part.dead_letters)


def test_files_that_come_later_belong_to_the_next_version(library: Library, folder: Path) -> None:
    first = library.add(folder)
    (folder / "0a.png").write_bytes(picture(8, 8))
    assert library.open(first).read(1).sample_id == "1.png"
    assert library.add(folder).number == 2


def test_sources_of_form_1_still_open_and_mean_what_they_meant(library: Library, folder: Path, tmp_path: Path) -> None:
    lakehouse = Lakehouse(open_store(library.objects))
    path = make_lines(tmp_path / "lines")
    old = open_source(described(path), lakehouse)
    (path.parent / "b.png").write_bytes(picture(8, 8, seed=50))
    assert old.read(1).blobs[0] == picture(8, 8, seed=50)
    description, _ = describe_folder(folder)
    assert open_source(description, lakehouse).read(0).sample_id == "0.png"
    os.utime(folder / "0.png", ns=(1, 1))
    with pytest.raises(SourceInvalidError, match="changed"):
        open_source(description, lakehouse)


def test_names_in_any_order_and_of_any_number_are_listed_in_one_order(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{a}{b}/{c}" for a in "ab" for b in ("", "-", ".x", "\udcff") for c in ("1", "1.5", "10", "2")]
    for at, name in enumerate(names):
        image = tmp_path / "set" / f"{name}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(picture(8, 8, seed=at))
        image.with_suffix(".txt").write_text(name.encode("utf-8", "replace").decode())
    whole = library.add(tmp_path / "set")
    monkeypatch.setattr(external_sort, "RUN_ROWS", 5)
    monkeypatch.setattr(external_sort.sorted_rows, "__kwdefaults__", {"run_rows": 5})
    monkeypatch.setattr(listing, "GROUP_ROWS", 3)
    monkeypatch.setattr(listing, "GROUPS_KEPT", 1)
    parts = library.add(tmp_path / "set", "other")
    assert (whole.digest, whole.records) == (parts.digest, 32)
    assert whole.source["listing"] != parts.source["listing"]
    one, other = library.open(whole), library.open(parts)
    assert [one.read(at).content for at in range(32)] == [other.read(at).content for at in reversed(range(32))][::-1]
    assert len({one.record_id(at) for at in range(32)}) == 32


def test_a_damaged_listing_is_never_read_as_another(library: Library, folder: Path) -> None:
    version = library.add(folder)
    path = next((library.folder / "objects").rglob(version.source["listing"]))
    whole = path.read_bytes()
    path.chmod(0o644)
    for at in range(4, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            read = library.open(version).read(2)
        except (IndexDamagedError, SourceInvalidError):
            continue
        assert read.sample_id == "2.png"
    path.unlink()
    with pytest.raises(IndexDamagedError, match="missing"):
        library.open(version)


def test_a_collection_keeps_the_listing_of_a_version(library: Library, folder: Path) -> None:
    version = library.add(folder)
    database = open_database(library.registry)
    try:
        store = open_store(library.objects)
        clock = itertools.count(10**10, 10**6)
        reports = [
            collect(database, store, Lakehouse(store).get_parts, now_s=lambda: float(next(clock))) for _ in range(3)
        ]
        assert [(report.kept[0], report.deleted[0]) for report in reports] == [(1, 0)] * 3
        assert library.open(version).read(0).sample_id == "0.png"
    finally:
        database.close()


def test_chunks_are_cut_by_records_and_by_bytes() -> None:
    assert list(chunks.cut([1] * 600)) == [256, 256, 88]
    assert list(chunks.cut([5, 5, 5, 20, 1, 0, 9], bytes_max=10)) == [2, 1, 1, 3]
    assert list(chunks.cut([])) == []
    source = {"chunks": chunks.encode_counts(iter([2, 1, 4]))}
    assert list(chunks.chunks_of(source, 7)) == [(0, 2), (2, 1), (3, 4)]
    assert list(chunks.chunks_of({}, 300)) == [(0, 256), (256, 44)]
    with pytest.raises(SourceInvalidError, match="damaged"):
        list(chunks.chunks_of(source, 8))


def test_work_items_have_the_borders_of_the_version(
    library: Library, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = max(file.stat().st_size for file in folder.iterdir()) + len("Picture 0.")
    monkeypatch.setattr(chunks.cut, "__kwdefaults__", {"records_max": 256, "bytes_max": 2 * size})
    version = library.add(folder)
    monkeypatch.undo()
    flow = Flow(recipe=build_recipe([]), versions={version.id: version})
    items = flow.first_items()
    assert [(item.first, item.count) for item in items] == [(0, 2), (2, 2)]
    assert library.add(folder) == version, "the borders of a version stay, whatever is cut later"


def test_progress_is_reported_while_files_are_read(
    library: Library, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe, "PROGRESS_FILES", 3)
    seen: list[int] = []
    hub.register(library.registry, library.objects, "mine", folder, progress=lambda found: seen.append(found.files))
    assert seen == [3, 6, 8]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("http://example.com/a.png", "http: URL, and URLs are never fetched"),
        ("HTTPS://example.com/a.png", "https: URL"),
        ("data:image/png;base64,AAAA", "data: URL"),
        ("file:///etc/passwd", "file: URL"),
        ("s3://bucket/a.png", "s3: URL"),
        ("//example.com/a.png", "absolute"),
        ("/etc/passwd", "absolute"),
        ("C:\\a.png", "absolute"),
        ("../a.png", "'..' part"),
        ("a/../../a.png", "'..' part"),
        ("nul\0.png", "NUL"),
        ("", "empty"),
        ("\ud800.png", "surrogate"),
        ("x" * 5000, "5000 characters"),
        ("leads-out.png", "a link leads outside"),
    ],
)
def test_a_name_that_is_never_read_is_one_dead_letter(library: Library, tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "secret.png").write_bytes(picture(8, 8))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/leads-out.png").symlink_to(tmp_path / "secret.png")
    path = write_jsonl(tmp_path / "set", [record("x", [name]), record("y")])
    source = library.open(library.add(path))
    rule, message = rule_of(lambda: source.read(0))
    assert (rule, words in message) == ("path", True), message
    assert json.dumps(message)
    assert source.read(1).sample_id == "y"


def test_what_is_no_regular_file_is_one_dead_letter_and_does_not_block(library: Library, tmp_path: Path) -> None:
    (tmp_path / "set/folder.png").mkdir(parents=True)
    os.mkfifo(tmp_path / "set/pipe.png")
    (tmp_path / "set/loop.png").symlink_to("loop.png")
    names = ["folder.png", "pipe.png", "loop.png", "pipe.png/a", "gone.png"]
    lines = [*(record(name, [name]) for name in names), record("good")]
    source = library.open(library.add(write_jsonl(tmp_path / "set", lines)))
    seen = [rule_of(lambda at=at: source.read(at)) for at in range(len(names))]  # type: ignore[misc]
    assert [rule for rule, _ in seen] == ["file"] * len(names)
    assert [message.partition(", ")[2] for _, message in seen] == [
        "it is a folder, expected a regular file",
        "it is a pipe, expected a regular file",
        "Too many levels of symbolic links",
        "Not a directory",
        "No such file or directory",
    ]


def test_a_pipe_and_a_folder_among_the_files_of_a_folder_are_dead_letters(library: Library, folder: Path) -> None:
    os.mkfifo(folder / "9.png")
    (folder / "9.txt").mkdir()
    (folder / "3.txt").unlink()
    (folder / "3.txt").mkdir()
    source = library.open(library.add(folder))
    assert rule_of(lambda: source.read(3)) == ("file", "file can't be read: '3.txt', No such file or directory")
    assert source.record_id(4) == "9.png"
    assert rule_of(lambda: source.read(4))[0] == "file"


def test_a_file_without_permission_is_a_dead_letter_and_such_a_folder_is_refused(
    library: Library, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "1.png").chmod(0)
    denied = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith("1.png"):
            raise PermissionError(13, "Permission denied")
        return denied(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    source = library.open(library.add(folder))
    assert rule_of(lambda: source.read(1)) == ("file", "file can't be read: '1.png', Permission denied")
    scan = os.scandir
    (folder / "locked").mkdir()

    def lock(path: Any) -> Any:
        if str(path).rstrip("/").endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", lock)
    with pytest.raises(SourceInvalidError, match=r"folder can't be listed: .*locked, Permission denied"):
        library.add(folder)


def test_lines_that_break_rules_are_one_dead_letter_each(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (records, text_files, listed):
        monkeypatch.setattr(module, "LINE_BYTES_MAX", 300)
    lines: list[dict[str, Any] | str] = [
        record("a"),
        '"' + "x" * 1000 + '"',
        record("b"),
        "{",
        " \t",
        "[]",
        '{"images": 3}',
        '{"images": [1, "a.png"]}',
    ]
    path = write_jsonl(tmp_path, lines)
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n" + json.dumps(record("last")).encode())
    version = library.add(path)
    source = library.open(version)
    assert [source.read(at).sample_id for at in (8, 2, 0)] == ["last", "b", "a"]
    assert [source.record_id(at) for at in (3, 4)] == ["line-4", "line-6"], "a blank line is no record, but counts"
    rules = [rule_of(lambda at=at: source.read(at))[0] for at in (1, 3, 4, 5, 6, 7)]  # type: ignore[misc]
    assert rules == ["line-size", "json", "fields", "images", "images", "json"]
    path.write_bytes(path.read_bytes() + b"\n")
    assert library.add(path) == version


@pytest.mark.slow
def test_every_hostile_file_is_one_dead_letter_with_its_rule_and_the_others_are_processed(
    library: Library, folder: Path
) -> None:
    (folder / "empty.png").write_bytes(b"")
    (folder / "mislabelled.png").write_bytes(picture(8, 8, kind="JPEG"))
    (folder / "page.png").write_bytes(b"<!doctype html><html></html>")
    (folder / "cut.png").write_bytes(picture(64, 64)[:200])
    (folder / "photo.avif").write_bytes(b"\0\0\0\x18ftypavif\0\0\0\0")
    (folder / "latin.png").write_bytes(picture(8, 8))
    os.mkfifo(folder / "pipe.png")
    (folder / "link.png").symlink_to("/etc/hostname")
    (folder / "dangling.png").symlink_to("nowhere.png")
    (folder / "again.png").symlink_to("1.png")
    for path in sorted(folder.glob("*.*")):
        if not path.with_suffix(".txt").exists():
            path.with_suffix(".txt").write_text("A picture.")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "silent.png").write_bytes(picture(8, 8))
    (folder / "silent.txt").write_bytes(b"\xef\xbb\xbf \n")
    library.add(folder)
    part = library.process(make_spec(["mine"])).datasets[0]
    assert {letter.sample_id: letter.rule for letter in part.dead_letters} == {
        "empty.png": "empty",
        "page.png": "image-format",
        "cut.png": "truncated",
        "photo.avif": "image-format",
        "latin.png": "text",
        "pipe.png": "file",
        "link.png": "path",
        "dangling.png": "file",
        "silent.png": "conversations",
    }
    assert part.samples == 6


def test_a_line_in_another_encoding_and_a_file_in_place_of_a_folder_have_their_rules(
    library: Library, tmp_path: Path
) -> None:
    (tmp_path / "pages").write_bytes(b"a file")
    path = write_jsonl(tmp_path, [record("a", ["pages/1.png"]), record("b")])
    path.write_bytes(path.read_bytes() + '{"id": "é"}\n'.encode("latin-1") + '{"id": "x"}\n'.encode("utf-16"))
    version = library.add(path)
    source = library.open(version)
    rules = [rule_of(lambda at=at: source.read(at))[0] for at in range(version.records) if at != 1]  # type: ignore[misc]
    assert rules == ["file", "json", "json", "json"]
