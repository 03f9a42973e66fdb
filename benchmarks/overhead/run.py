"""Cost of run health: the same gang in turns with pages, loss health and stragglers, and with none of them.

Without them nothing is written to pages, the work of a step is not counted, and its loss is not judged. Torch's flight
recorder can't be turned off while a process runs: it is on in both.

Usage: run.py [--rounds 100] [--steps 3]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))
from polyreme_launcher.protocol.hang_evidence import HangLimits, HangWatch
from polyreme_launcher.protocol.hang_evidence import look as look_for_hangs
from polyreme_launcher.protocol.straggler_evidence import SpeedWatch
from polyreme_launcher.protocol.straggler_evidence import look as look_for_stragglers
from polyreme_launcher.rank_pages import RankPages
from polyreme_launcher.rank_processes import ALLOCATOR, with_torch_settings

RATIO_MAX = 1.01
RANKS = 2
WARM_ROUNDS = 2


class Gang:
    """Ranks that train some steps when they are asked to, with run health or without.

    Args:
        steps: Steps of a turn.
        folder: Of its checkpoints, which are empty.
    """

    def __init__(self, *, steps: int, folder: Path) -> None:
        self._pages, self._hang, self._speed = RankPages(), HangWatch(), SpeedWatch()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        settings = with_torch_settings({**ALLOCATOR, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, folder)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, settings))
            for rank in range(RANKS):
                ours, theirs = context.Pipe()
                page = stack.enter_context(self._pages.open(rank, time.monotonic_ns()))
                place = {"rank": rank, "port": port, "folder": folder, "page": f"/proc/{os.getpid()}/fd/{page}"}
                process = context.Process(target=_rank, args=(steps, theirs), kwargs=place)
                process.start()
                self._pipes.append(ours)
                self._processes.append(process)
            for pipe in self._pipes:
                pipe.recv()

    def turn(self, *, health: bool) -> tuple[float, float]:
        """Train; return the time that the ranks took, and their processor time together [s]."""
        for pipe in self._pipes:
            pipe.send(health)
        answers = [pipe.recv() for pipe in self._pipes]
        return max(wall_s for wall_s, _ in answers), sum(processor_s for _, processor_s in answers)

    def look(self) -> float:
        """Look at the pages as the leader's launcher does; return the processor time [s]."""
        began_s, now_s = time.process_time(), time.monotonic()
        states = list(self._pages.read(time.monotonic_ns()).values())
        self._speed = look_for_stragglers(self._speed, states, world=RANKS, pp=1, blocks={})
        self._hang = look_for_hangs(self._hang, states, now_s, world=RANKS, limits=HangLimits(), devices=RANKS, pp=1)
        return time.process_time() - began_s

    def end(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pages.close()


def _rank(steps: int, pipe: Connection, **place: Any) -> None:
    """Train for as long as the parent asks for turns; the parent does without torch."""
    from benchmarks.overhead.training import train

    train(**place, world=RANKS, gate=lambda switch: Gate(pipe, steps, switch))


class Gate:
    """Lets a rank train some steps at a time, and reports what they took.

    Args:
        pipe: To the parent, which says before each turn whether run health is on.
        steps: Of a turn.
        switch: Turns run health on or off.
    """

    def __init__(self, pipe: Connection, steps: int, switch: Callable[[bool], None]) -> None:
        self._pipe, self._steps, self._switch = pipe, steps, switch
        self._began: tuple[float, float] | None = None

    def __call__(self, number: int, _: Any) -> bool:
        """Take the beginning of a step."""
        if (number - 1) % self._steps == 0:
            now = time.perf_counter(), time.process_time()
            self._pipe.send(None if self._began is None else (now[0] - self._began[0], now[1] - self._began[1]))
            self._switch(self._pipe.recv())
            self._began = time.perf_counter(), time.process_time()
        return False


def main() -> int:
    """Compare, print one line of JSON; 0 when the bars hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="polyreme-bench-") as made, contextlib.ExitStack() as stack:
        gang = Gang(steps=options.steps, folder=Path(made))
        stack.callback(gang.end)
        rounds, looks = [], []
        for number in range(WARM_ROUNDS + options.rounds):
            order = (True, False) if number % 2 else (False, True)
            taken = {health: gang.turn(health=health) for health in order}
            looks.append(gang.look())
            rounds.append((taken[True], taken[False]))
    figures = report(rounds[WARM_ROUNDS:], options.steps) | {"look_us": round(statistics.median(looks) * 1e6, 1)}
    bars = {"step_time_ratio": RATIO_MAX, "processor_time_ratio": RATIO_MAX}
    ok = all(figures[name] <= most for name, most in bars.items())
    sys.stdout.write(json.dumps({"name": "bench-overhead", "figures": figures, "bar": bars, "ok": ok}) + "\n")
    return 0 if ok else 1


def report(rounds: list[tuple[tuple[float, float], tuple[float, float]]], steps: int) -> dict[str, float]:
    """Return the ratios of all rounds together and of the middle one, and times of a step [ms]."""
    figures: dict[str, float] = {}
    for place, name in enumerate(("step_time", "processor_time")):
        on, off = ([taken[side][place] for taken in rounds] for side in range(2))
        figures[f"{name}_ratio"] = round(statistics.median(a / b for a, b in zip(on, off, strict=True)), 4)
        figures[f"{name}_least_ratio"] = round(min(on) / min(off), 4)
        figures[f"{name}_ms"] = round(statistics.median(off) / steps * 1e3, 2)
    return figures


if __name__ == "__main__":
    raise SystemExit(main())
