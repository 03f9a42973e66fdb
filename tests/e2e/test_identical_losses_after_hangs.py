"""A process that hangs, and wakes late or never, costs an attempt; losses are those of an undisturbed run."""

from __future__ import annotations

import random

import psutil
import pytest

from polyreme_system.files import read_json
from tests.e2e.polyreme_home import CHECKPOINT_EVERY, RANKS, PolyremeHome, Serving, living

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

HEARTBEAT_TIMEOUT_S = 5
STALL_S = 5


def recorded_attempt(serving: Serving) -> int:
    status = (read_json(serving.run.state_file) or {}).get("status", {})
    return int((status.get("attempt") or {}).get("number", 0))


@pytest.mark.soak
def test_a_leader_that_wakes_after_its_place_was_given_away_counts_up_to_the_resume_point_alone(
    home: PolyremeHome, truth: dict[int, str]
) -> None:
    job = home.write_job("woken", health={"heartbeatTimeoutSeconds": HEARTBEAT_TIMEOUT_S})
    serving = home.start(job)
    serving.until(lambda: serving.committed(1), "a checkpoint is committed")
    old = [psutil.Process(pid) for pid in serving.pids(0).values()]
    for process in old:
        process.suspend()
    committed = serving.committed(1)

    serving.until(lambda: recorded_attempt(serving) == 2, "the silent leader is replaced")
    for process in old:
        process.resume()

    ended = serving.end()
    assert ended.code == 0, ended.said
    assert not living(old)
    assert home.losses("woken") == truth
    records = home.records("woken")
    assert [point.attempt for point in records.points] == [1, 2]
    # What wakes was asked to end, so it may leave with a checkpoint: that counts if it is committed before attempt 2
    # fixes its resume point.
    resumed = records.points[1].resume_from
    assert resumed is not None
    assert max(path.name for path in committed) <= resumed < "a000002", "nothing committed is lost"
    last = int(resumed.rpartition("-s")[2])
    assert [record.step for record in records.history if record.attempt == 1] == list(range(1, last + 1))
    cause = read_json(serving.run.state_file)["status"]["restartRecords"][0]  # type: ignore[index]
    assert (cause["cause"], cause["index"]) == ("LeaderSilent", 0)


def test_a_stopped_rank_is_found_by_two_signals_and_the_run_goes_on_with_the_same_losses(
    home: PolyremeHome, truth: dict[int, str], draw: random.Random
) -> None:
    hang = {"hang": {"action": "Restart", "stallSeconds": STALL_S}}
    rank, step = draw.choice(RANKS), draw.randrange(1, 2 * CHECKPOINT_EVERY)
    serving = home.start(home.write_job("hangs", health=hang), "--inject", f"stop-rank={rank}@{step}")
    ended = serving.end()
    assert ended.code == 0, ended.said
    assert ended.item["attempts"] == 2
    assert "no rank has advanced for 5 s" in ended.said
    assert f"rank {rank} on worker {rank // 2} is stopped (state T)" in ended.said
    assert home.losses("hangs") == truth
    groups = home.call("runs", "logs", "hangs", "--stacks", "-o", "json").item
    assert {rank for each in groups for rank in each["ranks"]} == set(RANKS)
    assert [each["ranks"] for each in groups if not each["lines"]] == [[rank]], "a stopped process writes none"
