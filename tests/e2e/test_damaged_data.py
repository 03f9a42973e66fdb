"""Stored data that changes or goes while a run trains: nothing is trained on it, it is reported, the run continues."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import psutil
import pytest

from polyreme.run_files.paths import Home
from polyreme_datahub.digests import blob_key
from tests.e2e.polyreme_home import CHECKPOINT_EVERY, STEPS, PolyremeHome, Serving, unless_gone

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

DATA_DAMAGED = 8


def shards(home: PolyremeHome) -> tuple[Path, Path]:
    """The only shard of the only index, and its sample shard."""
    objects = Home(path=home.path).path / "data" / "objects"
    plan = json.loads(next((objects / "plans").iterdir()).read_bytes())
    (digest,) = set(plan["manifests"].values())
    manifest = json.loads((objects / blob_key(digest)).read_bytes())
    (shard,) = manifest["shards"]
    (samples,) = shard["samples"]
    return objects / blob_key(shard["digest"]), objects / blob_key(samples["digest"])


def garble(path: Path) -> None:
    """Flip every byte, in the file as it lies: who has it open sees it."""
    with path.open("r+b") as file:
        data = file.read()
        file.seek(0)
        file.write(bytes(byte ^ 255 for byte in data))


def test_damage_stops_the_run_before_it_is_trained_on_and_the_same_command_mends_it(
    tmp_path: Path, truth: dict[int, str], draw: random.Random
) -> None:
    home = PolyremeHome(tmp_path)
    job = home.write_job("damaged")
    serving = home.start(job)
    with serving.held(attempt=1, steps=draw.randrange(CHECKPOINT_EVERY + 1, STEPS // 2)):
        _, samples = shards(home)
        garble(samples)
    ended = serving.end()
    assert ended.code == DATA_DAMAGED, ended.said
    assert ended.item["attempts"] == 1
    assert "stored data is damaged: sample digits-1t-" in ended.item["message"]
    assert ended.said.count("run the same command again to check it") == 1
    report, log = Path(ended.item["report"]).read_text(), serving.run.host_log.read_text()
    rank_logs = "".join(path.read_text() for path in serving.run.pods.glob("*/rank-*.log"))
    assert all("stored data is damaged: sample digits-1t-" in told for told in (report, log, rank_logs))
    trained = home.losses("damaged")
    assert trained == {step: truth[step] for step in trained}

    serving = home.start(job)
    ended = serving.end()
    home.close()
    assert ended.code == 0, ended.said
    assert "checking and recreating it before the ranks start" in ended.said
    assert home.losses("damaged") == truth


@pytest.mark.soak
def test_a_killed_data_worker_is_started_again_and_data_that_is_gone_is_made_again(
    tmp_path: Path, truth: dict[int, str]
) -> None:
    home = PolyremeHome(tmp_path)
    serving = home.start(home.write_job("deleted"))
    serving.until(lambda: any((tmp_path / "data" / "objects").rglob("*")), "the data worker writes")
    for worker in data_workers(serving):
        unless_gone(lambda: worker.send_signal(signal.SIGKILL))  # noqa: B023
    with serving.held(attempt=1, steps=CHECKPOINT_EVERY + 1):
        stored = shards(home)
        for path in stored:
            path.unlink()
        for plan in (tmp_path / "data" / "objects" / "plans").iterdir():
            plan.unlink()
        serving.until(lambda: all(path.exists() for path in stored), "the shards are created again")
        serving.kill_rank(1)
    ended = serving.end()
    home.close()
    assert ended.code == 0, ended.said
    assert "the data worker was killed by SIGKILL; started again (1 of 3)" in ended.said
    assert home.losses("deleted") == truth


def data_workers(serving: Serving) -> list[psutil.Process]:
    return [each for each in serving.tree() if "polyreme_datahub_service.worker" in (unless_gone(each.cmdline) or ())]
