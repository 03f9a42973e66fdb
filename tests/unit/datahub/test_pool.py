"""A worker pool: what fails comes again later and later, what is away costs no try, what stays away ends the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_api.store import ObjectStore, StoreFailedError
from polyreme_datahub.errors import RegistryFailedError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.registry import results, work_items
from polyreme_datahub.registry.engine import Database, open_database
from polyreme_datahub.registry.rows import Results
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner import pool
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.pool import Pool
from polyreme_datahub.topics.memory import InProcessSubscription, InProcessTopics
from polyreme_datahub.topics.types import Delivery
from tests.unit.datahub.jobs import Home

NO_STORE = cast("ObjectStore", None)


class Script:
    """Does items: raises the errors it was given, one a call, then ends the item."""

    def __init__(self, database: Database, errors: Sequence[Exception]) -> None:
        self._database = database
        self.errors = list(errors)
        self.order: list[str] = []

    def do(self, item: WorkItem) -> None:
        self.order.append(item.key)
        if self.errors:
            raise self.errors.pop(0)
        made = Results(version_id=1)
        assert results.commit(self._database, made, finished=item, owner="me", now_s=1.0)

    def close(self) -> None:
        pass


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return open_database(Home(tmp_path).registry)


def item(number: int) -> WorkItem:
    return WorkItem(key=f"f/decode/1/{number}", flow="f", operation="decode", version_id=1, first=number, count=1)


def pool_of(database: Database, script: Script, **settings: Any) -> Pool:
    """A pool of this process; its items store nothing."""
    settings = {"owner": "me", "backoff_s": 0.001, "workers": 1, **settings}
    context = RunContext(database=database, lakehouse=Lakehouse(NO_STORE), **settings)
    return Pool(context, lambda: script, operations=["decode"], flow="f")


def run(
    database: Database,
    script: Script,
    items: Sequence[WorkItem],
    *,
    topics: InProcessTopics | None = None,
    workers: int = 1,
    done: Callable[[], bool] | None = None,
) -> None:
    work_items.add(database, items)
    moments = iter(range(10**6))

    def tick_s() -> float:
        """Each look at the clock is a second later, so no test waits for a due time."""
        return float(next(moments))

    made = pool_of(database, script, topics=topics, workers=workers, now_s=tick_s, steady_s=tick_s)
    made.run_until(done or (lambda: not work_items.open_count(database, "f", "decode")))


def tries_of(database: Database, key: str) -> int:
    claimed = work_items.claim_one(database, key, "look", now_s=1e9, ttl_s=1.0)
    assert claimed is not None
    return claimed.tries


def test_what_is_away_for_a_while_is_waited_for(database: Database) -> None:
    script = Script(database, [StoreFailedError("away")] * (pool.OUTAGES_MAX - 1))
    run(database, script, [item(0)])
    assert len(script.order) == pool.OUTAGES_MAX


def test_what_stays_away_ends_the_run_after_its_bound_and_costs_no_try(database: Database) -> None:
    script = Script(database, [StoreFailedError("away")] * 99)
    with pytest.raises(EnvironmentFailedError, match="away"):
        run(database, script, [item(0)])
    assert len(script.order) == pool.OUTAGES_MAX
    assert tries_of(database, item(0).key) == 1


def test_a_success_in_between_resets_the_bound(database: Database) -> None:
    class Flaky(Script):
        def do(self, item: WorkItem) -> None:
            if len(self.order) % pool.OUTAGES_MAX != pool.OUTAGES_MAX - 1:
                self.errors = [StoreFailedError("away")]
            super().do(item)

    script = Flaky(database, [])
    run(database, script, [item(number) for number in range(3)])
    assert len(script.order) == 3 * pool.OUTAGES_MAX


@pytest.mark.parametrize("workers", [2, 12])
def test_many_workers_that_fail_at_once_end_no_run(database: Database, workers: int) -> None:
    """Each failure counts, but a short time is no outage: here each look at the clock takes none."""
    script = Script(database, [StoreFailedError("away")] * (4 * workers))
    work_items.add(database, items := [item(number) for number in range(workers)])
    moments = iter(range(10**6))
    made = pool_of(database, script, workers=workers, now_s=lambda: float(next(moments)), steady_s=lambda: 0.0)
    made.run_until(lambda: not work_items.open_count(database, "f", "decode"))
    assert len(script.order) == 4 * workers + len(items)


def test_a_registry_that_is_away_at_a_look_is_waited_for(database: Database) -> None:
    failures = [RegistryFailedError("away")] * (pool.OUTAGES_MAX - 1)

    def done() -> bool:
        if failures:
            raise failures.pop()
        return not work_items.open_count(database, "f", "decode")

    script = Script(database, [])
    run(database, script, [item(0), item(1)], done=done)
    assert sorted(script.order) == [item(0).key, item(1).key]
    with pytest.raises(RegistryFailedError, match="away"):
        run(database, script, [item(2)], done=lambda: failing(RegistryFailedError("away")))


class AwayTopics(InProcessTopics):
    """A bus that can't be subscribed to for a while, and ends the first subscription."""

    failures = 5
    """At least one of them is a subscription that fails when it is read."""

    def subscribe(self, topics: Sequence[str], *, group: str) -> InProcessSubscription:
        self.failures -= 1
        if self.failures > 0:
            raise EnvironmentFailedError("topics: no broker")
        found = super().subscribe(topics, group=group)
        return found if self.failures < 0 else BrokenSubscription(self, [(topic, group) for topic in topics])


class BrokenSubscription(InProcessSubscription):
    def receive(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery]:
        raise EnvironmentFailedError("topics: connection closed")


def test_a_bus_that_is_away_ends_no_run_and_items_are_done_meanwhile(database: Database) -> None:
    script, topics = Script(database, []), AwayTopics()
    run(database, script, [item(number) for number in range(20)], topics=topics)
    assert len(script.order) == 20
    assert topics.failures < 0


def test_workers_work_most_of_the_time_while_each_try_to_subscribe_blocks(database: Database) -> None:
    """Pulsar's client tries for 10 s before it says that no broker answers."""
    moment_s, tries = 0.0, 0

    class BlockingTopics(InProcessTopics):
        def subscribe(self, topics: Sequence[str], *, group: str) -> InProcessSubscription:
            nonlocal moment_s, tries
            moment_s, tries = moment_s + 10.0, tries + 1
            raise EnvironmentFailedError("topics: no broker")

    class Slow(Script):
        def do(self, item: WorkItem) -> None:
            nonlocal moment_s
            moment_s += 1.0
            super().do(item)

    work_items.add(database, items := [item(number) for number in range(60)])
    script = Slow(database, [])
    made = pool_of(database, script, topics=BlockingTopics(), now_s=lambda: moment_s, steady_s=lambda: moment_s)
    made.run_until(lambda: not work_items.open_count(database, "f", "decode"))
    assert len(script.order) == len(items)
    assert tries <= 3


def failing(error: Exception) -> bool:
    raise error


def test_an_unforeseen_error_ends_the_run_after_its_own_bound(database: Database) -> None:
    script = Script(database, [ZeroDivisionError("bug")] * 99)
    with pytest.raises(ZeroDivisionError):
        run(database, script, [item(0)])
    assert len(script.order) == pool.TRIES_MAX
    assert tries_of(database, item(0).key) == pool.TRIES_MAX + 1


def test_an_error_that_no_retry_mends_ends_the_run_at_once(database: Database) -> None:
    script = Script(database, [InvalidConfigError("dataset file changed")])
    with pytest.raises(InvalidConfigError, match="changed"):
        run(database, script, [item(0), item(1)])
    assert len(script.order) == 1


def test_an_item_that_another_worker_holds_is_left_alone_until_its_lease_runs_out(database: Database) -> None:
    work_items.add(database, [item(0)])
    held = work_items.claim_one(database, item(0).key, "another", now_s=0.0, ttl_s=40.0)
    assert held is not None
    script = Script(database, [])
    run(database, script, [item(0), item(1)])
    assert script.order == [item(1).key, item(0).key]
