"""Sorts more rows than memory holds: sorted runs in temporary files, merged when they are read."""

from __future__ import annotations

import heapq
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any

RUN_ROWS = 200_000
"""Rows that are sorted in memory; only more than that are written to files."""
Row = Sequence[Any]


def sorted_rows(rows: Iterable[Row], *, key: Callable[[Row], Any], run_rows: int = RUN_ROWS) -> Iterator[Row]:
    """Yield JSON-able rows in order.

    Args:
        rows: The rows, in any order.
        key: What they are sorted by.
        run_rows: Rows in memory.
    """
    remaining = iter(rows)
    run = sorted(itertools.islice(remaining, run_rows), key=key)
    if len(run) < run_rows:
        yield from run
        return
    with ExitStack() as stack:
        files: list[IO[str]] = []
        while run:
            file = stack.enter_context(tempfile.TemporaryFile("w+", encoding="ascii"))
            file.writelines(json.dumps(row) + "\n" for row in run)
            file.seek(0)
            files.append(file)
            run = sorted(itertools.islice(remaining, run_rows), key=key)
        yield from heapq.merge(*(map(json.loads, file) for file in files), key=key)
