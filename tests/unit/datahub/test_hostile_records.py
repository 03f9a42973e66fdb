"""Records and files from outside may hold anything: each costs itself at most, never the run."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyreme_datahub.errors import BadRecordError, SourceAwayError, SourceInvalidError
from polyreme_datahub.operations import images
from polyreme_datahub.operations.images import open_upright
from polyreme_datahub.sources import files, records
from polyreme_datahub.sources.files import FolderFiles, FolderSource, JsonlSource, describe_folder
from polyreme_datahub.sources.records import build_record
from tests.unit.datahub.jobs import Home, make_spec, picture, record, write_jsonl
from tests.unit.datahub.listed_sources import Shelf, described


def rule_of(call: Callable[[], object]) -> str:
    with pytest.raises(BadRecordError) as bad:
        call()
    assert bad.value.message.encode()
    return bad.value.rule


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "name", ["../outside.png", "/etc/passwd", "../../etc/passwd", "link.png", "a/../../outside.png"]
)
def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "set"
    (folder / "a").mkdir(parents=True)
    (tmp_path / "outside.png").write_bytes(picture(8, 8))
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    assert rule_of(lambda: build_record(record("x", [name]), files=FolderFiles(folder), default_id="d")) == "file"


@pytest.mark.parametrize("name", ["nul\0.png", "x" * 5000 + ".png", "loop.png", "pipe.png", "a", "", "\ud800.png"])
def test_a_path_to_no_regular_file_is_refused_without_blocking(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "loop.png").symlink_to("loop.png")
    os.mkfifo(tmp_path / "pipe.png")
    assert rule_of(lambda: build_record(record("x", [name]), files=FolderFiles(tmp_path), default_id="d")) == "file"


def test_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "good.png").write_bytes(picture(8, 8))
    (tmp_path / "link.png").symlink_to("good.png")
    assert build_record(record("x", ["link.png"]), files=FolderFiles(tmp_path), default_id="d").blobs == [picture(8, 8)]


def test_a_folder_that_is_away_is_not_the_records_fault(tmp_path: Path) -> None:
    with pytest.raises(SourceAwayError):
        build_record(record("x", ["a.png"]), files=FolderFiles(tmp_path / "unmounted"), default_id="d")


def test_the_files_of_one_record_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORD_BYTES_MAX", 250)
    for name in "abc":
        (tmp_path / f"{name}.png").write_bytes(b"x" * 100)
    assert len(build_record(record("x", ["a.png", "b.png"]), files=FolderFiles(tmp_path), default_id="d").blobs) == 2
    call = lambda: build_record(record("x", ["a.png", "b.png", "c.png"]), files=FolderFiles(tmp_path), default_id="d")
    assert rule_of(call) == "file"


HUGE = "1" + "0" * 400
BOXES = ["0,0,NaN,1", "0,0,1e999,1", "0,0,Infinity,1", f"0,0,{HUGE},1", "true,0,1,1", "2,0,1,1", "0,0,1"]


@pytest.mark.parametrize("box", BOXES)
def test_a_box_is_four_finite_numbers_in_order(tmp_path: Path, box: str) -> None:
    (tmp_path / "a.png").write_bytes(picture(8, 8))
    content = json.loads(f'{{"id":"x","images":["a.png"],"boxes":[{{"image":0,"box":[{box}]}}],"conversations":[]}}')
    content["conversations"] = record("x")["conversations"]
    assert rule_of(lambda: build_record(content, files=FolderFiles(tmp_path), default_id="d")) == "boxes"


CORNERS = [[0, 0], [4, 0], [4, 4]]
SHAPES: list[tuple[dict[str, Any], str, str]] = [
    ({"points": [{"point": [1, 2]}], "polygons": [{"polygon": CORNERS}], "mirrorSafe": True}, "", ""),
    ({"points": [{"point": [1, 2]}]}, "at <point:0>", ""),
    ({}, "no boxes, so <box:7> is text", ""),
    ({"points": [{"point": [1, 2, 3]}]}, "", "points"),
    ({"points": [{"point": [1, float("nan")]}]}, "", "points"),
    ({"points": [{"point": [1, 2], "image": 1}]}, "", "points"),
    ({"polygons": [{"polygon": CORNERS[:2]}]}, "", "polygons"),
    ({"polygons": [{"polygon": [[0, 0]] * 257}]}, "", "polygons"),
    ({"polygons": [{"box": [0, 0, 1, 1]}]}, "", "polygons"),
    ({"points": [{"point": [1, 2]}]}, "at <point:1>", "boxes"),
    ({"points": [{"point": [1, 2]}]}, "at <box:0>", "boxes"),
    ({"points": [{"point": [1, 2]}]}, "<point:0>" * 1001, "boxes"),
    ({"mirrorSafe": "yes"}, "", "fields"),
]


@pytest.mark.parametrize(("fields", "text", "rule"), SHAPES)
def test_points_polygons_and_the_marks_that_name_them_are_checked_at_the_door(
    tmp_path: Path, fields: dict[str, Any], text: str, rule: str
) -> None:
    (tmp_path / "a.png").write_bytes(picture(8, 8))
    content = record("x", ["a.png"], **fields)
    content["conversations"][1]["content"] += text
    call = lambda: build_record(content, files=FolderFiles(tmp_path), default_id="d")
    if rule:
        assert rule_of(call) == rule
    else:
        assert fields.keys() <= call().content.keys()


HOSTILE = [
    "[" * 5000 + "]" * 5000,
    '{"id":"x","conversations":' + "[" * 900 + "]" * 900 + "}",
    '{"id":"x","conversations":[' + '{"role":' * 400 + "1" + "}" * 400 + "]}",
    '{"id":"half","conversations":[{"role":"assistant","content":"\\ud800"}]}',
    '{"id":"\\ud800","conversations":[{"role":"assistant","content":"a"}]}',
    '{"id":"nul\\u0000","conversations":[{"role":"assistant","content":"a"}]}',
    '{"id":"x","id":"y","conversations":[{"role":"assistant","content":"a"}]}',
    '{"id":' + "9" * 6000 + "}",
    '{"id":1,"conversations":NaN}',
    '"text"',
    "\udcff\udcfe",
]


@pytest.mark.slow
def test_every_hostile_line_is_one_dead_letter_and_the_others_are_processed(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    text = "\r\n".join(
        [*HOSTILE, json.dumps(record("good")), json.dumps(record("good")), json.dumps(record("nul\0 text"))]
    )
    (folder / "data.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode("utf-8", "surrogateescape"))
    home = Home(tmp_path / "home")
    home.register("mine", folder / "data.jsonl")
    part = home.process(make_spec(["mine"])).datasets[0]
    letters = {letter.ordinal: letter.rule for letter in part.dead_letters}
    assert sorted(letters) == [*range(len(HOSTILE)), len(HOSTILE) + 1, len(HOSTILE) + 2]
    assert letters[len(HOSTILE) + 1] == letters[len(HOSTILE) + 2] == "id"
    assert "operation" not in letters.values()
    assert part.samples == 1


def test_a_line_feed_more_or_less_at_the_end_is_no_record(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf")
    for text, lines in (("{}\r\n{}\r\n", 2), ("{}\n{}", 2), ("{}\n\n", 1), ("{}", 1)):
        path = tmp_path / "data.jsonl"
        path.write_bytes(text.encode())
        shelf.opened(path)
        assert shelf.records == lines
        assert JsonlSource(described(path))._line(0).strip() == b"{}"


def test_an_empty_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b"")
    with pytest.raises(SourceInvalidError, match="is empty"):
        Shelf(tmp_path / "shelf").opened(tmp_path / "data.jsonl")
    with pytest.raises(SourceInvalidError, match="holds no image"):
        describe_folder(tmp_path)


def test_a_line_longer_than_its_bound_is_one_dead_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LINE_BYTES_MAX", 300)
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    path = write_jsonl(tmp_path, [record("a"), '"' + "x" * 1000 + '"', record("b")])
    source = JsonlSource(described(path))
    assert [source.read(at).sample_id for at in (2, 0)] == ["b", "a"]
    assert rule_of(lambda: source.read(1)) == "line-size"


def test_a_file_that_changes_while_it_is_read_ends_the_run(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, [record("a"), record("b")])
    source = JsonlSource(described(path))
    source.read(0)
    write_jsonl(tmp_path, [record("a"), record("bcd")])
    with pytest.raises(SourceInvalidError, match="changed"):
        source.read(1)


def test_a_caption_outside_the_folder_is_refused_and_names_may_be_any_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret", "utf-8")
    for name in (b"a.png", b"b\xff.png", b"c.png"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(picture(8, 8))
    (folder / "a.txt").symlink_to(tmp_path / "secret.txt")
    (folder / os.fsdecode(b"b\xff.txt")).write_bytes(b"\xef\xbb\xbfA picture.\r\n")
    (folder / "c.txt").write_bytes(b"\xff\xfe")
    source = FolderSource(describe_folder(folder)[0])
    assert rule_of(lambda: source.read(0)) == "file"
    read = source.read(1)
    assert (read.sample_id, read.content["conversations"][1]["content"]) == ("b\\xff.png", "A picture.")
    assert rule_of(lambda: source.read(2)) == "text"


def ramp() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.tile(np.arange(0, 256, 8, dtype=np.uint8), (16, 1))


@pytest.mark.parametrize(
    "kind", ["gray", "deep", "rgb", "rgba", "palette", "gif", "webp", "cmyk", "bmp", "tiff", "deep-tiff"]
)
def test_every_kind_of_picture_has_the_same_shades(kind: str) -> None:
    gray = Image.fromarray(ramp())
    deep = Image.fromarray(ramp().astype(np.uint16) * 257)
    made = {
        "gray": encoded(gray),
        "deep": encoded(deep),
        "rgb": encoded(gray.convert("RGB")),
        "rgba": encoded(gray.convert("RGBA")),
        "palette": encoded(gray.convert("P")),
        "gif": encoded(gray, "GIF"),
        "webp": encoded(gray.convert("RGB"), "WEBP", lossless=True),
        "cmyk": encoded(gray.convert("RGB").convert("CMYK"), "JPEG", quality=100),
        "bmp": encoded(gray, "BMP"),
        "tiff": encoded(gray, "TIFF"),
        "deep-tiff": encoded(deep, "TIFF"),
    }
    shades = np.asarray(open_upright(made[kind]).convert("L")).astype(int)
    assert np.abs(shades - ramp()).max() <= 3
    assert (
        open_upright(made[kind]).mode == ("L" if kind in {"gray", "deep", "bmp", "tiff", "deep-tiff"} else "RGB")
        or kind == "gif"
    )


def test_a_deep_picture_is_turned_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert open_upright(encoded(Image.fromarray(ramp().astype(np.uint16) * 257), exif=exif)).size == (16, 32)


def test_what_is_transparent_lies_on_white() -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert np.asarray(open_upright(encoded(clear))).min() == 255
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    assert np.asarray(open_upright(encoded(palette, transparency=0))).min() == 255


def test_a_picture_that_unpacks_to_too_many_pixels_is_refused_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "PIXELS_MAX", 100)
    assert rule_of(lambda: open_upright(encoded(Image.new("1", (11, 10))))) == "image-size"


def test_floating_point_pixels_are_refused() -> None:
    assert rule_of(lambda: open_upright(encoded(Image.new("F", (8, 8)), "TIFF"))) == "image-depth"


def test_damaged_pictures_are_refused_or_read_and_nothing_else() -> None:
    generator = np.random.default_rng(3)
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP"):
        whole = np.frombuffer(encoded(Image.fromarray(ramp()).convert("RGB"), kind), dtype=np.uint8)
        for _ in range(60):
            spoiled = whole[: generator.integers(1, whole.size + 1)].copy()
            spoiled[generator.integers(0, spoiled.size, size=4)] = generator.integers(0, 256, size=4)
            with contextlib.suppress(BadRecordError):
                assert open_upright(spoiled.tobytes()).mode in {"L", "RGB"}


def test_a_kind_of_picture_that_is_not_named_is_refused() -> None:
    assert rule_of(lambda: open_upright(encoded(Image.fromarray(ramp()), "PPM"))) == "image-format"
