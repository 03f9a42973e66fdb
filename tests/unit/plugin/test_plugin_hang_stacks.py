"""Stacks of an attempt that hung, on the page of its job: equal ones together, from the checkpoint root."""

from pathlib import Path

from polyreme.plugin.description import render
from polyreme.plugin.hang_stacks import stacks_of
from polyreme_api.rank_logs import RankAttempt
from polyreme_api.times import rfc3339
from polyreme_datahub.objects import open_store
from tests.unit.plugin.plugin_scenes import NOW_S, job, runs, snapshot, text

HEAD = "Current thread 0x1 [python] (most recent call first):\n"
WAITS = '  File "collectives.py", line 27 in sum_over\n  File "loop.py", line 160 in _step'
SPINS = '  File "loop.py", line 12'


def test_describe_groups_equal_stacks_of_the_newest_attempt_that_hung(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    for attempt, rank, stack in ((1, 0, SPINS), (2, 0, WAITS), (2, 1, SPINS), (2, 2, WAITS), (3, 0, SPINS)):
        log = RankAttempt(attempt, rank)
        store.put(log.stored_stacks_key, (HEAD + stack).encode())
    records = [
        {"attempt": number, "at": rfc3339(NOW_S), "cause": cause, "scope": "RestartProcess"}
        for number, cause in ((1, "Hung"), (2, "Hung"), (3, "RankKilled"))
    ]

    def drawn(root: str, records: list[dict[str, object]]) -> tuple[str, str]:
        status = runs("n0", "n1", restartRecords=records, checkpointLocation=root)
        seen = snapshot(job("big", status=status))
        stacks, unread = stacks_of(seen.jobs[0])
        return text(render(seen, seen.jobs[0], [], stacks=stacks)), unread

    page, unread = drawn(tmp_path.as_uri(), records)
    assert not unread
    lines = [line.split(maxsplit=2) for line in page.partition("Stacks\n")[2].splitlines()[:4]]
    assert lines[0] == ["ATTEMPT", "RANKS", "STACK"]
    assert lines[1][:2] == ["2", "1"]
    assert 'File "loop.py", line 12' in page
    assert "2         0, 2" in page
    assert "Stacks" not in drawn(tmp_path.as_uri(), records[2:])[0], "no attempt hung"
    page, unread = drawn((tmp_path / "away").as_uri(), records)
    assert "Stacks" not in page
    assert unread.startswith("stacks of attempt 2 in file://")
