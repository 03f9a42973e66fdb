"""Evidence of stragglers: who is named, when, and why uneven data name no rank."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from polyreme_api.progress import Straggler
from polyreme_api.rank_state import ExchangeKind, RankState
from polyreme_launcher.protocol.straggler_evidence import BURST_ROUNDS, ROUNDS, SpeedWatch, look

WORLD = 8
USUAL_US, WORK = 1_000_000, 1000
SLOW_ROUNDS = ROUNDS - BURST_ROUNDS
Speeds = Callable[[int], RankState]


def usual(number: int) -> RankState:
    return RankState(rank=number, computed_us=USUAL_US, work=WORK)


def slowed(by: float, *ranks: int) -> Speeds:
    return lambda number: dataclasses.replace(
        usual(number), computed_us=int(USUAL_US * (by if number in ranks else 1.0))
    )


class Gang:
    """Eight ranks that take one step after another, looked at once in each."""

    def __init__(self, *, pp: int = 1, ep: int = 1) -> None:
        self.watch, self.step, self.pp, self.ep = SpeedWatch(), 1, pp, ep

    def train(self, rounds: int, *, ranks: Speeds = usual) -> Sequence[Straggler]:
        for _ in range(rounds):
            self.step += 1
            states = [dataclasses.replace(ranks(number), step=self.step) for number in range(WORLD)]
            self.look(states)
        return self.watch.stragglers

    def look(self, states: Sequence[RankState]) -> None:
        blocks = {ExchangeKind.EXPERTS: self.ep}
        self.watch = look(self.watch, states, world=WORLD, pp=self.pp, blocks=blocks)


def test_a_slow_rank_is_named_with_the_step_in_which_it_began_and_how_much_slower_it_is() -> None:
    gang = Gang()
    gang.train(30)
    assert not gang.train(SLOW_ROUNDS - 1, ranks=slowed(1.3, 5))
    assert gang.train(1, ranks=slowed(1.3, 5)) == (Straggler(ranks=(5,), since_step=31, slowdown=1.3),)
    assert gang.train(20, ranks=slowed(2.0, 5))[0].slowdown == 1.3, "each other figure would be another record"


def test_a_rank_is_no_longer_named_after_a_few_usual_rounds() -> None:
    gang = Gang()
    gang.train(ROUNDS, ranks=slowed(1.3, 5))
    assert gang.train(BURST_ROUNDS)
    assert not gang.train(1)


@pytest.mark.parametrize("rounds", [1, SLOW_ROUNDS - 1])
def test_a_burst_names_no_rank(rounds: int) -> None:
    gang = Gang()
    for _ in range(5):
        assert not gang.train(rounds, ranks=slowed(5.0, 2))
        assert not gang.train(ROUNDS)


@pytest.mark.parametrize("fixed", [0.0, 0.5, 1.0], ids=["none", "half", "all"])
@pytest.mark.parametrize("work", [0.5, 2.0])
def test_a_rank_with_other_work_than_the_others_is_not_named_whatever_part_of_the_time_is_fixed(
    work: float, fixed: float
) -> None:
    def uneven(number: int) -> RankState:
        share = work if number == 3 else 1.0
        took = int(USUAL_US * (fixed + (1 - fixed) * share))
        return RankState(rank=number, computed_us=took, work=int(WORK * share))

    assert not Gang().train(40, ranks=uneven)


def test_ranks_are_compared_within_their_pipeline_stage() -> None:
    assert not Gang(pp=2).train(40, ranks=slowed(3.0, 4, 5, 6, 7))
    assert [found.ranks for found in Gang(pp=2).train(40, ranks=slowed(1.3, 2))] == [(2,)]
    assert [found.ranks for found in Gang().train(40, ranks=slowed(3.0, 4, 5, 6, 7))] == [(4,), (5,), (6,), (7,)]


def exchanging(slow_us: int, *, late: int = -1) -> Speeds:
    """The exchanges of ranks 4 to 7 take longer; all wait for a late rank, which waits for none."""

    def state(number: int) -> RankState:
        wait = 0 if number == late or late // 4 != number // 4 else 900_000
        return dataclasses.replace(usual(number), experts_us=(slow_us if number >= 4 else 100_000) + wait)

    return state


def test_a_group_is_named_by_the_least_time_of_its_members() -> None:
    assert Gang(ep=4).train(20, ranks=exchanging(300_000)) == (
        Straggler(ranks=(4, 5, 6, 7), group="experts", since_step=1, slowdown=3.0),
    )
    assert not Gang(ep=4).train(20, ranks=exchanging(100_000, late=6)), "they wait for a rank, not for the network"
    assert not Gang(ep=4).train(20, ranks=exchanging(140_000)), "it varies"
    assert not Gang(ep=8).train(20, ranks=exchanging(300_000)), "there is no other group"


def test_a_round_needs_another_step_of_every_rank() -> None:
    gang = Gang()
    gang.train(ROUNDS - 1, ranks=slowed(1.3, 5))
    states = [dataclasses.replace(slowed(1.3, 5)(number), step=gang.step + 1) for number in range(WORLD)]
    for incomplete in (
        states[1:],
        [dataclasses.replace(states[0], step=gang.step), *states[1:]],
        [dataclasses.replace(states[0], watched=False), *states[1:]],
        [dataclasses.replace(states[0], computed_us=0), *states[1:]],
    ):
        gang.look(incomplete)
        assert not gang.watch.stragglers
    gang.look(states)
    assert gang.watch.stragglers
