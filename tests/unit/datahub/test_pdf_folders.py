"""A folder of PDFs: each page is a record, and a document that can't be opened is one dead letter."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from polyreme_datahub.errors import BadRecordError, SourceInvalidError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.recipes.recipe import parse_recipe
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import find_version
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.flow_run import run_flow
from polyreme_datahub.runner.walk import Walk
from polyreme_datahub.sources.found import sentence
from polyreme_datahub.sources.open import open_source
from tests.unit.datahub.jobs import Home, make_spec, picture
from tests.unit.datahub.test_pdf_pages import document, locked

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, data in {"a.pdf": document(), "B.PDF": locked(), "c.pdf": b"%PDF-1.4 no", "d.pdf": b""}.items():
        (folder / name).write_bytes(data)
    (folder / "e.png").write_bytes(picture(20, 20))
    (folder / "e.txt").write_text("A picture.")
    return folder


def test_pages_are_records_and_a_locked_document_is_one_dead_letter(tmp_path: Path, folder: Path) -> None:
    home = Home(tmp_path / "home")
    home.register("pages", folder)
    database, lakehouse = open_database(home.registry), Lakehouse(open_store(home.objects))
    try:
        version = find_version(database, "pages")
        assert version.records == 6
        assert sentence(version.source["found"]) == (
            "1 image, 2 pages of 1 PDF, 3 files that can't be read that will be dead letters"
        )
        source = open_source(version.source, lakehouse)
        names = [source.record_id(at) for at in range(6)]
        assert names == ["B.PDF", "a.pdf#page=1", "a.pdf#page=2", "c.pdf", "d.pdf", "e.png"]
        read = source.read(2)
        assert (read.content["page"], [len(blob) for blob in read.blobs]) == (1, [len(document())])
        context = RunContext(
            database=database,
            lakehouse=lakehouse,
            owner="pages",
            now_s=time.time,
            steady_s=time.monotonic,
            workers=1,
        )
        recipe = parse_recipe({"version": 1, "operations": ["pdf-pages", "decode"]})
        flow = Flow(recipe=recipe, versions={version.id: version})
        run_flow(context, flow)
        walk = Walk(database, lakehouse, constants={})
        through = [one.sample_id for one in walk.samples(version, recipe.steps, values_of=())]
        assert through == ["a.pdf#page=1", "a.pdf#page=2", "e.png"]
        letters = results.letters_between(database, version.id, first=0, count=6)
        rules = {letter.sample_id: letter.rule for letter in letters}
        assert rules == {"B.PDF": "pdf-password", "c.pdf": "pdf", "d.pdf": "empty"}
        assert any("B.PDF" in letter.error and "password" in letter.error for letter in letters)
    finally:
        database.close()


def test_a_document_that_changed_since_ends_the_run(tmp_path: Path, folder: Path) -> None:
    home = Home(tmp_path / "home")
    home.register("pages", folder)
    (folder / "a.pdf").write_bytes(document() + b"\n")
    with pytest.raises(SourceInvalidError, match=r"a\.pdf"):
        home.process(make_spec(["pages"]))


def test_a_job_whose_recipe_renders_no_pages_says_so(tmp_path: Path, folder: Path) -> None:
    home = Home(tmp_path / "home")
    home.register("pages", folder)
    part = home.process(make_spec(["pages"])).datasets[0]
    letters = {letter.sample_id: letter for letter in part.dead_letters}
    assert letters["a.pdf#page=1"].rule == "pdf"
    assert "pdf-pages" in letters["a.pdf#page=1"].error
    assert part.samples == 1


def test_pages_of_a_document_are_read_from_one_copy(tmp_path: Path, folder: Path) -> None:
    home = Home(tmp_path / "home")
    home.register("pages", folder)
    database = open_database(home.registry)
    version = find_version(database, "pages")
    database.close()
    source = open_source(version.source, Lakehouse(open_store(home.objects)))
    source.read(1)
    (folder / "a.pdf").unlink()
    assert source.read(2).content["page"] == 1
    with pytest.raises(BadRecordError, match=r"B\.PDF"):
        source.read(0)
