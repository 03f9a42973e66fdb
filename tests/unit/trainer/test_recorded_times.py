"""Times on a rank's page: computing apart from waits, exchanges by their kind, and ends that are lost."""

from __future__ import annotations

import mmap
import os
import types
from collections.abc import Iterator

import pytest

from polyreme_api.rank_state import (
    ACTIVITY,
    COMPUTED_US,
    EXCHANGED_US,
    MOVED_NS,
    MOVES,
    PAGE_FIELDS,
    WORK,
    ExchangeKind,
    RankActivity,
)
from polyreme_system import rank_page as system_page
from polyreme_system.rank_page import PAGE_BYTES, open_page, read_page
from polyreme_trainer import rank_page


class Page:
    """This process's page, on a clock that the test moves."""

    def __init__(self, descriptor: int) -> None:
        self.now_ns = 1_000
        self._page = mmap.mmap(descriptor, PAGE_BYTES)

    def work(self, microseconds: int) -> None:
        self.now_ns += 1000 * microseconds

    def __getitem__(self, place: int) -> int:
        return read_page(self._page, PAGE_FIELDS)[place]


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    descriptor = open_page()
    found = Page(descriptor)
    writer = system_page.PageWriter(moves=MOVES, moved_ns=MOVED_NS)
    monkeypatch.setattr(system_page, "time", types.SimpleNamespace(monotonic_ns=lambda: found.now_ns))
    monkeypatch.setattr(rank_page, "_PAGE", writer)
    rank_page.attach(os.dup(descriptor))
    yield found
    os.close(descriptor)


def test_waits_for_data_and_exchanges_are_no_computing_and_exchanges_count_by_kind(page: Page) -> None:
    group, other = object(), object()
    rank_page.time_exchanges(group, ExchangeKind.EXPERTS)

    @rank_page.exchanges
    def exchange(microseconds: int, group: object) -> None:
        page.work(microseconds)

    rank_page.enter_step(2, first=False)
    with rank_page.activity(RankActivity.DATA_WAIT):
        page.work(500)
        exchange(70, group)
        rank_page.add_rows(300)
    rank_page.add_rows(20)
    page.work(30)
    exchange(200, group)
    exchange(40, group=group)
    exchange(8, other)
    page.work(5)
    rank_page.leave_step(work=9)
    assert (page[COMPUTED_US], page[WORK]) == (35, 9)
    assert rank_page.rows() == 20, "drawing answers and measuring held-out samples are no work of the step"
    assert [page[EXCHANGED_US + kind] for kind in ExchangeKind] == [0, 240, 0, 0]


def test_a_first_step_has_no_time_since_kernels_are_made_in_it(page: Page) -> None:
    rank_page.enter_step(1, first=True)
    page.work(10**6)
    rank_page.leave_step(work=9)
    assert page[COMPUTED_US] == 0


def test_the_end_of_a_phase_that_was_lost_ends_with_the_next_step(page: Page) -> None:
    rank_page.enter_activity(RankActivity.EVALUATING)
    rank_page.enter_step(3, first=False)
    assert page[ACTIVITY] == RankActivity.STEP
    with pytest.raises(ValueError, match="lost"), rank_page.activity(RankActivity.CHECKPOINTING):
        raise ValueError("lost")
    assert page[ACTIVITY] == RankActivity.STEP
