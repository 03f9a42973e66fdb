"""Files that ``datasets``, pandas, polars, webdataset and Energon wrote are read, and what is left out is reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.sources.types import RawRecord
from tests.unit.datahub.listed_sources import Shelf

WRITTEN = Path(__file__).parent / "written"
CONVERSATIONS, PLAIN, TEXTS = "conversations with images", "conversations without images", "images with texts"
PREFERENCES, PLAIN_PREFERENCES = "preferences with images", "preferences without images"
FILES: dict[str, tuple[int, str, str]] = {
    "datasets-saved": (3, CONVERSATIONS, ""),
    "datasets-image.parquet": (3, CONVERSATIONS, ""),
    "datasets-parts.parquet": (3, CONVERSATIONS, ""),
    "datasets-sequence.parquet": (3, PLAIN, "source"),
    "datasets-sequence.json": (3, PLAIN, "source"),
    "datasets-pairs.csv": (3, PLAIN, ""),
    "datasets-pairs.jsonl": (3, PLAIN, ""),
    "pandas-array.json": (3, CONVERSATIONS, "split"),
    "pandas-lines.jsonl": (3, CONVERSATIONS, "split"),
    "pandas-paths.parquet": (3, CONVERSATIONS, "split"),
    "pandas-text.csv": (3, CONVERSATIONS, "split"),
    "pandas-text.parquet": (3, CONVERSATIONS, "split"),
    "pandas-categories.parquet": (3, CONVERSATIONS, "score"),
    "polars-binary.parquet": (3, TEXTS, "kind"),
    "polars-alpaca.ndjson": (3, PLAIN, ""),
    "polars-rows.tsv": (3, TEXTS, ""),
    "webdataset.tar": (3, CONVERSATIONS, "source"),
    "webdataset-caption.tar": (3, TEXTS, "caption, url, width"),
    "imagefolder-jsonl": (2, TEXTS, ""),
    "imagefolder-csv": (2, TEXTS, ""),
    "sharegpt.json": (3, PLAIN, ""),
    "openai.jsonl": (3, CONVERSATIONS, "messages[].weight"),
    "energon/shard_000000.tar": (2, CONVERSATIONS, ""),
    "datasets-rlaif.parquet": (3, PREFERENCES, "ds_name"),
    "datasets-trl": (3, PREFERENCES, ""),
    "datasets-ultrafeedback.jsonl": (3, PLAIN_PREFERENCES, "prompt, prompt_id, score_chosen, score_rejected"),
    "datasets-hh.parquet": (3, PLAIN_PREFERENCES, ""),
    "pandas-swift.jsonl": (3, PREFERENCES, ""),
    "pandas-preferences.csv": (3, PLAIN_PREFERENCES, "score"),
}


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "objects")


def answers(records: list[RawRecord]) -> list[tuple[str, int]]:
    return [(one.content["conversations"][-1]["content"], len(one.blobs)) for one in records]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_library_is_read_whole_and_what_is_not_read_is_said(shelf: Shelf, name: str) -> None:
    records, kind, unread = FILES[name]
    images = 0 if "without" in kind else 1
    read = shelf.read(WRITTEN / name)
    assert answers(read) == [(f"Picture {at}.", images) for at in range(records)]
    assert [one.content.get("rejected") for one in read] == ["A dog." if "preferences" in kind else None] * records
    said = f"{records} records looked at: {records} {kind}" + (f"; not read: {unread}" if unread else "")
    assert shelf.looked == said


def test_conversations_of_llava_with_and_without_image_lie_in_one_array(shelf: Shelf) -> None:
    assert [images for _, images in answers(shelf.read(WRITTEN / "llava.json"))] == [1, 1, 1, 0]
    assert shelf.looked == ("4 records looked at: 3 conversations with images, 1 conversation without images")


def test_an_image_that_metadata_does_not_name_and_a_member_that_is_not_read_are_counted(shelf: Shelf) -> None:
    shelf.add(WRITTEN / "imagefolder-csv")
    assert shelf.found == "2 records, 2 images, 1 image that metadata.csv does not name, not read"
    shelf.add(WRITTEN / "webdataset.tar")
    assert shelf.found == "3 records, 3 images, 3 other files (.cls), not read"


def test_splits_of_energon_are_not_trained_together(shelf: Shelf) -> None:
    with pytest.raises(SourceInvalidError, match=r"holds Energon's splits train, val .*; name the shards of one by a"):
        shelf.add(WRITTEN / "energon")


def test_a_source_without_a_usable_record_is_refused_with_the_first_reason(shelf: Shelf, tmp_path: Path) -> None:
    with pytest.raises(
        SourceInvalidError, match=r"no usable record: 1 were looked at, as line-1 \(id\): id is \{'0': 0"
    ):
        shelf.add(WRITTEN / "pandas-columns.json")
    shutil.copytree(WRITTEN / "pictures", tmp_path / "pictures")
    shutil.copy(WRITTEN / "llava.json", tmp_path)
    with pytest.raises(SourceInvalidError, match=r"no usable record: 3 were looked at, as 0.png \(file\)"):
        shelf.add(tmp_path / "pictures")
    shutil.rmtree(tmp_path / "pictures")
    with pytest.raises(SourceInvalidError, match=r"name the file with its records, as in '.*/llava.json'"):
        shelf.add(tmp_path)
