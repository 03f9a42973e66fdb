"""Cache of what was read of runs: items are kept while their stamp is the same."""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Items by key, those that were asked for last, each while its stamp is the same.

    Args:
        most: Items that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._items: collections.OrderedDict[Hashable, tuple[object, T]] = collections.OrderedDict()

    def get(self, key: Hashable, stamp: object) -> T | None:
        """Return the item; None where there is none, or its stamp is another one."""
        with self._lock:
            found = self._items.get(key)
            if found is None or found[0] != stamp:
                return None
            self._items.move_to_end(key)
            return found[1]

    def put(self, key: Hashable, stamp: object, item: T) -> None:
        """Keep an item, in place of one with another stamp."""
        with self._lock:
            self._items[key] = stamp, item
            self._items.move_to_end(key)
            while len(self._items) > self._most:
                self._items.popitem(last=False)
