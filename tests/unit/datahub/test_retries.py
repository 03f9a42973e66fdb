"""What fails comes again later and later; what is away costs no sample a try; what stays away ends the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.store import ObjectStore, StoreFailedError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.operations import runner
from polyreme_datahub.operations.decode import Decode
from polyreme_datahub.operations.runner import Runner
from polyreme_datahub.operations.types import Result, Work
from polyreme_datahub.operations.worker import TRIES_MAX, Chunk, Worker, chunk_message
from polyreme_datahub.processing import Processing, resolve
from polyreme_datahub.registry import work
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database, open_database
from polyreme_datahub.registry.work import StageCount
from polyreme_datahub.topics.memory import InProcessTopics
from polyreme_datahub.topics.types import Message
from tests.unit.datahub.jobs import Home, digits, make_spec
from tests.unit.datahub.stores import PassingStore

DONE = StageCount(stage="decode", misses=1)


class AwayStore(PassingStore):
    """A store whose next writes fail."""

    def __init__(self, store: ObjectStore, *, failures: int) -> None:
        super().__init__(store)
        self.failures = failures

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreFailedError("object store failed: away")
        super().put_if_absent(key, data)


class NotedTopics(InProcessTopics):
    """A bus that notes each delay and waits for none."""

    def __init__(self) -> None:
        super().__init__()
        self.delays_s: list[float] = []

    def publish(self, message: Message, *, timeout_s: float, delay_s: float = 0.0) -> bool:
        self.delays_s.append(delay_s)
        return super().publish(message, timeout_s=timeout_s)

    def give_back(self, loan: int, *, delay_s: float | None) -> None:
        if delay_s is not None:
            self.delays_s.append(delay_s)
        super().give_back(loan, delay_s=None if delay_s is None else 0.0)


class Script:
    """Does messages: raises the errors it was given, one a call, then commits."""

    def __init__(self, database: Database, errors: Sequence[Exception], children: Mapping[str, Message]) -> None:
        self._database = database
        self._errors = list(errors)
        self._children = children
        self.order: list[str] = []

    def __call__(self, message: Message) -> tuple[StageCount, Sequence[Message]]:
        work.begin_try(self._database, message.key, now_s=0.0)
        self.order.append(message.key)
        if self._errors:
            raise self._errors.pop(0)
        children = [self._children[message.key]] if message.key in self._children else []
        outcome = work.Outcome(version_id=1, count=DONE, children=children)
        work.commit(self._database, message, outcome, now_s=0.0)
        return DONE, children


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return open_database(Home(tmp_path).registry)


def message(number: int, topic: str = "decode") -> Message:
    return chunk_message(topic, "p", Chunk(version_id=1, first=number, count=1))


def ignore(_: Message, count: StageCount) -> None:
    del count


def run(database: Database, script: Script, messages: Sequence[Message]) -> list[float]:
    topics = NotedTopics()
    Runner(database, script, counted=ignore, workers=1, now_s=lambda: 100.0, topics=topics).run(messages)
    return topics.delays_s


def test_what_is_away_for_a_while_is_waited_for_longer_and_longer(database: Database) -> None:
    script = Script(database, [StoreFailedError("away")] * (runner.OUTAGES_MAX - 1), {})
    delays_s = run(database, script, [message(0)])
    assert delays_s == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0]
    assert work.due_messages(database, "p", count_max=9) == []


def test_what_stays_away_ends_the_run_after_its_bound_and_costs_no_try(database: Database) -> None:
    script = Script(database, [StoreFailedError("away")] * 99, {})
    with pytest.raises(EnvironmentFailedError, match="away"):
        run(database, script, [message(0)])
    assert len(script.order) == runner.OUTAGES_MAX
    assert work.begin_try(database, message(0).key, now_s=0.0) == 1
    assert work.due_messages(database, "p", count_max=9) == [message(0)]


def test_a_success_in_between_begins_the_bound_anew(database: Database) -> None:
    class Now(Script):
        def __call__(self, message: Message) -> tuple[StageCount, Sequence[Message]]:
            if len(self.order) % runner.OUTAGES_MAX != runner.OUTAGES_MAX - 1:
                self._errors = [StoreFailedError("away")]
            return super().__call__(message)

    script = Now(database, [], {})
    run(database, script, [message(number) for number in range(3)])
    assert len(script.order) == 3 * runner.OUTAGES_MAX


def test_an_unforeseen_error_ends_the_run_after_its_own_bound(database: Database) -> None:
    script = Script(database, [ZeroDivisionError("bug")] * 99, {})
    with pytest.raises(ZeroDivisionError):
        run(database, script, [message(0)])
    assert len(script.order) == runner.REDELIVERIES_MAX
    assert work.begin_try(database, message(0).key, now_s=0.0) == runner.REDELIVERIES_MAX + 1


def test_a_due_time_that_an_earlier_run_noted_is_kept_and_bounded(database: Database) -> None:
    for number, due_s in enumerate((90.0, 104.0, 9999.0)):
        work.begin_try(database, message(number).key, now_s=0.0)
        work.end_try(database, message(number).key, counts=True, due_s=due_s, error="bug")
    delays_s = run(database, Script(database, [], {}), [message(number) for number in range(3)])
    assert delays_s == [0.0, 4.0, runner.DUE_WAIT_MAX_S]


def test_a_child_is_done_next_while_its_bytes_are_in_the_cache(database: Database) -> None:
    parents = [message(number) for number in range(4)]
    children = {parent.key: message(number, "compose") for number, parent in enumerate(parents)}
    script = Script(database, [], children)
    run(database, script, parents)
    assert script.order == [key for parent in parents for key in (parent.key, children[parent.key].key)]


def test_a_child_that_finds_its_topic_full_comes_by_the_outbox(database: Database) -> None:
    class Full(NotedTopics):
        def publish(self, message: Message, *, timeout_s: float, delay_s: float = 0.0) -> bool:
            return timeout_s > 0 and super().publish(message, timeout_s=timeout_s, delay_s=delay_s)

    child = message(0, "compose")
    script = Script(database, [], {message(0).key: child})
    Runner(database, script, counted=ignore, workers=1, topics=Full()).run([message(0)])
    assert script.order == [message(0).key, child.key]


def ingested(home: Home, database: Database, store: ObjectStore) -> DatasetVersion:
    home.register("two", digits(2, pages=40))
    version = resolve(database, "two", now_s=1.0)
    processing = Processing(database, store)
    processing._versions = {version.id: version}
    processing._ingest()
    return version


def test_a_store_away_in_careful_tries_buries_no_sound_sample(tmp_path: Path, database: Database) -> None:
    store = open_store(Home(tmp_path).objects)
    version = ingested(Home(tmp_path), database, store)

    class Away(Decode):
        failures = 5 * TRIES_MAX

        def compute(self, work: Work, read: Mapping[str, bytes]) -> Result:
            if self.failures:
                self.failures -= 1
                raise StoreFailedError("away")
            return super().compute(work, read)

    worker = Worker(database, Lakehouse(store), {version.id: version}, {"decode": Away()}, now_s=lambda: 1.0)
    due = chunk_message("decode", "p", Chunk(version_id=version.id, first=0, count=40))
    for _ in range(TRIES_MAX):
        work.begin_try(database, due.key, now_s=1.0)
    for _ in range(5 * TRIES_MAX):
        with pytest.raises(StoreFailedError):
            worker.do(due)
    assert worker.do(due)[0] == StageCount(stage="decode", misses=40)


@pytest.mark.slow
def test_a_store_that_fails_for_a_while_costs_no_record(tmp_path: Path, database: Database) -> None:
    home = Home(tmp_path)
    home.register("two", digits(2, pages=600))
    store = AwayStore(open_store(home.objects), failures=runner.OUTAGES_MAX - 1)
    report = Processing(database, store, backoff_s=0.001).process(make_spec(["two"]), job="")
    assert store.failures == 0
    assert (report.datasets[0].samples, report.datasets[0].dead_letters) == (600, ())
