"""``polyreme run`` is stopped or killed: nothing is left running, and the next call ends with the losses of a calm
run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.polyreme_home import PolyremeHome, Serving, all_end, living, unless_gone

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

CANCELLED = 6


def only_run(home: PolyremeHome, name: str) -> dict[str, object]:
    rows = [row for row in home.call("runs", "ls", "-o", "json").item if row["name"] == name]
    assert len(rows) == 1
    return dict(rows[0])


def test_a_killed_run_takes_everything_with_it_and_the_next_call_goes_on(tmp_path: Path, truth: dict[int, str]) -> None:
    home = PolyremeHome(tmp_path)
    job = home.write_job("host-killed")
    killed = home.start(job)
    pipeline = killed.until(lambda: data_workers(killed), "the data pipeline has started")
    killed.until(lambda: any((tmp_path / "data" / "objects").rglob("*")), "it has written something")
    tree = killed.tree()
    assert set(pipeline) <= set(tree), "it still runs"
    killed.process.kill()
    assert all_end(tree), f"still there: {living(tree)}"

    killed = home.start(job)
    killed.until(lambda: killed.attempts and killed.committed(killed.attempts[-1]), "a checkpoint is committed")
    attempt, tree = killed.attempts[-1], killed.tree()
    assert len(tree) >= 1 + 2 * (1 + 1 + 2), "a launcher, a fork server and two ranks for each of two workers"
    killed.process.kill()
    assert all_end(tree), f"still there: {living(tree)}"
    assert only_run(home, "host-killed")["state"] == "Stopped"

    with stranger() as other:
        # As if the system had given the pids of the dead to other processes.
        blame(killed, other)
        ended = home.start(job).end()
        assert ended.code == 0, ended.said
        assert other.is_running(), "a process that only has the number of one of ours is nobody's to kill"
    home.close()
    assert "run host-killed continues" in ended.said
    assert ended.item["attempts"] == attempt + 1
    assert home.losses("host-killed") == truth


def test_the_first_signal_checkpoints_and_stops_and_the_second_ends_at_once(
    home: PolyremeHome, truth: dict[int, str], draw: random.Random
) -> None:
    job = home.write_job("interrupted")
    first = home.start(job)
    with first.held(attempt=1, steps=3):
        tree = first.tree()
        first.process.send_signal(draw.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
        first.until(lambda: "stopping" in first.said, "it says that it stops")
        first.until(first.is_asked_to_end, "a rank is asked to end")
    ended = first.end()
    assert ended.code == CANCELLED, ended.said
    assert all_end(tree), f"still there: {living(tree)}"
    saved = first.committed(1)[-1]
    assert f"s{first.step(1):08d}" in saved.name, "what was trained last is in the checkpoint"
    row = only_run(home, "interrupted")
    assert (row["state"], row["pid"]) == ("Stopped", None)

    second = home.start(job)
    with second.held(attempt=2, steps=2):
        assert home.newest_point("interrupted") == saved.name
        tree = second.tree()
        second.process.send_signal(signal.SIGHUP)
        second.until(lambda: "stopping" in second.said, "it says that it stops")
        second.process.send_signal(signal.SIGTERM)
        ended = second.end()
    assert ended.code == CANCELLED, ended.said
    assert "stopped at once" in ended.said
    assert all_end(tree), f"still there: {living(tree)}"

    ended = home.start(job).end()
    assert ended.code == 0, ended.said
    assert home.losses("interrupted") == truth


def test_a_launcher_that_is_asked_to_end_checkpoints_and_costs_one_attempt_and_no_step(
    home: PolyremeHome, truth: dict[int, str], draw: random.Random
) -> None:
    serving = home.start(home.write_job("asked"))
    with serving.held(attempt=1, steps=draw.randrange(2, 7)):
        os.kill(serving.pids(draw.choice((0, 1)))["launcher"], draw.choice((signal.SIGTERM, signal.SIGHUP)))
        serving.until(serving.is_asked_to_end, "a rank is asked to end")
    ended = serving.end()
    assert ended.code == 0, ended.said
    assert ended.item["attempts"] == 2
    assert "its launcher received SIGTERM" in ended.said
    resumed = home.newest_point("asked")
    assert resumed is not None
    assert resumed.endswith(f"s{serving.step(1):08d}"), "what was trained last is in the checkpoint"
    assert home.losses("asked") == truth


def data_workers(serving: Serving) -> list[psutil.Process]:
    return [each for each in serving.tree() if "polyreme_datahub_service.worker" in (unless_gone(each.cmdline) or ())]


def stranger() -> psutil.Popen:
    return psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def blame(serving: Serving, other: psutil.Popen) -> None:
    """Put a stranger's number where the run says who served it and which processes were its pods'."""
    identity = json.loads(serving.run.identity_file.read_text())
    identity["host"]["pid"] = other.pid
    serving.run.identity_file.write_text(json.dumps(identity))
    for record in serving.run.pods.glob("*/process.json"):
        record.write_text(json.dumps({**json.loads(record.read_text()), "pid": other.pid}))
    for record in serving.run.pods.glob("*/processes.json"):
        record.write_text(json.dumps({"launcher": other.pid, "fork_server": other.pid, "ranks": {"0": other.pid}}))
