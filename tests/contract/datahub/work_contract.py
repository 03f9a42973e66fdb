"""What every registry promises about work items and their results; the same tests run on SQLite and PostgreSQL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from polyreme_datahub.digests import action_key, digest_value
from polyreme_datahub.lakehouse import Artifact
from polyreme_datahub.registry import backlog, bulk, datasets, flows, lineage, results, schema, work_items
from polyreme_datahub.registry.engine import Database, open_database
from polyreme_datahub.registry.rows import Action, Drop, Letter, OperationCount, Output, Results, SampleRow
from polyreme_datahub.registry.work_items import Claimed, WorkItem

ROOT = Path(__file__).parents[3]
THREADS, ITEMS = 8, 1000
KILLED_WITHIN = """
import os, signal, sys
from polyreme_datahub.registry import results, schema
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.registry.rows import Results, OperationCount
from tests.contract.datahub.work_contract import item, outcome
database = open_database(sys.argv[1])
results._add_counts = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
made = outcome(int(sys.argv[2]), "x")
results.commit(database, made, finished=item(0), owner="killed", now_s=1.0, children=[item(1)])
"""


def item(at: int, *, flow: str = "f", operation: str = "decode", version_id: int = 1, count: int = 10) -> WorkItem:
    return WorkItem(
        key=f"{flow}/{operation}/{at}",
        flow=flow,
        operation=operation,
        version_id=version_id,
        first=at * count,
        count=count,
    )


def outcome(version_id: int, output: str) -> Results:
    return Results(
        version_id=version_id,
        samples=[SampleRow(ordinal=0, sample_id="s", record=output)],
        artifacts=[Artifact(digest=output, blob="b", start=0, length=1)],
        actions=[Action(key="k", operation="decode", inputs=("i", "j"), output=output, value='{"a":1}')],
        letters=[Letter(key="d", operation="decode", ordinal=1, sample_id="t\0", rule="r", error=output)],
        drops=[Drop(key="e", operation="size", ordinal=2, sample_id="u", reason=output)],
        counts=[OperationCount(operation="decode", hits=1, misses=2, dead=1, dropped=1)],
    )


class WorkContract:
    """Subclasses give ``url``."""

    @pytest.fixture
    def opened(self, url: str) -> Iterator[Database]:
        database = open_database(url)
        datasets.add_version(database, name="a", source={}, digest="x", records=100, now_s=1.0)
        yield database
        database.close()

    def test_the_backlog_counts_open_items_of_all_flows_by_operation_and_device(self, opened: Database) -> None:
        steps = [{"step": "decode", "device": "cpu"}, {"step": "embed", "device": "gpu"}, {"step": "old"}]
        for flow in ("f", "g"):
            flows.add_flow(opened, flow, {"steps": steps}, now_s=1.0)
        mine = [item(at, flow=flow, operation="decode") for flow in ("f", "g") for at in range(3)]
        work_items.add(
            opened, [*mine, item(0, operation="embed"), item(0, operation="old"), item(0, flow="h", operation="lost")]
        )
        work_items.claim_one(opened, mine[0].key, "o", now_s=10.0, ttl_s=30.0)
        work_items.claim_one(opened, mine[1].key, "o", now_s=10.0, ttl_s=30.0)
        made = Results(version_id=1, counts=[OperationCount(operation="decode", misses=1)])
        results.commit(opened, made, finished=mine[1], owner="o", now_s=20.0)
        reader = backlog.BacklogReader(opened)
        seen = [(one.operation, one.device, one.items, one.records, one.leased) for one in reader.read(now_s=25.0)]
        assert seen == [
            ("decode", "cpu", 5, 50, 1),
            ("embed", "gpu", 1, 10, 0),
            ("lost", "cpu", 1, 10, 0),
            ("old", "cpu", 1, 10, 0),
        ]
        assert [one.leased for one in reader.read(now_s=45.0)] == [0, 0, 0, 0]
        assert backlog.done_since(opened, 15.0) == {"decode": 1}
        assert backlog.done_since(opened, 20.0) == {}
        results.commit(opened, outcome(1, "x"), finished=mine[2], owner="o", now_s=30.0)
        assert backlog.dead_letters(opened) == {"decode": 1}

    def test_threads_claim_each_item_exactly_once(self, opened: Database) -> None:
        work_items.add(opened, [item(at) for at in range(ITEMS)])
        claimed: Counter[str] = Counter()

        def work(owner: str) -> None:
            while found := take(opened, owner, count_max=16):
                claimed.update(one.item.key for one in found)

        at_once([partial(work, f"w{number}") for number in range(THREADS)])
        assert len(claimed) == ITEMS
        assert set(claimed.values()) == {1}

    def test_items_come_by_operation_in_the_order_asked_then_by_ordinal(self, opened: Database) -> None:
        work_items.add(
            opened, [item(2), item(0), item(1, operation="embed"), item(0, operation="other"), item(0, flow="g")]
        )
        operations = ["embed", "decode"]
        found = work_items.claim(opened, "f", operations, "w", now_s=1.0, ttl_s=9.0, count_max=9)
        assert [one.item for one in found] == [item(1, operation="embed"), item(0), item(2)]
        assert [one.item.flow for one in take(opened, "w", flow=None)] == ["g"]

    def test_a_lease_runs_out_and_its_try_counts(self, opened: Database) -> None:
        work_items.add(opened, [item(0)])
        assert take(opened, "one", now_s=10.0) == [Claimed(item=item(0), tries=1)]
        assert take(opened, "two", now_s=19.9) == []
        assert work_items.renew(opened, [item(0).key], "one", now_s=15.0, ttl_s=10.0) == {item(0).key}
        assert take(opened, "two", now_s=24.9) == []
        assert take(opened, "two", now_s=25.0) == [Claimed(item=item(0), tries=2)]
        assert work_items.renew(opened, [item(0).key], "one", now_s=25.0, ttl_s=10.0) == set()
        assert not work_items.release(opened, item(0).key, "one", due_s=0.0, error="late", counts_try=True)

    def test_a_released_item_is_due_later_and_counts_only_its_own_failures(self, opened: Database) -> None:
        work_items.add(opened, [item(0)])

        def fail(now_s: float, *, counts_try: bool) -> int:
            (claimed,) = take(opened, "w", now_s=now_s)
            key = claimed.item.key
            assert work_items.release(opened, key, "w", due_s=now_s + 5, error="nul \0", counts_try=counts_try)
            assert take(opened, "w", now_s=now_s + 4.9) == []
            return claimed.tries

        assert [fail(0.0, counts_try=False), fail(5.0, counts_try=True), fail(10.0, counts_try=True)] == [1, 1, 2]

    def test_a_key_from_a_topic_is_claimed_once(self, opened: Database) -> None:
        work_items.add(opened, [item(0)])
        key = item(0).key
        assert work_items.claim_one(opened, "gone", "w", now_s=1.0, ttl_s=9.0) is None
        assert work_items.claim_one(opened, key, "w", now_s=1.0, ttl_s=9.0) == Claimed(item=item(0), tries=1)
        assert work_items.claim_one(opened, key, "v", now_s=2.0, ttl_s=9.0) is None
        assert results.commit(opened, Results(version_id=1), finished=item(0), owner="w", now_s=3.0)
        assert work_items.claim_one(opened, key, "v", now_s=99.0, ttl_s=9.0) is None

    def test_the_first_commit_of_an_item_wins_whole(self, opened: Database) -> None:
        work_items.add(opened, [item(0)])
        wins: list[str] = []

        def commit(owner: str) -> None:
            first = results.commit(
                opened, outcome(1, owner), finished=item(0), owner=owner, now_s=1.0, children=[item(0, operation=owner)]
            )
            wins.extend([owner] * first)

        at_once([partial(commit, f"w{number}") for number in range(THREADS)])
        (winner,) = wins
        assert results.outputs_of(opened, ["k", "none"]) == {"k": Output(winner, '{"a":1}')}
        assert [row.record for row in results.samples_between(opened, 1, first=0, count=9)] == [winner]
        (letter,) = results.letters_between(opened, 1, first=0, count=9)
        assert (letter.operation, letter.sample_id, letter.error) == ("decode", "t\\x00", winner)
        assert [drop.reason for drop in results.drops_between(opened, 1, first=0, count=9)] == [winner]
        assert set(results.places_of(opened, [f"w{number}" for number in range(THREADS)])) == {winner}
        assert work_items.counts_by_operation(opened, "f") == {"decode": (0, 1), winner: (1, 0)}
        assert results.ended_counts(opened, 1) == {"decode": (1, 0), "size": (0, 1)}

    def test_a_part_is_written_only_while_its_item_is_open_and_held(self, opened: Database) -> None:
        work_items.add(opened, [item(0)])
        take(opened, "w")

        def part(owner: str, output: str) -> bool:
            row = SampleRow(ordinal=0, sample_id="s", record=output)
            made = Results(version_id=1, samples=[row])
            return results.commit(opened, made, finished=None, owner=owner, now_s=1.0, within=item(0))

        assert not part("other", "a")
        assert part("w", "b")
        last = Results(version_id=1, removed=[0])
        assert results.commit(opened, last, finished=item(0), owner="w", now_s=2.0)
        assert not part("w", "c")
        assert results.samples_between(opened, 1, first=0, count=9) == []
        with pytest.raises(ValueError, match="need an item"):
            results.commit(opened, outcome(1, "d"), finished=None, owner="w", now_s=1.0)

    def test_a_kill_within_the_transaction_leaves_nothing_of_it(self, opened: Database, url: str) -> None:
        work_items.add(opened, [item(0)])
        call = [sys.executable, "-c", KILLED_WITHIN, url, "1"]
        path = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=path, check=False, timeout=60)
        assert ended.returncode == -signal.SIGKILL, ended.stderr
        assert results.samples_between(opened, 1, first=0, count=9) == []
        assert results.outputs_of(opened, ["k"]) == {}
        assert work_items.counts_by_operation(opened, "f") == {"decode": (1, 0)}
        assert results.commit(opened, outcome(1, "y"), finished=item(0), owner="w", now_s=2.0)

    def test_the_outbox_gives_each_key_until_it_is_sent_and_again_when_it_was_lost(self, opened: Database) -> None:
        work_items.add(opened, [item(0), item(1), item(2)])

        def unsent(now_s: float) -> set[str]:
            return {one.key for one in work_items.take_unpublished(opened, now_s=now_s, count_max=9)}

        keys = [item(at).key for at in range(3)]
        assert unsent(1.0) == set(keys)
        work_items.mark_published(opened, keys, now_s=1.0)
        assert unsent(1.0) == set()
        for at in range(2):
            work_items.claim_one(opened, keys[at], "w", now_s=2.0, ttl_s=10.0)
        work_items.release(opened, keys[0], "w", due_s=5.0, error="e", counts_try=True)
        assert (unsent(4.0), unsent(5.0)) == (set(), {keys[0]})
        assert work_items.unpublish_expired(opened, now_s=11.0, lost_after_s=60.0) == 0
        assert work_items.unpublish_expired(opened, now_s=12.0, lost_after_s=60.0) == 1
        assert unsent(12.0) == {keys[0], keys[1]}
        assert work_items.unpublish_expired(opened, now_s=61.0, lost_after_s=60.0) == 1
        assert unsent(61.0) == set(keys)

    def test_only_done_items_of_ended_flows_are_purged(self, opened: Database) -> None:
        work_items.add(opened, [item(0), item(1), item(0, flow="g"), item(1, flow="g"), item(0, flow="h")])
        for flow, at in (("f", 0), ("g", 0), ("g", 1), ("h", 0)):
            done = item(at, flow=flow)
            results.commit(opened, Results(version_id=1), finished=done, owner="w", now_s=50.0 if flow == "h" else 5.0)
        assert work_items.purge(opened, older_than_s=10.0, count_max=1) == 1
        assert work_items.purge(opened, older_than_s=10.0, count_max=9) == 1
        assert work_items.purge(opened, older_than_s=10.0, count_max=9) == 0
        counted = {flow: work_items.counts_by_operation(opened, flow) for flow in "fgh"}
        assert counted == {"f": {"decode": (1, 1)}, "g": {}, "h": {"decode": (0, 1)}}
        work_items.reopen(opened, [item(0, flow="h").key])
        assert work_items.open_count(opened, "h", "decode") == 1

    def test_replayed_letters_reopen_the_items_that_hold_them(self, opened: Database) -> None:
        work_items.add(opened, [item(0), item(1), item(2)])
        letters = [
            Letter(
                key=f"{at}", operation="decode" if at < 20 else "blur", ordinal=at, sample_id="s", rule="r", error=""
            )
            for at in (3, 15, 16, 25)
        ]
        made = Results(version_id=1, letters=letters)
        results.commit(opened, made, finished=item(0), owner="w", now_s=1.0)
        for at in (1, 2):
            results.commit(opened, Results(version_id=1), finished=item(at), owner="w", now_s=1.0)
        assert results.replay(opened, 1, "decode", [15, 25]) == [item(1)]
        left = results.letters_between(opened, 1, first=0, count=100)
        assert [letter.ordinal for letter in left] == [3, 16, 25]
        assert results.replay(opened, 1, operations=["none"]) == []
        assert results.letters_between(opened, 1, first=0, count=100) == []
        assert work_items.counts_by_operation(opened, "f") == {"decode": (1, 2)}

    def test_outputs_are_read_by_key_in_pages_and_lead_back_to_what_they_are_made_from(self, opened: Database) -> None:
        work_items.add(opened, [item(0)])
        samples = [SampleRow(ordinal=at, sample_id=f"s{at}", record=digest_value(at)) for at in range(1200)]
        actions, joins = [], {}
        for row in samples:
            decoded = digest_value(["decoded", row.ordinal])
            actions.append(Action(key=action_key("d", row.record), operation="d", inputs=(row.record,), output=decoded))
            if row.ordinal % 3:
                key, joined = action_key("j", f"{row.record}:{decoded}"), digest_value(["joined", row.ordinal])
                inputs = (row.record, decoded)
                actions.append(Action(key=key, operation="j", inputs=inputs, output=joined, value=str(row.ordinal)))
                joins[key] = Output(joined, str(row.ordinal))
        made = Results(version_id=1, samples=samples, actions=actions)
        assert results.commit(opened, made, finished=item(0), owner="w", now_s=1.0)
        assert results.outputs_of(opened, [*joins, "unknown"]) == joins
        walked = lineage.lineage_of(opened, digest_value(["joined", 7]), count_max=10)
        assert [made.operation for made in walked.made] == ["j", "d"]
        assert (walked.raw, walked.complete) == ([samples[7].record], True)
        assert not lineage.lineage_of(opened, digest_value(["joined", 7]), count_max=1).complete

    def test_many_rows_are_written_as_few_are_with_any_text(self, opened: Database) -> None:
        texts = ["tab\t", "line\n", "return\r", "back\\slash", "\\N", "\\.", "", "\u00e9\u4e2d\U0001f600", "\"q,'"]
        rows = [
            {"key": f"{at:05d}", "operation": "o", "output": f"out{at}", "value": text if at % 2 else None}
            for at, text in enumerate(texts * 100)
        ]
        halves = [rows[:: len(rows) // 10], rows, [{**row, "output": "late"} for row in rows]]
        for some in halves:
            opened.write(partial(bulk.insert_new, table=schema.actions, rows=some))
        found = results.outputs_of(opened, [str(row["key"]) for row in rows])
        assert found == {row["key"]: Output(str(row["output"]), row["value"]) for row in rows}

    def test_lookups_by_output_and_by_blob_use_an_index(self, opened: Database) -> None:
        places = [Artifact(digest=digest_value(at), blob=digest_value([at]), start=0, length=1) for at in range(3000)]
        actions = [Action(key=one.blob, operation="o", inputs=(one.blob,), output=one.digest) for one in places]
        results.commit(
            opened,
            Results(version_id=1, artifacts=places, actions=actions),
            finished=None,
            owner="w",
            now_s=1.0,
        )
        opened.write(lambda connection: connection.execute(text("ANALYZE")))
        for table, column in (("actions", "output"), ("artifacts", "blob"), ("action_inputs", "digest")):
            assert f"ix_{table}_{column}" in opened.read(partial(plan_of, table=table, column=column))

    def test_a_flow_is_described_once(self, opened: Database) -> None:
        assert flows.find_flow(opened, "f") is None
        for recipe in ("nul \0", "other"):
            flows.add_flow(opened, "f", {"recipe": recipe}, now_s=1.0)
        assert flows.find_flow(opened, "f") == {"recipe": "nul \0"}


def plan_of(connection: Connection, table: str, column: str) -> str:
    """Return the plan of a lookup as the database describes it."""
    word = "EXPLAIN" if connection.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN"
    return str(connection.execute(text(f"{word} SELECT * FROM {table} WHERE {column} = 'x'")).all())


def take(
    database: Database, owner: str, *, flow: str | None = "f", now_s: float = 1.0, count_max: int = 9
) -> list[Claimed]:
    return work_items.claim(database, flow, ["decode"], owner, now_s=now_s, ttl_s=10.0, count_max=count_max)


def at_once(calls: list[Callable[[], object]]) -> None:
    """Run calls in threads; raise what one of them raised."""
    failures: list[Exception] = []

    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised again by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
