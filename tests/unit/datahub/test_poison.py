"""A sample that breaks its stage in an unforeseen way is set aside; the others of its chunk are not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.operations.compose import Compose
from polyreme_datahub.operations.decode import Decode
from polyreme_datahub.operations.runner import Runner
from polyreme_datahub.operations.types import ImageParameters, Operation, Result, Work
from polyreme_datahub.operations.worker import TRIES_MAX, Chunk, Worker, chunk_message
from polyreme_datahub.processing import Processing, resolve
from polyreme_datahub.registry import work
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.registry.work import StageCount
from polyreme_datahub.topics.types import Message
from tests.unit.datahub.jobs import Home, digits, make_spec

pytestmark = pytest.mark.slow
POISON = 17
PAGES = 40


class Fragile(Decode):
    """A decode with a bug in it."""

    def compute(self, work: Work, read: Mapping[str, bytes]) -> Result:
        if work.row.ordinal == POISON:
            raise ZeroDivisionError("bug")
        return super().compute(work, read)


def test_an_unforeseen_error_costs_one_sample_after_its_tries(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.register("two", digits(2, pages=PAGES))
    database = open_database(home.registry)
    store = open_store(home.objects)
    version = resolve(database, "two", now_s=1.0)
    processing = Processing(database, store)
    processing._versions = {version.id: version}
    processing._ingest()
    images = ImageParameters(patch_px=14, merge=2, image_tokens_max=30)
    operations: dict[str, Operation] = {"decode": Fragile(), "compose": Compose(images)}
    worker = Worker(database, Lakehouse(store), {version.id: version}, operations, now_s=lambda: 1.0)
    counts: list[StageCount] = []

    def counted(_: Message, count: StageCount) -> None:
        counts.append(count)

    chunk = Chunk(version_id=version.id, first=0, count=PAGES)
    Runner(database, worker.do, counted=counted).run([chunk_message("decode", "p", chunk)])
    letters = list(work.letters_between(database, version.id, first=0, count=PAGES).values())
    assert [(letter.ordinal, letter.stage, letter.rule) for letter in letters] == [(POISON, "decode", "operation")]
    assert {count.stage: (count.misses, count.dead) for count in counts} == {
        "decode": (PAGES - 1, 1),
        "compose": (PAGES - 1, 0),
    }
    database.close()


def test_careful_tries_of_a_chunk_bury_no_sound_sample(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.register("two", digits(2, pages=PAGES))
    database = open_database(home.registry)
    version = resolve(database, "two", now_s=1.0)
    processing = Processing(database, open_store(home.objects))
    processing._versions = {version.id: version}
    processing._ingest()
    operations: dict[str, Operation] = {"decode": Decode()}
    worker = Worker(database, Lakehouse(open_store(home.objects)), {version.id: version}, operations, now_s=lambda: 1.0)
    message = chunk_message("decode", "p", Chunk(version_id=version.id, first=0, count=PAGES))
    for _ in range(2 * TRIES_MAX):
        work.begin_try(database, message.key, now_s=1.0)
    count, _ = worker.do(message)
    assert (count.misses, count.dead) == (PAGES, 0)
    database.close()
    assert home.process(make_spec(["two"])).datasets[0].samples == PAGES
