"""Which node for which worker index. The interface is the point: a placer that knows the network replaces this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Placer(Protocol):
    """A pure function from free devices to a node for each worker."""

    def __call__(self, free: Mapping[str, int], *, workers: int, devices: int) -> list[str] | None:
        """Return a node name for each worker, in index order; None if they don't all fit.

        Args:
            free: Free devices of each usable node, by name.
            workers: Workers to place, all or none.
            devices: Devices of each worker, all on one node.
        """
        ...


def place_best_fit(free: Mapping[str, int], *, workers: int, devices: int) -> list[str] | None:
    """Fill as few nodes as possible: the emptiest first, and for the rest the node that it fills most tightly.

    Workers of consecutive indices share a node, so that ranks that talk most (the lowest ones) sit together. Ties go by
    name: equal inputs give equal placements.
    """
    slots = {name: count // devices for name, count in free.items() if count >= devices}
    placed: list[str] = []
    while len(placed) < workers:
        rest = workers - len(placed)
        if not slots:
            return None
        holds_rest = [name for name, count in slots.items() if count >= rest]
        if holds_rest:
            chosen = min(holds_rest, key=lambda name: (slots[name], name))
        else:
            chosen = min(slots, key=lambda name: (-slots[name], name))
        placed += [chosen] * min(rest, slots.pop(chosen))
    return placed
