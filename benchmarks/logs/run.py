"""Cost of the output of ranks: through the launcher's pipes, files and printer, beside a plain file.

Usage: run.py [--rounds 6] [--steps 100] [--lines 10]
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RANKS = 2
SIZE = 384
"""Side of the matrices of a step's work, which takes some milliseconds."""
PRODUCTS = 4
LINE = "2026-11-26 10:02:11,482 INFO step {step} of 5000: loss 2.41713, 61203 tokens/s, routed rows 0.98, line {line}"
BULK_LINES = 200_000
SETTLE_S = 0.5
"""After a rank has ended, so long until its last lines are printed."""
STEP_RATIO_MAX = 1.03
"""Noise of a step's median between two runs of the same on a busy machine is 2 %."""
LINE_US_MAX = 60.0
"""At 1,000 lines a second, more than a pod of eight ranks writes: 6 % of a core."""


def main() -> int:
    """Run and print one line of JSON; 0 when every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="times that both ways are measured, one after the other")
    parser.add_argument("--steps", type=int, default=100, help="steps of a round")
    parser.add_argument("--lines", type=int, default=10, help="lines that each rank writes a step")
    options = parser.parse_args()
    steps_s: dict[str, list[float]] = {"file": [], "pipe": []}
    step_cpu_s: dict[str, list[float]] = {"file": [], "pipe": []}
    writes_us: dict[str, list[float]] = {"file": [], "pipe": []}
    cpu_s = wall_s = 0.0
    with tempfile.TemporaryDirectory(prefix="polyreme-bench-") as folder:
        for number in range(options.rounds):
            # Each goes first as often as the other.
            for way in ("file", "pipe") if number % 2 else ("pipe", "file"):
                seen, used_s = trained(way, Path(folder), options.steps, options.lines)
                cpu_s += used_s
                for each in seen:
                    steps_s[way] += each["steps_s"]
                    step_cpu_s[way] += each["cpu_s"]
                    writes_us[way] += each["writes_us"]
                if way == "pipe":
                    wall_s += max(sum(each["steps_s"]) for each in seen)
        bulk_us = bulk(Path(folder))
    lines = options.rounds * options.steps * options.lines * RANKS
    ratio = statistics.median(steps_s["pipe"]) / statistics.median(steps_s["file"])
    figures = {
        "ranks": RANKS,
        "lines_per_s": round(lines / wall_s),
        "step_file_ms": round(statistics.median(steps_s["file"]) * 1e3, 3),
        "step_pipe_ms": round(statistics.median(steps_s["pipe"]) * 1e3, 3),
        "step_ratio": round(ratio, 4),
        "step_cpu_ratio": round(statistics.median(step_cpu_s["pipe"]) / statistics.median(step_cpu_s["file"]), 4),
        "write_file_us": round(statistics.median(writes_us["file"]), 2),
        "write_pipe_us": round(statistics.median(writes_us["pipe"]), 2),
        "write_file_p99_us": round(quantile(writes_us["file"], 0.99), 2),
        "write_pipe_p99_us": round(quantile(writes_us["pipe"], 0.99), 2),
        "launcher_line_us": round(cpu_s / lines * 1e6, 2),
        "launcher_cores_ratio": round(cpu_s / wall_s, 4),
        "launcher_bulk_line_us": round(bulk_us, 2),
    }
    ok = ratio <= STEP_RATIO_MAX and figures["launcher_line_us"] <= LINE_US_MAX
    bar = {"step_ratio": STEP_RATIO_MAX, "launcher_line_us": LINE_US_MAX}
    print(json.dumps({"name": "bench-logs", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def quantile(values: list[float], share: float) -> float:
    """Return the value that so large a share lies at or below."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def trained(way: str, folder: Path, steps: int, lines: int) -> tuple[list[dict[str, list[float]]], float]:
    """Run the ranks at the same time; return what each measured, and what the launcher's threads used [s]."""
    with contextlib.ExitStack() as open_, outputs(way, folder) as output:
        running = [
            subprocess.Popen(
                [sys.executable, __file__, "rank", str(steps), str(lines), str(folder / f"{way}-{rank}.json")],
                stdout=open_.enter_context(output(rank)),
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
            for rank in range(RANKS)
        ]
        open_.close()
        for process in running:
            if process.wait():
                raise RuntimeError(f"a rank ended with {process.returncode}")
        time.sleep(SETTLE_S)
        used_s = threads_s()
    return [json.loads((folder / f"{way}-{rank}.json").read_text()) for rank in range(RANKS)], used_s


def threads_s() -> float:
    """Processor time of the launcher's threads for output, in this process [s]."""
    threads = [thread for thread in threading.enumerate() if thread.name in {"rank-output", "line-printer"}]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident is not None]
    return sum(time.clock_gettime(clock) for clock in clocks)


@contextlib.contextmanager
def outputs(way: str, folder: Path) -> Iterator[Callable[[int], Any]]:
    """Give a function that opens the output of a rank."""
    if way == "file":
        yield lambda rank: (folder / f"plain-{rank}.log").open("ab")
        return
    from polyreme_api.rank_logs import RankAttempt
    from polyreme_launcher.line_printer import LinePrinter
    from polyreme_launcher.rank_output import RankOutput
    from polyreme_system.clock import SystemClock

    # The reader of the pod's output, in containerd's place.
    collector = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert collector.stdin is not None
    printer = LinePrinter(collector.stdin.fileno(), SystemClock())
    output = RankOutput(on_data=printer.take, on_end=printer.end, on_trouble=print)

    def open_(rank: int) -> contextlib.AbstractContextManager[int]:
        log = RankAttempt(1, rank)
        return output.open((1, rank), path=folder / log.file_name, prefix=log.prefix)

    try:
        yield open_
    finally:
        output.close()
        printer.close(30)
        collector.stdin.close()
        collector.wait()


def bulk(folder: Path) -> float:
    """Return what a line costs the launcher where a rank writes as fast as it can [us]."""
    with outputs("pipe", folder) as output:
        with output(0) as descriptor:
            command = [sys.executable, "-c", f"import sys; sys.stdout.write({LINE!r} + '\\n'); "]
            command[2] += f"[sys.stdout.write({LINE!r} + '\\n') for _ in range({BULK_LINES})]"
            writer = subprocess.Popen(command, stdout=descriptor)
        writer.wait()
        time.sleep(SETTLE_S)
        return threads_s() / BULK_LINES * 1e6


def rank(steps: int, lines: int, result: Path) -> int:
    """Be a rank: compute, write some lines, measure both."""
    import numpy as np

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    rng = np.random.default_rng(1)
    a, b = rng.random((SIZE, SIZE), dtype=np.float32), rng.random((SIZE, SIZE), dtype=np.float32)
    steps_s, cpu_s, writes_us = [], [], []
    for step in range(steps):
        begun_s, used_s = time.perf_counter(), time.process_time()
        for _ in range(PRODUCTS):
            a @ b
        for line in range(lines):
            wrote_s = time.perf_counter()
            print(LINE.format(step=step, line=line))
            writes_us.append((time.perf_counter() - wrote_s) * 1e6)
        steps_s.append(time.perf_counter() - begun_s)
        cpu_s.append(time.process_time() - used_s)
    result.write_text(json.dumps({"steps_s": steps_s, "cpu_s": cpu_s, "writes_us": writes_us}))
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        raise SystemExit(rank(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
    raise SystemExit(main())
