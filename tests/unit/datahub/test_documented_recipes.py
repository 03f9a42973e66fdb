"""Recipes that the how-tos show are run as they stand, over images and pages."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub import hub, lifecycle
from polyreme_datahub.recipes.recipe import parse_recipe
from tests.documented import ROOT
from tests.unit.datahub.jobs import Home, picture
from tests.unit.datahub.test_pdf_pages import document

PAGES = sorted((ROOT / "docs").rglob("*.md"))
_FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(kind: str) -> list[str]:
    return [found[2] for page in PAGES for found in _FENCED.finditer(page.read_text()) if found[1] == kind]


RECIPES: list[Mapping[str, Any]] = [
    content
    for block in blocks("yaml")
    if "operations:" in block
    for content in [yaml.safe_load(block)]
    if "operations" in content
]


def test_recipes_are_found_in_the_docs() -> None:
    assert len(RECIPES) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("at", range(len(RECIPES)))
def test_a_recipe_of_the_docs_brings_images_and_its_pages_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    (tmp_path / "short_answers.py").write_text(next(block for block in blocks("python") if "short_answers" in block))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.png").write_bytes(picture(40, 30))
    (tmp_path / "set/a.txt").write_text("A picture.")
    has_pages = "pdf-pages" in str(RECIPES[at])
    if has_pages:
        (tmp_path / "set/b.pdf").write_bytes(document())
    home = Home(tmp_path / "home")
    report = hub.ingest(
        tmp_path / "set",
        name="mine",
        recipe=RECIPES[at],
        registry_url=home.registry,
        objects_url=home.objects,
        workers=1,
    )
    assert (report.samples, report.dead_letters) == (3 if has_pages else 1, ())
    assert lifecycle.statistics(home.registry, home.objects, "mine")["samples"] == report.samples


def recipe(*operations: Any) -> dict[str, Any]:
    return {"version": 1, "operations": list(operations)}


def test_steps_after_pdf_pages_read_it_where_they_declare_the_record() -> None:
    steps = parse_recipe(recipe({"operation": "pdf-pages", "step": "pages"}, "decode", "image-hash")).steps
    assert [step.inputs for step in steps] == [("record",), ("pages",), ("decode",)]


@pytest.mark.parametrize(
    "operations",
    [("decode", "pdf-pages"), ("pdf-pages", {"operation": "decode", "inputs": ["record"]})],
)
def test_a_recipe_whose_images_would_be_pages_is_refused_unless_a_version_was_made_by_it(operations: Any) -> None:
    with pytest.raises(
        InvalidConfigError, match=r"step 'decode' reads 'record', whose pages it does not take; put 'pdf"
    ):
        parse_recipe(recipe(*operations))
    assert len(parse_recipe(recipe(*operations), is_stored=True).steps) == 2
