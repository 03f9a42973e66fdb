"""A worker that hangs for so long that it is replaced, and wakes late: each step still counts once."""

from __future__ import annotations

import psutil
import pytest

from polyreme.files import read_json
from tests.e2e.polyreme_home import PolyremeHome, Serving, living

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

HEARTBEAT_TIMEOUT_S = 5


def recorded_attempt(serving: Serving) -> int:
    status = (read_json(serving.run.state_file) or {}).get("status", {})
    return int((status.get("attempt") or {}).get("number", 0))


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
