"""Packs are read a step ahead in a thread: the same packs, errors at their step, a clean end."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from polyreme_api.batch import PackedBatch
from polyreme_api.errors import EnvironmentFailedError, NotSealedError, RefusedError
from polyreme_datahub.objects import open_store
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.parallel.mesh import GROUP_AXES, Meshes
from polyreme_trainer.parallel.pipeline import PipelineSettings
from polyreme_trainer.parallel.world import RankSettings
from polyreme_trainer.train import microbatches
from polyreme_trainer.train.microbatches import PackReader, ReadPacks, read_packs
from polyreme_trainer.train.settings import CheckpointSettings, TrainSettings
from tests.parallel.pages import Pages

WAIT_S_MAX = 30.0
MESHES = Meshes(
    layout=Layout(), rank=0, **dict.fromkeys((*GROUP_AXES, "communicators", "control_group"), cast("Any", None))
)


class WatchedPages(Pages):
    """Notes what is read and by which thread; may hold a step up, and fail at one."""

    def __init__(self, *, held_up: int = 0, fails_at: int = 0) -> None:
        super().__init__()
        self._held_up, self._fails_at = held_up, fails_at
        self.begun: dict[int, threading.Event] = {step: threading.Event() for step in range(1, 9)}
        self.release = threading.Event()
        self.ended: list[int] = []
        self.threads: set[str] = set()

    def packs(self, step: int, *, first: int, count: int) -> PackedBatch:
        self.threads.add(threading.current_thread().name)
        self.begun[step].set()
        if step == self._held_up:
            assert self.release.wait(WAIT_S_MAX)
        if step == self._fails_at:
            raise RefusedError(f"step {step} is damaged")
        found = super().packs(step, first=first, count=count)
        self.ended.append(step)
        return found

    def state(self, step: int) -> dict[str, Any]:
        self.threads.add(threading.current_thread().name)
        return super().state(step)


@pytest.fixture
def settings(tmp_path: Path) -> TrainSettings:
    return TrainSettings(
        rank=RankSettings(rank=0, world=1, attempt=1),
        layout=Layout(),
        shape=KIMI_VL_NANO,
        steps=4,
        pipeline=PipelineSettings(schedule=None, layers=(), microbatches=2),
        checkpoint=CheckpointSettings(store=open_store(tmp_path.as_uri())),
    )


def reader_of(source: Pages, settings: TrainSettings) -> PackReader:
    return PackReader(source, settings, MESHES, image_balancer=None)


def equal(one: list[ReadPacks], other: list[ReadPacks]) -> bool:
    names = ("tokens_T", "targets_T", "positions_T", "document_offsets", "patches_PC", "grids_I2")
    return all(
        np.array_equal(np.asarray(getattr(a.batch, name)), np.asarray(getattr(b.batch, name)))
        for a, b in zip(one, other, strict=True)
        for name in names
    )


def test_the_next_step_is_read_meanwhile_and_none_beyond_it(settings: TrainSettings) -> None:
    source = WatchedPages()
    with reader_of(source, settings) as reader:
        for step in range(1, 5):
            reader.take(step)
            assert step == 4 or source.begun[step + 1].wait(WAIT_S_MAX)
            assert not source.begun[step + 2].is_set()
    assert source.ended == [1, 1, 2, 2, 3, 3, 4, 4], "two microbatches a step, and nothing behind the last step"


@pytest.mark.parametrize("first", [1, 3])
def test_packs_are_those_of_reading_in_place_from_whichever_step_a_run_goes_on(
    settings: TrainSettings, first: int
) -> None:
    with reader_of(Pages(), settings) as reader:
        for step in range(first, 5):
            assert equal(reader.take(step), read_packs(Pages(), settings, MESHES, None, step))


def test_an_error_is_raised_at_the_step_that_it_is_of(settings: TrainSettings) -> None:
    source = WatchedPages(fails_at=3)
    with reader_of(source, settings) as reader:
        reader.take(1)
        reader.take(2)
        assert source.begun[3].wait(WAIT_S_MAX)
        reader.state(2)
        with pytest.raises(RefusedError, match="step 3 is damaged"):
            reader.take(3)


def test_a_run_that_ends_before_a_step_never_sees_its_error(settings: TrainSettings) -> None:
    source = WatchedPages(fails_at=2)
    with reader_of(source, settings) as reader:
        reader.take(1)
        assert source.begun[2].wait(WAIT_S_MAX)


def test_leaving_waits_for_the_read_under_way(settings: TrainSettings) -> None:
    source = WatchedPages(held_up=2)
    with reader_of(source, settings) as reader:
        reader.take(1)
        assert source.begun[2].wait(WAIT_S_MAX)
        threading.Thread(target=source.release.set).start()
    assert source.ended == [1, 1, 2, 2]
    assert not any(thread.name.startswith("packs") for thread in threading.enumerate())


def test_one_thread_alone_walks_the_order_of_the_source(settings: TrainSettings) -> None:
    source = WatchedPages()
    with reader_of(source, settings) as reader:
        reader.take(1)
        assert reader.state(1) == Pages().state(1)
    assert len(source.threads) == 1
    assert threading.current_thread().name not in source.threads


class GrowingPages(Pages):
    """Step 2 is still processed until it was asked for some times."""

    def __init__(self, tries: int) -> None:
        super().__init__()
        self.tries = tries

    def packs(self, step: int, *, first: int, count: int) -> PackedBatch:
        if step == 2 and self.tries:
            self.tries -= 1
            raise NotSealedError("steps 2 to 3 need a block")
        return super().packs(step, first=first, count=count)


def test_a_step_whose_samples_are_still_processed_is_waited_for(
    settings: TrainSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(microbatches, "SEALED_POLL_S", 0.01)
    said: list[str] = []
    settings = dataclasses.replace(settings, data_wait_s=0.02)
    with PackReader(GrowingPages(2), settings, MESHES, image_balancer=None, on_wait=said.append) as reader:
        reader.take(1)
        assert reader.state(1) == Pages().state(1), "the state can be saved meanwhile"
        assert equal(reader.take(2), read_packs(Pages(), settings, MESHES, None, 2))
    assert said == ["steps 2 to 3 need a block"]
    with reader_of(GrowingPages(99), settings) as reader:
        reader.take(1)
        with pytest.raises(EnvironmentFailedError, match=r"step 2 waited 0\.02 s for it"):
            reader.take(2)
