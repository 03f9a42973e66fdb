"""Times at which a worker commits a part of an item: soon after it began, then less and less often.

A worker that is killed again and again still gets further each time; one that lives long pays little.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_S = 0.25
EVERY_S_MAX = 8.0
BYTES_MAX = 16 * 2**20


class CommitPace:
    """Tells when the next commit is due.

    Args:
        steady_s: Monotonic clock [s].
    """

    def __init__(self, steady_s: Callable[[], float]) -> None:
        self._steady_s = steady_s
        self._every_s = FIRST_S
        self._began_s = steady_s()

    def begin(self) -> None:
        """Begin a part."""
        self._began_s = self._steady_s()

    def due(self, size_bytes: int) -> bool:
        """Tell whether to commit now what was made since ``begin``."""
        if size_bytes >= BYTES_MAX:
            return True
        if self._steady_s() - self._began_s < self._every_s:
            return False
        self._every_s = min(EVERY_S_MAX, self._every_s * 2)
        return True
