"""Pages of a cache: who owns which, in whole numbers; the tensors are elsewhere (``cache.py``).

A page has room for the latents of a few consecutive tokens of a sequence (PagedAttention, arXiv:2309.06180). Sequences
with the same beginning share its pages. A page that several sequences hold is never written: a
sequence that would write it gets a copy of its own first. A sequence wastes less than one page.
"""

from __future__ import annotations

import dataclasses

from polyreme_api.errors import InvalidConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A page whose content must be copied before the next token is written."""

    source: int
    target: int


class Pages:
    """Pages of a pool, and the table of each sequence: its pages in the order of its tokens."""

    def __init__(self, total: int, *, page_tokens: int) -> None:
        """Start with all pages free.

        Raises:
            InvalidConfigError: If there are none.
        """
        if total < 1 or page_tokens < 1:
            raise InvalidConfigError(f"a cache needs pages: {total} of {page_tokens} tokens each, expected at least 1")
        self.total, self.page_tokens = total, page_tokens
        self.tables: dict[int, list[int]] = {}
        self._free = list(range(total - 1, -1, -1))
        self._holders = [0] * total

    @property
    def free(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def count(self, tokens: int) -> int:
        """Pages that so many tokens fill."""
        return -(-tokens // self.page_tokens)

    def places(self, sequence: int, begin: int, end: int) -> list[int]:
        """Return where tokens of a sequence are: page * page_tokens + place within the page."""
        table, size = self.tables[sequence], self.page_tokens
        return [table[token // size] * size + token % size for token in range(begin, end)]

    def missing(self, sequence: int, written: int, tokens: int) -> int:
        """Free pages that ``grow`` would take."""
        table = self.tables.get(sequence, [])
        return self.count(tokens) - len(table) + len(self._shared(table, written))

    def grow(self, sequence: int, written: int, tokens: int) -> list[Copy]:
        """Give a sequence room for its first ``tokens`` tokens, and pages of its own for those after ``written``.

        Args:
            sequence: Number of the sequence; a new one begins here.
            written: Tokens whose latents are in its pages already.
            tokens: Tokens that it shall have room for.

        Returns:
            Pages to copy before anything is written.

        Raises:
            InvalidConfigError: If there are too few free pages; nothing is changed then.
        """
        missing = self.missing(sequence, written, tokens)
        if missing > self.free:
            raise InvalidConfigError(f"cache is full: {missing} pages wanted for {tokens} tokens, {self.free} free")
        table = self.tables.setdefault(sequence, [])
        copies = []
        for place in self._shared(table, written):
            copies.append(Copy(source=table[place], target=self._take()))
            self._holders[table[place]] -= 1
            table[place] = copies[-1].target
        table.extend(self._take() for _ in range(self.count(tokens) - len(table)))
        return copies

    def fork(self, parent: int, child: int, tokens: int) -> None:
        """Begin a sequence that shares the pages of the first tokens of another."""
        table = self.tables[parent][: self.count(tokens)]
        for page in table:
            self._holders[page] += 1
        self.tables[child] = table

    def release(self, sequence: int) -> None:
        """End a sequence; pages that no other holds are free."""
        for page in reversed(self.tables.pop(sequence, [])):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _shared(self, table: list[int], written: int) -> list[int]:
        """Places of pages that would be written and that others hold too."""
        first = written // self.page_tokens
        return [place for place in range(first, len(table)) if self._holders[table[place]] > 1]

    def _take(self) -> int:
        page = self._free.pop()
        self._holders[page] = 1
        return page
