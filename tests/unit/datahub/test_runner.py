"""Flows: what changed is computed, and nothing else; one bad sample costs the others nothing; lost bytes come back."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete

from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.named_versions import resolve
from polyreme_datahub.objects import open_store
from polyreme_datahub.recipes.recipe import Recipe, parse_recipe
from polyreme_datahub.registry import results, schema
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.registry.rows import OperationCount
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow import Flow
from polyreme_datahub.runner.flow_run import run_flow
from polyreme_datahub.runner.walk import Walk
from tests.unit.datahub.jobs import Home, digits, make_spec

pytestmark = pytest.mark.slow
HERE = "tests.unit.datahub.runner_operations"


def recipe(*steps: str | dict[str, Any]) -> Recipe:
    entries = [{"operation": step} if isinstance(step, str) else step for step in steps]
    for entry in entries:
        entry["operation"] = f"{HERE}:{entry['operation'].replace('-', '_')}"
    return parse_recipe({"version": 1, "operations": entries})


class Bench:
    """A home with 40 pages, and flows over them."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder)
        self.home.register("two", digits(2, pages=40))
        self.database = open_database(self.home.registry)
        self.store = open_store(self.home.objects)
        self.version = resolve(self.database, "two", now_s=1.0)

    def run(self, recipe: Recipe, *, workers: int = 2) -> dict[str, Counter[str]]:
        counts: dict[str, Counter[str]] = {}
        lock = threading.Lock()

        def counted(_: WorkItem, new: Sequence[OperationCount]) -> None:
            with lock:
                for count in new:
                    here = counts.setdefault(count.operation, Counter())
                    here.update(misses=count.misses, dead=count.dead, dropped=count.dropped)

        context = RunContext(
            database=self.database,
            lakehouse=Lakehouse(self.store),
            owner=f"bench-{time.monotonic_ns()}",
            now_s=time.time,
            steady_s=time.monotonic,
            workers=workers,
        )
        flow = Flow(recipe=recipe, versions={self.version.id: self.version})
        run_flow(context, flow, on_counts=counted)
        return counts

    def through(self, recipe: Recipe) -> list[int]:
        walk = Walk(self.database, Lakehouse(self.store), constants={})
        return [walked.ordinal for walked in walk.samples(self.version, recipe.steps, values_of=())]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def misses(counts: dict[str, Counter[str]]) -> dict[str, int]:
    return {name: count["misses"] for name, count in counts.items() if count["misses"]}


def test_a_changed_step_costs_itself_and_the_steps_that_read_another_output(bench: Bench) -> None:
    assert misses(bench.run(recipe("length", "parity", "keep-even"))) == {
        "ingest": 40,
        "length": 40,
        "parity": 40,
        "keep-even": 20,
    }
    assert misses(bench.run(recipe("length", "parity", "keep-even"))) == {}
    changed = recipe("length", {"operation": "parity", "parameters": {"factor": 2}}, "keep-even")
    assert misses(bench.run(changed)) == {"parity": 40, "keep-even": 20}


def test_a_changed_step_with_the_same_outputs_costs_nothing_after_it(bench: Bench) -> None:
    bench.run(recipe("length", "parity", "keep-even"))
    renamed = recipe({"operation": "length", "parameters": {"label": "another"}}, "parity", "keep-even")
    assert misses(bench.run(renamed)) == {"length": 40}
    # 14 of the tripled lengths are lengths that were there before, and no parity is another one.
    tripled = recipe({"operation": "length", "parameters": {"factor": 3}}, "parity", "keep-even")
    assert misses(bench.run(tripled)) == {"length": 40, "parity": 26}


def test_steps_after_a_changed_one_read_the_new_bytes_that_it_made(bench: Bench) -> None:
    bench.run(recipe("length", "print-length", "count-bytes"))
    labelled = recipe("length", {"operation": "print-length", "parameters": {"label": "!"}}, "count-bytes")
    assert misses(bench.run(labelled)) == {"print": 40, "count": 40}


def test_a_filter_drops_and_a_barrier_keeps_the_first(bench: Bench) -> None:
    steps = recipe("length", "parity", "first-of-each", "after")
    counts = bench.run(steps)
    assert counts["first-of-each"]["dropped"] == 38
    assert misses(counts)["after"] == 2
    assert bench.through(steps) == [0, 1]
    dropped = results.drops_between(bench.database, bench.version.id, first=0, count=40)
    assert {drop.reason for drop in dropped} == {"as digits-2t-s5-000000", "as digits-2t-s5-000001"}


def test_one_bad_sample_costs_itself_and_no_other(bench: Bench) -> None:
    steps = recipe("fragile")
    counts = bench.run(steps)
    assert counts["fragile"] == Counter(misses=38, dead=2, dropped=0)
    letters = results.letters_between(bench.database, bench.version.id, first=0, count=40)
    assert {(letter.sample_id, letter.rule) for letter in letters} == {
        ("digits-2t-s5-000003", "operation"),
        ("digits-2t-s5-000005", "crash"),
    }
    assert len(bench.through(steps)) == 38


def test_lost_intermediates_are_made_again_from_the_source(bench: Bench) -> None:
    spec = make_spec(["two"])
    first = bench.home.process(spec)
    for info in list(bench.store.list("blobs/")):
        bench.store.delete(info.key)
    second = bench.home.process(spec)
    assert second.datasets[0].manifest == first.datasets[0].manifest


def test_replayed_dead_letters_are_tried_again(bench: Bench) -> None:
    steps = recipe("fragile")
    bench.run(steps)
    reopened = results.replay(bench.database, bench.version.id, "fragile")
    assert [item.first for item in reopened] == [0]
    assert bench.run(steps)["fragile"]["dead"] == 2
    bench.database.write(lambda connection: connection.execute(delete(schema.dead_letters)))
