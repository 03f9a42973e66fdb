"""A record means the same in every container, and what its form lacks is one dead letter."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_datahub.errors import BadRecordError, SourceInvalidError
from polyreme_datahub.operations.decode_images import DecodeParameters, decode
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.sources import text_files
from polyreme_datahub.sources.open import open_source
from polyreme_datahub.sources.types import RawRecord, Source
from tests.unit.datahub.jobs import picture
from tests.unit.datahub.listed_sources import Shelf
from tests.unit.datahub.shards_and_tables import tar_of, write_parquet

USER, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
TURNS = [USER, ANSWER]
SYSTEM = {"role": "system", "content": "S"}
FORMS: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
    "own": ({"conversations": TURNS}, TURNS),
    "LLaVA's": ({"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]}, TURNS),
    "OpenAI's": ({"messages": TURNS}, TURNS),
    "with weights": ({"messages": [{**USER, "weight": 0}, {**ANSWER, "weight": 1}]}, TURNS),
    "parts": (
        {"messages": [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]},
        TURNS,
    ),
    "pairs of turns": ({"texts": [{"user": "Q", "assistant": "A"}]}, TURNS),
    "one conversation": ({"conversation": TURNS}, TURNS),
    "lists by key": ({"conversations": {"from": ["human", "gpt"], "value": ["Q", "A"]}}, TURNS),
    "JSON text": ({"messages": json.dumps(TURNS)}, TURNS),
    "a document": ({"text": "A"}, [ANSWER]),
    "a question": ({"question": "Q", "answer": "A"}, TURNS),
    "Alpaca's": ({"instruction": "Q", "input": "", "output": "A"}, TURNS),
    "Alpaca's with input": ({"instruction": "Q", "input": "x", "output": "A"}, [{**USER, "content": "Q\nx"}, ANSWER]),
    "a prompt": ({"prompt": "Q", "completion": "A"}, TURNS),
    "a prompt of turns": ({"prompt": [USER], "completion": [ANSWER]}, TURNS),
    "system": ({"system": "S", "conversations": TURNS}, [SYSTEM, *TURNS]),
    "other fields": ({"text": "A", "source": "web", "score": 0.5}, [ANSWER]),
    "null fields": ({"images": None, "masks": None, "id": None, "boxes": None, "conversations": TURNS}, TURNS),
}


def cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def rows_as_text(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows([{name: cell(value) for name, value in row.items()} for row in rows])
    return text.getvalue()


CONTAINERS: dict[str, Callable[[Path, Mapping[str, Any]], Any]] = {
    "d.jsonl": lambda path, row: path.write_text(json.dumps(row)),
    "D.NDJSON": lambda path, row: path.write_text(json.dumps(row) + "\r\n"),
    "d.json": lambda path, row: path.write_text(json.dumps([row], indent=1)),
    "D.CSV": lambda path, row: path.write_text("\ufeff" + rows_as_text([row])),
    "d.parquet": lambda path, row: write_parquet(path, {name: [value] for name, value in row.items()}),
    "D.TAR": lambda path, row: path.write_bytes(tar_of([("a.json", json.dumps(row).encode())])),
}


class Library(Shelf):
    """A shelf for lines."""

    def lines(self, folder: Path, *rows: Any) -> Source:
        (folder / "d.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return self.add(folder / "d.jsonl")


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return Library(tmp_path / "objects")


def rule_of(read: Callable[[], RawRecord]) -> tuple[str, str]:
    with pytest.raises(BadRecordError) as bad:
        read()
    return bad.value.rule, bad.value.message


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_form_means_the_same_in_every_container(library: Library, tmp_path: Path, container: str) -> None:
    for form, (fields, turns) in FORMS.items():
        CONTAINERS[container](tmp_path / container, fields)
        read = library.add(tmp_path / container).read(0)
        assert read.content["conversations"] == turns, form
        assert read.content["images"] == []


@pytest.mark.parametrize("container", CONTAINERS)
def test_ids_and_shapes_mean_the_same_in_every_container(library: Library, tmp_path: Path, container: str) -> None:
    (tmp_path / "a.png").write_bytes(picture(8, 8))
    boxes = [{"image": 0, "box": [1, 2, 3, 4], "label": ""}]
    fields = {"id": 7, "text": "A", "image": "a.png", "boxes": boxes, "mirrorSafe": True}
    if container == "D.TAR":
        members = [("a.json", json.dumps(fields).encode()), ("a.png", picture(8, 8))]
        (tmp_path / container).write_bytes(tar_of(members))
    else:
        CONTAINERS[container](tmp_path / container, fields)
    read = library.add(tmp_path / container).read(0)
    assert (read.sample_id, read.content["boxes"], read.content["mirrorSafe"]) == ("7", boxes, True)
    assert read.blobs == [picture(8, 8)]


BAD: dict[str, tuple[dict[str, Any] | str, str, str]] = {
    "a field twice": ('{"id": "a", "id": "b", "text": "A"}', "json", "line 1: the field 'id' is there twice"),
    "twice inside": ('{"conversations": [{"role": "user", "role": "assistant", "content": "A"}]}', "json", "'role'"),
    "white space": ({"conversations": [USER, {**ANSWER, "content": " \n"}]}, "conversations", "no assistant turn"),
    "no text": ({"txt": "A"}, "text", "line 1: no text, expected conversations, messages"),
    "images twice": ({"text": "A", "image": "a.png", "images": ["b.png"]}, "images", "by 'images' and 'image'"),
    "a null image": ({"caption": "A", "image": None}, "image", "'caption': its image is null"),
    "a null question": ({"question": "Q", "answer": "A", "image": None}, "image", "'question': its image is null"),
    "an unknown role": ({"messages": [{"role": "tool", "content": "A"}]}, "conversations", "'role': 'tool'"),
    "two systems": ({"system": "S", "messages": [SYSTEM, *TURNS]}, "conversations", "no system turn beside it"),
    "unequal lists": ({"messages": {"role": ["user"], "content": []}}, "conversations", "expected a list of turns"),
    "a true id": ({"id": True, "text": "A"}, "id", "id is True"),
    "half an id": ({"id": 0.5, "text": "A"}, "id", "id is 0.5"),
    "a URL": ({"text": "A", "image": "https://example.com/a.png"}, "path", "URLs are never fetched"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_a_form_lacks_is_one_dead_letter(library: Library, tmp_path: Path, what: str) -> None:
    row, rule, words = BAD[what]
    source = library.lines(tmp_path, row, {"text": "fine"})
    seen, message = rule_of(lambda: source.read(0))
    assert (seen, words in message) == (rule, True), message
    assert source.read(1).content["conversations"][0]["content"] == "fine"
    assert library.looked.startswith("2 records looked at: 1 text without images, 1 unusable, as ")


def test_parts_of_turns_name_images_in_their_order(library: Library, tmp_path: Path) -> None:
    for at in range(2):
        (tmp_path / f"{at}.png").write_bytes(picture(8, 8, seed=at))
    parts = [{"type": "image_url", "image_url": {"url": "1.png"}}, {"type": "image", "image": "0.png"}]
    read = library.lines(tmp_path, {"messages": [{"role": "user", "content": parts}, ANSWER]}).read(0)
    assert read.blobs == [picture(8, 8, seed=1), picture(8, 8, seed=0)]
    assert read.content["conversations"][0]["content"] == "<image><image>"


def test_a_box_of_coco_is_converted_and_one_outside_of_its_image_is_a_dead_letter(
    library: Library, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(picture(200, 80))
    boxes: list[Mapping[str, Any]] = [
        {"bbox": [10, 20, 30, 40]},
        {"box": [10, 20, 202, 81]},
        {"box": [10, 20, 203, 40]},
        {"box": [300, 20, 340, 40]},
        {"box": [30, 20, 10, 40]},
    ]
    source = library.lines(tmp_path, *({"text": "A", "image": "a.png", "boxes": [box]} for box in boxes))

    def decoded(at: int) -> Any:
        read = source.read(at)
        blobs = {blob.digest: blob for blob in map(Blob, read.blobs)}
        return decode(Value(data=read.content, blobs=blobs), DecodeParameters()).data["boxes"]

    assert decoded(0) == [{"image": 0, "box": [10, 20, 40, 60], "label": ""}]
    assert decoded(1)[0]["box"] == [10, 20, 202, 81], "a hundredth, or a pixel, is cut off where it is written"
    for at, words in ((2, "(203, 40), its image is 200 x 80"), (3, "(300, 20)"), (4, "or bbox: [left, top, width")):
        with pytest.raises(BadRecordError) as bad:
            decoded(at)
        assert (bad.value.rule, words in bad.value.message) == ("boxes", True), bad.value.message


def test_a_version_keeps_the_rules_under_which_it_was_registered(library: Library, tmp_path: Path) -> None:
    blank = {"conversations": [USER, {**ANSWER, "content": " "}], "id": "blank"}
    library.lines(
        tmp_path,
        blank,
        '{"id": "a", "id": "b", "conversations": [{"role": "assistant", "content": "A"}]}',
        blank | {"id": "c", "conversations": TURNS},
    )
    description = {name: value for name, value in library.description.items() if name != "rules"}
    old = open_source(description, library.lakehouse)
    assert [old.read(at).sample_id for at in range(3)] == ["blank", "b", "c"]
    write_parquet(tmp_path / "d.parquet", {"text": ["A"], "system": ["S"]})
    rows = library.add(tmp_path / "d.parquet")
    assert [turn["role"] for turn in rows.read(0).content["conversations"]] == ["system", "assistant"]


def test_an_image_that_an_older_release_did_not_list_is_a_dead_letter_that_says_so(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(picture(8, 8))
    monkeypatch.setattr("polyreme_datahub.sources.describe.named_files", lambda _fields: [])
    source = library.lines(tmp_path, {"text": "A", "image": "a.png"}, {"text": "fine"})
    assert rule_of(lambda: source.read(0)) == ("file", "file was not listed: 'a.png'; register the dataset again")


@pytest.mark.parametrize("first", ["images", "texts"])
def test_members_of_a_key_that_lie_apart_are_one_sample(library: Library, tmp_path: Path, first: str) -> None:
    images = [(f"{name}.png", picture(8, 8, seed=at)) for at, name in enumerate("bac")]
    texts = [(f"{name}.txt", f"Text {name}.".encode()) for name in "cab"]
    members = [*images, *texts] if first == "images" else [*texts, *images]
    (tmp_path / "s.tar").write_bytes(tar_of(members))
    source = library.add(tmp_path / "s.tar")
    read = [source.read(at) for at in range(3)]
    assert [one.sample_id[-1] for one in read] == [name[0] for name, _ in members[:3]], "in the order of first members"
    by_name = {name[0]: data for name, data in images}
    assert [(one.content["conversations"][-1]["content"], *one.blobs) for one in read] == [
        (f"Text {one.sample_id[-1]}.", by_name[one.sample_id[-1]]) for one in read
    ]


def test_of_a_cut_shard_whose_members_lie_apart_no_half_is_learned(library: Library, tmp_path: Path) -> None:
    members = [*((f"{at}.txt", b"Text.") for at in range(3)), *((f"{at}.png", picture(8, 8)) for at in range(3))]
    whole = tar_of(members)
    (tmp_path / "set").mkdir()
    (tmp_path / "set/good.tar").write_bytes(tar_of([("good.txt", b"Good.")]))
    (tmp_path / "set/s.tar").write_bytes(whole[: whole.index(picture(8, 8)[:8]) + 1024])
    source = library.add(tmp_path / "set")
    assert [rule_of(lambda at=at: source.read(at))[0] for at in (1, 2, 3)] == ["tar"] * 3  # type: ignore[misc]


def test_files_of_macos_are_no_records_and_texts_of_any_case_are_found(library: Library, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for name in ("A.PNG", "._A.PNG", "b.png"):
        (tmp_path / "set" / name).write_bytes(picture(8, 8))
    for name in ("A.TXT", "._A.TXT", "b.txt", "notes.md"):
        (tmp_path / "set" / name).write_text(f"Text of {name}")
    source = library.add(tmp_path / "set")
    assert [source.read(at).content["conversations"][1]["content"] for at in range(2)] == [
        "Text of A.TXT",
        "Text of b.txt",
    ]
    assert library.records == 2
    assert library.found == "2 images, 3 other files (._* of macOS, .md), not read"


def test_a_table_of_views_dictionaries_and_null_columns_is_read(library: Library, tmp_path: Path) -> None:
    columns = {
        "text": pyarrow.array(["A", "B"], pyarrow.string_view()),
        "image": pyarrow.nulls(2),
        "id": pyarrow.array(["x", "y"]).dictionary_encode(),
    }
    with pytest.raises(SourceInvalidError, match="'text': its image is null"):
        library.add(write_parquet(tmp_path / "d.parquet", columns))
    images = {"images": pyarrow.array([[picture(8, 8)]] * 2, pyarrow.list_(pyarrow.binary_view()))}
    source = library.add(
        write_parquet(tmp_path / "e.parquet", {"text": columns["text"], "id": columns["id"], **images})
    )
    assert [source.read(at).sample_id for at in range(2)] == ["x", "y"]
    assert source.read(1).blobs == [picture(8, 8)]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(JSON_VALUES, max_size=6), st.sampled_from([None, 2]), st.booleans(), st.integers(0, 2**16))
def test_an_array_is_cut_into_its_elements_and_a_part_of_it_says_where_it_ends(
    values: list[Any], indent: int | None, ascii_only: bool, cut: int
) -> None:
    data = json.dumps(values, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    elements = list(text_files.records_of(io.BytesIO(data), text_files.ARRAY, name="d.json"))
    assert [element.data for element in elements] == [data[one.start : one.start + one.size] for one in elements]
    assert [json.loads(element.data.decode("utf-8", "surrogatepass")) for element in elements] == values
    part = data[: 1 + cut % (len(data) - 1)]
    found_of_part = list(text_files.records_of(io.BytesIO(part), text_files.ARRAY, name="d.json"))
    assert "cut off" in found_of_part[-1].problem
    assert [one.data for one in found_of_part[:-1]] == [one.data for one in elements[: len(found_of_part) - 1]]
