"""Pages never leak, are never written by two, and the oldest sequence always proceeds; over random histories."""

import random
from collections import Counter

import pytest

from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_trainer.serve.pages import Pages
from polyreme_trainer.serve.scheduler import Scheduler, Sequence

HISTORIES = 10_000


class Memory:
    """What a cache of these pages would hold: of each token, its sequence's prompt and its place."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self, scheduler: Scheduler, draw: random.Random) -> list[int]:
        """Run a step; return the sequences that ran."""
        step = scheduler.plan()
        pages = scheduler.pages
        for copy in step.copies:
            for slot in range(pages.page_tokens):
                self.held[copy.target, slot] = self.held.get((copy.source, slot), (-1, -1))
        written: Counter[tuple[int, int]] = Counter()
        for piece in step.pieces:
            for token in range(piece.begin, piece.end):
                place = self._place(pages, piece.sequence, token)
                written[place] += 1
                self.held[place] = self._content(piece.sequence, token)
        assert not [place for place, times in written.items() if times > 1], "two write one place"
        for piece in step.pieces:
            for token in range(piece.end):
                assert self.held[self._place(pages, piece.sequence, token)] == self._content(piece.sequence, token)
        scheduler.ran(step, [draw.randrange(6) for piece in step.pieces if piece.answers])
        return [piece.sequence.number for piece in step.pieces]

    @staticmethod
    def _place(pages: Pages, sequence: Sequence, token: int) -> tuple[int, int]:
        return pages.tables[sequence.number][token // pages.page_tokens], token % pages.page_tokens

    @staticmethod
    def _content(sequence: Sequence, token: int) -> tuple[int, int]:
        """The tokens of a prompt are the same for all that share it."""
        return (sequence.like if token < sequence.prompt else sequence.number), token


def check(pages: Pages) -> None:
    """Every page is free or held, never both, and no sequence has a page too many."""
    held = Counter(page for table in pages.tables.values() for page in table)
    assert len(held) + pages.free == pages.total, "a page leaked"
    assert held.keys() <= set(range(pages.total))


def history(seed: int) -> int:
    """Play one history to its end; return how often a sequence had to leave."""
    draw = random.Random(seed)
    pages = Pages(draw.randint(3, 24), page_tokens=draw.choice((1, 2, 3, 16)))
    scheduler = Scheduler(pages, rows_max=draw.randint(1, 6), prefill_tokens=draw.choice((1, 4, 100)))
    memory = Memory()
    sequences: list[Sequence] = []
    room = pages.total * pages.page_tokens
    for number in range(draw.randint(1, 8)):
        new = draw.randint(1, max(1, room // 2))
        like = draw.choice([number, *(other.like for other in sequences)])
        prompt = draw.randint(1, max(1, room - new)) if like == number else sequences[like].prompt
        sequence = Sequence(number=number, prompt=prompt, new_tokens_max=new, stop_token=0, like=like)
        sequences.append(sequence)
        try:
            scheduler.add(sequence)
        except RefusedError:
            assert pages.count(prompt + new) > pages.total
            sequence.new_tokens_max = 0
    for _ in range(10_000):
        if not scheduler.running and not scheduler.waiting:
            break
        oldest = scheduler.running[:1]
        if draw.random() < 0.05:
            scheduler.cancel(draw.choice([*scheduler.running, *scheduler.waiting]).number)
            check(pages)
            continue
        ran = memory.run(scheduler, draw)
        check(pages)
        assert ran, "something waits, and nothing runs"
        assert all(sequence.number in ran for sequence in oldest), "the oldest one waits"
        for sequence in scheduler.running:
            assert len(pages.tables[sequence.number]) <= pages.count(sequence.tokens), "more than a page is wasted"
    assert not scheduler.running
    assert not scheduler.waiting
    assert pages.free == pages.total
    return scheduler.preemptions


def test_random_histories_keep_every_page_accounted_for() -> None:
    assert sum(history(seed) for seed in range(HISTORIES)) > HISTORIES // 10, "few had to leave: the histories are lax"


def test_more_than_the_free_pages_is_refused_and_changes_nothing() -> None:
    pages = Pages(2, page_tokens=4)
    pages.grow(0, 0, 5)
    with pytest.raises(InvalidConfigError, match="cache is full: 1 pages wanted for 1 tokens, 0 free"):
        pages.grow(1, 0, 1)
    assert (pages.free, pages.tables) == (0, {0: [0, 1]})


def test_a_cache_without_pages_is_refused() -> None:
    with pytest.raises(InvalidConfigError, match="a cache needs pages: 0 of 16 tokens"):
        Pages(0, page_tokens=16)
