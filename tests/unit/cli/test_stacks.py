"""Stacks of ranks that made no progress: equal ones together, from the folders of pods or from the checkpoint root."""

from pathlib import Path

from polyreme.run_files.paths import Home
from polyreme.run_files.stacks import StackGroup, group, of_pods, of_store
from polyreme_api.rank_logs import RankAttempt
from polyreme_datahub.objects import open_store

WAITS = '  File "collectives.py", line 27 in sum_over\n  File "loop.py", line 160 in _step'
SPINS = '  File "loop.py", line 12 in spin'


def dump(main: str, number: str) -> str:
    """What faulthandler writes: the main thread is the last."""
    other = f'Thread 0x0000{number} (most recent call first):\n  File "wait.py", line 1 in wait\n'
    return f"{other}\nCurrent thread 0x0000{number} [python] (most recent call first):\n{main}\n"


def test_equal_stacks_of_the_newest_attempt_are_together_and_the_odd_ones_first(tmp_path: Path) -> None:
    run = Home(path=tmp_path).run("default", "one")
    written = {
        RankAttempt(1, 0): dump(SPINS, "1"),
        RankAttempt(2, 0): dump(WAITS, "2"),
        RankAttempt(2, 1): dump(SPINS, "3"),
        RankAttempt(2, 2): dump(SPINS, "7") + dump(WAITS, "4"),
        RankAttempt(2, 3): "",
        RankAttempt(3, 0): "",
    }
    store = open_store(f"file://{tmp_path}/root")
    for log, text in written.items():
        path = run.pods / f"pod-{log.rank // 2}" / log.stacks_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if text:
            store.put(log.stored_stacks_key, text.encode())
    spins, waits = tuple(SPINS.splitlines()), tuple(WAITS.splitlines())
    found = [
        StackGroup(attempt=2, ranks=[1], lines=spins),
        StackGroup(attempt=2, ranks=[3], lines=()),
        StackGroup(attempt=2, ranks=[0, 2], lines=waits),
    ]
    assert group(of_pods(run)) == found
    assert group(of_store(store)) == [found[0], found[2]]
    assert [each.ranks for each in group(of_pods(run, 1))] == [[0]]
    assert group(of_pods(run, 3)) == []
