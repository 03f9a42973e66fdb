"""Stacks that ranks wrote when they made no progress: from the pods' folders, or stored; equal ones together.

A rank writes the stacks of all its threads by Python's ``faulthandler``, which ends with the main thread's: that one
waits, computes or spins, so ranks are grouped by it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

from polyreme.run_files.paths import RunDirectory
from polyreme_api.rank_logs import STORED_PREFIX, RankAttempt, of_stored_key
from polyreme_api.store import ObjectStore

_FILE = re.compile(r"rank-([0-9]{1,9})\.a([0-9]{1,9})\.stacks")
_THREAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Ranks of an attempt with the same stack."""

    attempt: int
    ranks: Sequence[int]
    lines: Sequence[str]
    """Of their main threads, the most recent call first; empty: they wrote none."""


def of_pods(run: RunDirectory, attempt: int | None = None) -> dict[RankAttempt, str]:
    """Read what ranks wrote to the folders of a run's pods, in an attempt or in all.

    Raises:
        OSError: If a file can't be read.
    """
    found = {}
    for path in sorted(run.pods.glob("*/rank-*.stacks")):
        if (name := _FILE.fullmatch(path.name)) is not None and attempt in {None, int(name[2])}:
            found[RankAttempt(int(name[2]), int(name[1]))] = path.read_text(errors="replace")
    return found


def of_store(store: ObjectStore, attempt: int | None = None) -> dict[RankAttempt, str]:
    """Read what is stored in a checkpoint root.

    Raises:
        StoreFailedError: If the store stays away.
    """
    keys = [of_stored_key(info.key, kind="stacks") for info in store.list(STORED_PREFIX)]
    logs = [log for log in keys if log is not None and attempt in {None, log.attempt}]
    newest = max((log.attempt for log in logs), default=0)
    return {log: store.get(log.stored_stacks_key).decode(errors="replace") for log in logs if log.attempt == newest}


def group(stacks: Mapping[RankAttempt, str]) -> list[StackGroup]:
    """Group the ranks of the newest attempt that has stacks: the smallest groups first, for they are the odd ones."""
    newest = max((log.attempt for log, text in stacks.items() if text.strip()), default=None)
    if newest is None:
        return []
    ranks: dict[tuple[str, ...], list[int]] = {}
    for log, text in sorted(stacks.items()):
        if log.attempt == newest:
            ranks.setdefault(main_thread(text.splitlines()), []).append(log.rank)
    groups = [StackGroup(attempt=newest, ranks=found, lines=lines) for lines, found in ranks.items()]
    return sorted(groups, key=lambda each: (len(each.ranks), each.ranks))


def main_thread(lines: Iterable[str]) -> tuple[str, ...]:
    """Return the stack of the last thread of a dump, without the thread's number."""
    found: list[str] = []
    for line in lines:
        if _THREAD.fullmatch(line):
            found = []
        elif line.strip():
            found.append(line)
    return tuple(found)
