"""The pages of a pod's ranks: the launcher makes one for each rank that it forks, and reads them."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator

from polyreme_api.rank_state import (
    ACTIVITY,
    COMPUTED_US,
    EXCHANGED_US,
    EXCHANGES,
    MICROBATCH,
    MOVED_NS,
    MOVES,
    PAGE_FIELDS,
    SENT_BACKWARD,
    SENT_FORWARD,
    STAGE,
    STEP,
    UNTIL_NS,
    WAIT,
    WORK,
    ExchangeKind,
    RankActivity,
    RankState,
    RankWait,
)
from polyreme_system.rank_page import PAGE_BYTES, open_page, read_page, write_number

_NS_PER_MS = 1_000_000


class RankPages:
    """One page for each rank of the newest attempt."""

    def __init__(self) -> None:
        self._pages: dict[int, tuple[mmap.mmap, int]] = {}
        """By rank: the page, and when it was made [ns]."""

    @contextlib.contextmanager
    def open(self, rank: int, now_ns: int) -> Iterator[int | None]:
        """Make an empty page in place of the rank's last one; give its descriptor, or None if there can be none.

        The descriptor is valid until the block ends.
        """
        self._close(rank)
        try:
            descriptor = open_page()
        except (OSError, AttributeError):  # AttributeError: a system without memory files
            yield None
            return
        try:
            self._pages[rank] = mmap.mmap(descriptor, PAGE_BYTES), now_ns
            yield descriptor
        finally:
            os.close(descriptor)

    def read(self, now_ns: int) -> dict[int, RankState]:
        """Return what the ranks have written, by rank."""
        return {rank: _state(rank, page, made_ns, now_ns) for rank, (page, made_ns) in self._pages.items()}

    def limit(self, until_ns: int) -> None:
        """Tell the ranks until when they may begin steps."""
        for page, _ in self._pages.values():
            write_number(page, UNTIL_NS, until_ns)

    def close(self) -> None:
        """Free the pages."""
        for rank in list(self._pages):
            self._close(rank)

    def _close(self, rank: int) -> None:
        if (known := self._pages.pop(rank, None)) is not None:
            known[0].close()


def _state(rank: int, page: mmap.mmap, made_ns: int, now_ns: int) -> RankState:
    numbers = read_page(page, PAGE_FIELDS)
    try:
        activity, wait = RankActivity(numbers[ACTIVITY]), RankWait(numbers[WAIT])
    except ValueError:
        return RankState(rank=rank, watched=False)
    return RankState(
        rank=rank,
        activity=activity,
        step=numbers[STEP],
        wait=wait,
        stage=numbers[STAGE],
        microbatch=numbers[MICROBATCH],
        moves=numbers[MOVES],
        exchanges=numbers[EXCHANGES],
        sent_forward=numbers[SENT_FORWARD],
        sent_backward=numbers[SENT_BACKWARD],
        quiet_ms=max(0, now_ns - (numbers[MOVED_NS] or made_ns)) // _NS_PER_MS,
        computed_us=numbers[COMPUTED_US],
        work=numbers[WORK],
        stage_us=numbers[EXCHANGED_US + ExchangeKind.STAGE],
        experts_us=numbers[EXCHANGED_US + ExchangeKind.EXPERTS],
        context_us=numbers[EXCHANGED_US + ExchangeKind.CONTEXT],
        tensor_us=numbers[EXCHANGED_US + ExchangeKind.TENSOR],
    )
