"""From where samples are read: counts by tier, and the line that says so in a data engine's log."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol, runtime_checkable

FIRST_SAID_S, SAID_EVERY_S = 60.0, 600.0
"""When the shares are logged: after a minute, then every ten."""
MIB = 2**20


class Tier(enum.StrEnum):
    """Where a sample's bytes were found."""

    MEMORY = "memory"
    """Decoded, kept from an earlier visit."""
    FILES = "local files"
    BUCKET = "the bucket"
    """It was waited for."""


class ReadCounts:
    """Samples by tier, and bytes that were fetched; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.samples: Counter[Tier] = Counter()
        self.fetched_bytes = 0

    def add(self, tier: Tier) -> None:
        """Count a sample."""
        with self._lock:
            self.samples[tier] += 1

    def add_fetched(self, size_bytes: int) -> None:
        """Count what a request brought."""
        with self._lock:
            self.fetched_bytes += size_bytes

    def sentence(self) -> str:
        """Say which share of the samples came from where."""
        with self._lock:
            total = max(1, self.samples.total())
            shares = [f"{100.0 * self.samples[tier] / total:.1f} % from {tier}" for tier in Tier]
            fetched = f"{self.fetched_bytes / MIB:,.0f} MiB were fetched from it"
            return f"{self.samples.total():,} samples read: {', '.join(shares)} ({fetched})"


@runtime_checkable
class Counting(Protocol):
    """A source that counts its reads."""

    @property
    def reads(self) -> ReadCounts:
        """Return its counts."""
        ...


@dataclasses.dataclass(slots=True)
class ReadTeller:
    """Says now and then where a source's samples come from.

    Args:
        counts: Of the source.
        say: Takes the sentence.
        steady_s: A clock that never jumps [s].
    """

    counts: ReadCounts
    say: Callable[[str], None]
    steady_s: Callable[[], float]
    _due_s: float = dataclasses.field(init=False)
    _lock: threading.Lock = dataclasses.field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._due_s = self.steady_s() + FIRST_SAID_S

    def tell_if_due(self) -> None:
        """Say it if it is time to; many threads may call this often."""
        now_s = self.steady_s()
        with self._lock:
            if now_s < self._due_s:
                return
            self._due_s = now_s + SAID_EVERY_S
        self.say(self.counts.sentence())
