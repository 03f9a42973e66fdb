"""Tar shards, Parquet and datasets of Hugging Face are versions of their content, as files of a folder are."""

from __future__ import annotations

import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from polyreme_datahub.errors import BadRecordError, SourceInvalidError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.registry.datasets import DatasetVersion, find_version
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.sources import found, tables, tar_members
from polyreme_datahub.sources.open import _tree, open_source
from polyreme_datahub.sources.trees import LocalTree
from polyreme_datahub.sources.types import Source
from tests.unit.datahub.jobs import Home, make_spec, picture
from tests.unit.datahub.listed_sources import Shelf
from tests.unit.datahub.shards_and_tables import rows_of, tar_of, write_arrow, write_parquet, write_saved, write_shards


class Library(Home):
    """A home, and what is registered there."""

    def add(self, path: Path | str, name: str = "mine") -> DatasetVersion:
        self.register(name, path)
        database = open_database(self.registry)
        try:
            return find_version(database, name)
        finally:
            database.close()

    def open(self, path: Path | str) -> Source:
        return open_source(self.add(path).source, Lakehouse(open_store(self.objects)))


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "home")


def make_parquet(folder: Path) -> Path:
    for at in range(2):
        write_parquet(folder / f"data/train-{at:05}-of-00002.parquet", rows_of(3 * at, 3))
    return folder


FORMS: dict[str, Callable[[Path], Path]] = {"shards": write_shards, "parquet": make_parquet, "saved": write_saved}


def answers(source: Source, records: Sequence[int]) -> list[tuple[str, str, bytes]]:
    read = [source.read(at) for at in records]
    return [(one.sample_id, one.content["conversations"][-1]["content"], *one.blobs) for one in read]


def letters(library: Library, path: Path | str) -> tuple[list[str], list[tuple[str, str, str]]]:
    """List; return the answers of good records, and id, rule and sentence of bad ones."""
    shelf = Shelf(library.folder / "shelf")
    source = shelf.opened(path)
    good, bad = [], []
    for at in range(shelf.records):
        try:
            good.append(source.read(at).content["conversations"][-1]["content"])
        except BadRecordError as error:
            bad.append((error.sample_id or source.record_id(at), error.rule, error.message))
    return good, bad


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_its_records_in_order_with_ids_that_stay(library: Library, tmp_path: Path, form: str) -> None:
    version = library.add(FORMS[form](tmp_path / "set"))
    source = library.open(tmp_path / "set")
    more = {"saved": ", 3 other files (.arrow, .json), not read"}.get(form, "")
    assert found.sentence(version.source["found"]) == "6 records, 6 images" + more
    seen = answers(source, range(6))
    assert [one[1:] for one in seen] == [(f"Picture {at}.", picture(8, 8, seed=at)) for at in range(6)]
    assert [one[0] for one in seen] == [source.record_id(at) for at in range(6)]
    assert answers(source, [5, 0, 3, 3, 1]) == [seen[at] for at in (5, 0, 3, 3, 1)]
    assert (
        seen[4][0]
        == {
            "shards": "train-00001-of-00002.tar/0004",
            "parquet": "data/train-00001-of-00002.parquet#row=2",
            "saved": "data-00001-of-00002.arrow#row=2",
        }[form]
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_version_is_the_content_of_its_records(library: Library, tmp_path: Path, form: str) -> None:
    first = library.add(FORMS[form](tmp_path / "set"))
    for file in (tmp_path / "set").rglob("*"):
        os.utime(file, ns=(1, 1))
    assert library.add(tmp_path / "set") == first
    shutil.move(tmp_path / "set", tmp_path / "moved")
    assert library.add(tmp_path / "moved").number == 1
    kept = answers(library.open(tmp_path / "moved"), range(3))
    target = max(path for path in (tmp_path / "moved").rglob("*-of-*"))
    match form:
        case "shards":
            target.write_bytes(tar_of([("0003.png", picture(8, 8, seed=99)), ("0003.txt", b"Picture 3.")]))
        case "parquet":
            other = rows_of(3, 3)
            write_parquet(target, other, group_rows=1)
            assert library.add(tmp_path / "moved").number == 1, "row groups are not content"
            write_parquet(target, {**other, "license": ["other"] * 3})
            assert library.add(tmp_path / "moved").number == 1, "columns that are not read are not content"
            write_parquet(target, {**other, "image": rows_of(4, 3)["image"]})
        case _:
            write_arrow(target, {**rows_of(3, 3), "image": rows_of(4, 3)["image"]})
    assert library.add(tmp_path / "moved").number == 2
    assert answers(library.open(tmp_path / "moved"), range(3)) == kept


@pytest.mark.parametrize("how", ["an image", "cut", "gone", "a link outside"])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_changed_since_is_refused_by_name(library: Library, tmp_path: Path, form: str, how: str) -> None:
    source = library.open(FORMS[form](tmp_path / "set"))
    target = max(path for path in (tmp_path / "set").rglob("*-of-*"))
    data, old, new = target.read_bytes(), picture(8, 8, seed=3), picture(8, 8, seed=99)
    match how:
        case "an image" if form == "parquet":
            write_parquet(target, {**rows_of(3, 3), "image": rows_of(4, 3)["image"]})
        case "an image":
            target.write_bytes(data.replace(old[60:80], new[60:80]))
        case "cut":
            target.write_bytes(data[: len(data) // 20])
        case _:
            target.unlink()
            if how != "gone":
                target.symlink_to("/etc/passwd")
    with pytest.raises(SourceInvalidError, match=rf"file changed since it was registered: .*{target.name}.*; register"):
        source.read(3)
    assert source.read(0).content["conversations"][-1]["content"] == "Picture 0."


def member(name: str, kind: bytes, **more: Any) -> bytes:
    """Return the header of a member that is no file."""
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in more.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT)


GOOD = [("good.png", picture(8, 8)), ("good.txt", b"Good.")]
IMAGE = picture(8, 8, seed=1)
BAD_SAMPLES: dict[str, tuple[list[tuple[str, bytes]], str, str]] = {
    "path traversal": ([("../../a.png", IMAGE), ("../../a.txt", b"x")], "path", "'..' part"),
    "absolute": ([("/etc/a.png", IMAGE), ("/etc/a.txt", b"x")], "path", "absolute"),
    "no text": ([("a.png", IMAGE)], "text", "no text, expected conversations, messages"),
    "null text": ([("a.png", IMAGE), ("a.json", b'{"caption": null}')], "text", "no text"),
    "text of another type": ([("a.png", IMAGE), ("a.json", b'{"caption": 7}')], "text", "'caption': 7, expected text"),
    "latin-1": ([("a.png", IMAGE), ("a.txt", b"caf\xe9")], "text", "a.txt: text is not UTF-8 at byte 3"),
    "not JSON": ([("a.png", IMAGE), ("a.json", b"{")], "json", "a.json is not JSON"),
    "JSON of another type": ([("a.png", IMAGE), ("a.json", b"7")], "fields", "int, expected an object"),
    "a turn of no form": (
        [("a.json", b'{"messages": [{"role": "user"}]}')],
        "conversations",
        "turn 1: {'role': 'user'}",
    ),
    "an unknown role": (
        [("a.json", b'{"conversations": [{"from": "x", "value": "y"}]}')],
        "conversations",
        "'role': 'x'",
    ),
    "other members": ([("a.cls", b"1"), ("a.npy", b"2")], "member", "its members end in .cls, .npy, expected an image"),
    "a member twice": ([("a.png", IMAGE), ("a.png", IMAGE), ("a.txt", b"x")], "member", "the member 'a.png' twice"),
    "two texts": ([("a.png", IMAGE), ("a.txt", b"x"), ("a.2.txt", b"x")], "member", "two texts"),
    "too many members": ([(f"a.{at}.png", b"") for at in range(200)], "member", "more than 128 members"),
    "marks without images": ([("a.txt", b"<image> and <image>"), ("a.png", IMAGE)], "images", "2 <image> marks, 1"),
}


@pytest.mark.parametrize("what", BAD_SAMPLES)
def test_a_bad_sample_of_a_shard_is_one_dead_letter_that_names_shard_member_and_rule(
    library: Library, tmp_path: Path, what: str
) -> None:
    members, rule, words = BAD_SAMPLES[what]
    (tmp_path / "s.tar").write_bytes(tar_of([*members, *GOOD]))
    good, bad = letters(library, tmp_path / "s.tar")
    assert good == ["Good."]
    assert [(one[1], one[0].startswith("s.tar/"), words in one[2]) for one in bad] == [(rule, True, True)], bad


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (member("a.png", tarfile.SYMTYPE, linkname="/etc/passwd"), "a link, expected a regular file"),
        (member("a.png", tarfile.LNKTYPE, linkname="good.png"), "a link, expected a regular file"),
        (member("a.png", tarfile.FIFOTYPE), "a pipe"),
        (member("a.png", tarfile.CHRTYPE), "a device"),
    ],
)
def test_a_member_that_is_no_regular_file_is_never_followed(
    library: Library, tmp_path: Path, header: bytes, words: str
) -> None:
    (tmp_path / "s.tar").write_bytes(header + tar_of(GOOD))
    good, bad = letters(library, tmp_path / "s.tar")
    assert (good, [one[:2] for one in bad]) == (["Good."], [("s.tar/a", "member")])
    assert words in bad[0][2]


def test_a_cut_shard_never_loses_a_sample_without_a_dead_letter(library: Library, tmp_path: Path) -> None:
    whole = (write_shards(tmp_path / "set", shards=1) / "train-00000-of-00001.tar").read_bytes()
    end = whole.rindex(b"Picture 2.") + tarfile.BLOCKSIZE
    for size in (0, 511, 512, 700, 1024, 1536, 2048, 2560, end - 512, end - 100, end):
        (tmp_path / "s.tar").write_bytes(whole[:size])
        good, bad = letters(library, tmp_path / "s.tar")
        assert good == [f"Picture {at}." for at in range(len(good))]
        assert len(good) < 3, size
        assert [one[1] for one in bad] == ["tar"], (size, bad)
        assert bad[0][0].startswith("s.tar"), bad
    (tmp_path / "s.tar").write_bytes(whole[: end + 512])
    assert letters(library, tmp_path / "s.tar") == ([f"Picture {at}." for at in range(3)], [])


@pytest.mark.parametrize("value", [b"\xff" * 12, b"\x80" + b"\xff" * 11])
def test_damaged_headers_end_a_shard_with_a_dead_letter_and_no_loop(
    library: Library, tmp_path: Path, value: bytes
) -> None:
    whole = bytearray((write_shards(tmp_path / "set", shards=1) / "train-00000-of-00001.tar").read_bytes())
    second = bytes(whole).index(b"0001.png")
    whole[second + 124 : second + 136] = value
    whole[second + 148 : second + 156] = b"        "
    whole[second + 148 : second + 156] = b"%06o\0 " % sum(whole[second : second + 512])
    (tmp_path / "s.tar").write_bytes(whole)
    good, bad = letters(library, tmp_path / "s.tar")
    assert good in ([], ["Picture 0."])
    assert [one[1] for one in bad] == ["tar"]


class Reads(io.BytesIO):
    """A file that keeps the size of its largest read."""

    largest = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.largest = max(self.largest, len(data))
        return data


def test_a_shard_is_read_by_blocks_and_a_huge_member_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Reads(tar_of([("a.png", bytes(5 * 2**20)), ("a.txt", b"x"), *GOOD]))
    assert [len(sample) for sample in tar_members.samples_of(large, "s.tar", "", left=[])] == [2, 2]
    assert large.largest == tar_members.BLOCK_BYTES
    monkeypatch.setattr(tar_members, "IMAGE_BYTES_MAX", 2**20)
    large.seek(0)
    large.largest = 0
    samples = list(tar_members.samples_of(large, "s.tar", "", left=[]))
    assert [sample[0].rule for sample in samples] == ["file", ""]
    assert "'a.png' can't be read, it has 5242880 bytes, expected at most 1048576" in samples[0][0].problem
    assert large.largest < 2**17
    header = member("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=2**33)
    bomb = Reads(header + tar_of(GOOD))
    assert [sample[0].rule for sample in tar_members.samples_of(bomb, "s.tar", "", left=[])] == ["tar"]
    assert bomb.largest < 2**17


def test_a_sample_has_several_images_a_conversation_and_shapes(library: Library, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "<image><image>Which is at <box:0>?"}, {"role": "assistant", "content": "B."}]
    sample = {
        "id": 17,
        "url": "https://example.com/is/never/fetched",
        "conversations": turns,
        "boxes": [{"image": 0, "box": [1, 2, 3, 4]}],
        "mirrorSafe": False,
    }
    members = [(f"./a/b.{at}.png", picture(8, 8, seed=at)) for at in (10, 2)]
    members += [("./a/b.json", json.dumps(sample).encode()), ("./a/b.txt", b"Not this."), ("./.DS_Store", b"x")]
    (tmp_path / "s.tar").write_bytes(tar_of(members))
    read = library.open(tmp_path / "s.tar").read(0)
    assert (read.sample_id, read.content["conversations"], read.content["mirrorSafe"]) == ("17", turns, False)
    assert read.blobs == [picture(8, 8, seed=2), picture(8, 8, seed=10)]
    assert read.content["boxes"] == [{"image": 0, "box": [1, 2, 3, 4], "label": ""}]


ROWS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "text": ({"text": ["A document."]}, ["A document."]),
    "caption": ({"image": [picture(8, 8)], "caption": [" A picture.\n"]}, ["A picture."]),
    "roles": (
        {"conversations": [[{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]]},
        ["Q", "A"],
    ),
    "pairs": (
        {"images": [[picture(8, 8)]], "texts": [[{"user": "Q", "assistant": "A", "source": "s"}]]},
        ["Q", "A"],
    ),
    "parts": (
        {
            "image": [picture(8, 8)],
            "messages": [
                [
                    {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "Q"}]},
                    {"role": "assistant", "content": [{"type": "text", "text": "A"}]},
                ]
            ],
        },
        ["<image>Q", "A"],
    ),
}


@pytest.mark.parametrize("form", ROWS)
def test_known_forms_of_rows_become_conversations(library: Library, tmp_path: Path, form: str) -> None:
    columns, expected = ROWS[form]
    source = library.open(write_parquet(tmp_path / "rows.parquet", {**columns, "id": [7]}))
    read = source.read(0)
    texts = [turn["content"] for turn in read.content["conversations"]]
    assert texts == (["Describe the image.", *expected] if form == "caption" else expected)
    assert (read.sample_id, len(read.blobs)) == ("7", len(columns.keys() & {"image", "images"}))


def test_a_bad_row_is_one_dead_letter_that_names_file_row_column_and_rule(library: Library, tmp_path: Path) -> None:
    latin = pyarrow.array([b"fine", b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    texts = pyarrow.concat_arrays([latin, pyarrow.array([None, " ", "last", "path"], pyarrow.string())])
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    image = {"bytes": picture(8, 8), "path": None}
    images = pyarrow.array([image, image, None, image, None, {"bytes": None, "path": "/etc/passwd"}], kind)
    write_parquet(tmp_path / "r.parquet", {"caption": texts, "image": images})
    good, bad = letters(library, tmp_path / "r.parquet")
    assert good == ["fine"]
    assert [(*one[:2], one[2].partition(", expected conversations")[0]) for one in bad] == [
        ("r.parquet#row=2", "text", "r.parquet, row 2, 'caption': text is not UTF-8 at byte 3"),
        ("r.parquet#row=3", "text", "r.parquet, row 3: no text"),
        ("r.parquet#row=4", "text", "r.parquet, row 4, 'caption': ' ', expected text"),
        (
            "r.parquet#row=5",
            "image",
            "r.parquet, row 5, 'caption': its image is null; leave the field out of texts without image",
        ),
        (
            "r.parquet#row=6",
            "path",
            "file can't be read: '/etc/passwd', the path is absolute; write it relative to the dataset's folder",
        ),
    ]


def test_a_huge_image_of_a_row_is_a_dead_letter(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polyreme_datahub.sources.listed_tables.IMAGE_BYTES_MAX", 1000)
    write_parquet(tmp_path / "r.parquet", {"text": ["a", "b"], "image": [bytes(1001), b"x"]})
    good, bad = letters(library, tmp_path / "r.parquet")
    assert (good, [one[1:] for one in bad]) == (
        ["b"],
        [("file", "r.parquet, row 1, 'image': 1001 bytes, expected at most 1000")],
    )


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"prompt": ["a"], "image": [b"x"]}, "has the columns prompt, image, expected one of conversations, messages"),
        ({"text": [3]}, "column 'text' is int64, expected string"),
        ({"messages": [7]}, "column 'messages' is int64, expected a list of turns, or JSON text of one"),
        ({"text": ["a"], "image": [7]}, "column 'image' is int64, expected binary, struct<bytes"),
        ({"text": ["a"], "image": [b"x"], "images": [[b"x"]]}, "two columns 'images' and 'image'"),
        ({"text": ["a"], "id": [True]}, "column 'id' is bool, expected string or integer"),
    ],
)
def test_columns_that_are_missing_or_of_another_type_are_refused_at_the_door(
    library: Library, tmp_path: Path, columns: dict[str, Any], words: str
) -> None:
    for path in (write_parquet(tmp_path / "p/r.parquet", columns), write_arrow(tmp_path / "a/r.arrow", columns)):
        with pytest.raises(SourceInvalidError) as refused:
            library.add(path)
        assert f"dataset file {path.name} " in refused.value.message
        assert words in refused.value.message


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_damage_of_a_table_is_a_dead_letter_and_what_is_whole_is_read(
    library: Library, tmp_path: Path, form: str
) -> None:
    write = write_parquet if form == "parquet" else write_arrow
    path = write(tmp_path / f"set/b.{form}", rows_of(0, 6))
    write(tmp_path / f"set/a.{form}", rows_of(8, 1))
    whole = path.read_bytes()
    for size in range(0, len(whole), 389):
        path.write_bytes(whole[:size])
        good, bad = letters(library, tmp_path / "set")
        assert good == ["Picture 8.", *(f"Picture {at}." for at in range(len(good) - 1))]
        assert [one[1] for one in bad] == ["table"], (size, bad)
        assert bad[0][0].startswith(f"b.{form}")
    if form == "arrow":
        path.write_bytes(whole.replace(b"license", b"\xfficense"))
        assert [one[1] for one in letters(library, path)[1]] == ["table"], "a name of a column is not UTF-8"
    if form == "parquet":
        column = pyarrow.parquet.ParquetFile(path.parent / "a.parquet").metadata.row_group(0).column(0)
        assert column.path_in_schema == "image.bytes"
        path.write_bytes(whole)
        at = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
        path.write_bytes(whole[:at] + b"\xff" * 16 + whole[at + 16 :])
        good, bad = letters(library, path)
        assert good == [f"Picture {at}." for at in (0, 1, 4, 5)]
        assert [one[:2] for one in bad] == [("b.parquet#row=3", "table")]


def test_a_row_group_is_read_by_a_few_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BATCH_BYTES", 300_000)
    path = write_parquet(
        tmp_path / "r.parquet", {"text": ["x"] * 40, "image": [os.urandom(50_000) for _ in range(40)]}, group_rows=40
    )
    with path.open("rb") as file:
        table = tables.open_table(file, path.name)
        sizes = [batch.num_rows for batch in table.batches(0, tables.columns_of(table.schema, file="r"))]
    assert sum(sizes) == 40
    assert max(sizes) <= 6


def test_a_folder_of_two_forms_or_splits_is_refused_with_what_to_name(library: Library, tmp_path: Path) -> None:
    def refused(path: Path | str) -> str:
        with pytest.raises(SourceInvalidError) as error:
            library.add(path)
        return error.value.message

    folder = make_parquet(tmp_path / "set")
    write_parquet(folder / "data/test-00000-of-00001.parquet", rows_of(7, 1))
    assert "holds the splits test, train; name the files of one, as in" in refused(folder)
    assert refused(folder).endswith("/set/data/train-*.parquet'")
    assert library.add(f"{folder}/data/train-*.parquet").records == 6
    assert library.add(f"{folder}/data/test-*.parquet").records == 1
    assert "no shards or tables" in refused(f"{folder}/data/valid-*.parquet")
    (folder / "data/a.png").write_bytes(picture(8, 8))
    assert "holds files of 2 forms, such as data/a.png and data/" in refused(folder)
    saved = tmp_path / "dict"
    for split in ("train", "test"):
        write_saved(saved / split)
    assert refused(saved).endswith(f"name the files of one, as in '{saved}/train'")
    assert library.add(saved / "train").records == 6
    (saved / "train/data-00001-of-00002.arrow").unlink()
    assert "state.json names 'data-00001-of-00002.arrow', which is not there" in refused(saved / "train")
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/s.tar.gz").write_bytes(b"\x1f\x8b")
    assert "holds a compressed shard: s.tar.gz" in refused(tmp_path / "packed")
    assert "no such file" in refused(tmp_path / "gone.parquet")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_job_trains_on_every_form_and_a_second_run_computes_nothing(
    library: Library, tmp_path: Path, form: str
) -> None:
    library.add(FORMS[form](tmp_path / "set"))
    first, second = (library.process(make_spec(["mine"])).datasets[0] for _ in range(2))
    assert (first.samples, first.dead_letters) == (6, ())
    assert [count.hits for count in second.operations] == [6] * 5
    assert second.manifest == first.manifest


def test_a_file_at_the_root_of_the_machine_is_read_from_there() -> None:
    tree = _tree({"kind": "jsonl", "path": "/etc.jsonl"})
    assert isinstance(tree, LocalTree)
    assert tree._root == Path("/")
