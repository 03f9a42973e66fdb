"""Many seeds of the simulator, and every planted bug: what ``make soak-sim`` and ``make soak-health`` share."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from polyreme_simulator.campaign import Campaign, replay, run_campaign, table
from polyreme_simulator.run import Result
from tests.simulator.planted_bugs import first_caught, plant

PLAIN_EVERY_S = 60.0
"""How often the progress is written where no terminal shows the bar."""
SHOWN_MAX = 20


def soak(
    name: str,
    *,
    seeds: range,
    bugs: Iterable[str],
    processes: int,
    needed: Iterable[tuple[str, str]] | None = None,
    health: bool = False,
) -> int:
    """Look for the planted bugs, then run the seeds; 0 when no rule was broken and every bug was caught.

    Args:
        name: Name of the soak.
        seeds: Seeds of the unchanged sources.
        bugs: Planted bugs that must be caught.
        processes: Processes to use.
        needed: Cells (fault, point) that the seeds must reach between them; None: all.
        health: Whether nodes have agents and the operator a NodeFaultPolicy.
    """
    sys.stdout.write(f"seeds {seeds.start} to {seeds.stop - 1}; FIRST={seeds.start} runs them again\n")
    sys.stdout.flush()
    bugs = sorted(bugs)
    found = {bug: _caught_at(bug, processes=processes, health=health) for bug in bugs}
    began_s = time.perf_counter()
    with _Bar(name, len(seeds), health=health) as bar:
        campaign = run_campaign(seeds, processes=processes, health=health, on_done=bar.show)
    wall_s = time.perf_counter() - began_s
    unreached = campaign.unreached if needed is None else [cell for cell in needed if not campaign.reached.get(cell)]
    sys.stdout.write(table(campaign) + "\n")
    for result in campaign.broken[:SHOWN_MAX]:
        sys.stdout.write(replay(result, health=health) + "\n")
    if unreached:
        sys.stdout.write(f"not reached: {unreached}\n")
    for bug, seed in found.items():
        sys.stdout.write(f"{bug}: {'NOT CAUGHT' if seed is None else f'caught by seed {seed}'}\n")
    return _report(name, campaign, unreached=len(unreached), found=found, first=seeds.start, wall_s=wall_s)


def seeds_asked(default: int, *, first: int) -> range:
    """Return the seeds that the environment asks for (``SEEDS=``, ``FIRST=``)."""
    first = int(os.environ.get("FIRST") or first)
    return range(first, first + int(os.environ.get("SEEDS") or default))


def _report(
    name: str, campaign: Campaign, *, unreached: int, found: dict[str, int | None], first: int, wall_s: float
) -> int:
    caught = sum(seed is not None for seed in found.values())
    figures = {
        "seeds": campaign.seeds,
        "first": first,
        "violations": len(campaign.broken),
        "unreached": unreached,
        "planted_bugs_caught": caught,
        "attempts": campaign.attempts,
        "seconds_per_seed": round(wall_s / max(1, campaign.seeds), 2),
        "wall_s": round(wall_s, 1),
    }
    bar = {"violations": 0, "unreached": 0, "planted_bugs_caught": len(found)}
    ok = not campaign.broken and not unreached and caught == len(found)
    sys.stdout.write(json.dumps({"name": name, "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


def _caught_at(bug: str, *, processes: int, health: bool) -> int | None:
    with tempfile.TemporaryDirectory() as directory:
        plant(bug, Path(directory))
        seeds = first_caught(bug, Path(directory), processes=processes, health=health)
    sys.stderr.write(f"{bug}: {'not caught' if seeds is None else f'caught by seed {seeds - 1}'}\n")
    return None if seeds is None else seeds - 1


class _Bar:
    """A bar on a terminal, elsewhere a line a minute; a seed that breaks a rule is named at once."""

    def __init__(self, name: str, seeds: int, *, health: bool) -> None:
        console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._plain, self._seeds, self._health, self._named = not console.is_terminal, seeds, health, 0
        self._task: TaskID = self._progress.add_task(name, total=seeds)
        self._began_s = self._shown_s = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, done: int, broken: Sequence[Result]) -> None:
        """Show how many seeds are done, and how many of them broke a rule."""
        words = f"{len(broken)} broken" if broken else "none broken"
        for result in broken[self._named : SHOWN_MAX]:
            self._progress.console.print(replay(result, health=self._health), markup=False, highlight=False)
        self._named = len(broken)
        self._progress.update(self._task, completed=done, description=words)
        now_s = time.perf_counter()
        if self._plain and now_s - self._shown_s >= PLAIN_EVERY_S:
            self._shown_s = now_s
            left_s = (now_s - self._began_s) / done * (self._seeds - done)
            sys.stderr.write(f"{done} of {self._seeds} seeds, {words}, {left_s:.0f} s to go\n")
