"""History under any order of deaths, resumes and late writers, against a model of where every weight came from."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from polyreme_api.errors import InvalidConfigError
from polyreme_api.history import (
    ResumePoint,
    attempt_spans,
    checkpoint_name,
    choose_resume,
    committed_steps,
    is_history,
    parse_checkpoint_name,
)
from polyreme_api.progress import CheckpointRef, StepRecord

Lineage = tuple[tuple[int, int], ...]
"""The (attempt, step) pairs that made a state of the weights, oldest first."""


@dataclasses.dataclass(frozen=True)
class Life:
    """What one attempt does: steps, every how many it checkpoints, and what it does after its successor has begun."""

    steps: int
    every: int
    fixes: bool
    late_steps: int
    lose_newest: int
    """Checkpoints of all attempts, newest first, that are found torn when the next attempt chooses."""


lives = st.lists(
    st.builds(
        Life,
        steps=st.integers(0, 12),
        every=st.integers(1, 5),
        fixes=st.sampled_from([True, True, True, False]),
        late_steps=st.integers(0, 8),
        lose_newest=st.sampled_from([0, 0, 0, 1, 2, 9]),
    ),
    min_size=1,
    max_size=8,
)


class World:
    """A checkpoint root, and for each checkpoint where it came from."""

    def __init__(self) -> None:
        self.points: list[ResumePoint] = []
        self.records: dict[int, list[StepRecord]] = {}
        self.committed: dict[CheckpointRef, Lineage] = {}
        self.lineages: dict[int, Lineage] = {}
        self.late: set[CheckpointRef] = set()

    def train(self, attempt: int, steps: int, every: int, *, late: bool = False) -> None:
        for _ in range(steps):
            lineage = self.lineages[attempt]
            step = lineage[-1][1] + 1 if lineage else 1
            self.lineages[attempt] = lineage = (*lineage, (attempt, step))
            self.records.setdefault(attempt, []).append(
                StepRecord(attempt=attempt, step=step, loss=step + attempt / 16)
            )
            if step % every == 0:
                reference = CheckpointRef(attempt=attempt, step=step)
                self.committed[reference] = lineage
                if late:
                    self.late.add(reference)

    def begin(self, attempt: int) -> CheckpointRef | None:
        chosen = choose_resume(self.committed, self.points)
        name = None if chosen is None else checkpoint_name(chosen)
        self.points.append(ResumePoint(attempt=attempt, resume_from=name))
        self.lineages[attempt] = () if chosen is None else self.committed[chosen]
        return chosen

    def lose(self, count: int) -> None:
        for reference in sorted(self.committed, key=lambda each: (each.step, each.attempt), reverse=True)[:count]:
            del self.committed[reference]

    @property
    def newest(self) -> Lineage:
        return self.lineages[self.points[-1].attempt] if self.points else ()


def check(world: World) -> None:
    history = [(record.attempt, record.step) for record in committed_steps(world.points, world.records)]
    assert [step for _, step in history] == list(range(1, len(history) + 1)), "each step once, in order, without a gap"
    assert tuple(history) == world.newest, "history is what made the newest weights"
    chosen = choose_resume(world.committed, world.points)
    usable = [reference for reference, lineage in world.committed.items() if world.newest[: len(lineage)] == lineage]
    assert (chosen is None) == (not usable)
    if chosen is not None:
        assert chosen in usable, "a resume never leaves the history"
        assert chosen.step == max(reference.step for reference in usable), "a resume loses no more than it must"
    for reference, lineage in world.committed.items():
        assert is_history(reference, attempt_spans(world.points)) == (world.newest[: len(lineage)] == lineage)


@pytest.mark.slow
@given(lives)
@example([Life(steps=10, every=5, fixes=True, late_steps=8, lose_newest=0)] * 3)
@example([Life(steps=10, every=5, fixes=True, late_steps=0, lose_newest=1)] * 4)
def test_history_is_what_made_the_newest_weights(plan: list[Life]) -> None:
    world = World()
    previous: Life | None = None
    for attempt, life in enumerate(plan, start=1):
        if not life.fixes:
            continue
        world.begin(attempt)
        check(world)
        if previous is not None:
            paused = world.points[-2].attempt
            world.train(paused, previous.late_steps, previous.every, late=True)
            check(world)
        world.train(attempt, life.steps, life.every)
        check(world)
        world.lose(life.lose_newest)
        previous = life


@given(lives)
def test_a_late_commit_of_an_older_attempt_is_never_chosen(plan: list[Life]) -> None:
    world = World()
    for attempt, life in enumerate(plan, start=1):
        chosen = world.begin(attempt)
        assert chosen not in world.late
        if attempt > 1:
            world.train(attempt - 1, life.late_steps, 1, late=True)
        world.train(attempt, life.steps, life.every)


@given(lives)
def test_a_late_resume_point_of_an_older_attempt_changes_nothing(plan: list[Life]) -> None:
    """Attempt 2 fixes its point after attempt 3 did: 3 is newer, and 2 is on no path."""
    world = World()
    for attempt, life in enumerate(plan, start=1):
        world.begin(attempt * 2)
        world.train(attempt * 2, life.steps, life.every)
    before = committed_steps(world.points, world.records)
    for attempt in range(1, len(plan) + 1):
        late = ResumePoint(attempt=attempt * 2 - 1, resume_from=None)
        assert committed_steps([*world.points, late], world.records) == before


def test_without_a_resume_point_nothing_under_the_root_is_ours() -> None:
    assert choose_resume([CheckpointRef(attempt=1, step=50)], []) is None
    assert committed_steps([], {1: [StepRecord(attempt=1, step=1, loss=1.0)]}) == []


def test_an_attempt_that_resumed_earlier_cuts_the_one_between_away() -> None:
    points = [
        ResumePoint(attempt=1),
        ResumePoint(attempt=2, resume_from="a000001-s00000050"),
        ResumePoint(attempt=3, resume_from="a000001-s00000030"),
    ]
    assert attempt_spans(points) == {1: (0, 30), 3: (30, None)}
    committed = [CheckpointRef(attempt=attempt, step=step) for attempt, step in ((1, 30), (1, 50), (2, 80))]
    assert choose_resume(committed, points) == CheckpointRef(attempt=1, step=30)


@given(attempt=st.integers(1, 1_000_000), step=st.integers(0, 100_000_000))
def test_checkpoint_names_go_round(attempt: int, step: int) -> None:
    reference = CheckpointRef(attempt=attempt, step=step)
    assert parse_checkpoint_name(checkpoint_name(reference)) == reference


@given(
    first=st.tuples(st.integers(1, 999_999), st.integers(0, 99_999_999)),
    second=st.tuples(st.integers(1, 999_999), st.integers(0, 99_999_999)),
)
def test_names_sort_as_attempts_and_steps_do(first: tuple[int, int], second: tuple[int, int]) -> None:
    names = [checkpoint_name(CheckpointRef(attempt=attempt, step=step)) for attempt, step in (first, second)]
    assert (names[0] < names[1]) == (first < second)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a1-s1",
        "a000000-s00000050",
        "a000001-s00000050\n",
        "a000001-s00000050/x",
        "a0000001-s00000050",
        "a\u0660\u0660\u0660\u0660\u0660\u0661-s00000050",
    ],
)
def test_what_is_no_checkpoint_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfigError, match="not a checkpoint name"):
        parse_checkpoint_name(name)


@given(st.text(max_size=30))
def test_any_name_is_a_checkpoint_or_refused(name: str) -> None:
    try:
        reference = parse_checkpoint_name(name)
    except InvalidConfigError:
        return
    assert checkpoint_name(reference) == name
