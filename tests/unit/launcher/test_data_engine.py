"""The data engine of a pod: the same packs as without it, whatever happens to the engine."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from polyreme_api import environment as names
from polyreme_api.batch import PackedBatch
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, RefusedError
from polyreme_datahub.errors import SampleDamagedError
from polyreme_datahub.loader.engine.client import EngineSource, OpenRequest
from polyreme_datahub.loader.engine.read_ahead import ReadAhead
from polyreme_datahub.loader.order.balance import StepSplit
from polyreme_launcher import data_engine
from polyreme_launcher.data_engine import DEATHS_MAX, DataEngine, Observation, Watchdog
from tests.processes import is_stopped
from tests.unit.launcher.numbered_packs import DAMAGED_STEP, HANGING_STEP, PACKS, STEPS, NumberedPacks

TICK_S = 0.05
START_S = 60.0
SPLIT = StepSplit(data_ranks=1)
COMMAND = (sys.executable, "-m", "tests.unit.launcher.numbered_packs")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


@dataclasses.dataclass
class Pod:
    """A launcher's data engine, with its clock in a thread."""

    engine: DataEngine
    folder: Path
    ends: threading.Event = dataclasses.field(default_factory=threading.Event)
    ranks: list[EngineSource] = dataclasses.field(default_factory=list)
    descriptors: list[int] = dataclasses.field(default_factory=list)

    def tick(self) -> None:
        while not self.ends.wait(TICK_S):
            self.engine.tick(TICK_S)

    def rank(self, attempt: int = 1, *, pixels: bool = True) -> EngineSource:
        assert self.engine.descriptor is not None
        job = str(self.folder / "job.json")
        # A copy, as ranks have: the launcher closes its own when it gives up.
        descriptor = os.dup(self.engine.descriptor)
        self.descriptors.append(descriptor)
        source = EngineSource(
            descriptor, OpenRequest(attempt=attempt, job=job, split=SPLIT, pixels=True), open_wait_s=1.0, pixels=pixels
        )
        self.ranks.append(source)
        return source

    def signal(self, number: signal.Signals) -> int:
        until_s = time.monotonic() + START_S
        # There is none for a moment while a dead one is replaced.
        while (pid := self.engine.pid) is None and time.monotonic() < until_s:
            time.sleep(TICK_S)
        assert pid is not None
        os.kill(pid, number)
        return pid


def wait_until_stopped(pid: int) -> None:
    """Wait until all threads of a process are stopped: until the one that takes SIGSTOP runs, others still answer."""
    until_s = time.monotonic() + START_S
    while not is_stopped(pid):
        assert time.monotonic() < until_s, f"not all threads of process {pid} are stopped"
        time.sleep(TICK_S)


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    (folder / "job.json").write_text("0.0")
    engine = DataEngine(directory=folder, environment=ENVIRONMENT, stuck_s=3.0, command=COMMAND)
    engine.begin_attempt()
    pod = Pod(engine, folder)
    ticks = threading.Thread(target=pod.tick)
    ticks.start()
    yield pod
    pod.ends.set()
    ticks.join()
    for rank in pod.ranks:
        rank.close()
    for descriptor in pod.descriptors:
        os.close(descriptor)
    engine.close()


def assert_same(one: PackedBatch, other: PackedBatch) -> None:
    for field in dataclasses.fields(PackedBatch):
        ours, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(theirs, np.ndarray):
            assert ours.dtype == theirs.dtype, field.name
            np.testing.assert_array_equal(ours, theirs)
        else:
            assert ours == theirs, field.name


@pytest.mark.parametrize("ranks", [1, 4])
def test_every_field_of_every_pack_is_the_same_as_without_an_engine(pod: Pod, ranks: int) -> None:
    direct, sources = NumberedPacks(), [pod.rank() for _ in range(ranks)]
    share = PACKS // ranks

    def train(rank: int) -> None:
        source, first = sources[rank], rank * share
        for step in [*range(1, 8), 30, 3, STEPS]:
            assert_same(source.packs(step, first=first, count=share), direct.packs(step, first=first, count=share))
            assert (source.packs_in(step), source.pack_tokens_in(step)) == (PACKS, direct.pack_tokens_in(step))

    with concurrent.futures.ThreadPoolExecutor(ranks) as pool:
        list(pool.map(train, range(ranks)))
    for ours, theirs in zip(sources[0].grids(2, first=1, count=5), direct.grids(2, first=1, count=5), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    ours = sources[0].patches(2, pack=3, images=[0, 2])
    np.testing.assert_array_equal(np.asarray(ours), direct.patches(2, pack=3, images=[0, 2]))
    np.testing.assert_array_equal(sources[0].pairs(2, first=1, count=5), direct.pairs(2, first=1, count=5))
    assert sources[0].preference_sets == direct.preference_sets
    assert sources[0].token_ids == direct.token_ids
    assert sources[0].state(5) == direct.state(5)


def test_a_rank_without_pixels_gets_none_and_what_a_rank_writes_is_its_own(pod: Pod) -> None:
    whole, bare = pod.rank(), pod.rank(pixels=False)
    np.asarray(whole.packs(1, first=0, count=2).tokens_T)[:] = 7
    batch = bare.packs(1, first=0, count=2)
    assert np.asarray(batch.patches_PC).shape == (0, 12)
    expected = NumberedPacks().packs(1, first=0, count=2)
    assert_same(dataclasses.replace(batch, patches_PC=expected.patches_PC), expected)


def test_errors_of_the_source_reach_the_rank_as_they_are(pod: Pod) -> None:
    source = pod.rank()
    with pytest.raises(SampleDamagedError, match="stored data is damaged: step 40") as damaged:
        source.packs(DAMAGED_STEP, first=0, count=1)
    assert damaged.value.exit_code == SampleDamagedError.exit_code
    with pytest.raises(RefusedError, match=r"no packs 7\.\.9") as refused:
        source.packs(1, first=7, count=2)
    assert refused.value.field == "spec.packs"
    with pytest.raises(RefusedError, match="loader state belongs to other data"):
        source.check_state({"data": "others"})
    source.check_state({"data": "numbered", "step": 1})
    # A damaged sample that is read ahead is reported when its step is asked for.
    assert source.packs(DAMAGED_STEP - 1, first=0, count=1).unmasked_tokens == 39_000


def test_ranks_that_wait_go_on_with_the_next_engine(pod: Pod) -> None:
    (pod.folder / "job.json").write_text("0.5")
    sources = [pod.rank() for _ in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(source.packs, 2, first=at, count=1) for at, source in enumerate(sources)]
        time.sleep(0.2)
        killed = pod.signal(signal.SIGKILL)
        batches = [one.result(timeout=START_S) for one in waiting]
    until_s = time.monotonic() + START_S
    while pod.engine.pid in (None, killed) and time.monotonic() < until_s:
        time.sleep(TICK_S)  # on a slow machine the ranks were answered before the signal
    assert pod.engine.pid not in (None, killed)
    for at, batch in enumerate(batches):
        assert_same(batch, NumberedPacks().packs(2, first=at, count=1))


@pytest.mark.parametrize("how", ["stopped", "hangs"])
def test_a_stuck_engine_is_replaced(pod: Pod, how: str) -> None:
    source = pod.rank()
    source.packs(1, first=0, count=1)
    before = pod.engine.pid
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        if how == "stopped":
            wait_until_stopped(pod.signal(signal.SIGSTOP))
            assert_same(
                pool.submit(source.packs, 9, first=0, count=1).result(timeout=START_S),
                NumberedPacks().packs(9, first=0, count=1),
            )
        else:
            # Every engine hangs at this step: the rank gets a clear error, and never waits forever.
            with pytest.raises(EnvironmentFailedError, match="died or was stuck too often in this attempt"):
                pool.submit(source.packs, HANGING_STEP, first=0, count=1).result(timeout=60)
    assert pod.engine.pid != before


def test_engines_that_keep_dying_end_the_rank_and_the_next_attempt_has_a_new_one(pod: Pod) -> None:
    source = pod.rank()
    for _ in range(DEATHS_MAX):
        pid = pod.signal(signal.SIGKILL)
        while pod.engine.pid == pid:
            time.sleep(TICK_S)
    with pytest.raises(EnvironmentFailedError, match="died or was stuck too often in this attempt"):
        source.packs(1, first=0, count=1)
    pod.engine.begin_attempt()
    assert_same(pod.rank(2).packs(1, first=0, count=1), NumberedPacks().packs(1, first=0, count=1))


def test_an_engine_that_started_before_its_attempt_serves_it(pod: Pod) -> None:
    early = pod.engine.pid
    pod.engine.begin_attempt()
    assert_same(pod.rank().packs(1, first=0, count=1), NumberedPacks().packs(1, first=0, count=1))
    assert pod.engine.pid == early


def test_a_rank_of_an_attempt_that_is_over_is_refused(pod: Pod) -> None:
    old, _ = pod.rank(1), pod.rank(2)
    pod.signal(signal.SIGKILL)
    with pytest.raises(RefusedError, match="attempt 1 is over: this pod runs attempt 2"):
        pod.rank(2), old.packs(1, first=0, count=1)


def test_ranks_that_train_on_the_same_packs_share_one_read() -> None:
    packs = NumberedPacks(delay_s=0.01)
    with ReadAhead(packs, last_step=STEPS, threads=2) as ahead, concurrent.futures.ThreadPoolExecutor(4) as pool:
        for step in range(1, 10):
            shared = set(pool.map(lambda _, step=step: id(ahead.get(step, first=0, count=2)), range(4)))
            assert len(shared) == 1
    assert set(packs.asked.values()) == {1}
    assert packs.closed


def test_prepared_packs_stay_within_their_bytes() -> None:
    packs = NumberedPacks(patches=10_000)
    size = 120_000 + 4 * 64
    with ReadAhead(packs, last_step=STEPS, threads=2, bytes_max=3 * (size + 4096)) as ahead:
        for step in [*range(1, 12), 4, 30]:
            for first in (0, 4):
                taken = ahead.get(step, first=first, count=4)
                assert ahead.held_bytes <= 3 * (size + 4096)
                del taken
        gc.collect()
        assert ahead.held_bytes <= 3 * (size + 4096)
    with ReadAhead(packs, last_step=STEPS, threads=2, bytes_max=1000) as ahead:
        # Larger than the bound, and yet what a rank waits for.
        assert ahead.get(1, first=0, count=4).size > 1000


def test_packs_of_the_next_steps_are_prepared_before_they_are_asked_for() -> None:
    packs = NumberedPacks()
    with ReadAhead(packs, last_step=4, threads=1, steps_ahead=3) as ahead:
        ahead.get(1, first=2, count=2)
        ahead.get(2, first=2, count=2)
        deadline_s = time.monotonic() + 10
        while len(packs.asked) < 4 and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert sorted(packs.asked) == [(step, 2, 2) for step in (1, 2, 3, 4)]


def test_the_watchdog_takes_neither_work_nor_idleness_for_a_hang() -> None:
    watchdog = Watchdog(stuck_s=2.0)
    idle = Observation(waiting=1, answered=3, ticks=10)
    assert [watchdog.is_stuck(1.0, idle) for _ in range(4)] == [False, False, True, True]
    others = (Observation(1, 3, 50), Observation(1, 4, 50), Observation(0, 4, 50))
    assert not any(watchdog.is_stuck(1.0, seen) for seen in others * 3)


def test_only_on_and_off_are_values_of_the_variable() -> None:
    name = names.DATA_ENGINE
    assert [names.is_on(given, name, default=False) for given in ({}, {name: ""}, {name: "on"})] == [False, False, True]
    assert [names.is_on(given, name, default=True) for given in ({}, {name: ""}, {name: "off"})] == [True, True, False]
    with pytest.raises(InvalidConfigError, match="neither on nor off: POLYREME_DATA_ENGINE='1'"):
        names.is_on({name: "1"}, name, default=False)
    assert data_engine.STUCK_S < 60
