"""A document of many pages: what is read, sent to children and stored grows with the document, not with its pages."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.recipes.recipe import parse_recipe
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import find_version
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.flow_run import run_flow
from polyreme_datahub.sandbox.process import ChildProcess
from polyreme_datahub.sources.listing import Entry
from polyreme_datahub.sources.trees import LocalTree
from tests.unit.datahub.jobs import Home
from tests.unit.datahub.test_pdf_pages import with_objects

PAGES, WORKERS = 300, 2
FILLING = 3_000_000
"""Bytes of the document beside its pages, which nothing compresses."""


def long_document(pages: int) -> bytes:
    """A document of small pages."""
    kids = b" ".join(b"%d 0 R" % (4 + at) for at in range(pages))
    filling = random.Random(0).randbytes(FILLING)
    return with_objects(
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[%s]/Count %d>>" % (kids, pages),
        b"<</Length %d>>\nstream\n%s\nendstream" % (len(filling), filling),
        *(b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 %d 40]>>" % (40 + at % 50) for at in range(pages)),
    )


def test_a_document_is_moved_a_few_times_however_many_pages_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = {"read": 0, "sent": 0}
    read, send = LocalTree.read, ChildProcess.send

    def counted_read(tree: LocalTree, entry: Entry) -> bytes:
        data = read(tree, entry)
        moved["read"] += len(data)
        return data

    def counted_send(child: ChildProcess, header: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
        moved["sent"] += sum(map(len, blobs.values()))
        send(child, header, blobs)

    (tmp_path / "set").mkdir()
    document = long_document(PAGES)
    (tmp_path / "set" / "long.pdf").write_bytes(document)
    home = Home(tmp_path / "home")
    home.register("pages", tmp_path / "set")
    monkeypatch.setattr(LocalTree, "read", counted_read)
    monkeypatch.setattr(ChildProcess, "send", counted_send)
    database, store = open_database(home.registry), open_store(home.objects)
    try:
        version = find_version(database, "pages")
        assert version.records == PAGES
        context = RunContext(database=database, lakehouse=Lakehouse(store), workers=WORKERS)
        flow = Flow(
            recipe=parse_recipe({"version": 1, "operations": [{"operation": "pdf-pages", "parameters": {"dpi": 36}}]}),
            versions={version.id: version},
        )
        run_flow(context, flow)
        assert len(results.samples_between(database, version.id, first=0, count=PAGES)) == PAGES
        assert not results.letters_between(database, version.id, first=0, count=PAGES)
        moved["stored"] = sum(info.size_bytes for info in store.list("blobs/"))
    finally:
        database.close()
    times = {what: round(count / len(document), 1) for what, count in moved.items()}
    assert times["read"] <= 2, times
    assert times["sent"] <= 3 * WORKERS, times
    assert times["stored"] <= 1.5 * WORKERS, times
