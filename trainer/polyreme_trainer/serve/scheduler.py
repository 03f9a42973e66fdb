"""Choice of what runs in the next step of the engine: a pure function of what was asked and answered so far.

Sequences run in the order of their requests. Each step runs one token of every running answer, and pieces of the
prompts of new ones as far as a budget of tokens allows. A sequence is admitted once the cache has room for all that it
has; if a running one finds no page, the youngest gives its pages back, and is computed again later. So the oldest
always proceeds, and the same requests give the same steps, on every rank that has the same ones.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from polyreme_api.errors import RefusedError
from polyreme_trainer.serve.pages import Copy, Pages


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A prompt and what has been answered to it."""

    number: int
    prompt: int
    """Tokens of the prompt."""
    new_tokens_max: int
    stop_token: int
    like: int
    """Number of the first sequence with the same prompt; its own, if there is no other."""
    made: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    """Tokens, of prompt and answer, whose latents are in the cache."""

    @property
    def tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt + len(self.made)

    @property
    def ended(self) -> bool:
        """Whether the answer is whole."""
        return len(self.made) == self.new_tokens_max or self.made[-1:] == [self.stop_token]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a sequence that run in a step."""

    sequence: Sequence
    begin: int
    end: int

    @property
    def answers(self) -> bool:
        """Whether the next token of the answer comes out of it."""
        return self.end == self.sequence.tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What runs next."""

    pieces: list[Piece]
    copies: list[Copy]
    """Pages to copy first."""


class Scheduler:
    """The sequences that wait and those that run."""

    def __init__(self, pages: Pages, *, rows_max: int, prefill_tokens: int) -> None:
        """Start without sequences.

        Args:
            pages: Of the cache.
            rows_max: Sequences that run at once.
            prefill_tokens: Tokens of prompts that a step runs, at most.
        """
        self.pages = pages
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self._rows_max, self._prefill_tokens = rows_max, prefill_tokens

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn.

        Raises:
            RefusedError: If it may need more than the whole cache.
        """
        longest = sequence.prompt + sequence.new_tokens_max
        if self.pages.count(longest) > self.pages.total:
            raise RefusedError(
                f"does not fit the cache: {sequence.prompt} tokens of prompt and up to {sequence.new_tokens_max} of "
                f"answer, the cache has room for {self.pages.total * self.pages.page_tokens}; ask for a shorter answer"
            )
        self.waiting.append(sequence)

    def cancel(self, number: int) -> None:
        """Forget a sequence, whether it waits, runs or has ended."""
        self.running = [sequence for sequence in self.running if sequence.number != number]
        self.waiting = deque(sequence for sequence in self.waiting if sequence.number != number)
        self.pages.release(number)

    def plan(self) -> Step:
        """Return what runs next, and give it the pages that it needs."""
        step = Step(pieces=[], copies=[])
        budget = self._prefill_tokens
        for sequence in list(self.running):
            if sequence not in self.running:
                break  # it was preempted by an older one, and so were all after it
            decodes = sequence.cached == sequence.tokens - 1
            if (not decodes and budget < 1) or not self._room(sequence):
                continue
            step.copies.extend(self.pages.grow(sequence.number, sequence.cached, sequence.tokens))
            piece = Piece(sequence, sequence.cached, min(sequence.tokens, sequence.cached + max(1, budget)))
            step.pieces.append(piece)
            budget -= 0 if decodes else piece.end - piece.begin
        self._admit(step, budget)
        return step

    def ran(self, step: Step, tokens: list[int]) -> None:
        """Note that a step ran, and the token of each piece that answers."""
        made = iter(tokens)
        for piece in step.pieces:
            sequence = piece.sequence
            sequence.cached = piece.end
            if not piece.answers:
                continue
            sequence.made.append(next(made))
            if sequence.ended:
                self.running.remove(sequence)
                self.pages.release(sequence.number)

    def _room(self, sequence: Sequence) -> bool:
        """Make room for a running sequence; False if it was the youngest and had to leave."""
        while self.pages.missing(sequence.number, sequence.cached, sequence.tokens) > self.pages.free:
            youngest = self.running.pop()
            self.pages.release(youngest.number)
            youngest.cached = 0
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            # A sequence younger than this one has no piece yet, since pieces are planned from the oldest on.
            if youngest is sequence:
                return False
        return True

    def _admit(self, step: Step, budget: int) -> None:
        """Admit sequences from the front of the queue, while there are rows, pages and budget."""
        put_back = []
        while self.waiting and len(self.running) < self._rows_max and budget > 0:
            sequence = self.waiting.popleft()
            source = self._same_prompt(sequence)
            if source is not None and source.cached < sequence.prompt:
                put_back.append(sequence)  # its prompt is being computed
                continue
            if source is not None and not sequence.made:
                self.pages.fork(source.number, sequence.number, sequence.prompt)
                sequence.cached = sequence.prompt - 1
            if self.pages.missing(sequence.number, sequence.cached, sequence.tokens) > self.pages.free:
                self.pages.release(sequence.number)
                sequence.cached = 0
                put_back.append(sequence)
                break
            step.copies.extend(self.pages.grow(sequence.number, sequence.cached, sequence.tokens))
            end = min(sequence.tokens, sequence.cached + budget)
            step.pieces.append(Piece(sequence, sequence.cached, end))
            budget -= end - sequence.cached
            self.running.append(sequence)
        self.waiting.extendleft(reversed(put_back))

    def _same_prompt(self, sequence: Sequence) -> Sequence | None:
        """Return a running sequence with the same prompt, the furthest one."""
        same = [other for other in self.running if other.like == sequence.like]
        return max(same, key=lambda other: other.cached, default=None)
