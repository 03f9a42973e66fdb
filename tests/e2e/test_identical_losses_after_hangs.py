"""A process that hangs costs an attempt, whatever it hangs in; losses are those of an undisturbed run."""

from __future__ import annotations

import random

import psutil
import pytest

from polyreme_system.files import read_json
from tests.e2e.hanging_rank import hanging
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


def test_each_rank_that_hangs_is_named_and_the_run_continues_with_the_same_losses(
    home: PolyremeHome, truth: dict[int, str], draw: random.Random
) -> None:
    """One is stopped in attempt 1, one runs away in attempt 2, one never enters an exchange in attempt 3.

    torch's flight recorder is off: the pages of ranks are enough.
    """
    hang = {"hang": {"stallSeconds": STALL_S}}
    stopped, spins, waits = (draw.choice(RANKS) for _ in range(3))
    step = draw.randrange(1, CHECKPOINT_EVERY)
    asked = f"2:{spins}:{step + 12}:spin,3:{waits}:{step + 24}:wait"
    workers = {"replicas": 2, "devices": 2, "template": hanging(asked, TORCH_FR_BUFFER_SIZE="0")}
    job = home.write_job("hangs", health=hang, workers=workers, failurePolicy={"inPlaceMax": 5})
    serving = home.start(job, "--inject", f"stop-rank={stopped}@{step}")
    ended = serving.end()
    assert ended.code == 0, ended.said
    assert home.losses("hangs") == truth
    records = (read_json(serving.run.state_file) or {})["status"]["restartRecords"]
    assert [(record["cause"], record["scope"], record["index"]) for record in records] == [
        ("Hung", "RestartProcess", rank // 2) for rank in (stopped, spins, waits)
    ], ended.said
    named = [f"rank {rank} on worker {rank // 2} is" for rank in (stopped, spins, waits)]
    assert [name in record["message"] for name, record in zip(named, records, strict=True)] == [True] * 3

    groups = home.call("runs", "logs", "hangs", "--stacks", "--attempt", "1", "-o", "json").item
    assert [each["ranks"] for each in groups if not each["lines"]] == [[stopped]], "a stopped process writes none"
    assert {rank for each in groups for rank in each["ranks"]} == set(RANKS)
    (alone,) = (
        each
        for each in home.call("runs", "logs", "hangs", "--stacks", "-o", "json").item
        if any("hanging_rank.py" in line for line in each["lines"][:1])
    )
    assert (alone["attempt"], alone["ranks"]) == (3, [waits])


def test_a_rank_that_hangs_after_its_work_is_killed_and_the_run_succeeds(home: PolyremeHome) -> None:
    given = {"training": {"steps": 4, "packsPerStep": 4}, "parallelism": {"mode": "Auto"}}
    workers = {"replicas": 1, "devices": 2, "template": hanging("1:1:4:end")}
    serving = home.start(home.write_job("ends", workers=workers, **given))
    ended = serving.end()
    assert ended.code == 0, ended.said
    assert (ended.item["attempts"], ended.item["step"]) == (1, 4)
    assert (read_json(serving.run.state_file) or {})["status"].get("restartRecords", []) == []
    said = "".join(path.read_text() for path in serving.run.path.rglob("*.log"))
    assert "rank 1 of attempt 1 has done its work and has not ended within 30 s; it is killed" in said
