"""Processor time of a process with all its descendants, from /proc; and the line that each contender prints."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from polyreme_datahub.digests import canonical_json, digest_value

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processor_s(root: int) -> float:
    """Return the processor time so far of a process and its descendants, those that ended included [s]."""
    parents: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(fields[1])].append(int(entry.name))
        ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    todo, total = [root], 0
    while todo:
        pid = todo.pop()
        total += ticks.get(pid, 0)
        todo += parents[pid]
    return total / _TICKS_PER_S


def report(started_s: float, cards: Sequence[object], *, own_s: float = 0.0) -> None:
    """Print what a run took: since ``started_s`` on the monotonic clock, and all its processor time.

    Args:
        started_s: When the work began.
        cards: Values of the last step, in any order: runs over the same images must agree.
        own_s: Processor time of this process before the work began [s].
    """
    wall_s = time.monotonic() - started_s
    found = {
        "wall_s": wall_s,
        "cpu_s": processor_s(os.getpid()) - own_s,
        "samples": len(cards),
        "outputs": digest_value(sorted(canonical_json(card).decode() for card in cards)),
    }
    print(json.dumps(found))
