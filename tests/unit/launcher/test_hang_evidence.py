"""Evidence of a hang: deadlines, the second signal, and the ranks that hold up the others."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from polyreme_api.progress import StallKind
from polyreme_api.rank_state import RankActivity, RankState, RankWait
from polyreme_launcher.protocol.hang_evidence import ENDS_WITHIN_S, HangLimits, HangWatch, accuse, look, not_ended

LIMITS = HangLimits(step_s=600, first_step_s=900, data_wait_s=120)
LOOK_S = 2.0


def rank(number: int, wait: RankWait = RankWait.NOTHING, **fields: object) -> RankState:
    state = RankState(rank=number, activity=RankActivity.STEP, step=8, wait=wait, quiet_ms=10**7)
    return dataclasses.replace(state, **fields)  # type: ignore[arg-type]


class Observer:
    """Looks at four ranks every two seconds."""

    def __init__(self, *, world: int = 4) -> None:
        self.watch, self.now_s, self.world, self.moves = HangWatch(), 0.0, world, 0

    def look(self, ranks: Sequence[RankState], *, moves: bool = False) -> HangWatch:
        self.now_s += LOOK_S
        self.moves += moves
        ranks = [dataclasses.replace(each, moves=self.moves) for each in ranks]
        self.watch = look(self.watch, ranks, self.now_s, world=self.world, limits=LIMITS, devices=2, pp=1)
        return self.watch

    def train(self, *, pause_s: float = 0.0, activity: RankActivity = RankActivity.STEP) -> "Observer":
        """Let ranks advance, with one pause that ends."""
        ranks = [rank(number, activity=activity) for number in range(self.world)]
        for _ in range(5):
            self.look(ranks, moves=True)
        for _ in range(int(pause_s / LOOK_S) - 1):
            self.look(ranks)
        self.look(ranks, moves=True)
        return self

    def first_report_s(self, ranks: Sequence[RankState]) -> float | None:
        """Return after how long a stall of these ranks is confirmed; None: never within an hour."""
        began_s = self.now_s
        for _ in range(1800):
            if (stall := self.look(ranks).stall) is not None and stall.confirmed:
                return self.now_s - began_s
        return None


def spinning() -> list[RankState]:
    """Rank 2 is in no exchange, and three wait for it."""
    return [rank(number, RankWait.NOTHING if number == 2 else RankWait.EXCHANGE) for number in range(4)]


@pytest.mark.parametrize(
    ("prepare", "deadline_s"),
    [
        (lambda observer: observer, 600),
        (lambda observer: observer.train(), 60),
        (lambda observer: observer.train(pause_s=30), 150),
        (lambda observer: observer.train(pause_s=300), 600),
        (lambda observer: observer.train(pause_s=30, activity=RankActivity.DATA_WAIT).train(), 60),
    ],
    ids=["nothing learned", "floor", "five times the longest pause", "cap", "waits for data teach nothing about steps"],
)
def test_the_deadline_of_a_step_is_learned_between_a_floor_and_the_stated_cap(
    prepare: Callable[[Observer], Observer], deadline_s: float
) -> None:
    found_s = prepare(Observer()).first_report_s(spinning())
    assert found_s is not None
    assert deadline_s <= found_s <= deadline_s + 3 * LOOK_S


@pytest.mark.parametrize(
    ("activity", "cap_s"),
    [
        (RankActivity.FIRST_STEP, 900),
        (RankActivity.DATA_WAIT, 720),
        (RankActivity.LOADING, 900),
        (RankActivity.EVALUATING, 900),
        (RankActivity.CHECKPOINTING, 900),
        (RankActivity.EXPORTING, 900),
    ],
)
def test_the_rank_that_holds_up_the_others_sets_the_deadline_by_its_activity(
    activity: RankActivity, cap_s: float
) -> None:
    ranks = [rank(0, activity=activity), *(rank(number, RankWait.EXCHANGE) for number in range(1, 4))]
    found_s = Observer().train().first_report_s(ranks)
    assert found_s is not None
    assert cap_s <= found_s <= cap_s + 3 * LOOK_S


WAIT, FORWARD, BACKWARD = RankWait.EXCHANGE, RankWait.FORWARD, RankWait.BACKWARD


@pytest.mark.parametrize(
    ("ranks", "pp", "kind", "suspects"),
    [
        ([rank(0, WAIT), rank(1, stopped=True)], 1, StallKind.STOPPED, (1,)),
        ([rank(0, WAIT, stopped=True), rank(1)], 1, StallKind.STOPPED, (0,)),
        ([rank(0, WAIT), rank(1, WAIT), rank(2)], 1, StallKind.OUTSIDE, (2,)),
        ([rank(0, WAIT, exchanges=6), rank(1, WAIT, exchanges=5)], 1, StallKind.BEHIND, (1,)),
        ([rank(0, WAIT, exchanges=6), rank(1, WAIT, exchanges=6)], 1, StallKind.ALL_WAIT, ()),
        ([rank(0, WAIT, exchanges=6), rank(1, WAIT, exchanges=5, stage=1)], 2, StallKind.ALL_WAIT, ()),
        ([rank(0, idle=True), rank(1, idle=True)], 1, StallKind.IDLE, ()),
        ([rank(0, idle=True), rank(1)], 1, StallKind.BUSY, ()),
        # Rank 1 waits for the third output of rank 0, which says it has sent three and waits for the gradient.
        (
            [rank(0, BACKWARD, sent_forward=3), rank(1, FORWARD, stage=1, microbatch=2)],
            2,
            StallKind.NOT_SENT,
            (0,),
        ),
        (
            [rank(0, BACKWARD, microbatch=1), rank(1, FORWARD, stage=1, microbatch=3, sent_backward=2)],
            2,
            StallKind.NOT_SENT,
            (1,),
        ),
        # The sender is a step ahead.
        ([rank(0, WAIT, step=9), rank(1, FORWARD, stage=1, microbatch=3)], 2, StallKind.NOT_SENT, (0,)),
    ],
)
def test_the_rank_that_holds_up_the_others_is_named(
    ranks: list[RankState], pp: int, kind: StallKind, suspects: tuple[int, ...]
) -> None:
    assert accuse(ranks, pp=pp) == (kind, suspects)


def test_ranks_that_all_compute_are_reported_and_never_confirmed() -> None:
    observer = Observer().train()
    assert observer.first_report_s([rank(number) for number in range(4)]) is None
    assert observer.watch.stall is not None
    assert observer.watch.stall.kind is StallKind.BUSY


def test_a_hang_is_found_although_the_end_of_a_phase_was_lost() -> None:
    """All ranks always say that they evaluate, as if its end had been dropped; they train, and then one hangs."""
    observer = Observer().train(activity=RankActivity.EVALUATING)
    found_s = observer.first_report_s(
        [dataclasses.replace(each, activity=RankActivity.EVALUATING) for each in spinning()]
    )
    assert found_s is not None
    assert found_s <= 300 + 3 * LOOK_S


def test_a_stopped_rank_is_reported_after_ten_seconds_and_confirmed_at_the_deadline() -> None:
    observer = Observer().train()
    ranks = [rank(0, stopped=True), *(rank(number, RankWait.EXCHANGE) for number in range(1, 4))]
    for _ in range(6):
        observer.look(ranks)
    assert observer.watch.stall is not None
    assert not observer.watch.stall.confirmed
    found_s = observer.first_report_s(ranks)
    assert found_s is not None
    assert 60 - 12 <= found_s <= 60 - 12 + 2 * LOOK_S


def test_the_detector_is_armed_by_all_ranks_alone_and_starts_over_when_one_was_out_of_sight() -> None:
    observer = Observer().train()
    for _ in range(20):
        observer.look(spinning())
    assert observer.watch.armed
    observer.look(spinning()[:3])
    assert not observer.watch.armed
    observer.look([*spinning()[:3], rank(3, RankWait.EXCHANGE, watched=False)])
    assert not observer.watch.armed
    found_s = observer.first_report_s(spinning())
    assert found_s is not None
    assert found_s >= 60


def test_time_in_which_the_observer_itself_was_stopped_counts_for_nothing() -> None:
    observer = Observer().train()
    observer.look(spinning())
    observer.now_s += 500
    found_s = observer.first_report_s(spinning())
    assert found_s is not None
    assert found_s >= 60 - 2 * LOOK_S


def test_a_pause_that_the_pages_themselves_do_not_show_counts_for_nothing() -> None:
    """A launcher that sends old looks, such as one that lags, proves no pause."""
    observer = Observer().train()
    assert observer.first_report_s([dataclasses.replace(each, quiet_ms=5000) for each in spinning()]) is None


def test_ranks_that_have_done_all_and_stay_are_named_and_no_others() -> None:
    late_ms = int(1000 * ENDS_WITHIN_S)
    ranks = [
        rank(0, activity=RankActivity.DONE, quiet_ms=late_ms + 1),
        rank(1, activity=RankActivity.DONE, quiet_ms=late_ms),
        rank(2, activity=RankActivity.EXPORTING, quiet_ms=late_ms + 1),
    ]
    assert not_ended(ranks) == {0}
