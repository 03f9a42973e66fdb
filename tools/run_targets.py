"""Run make targets one after the other, all of them whatever fails, and end with a table of what each did.

A target that writes ``build/reports/<target>.xml`` (JUnit) has its tests counted.
"""

import resource
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPORTS = Path("build/reports")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one target did."""

    target: str
    status: int
    wall_s: float
    cpu_s: float
    """Of the processes that were waited for: a server that outlives its parent is not among them."""
    tests: dict[str, int]


def main(targets: Sequence[str]) -> int:
    """Run the targets; 0 when every one succeeded."""
    stages = [run(target) for target in targets]
    print(render(stages), flush=True)
    return int(any(stage.status for stage in stages))


def run(target: str) -> Stage:
    """Run one target, its output going where ours goes."""
    report = REPORTS / f"{target}.xml"
    report.unlink(missing_ok=True)
    print(f"\n=== {target}", flush=True)
    started_s, used_s = time.monotonic(), _cpu_s()
    status = subprocess.run(["make", "--no-print-directory", target], check=False, stdin=subprocess.DEVNULL).returncode
    wall_s, cpu_s = time.monotonic() - started_s, _cpu_s() - used_s
    tests = counts(report) if report.exists() else {}
    return Stage(target=target, status=status, wall_s=wall_s, cpu_s=cpu_s, tests=tests)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def counts(report: Path) -> dict[str, int]:
    """Count the tests of a JUnit report, written by our own pytest a moment ago, by outcome."""
    suites = ET.parse(report).getroot().iter("testsuite")  # noqa: S314 our own file
    total = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in total:
            total[name] += int(suite.get(name, 0))
    failed = total["failures"] + total["errors"]
    return {"passed": total["tests"] - failed - total["skipped"], "failed": failed, "skipped": total["skipped"]}


def render(stages: Sequence[Stage]) -> str:
    """One line a stage, then the verdict."""
    rows = []
    for stage in stages:
        verdict = "ok" if stage.status == 0 else "FAILED"
        tests = ", ".join(f"{count} {name}" for name, count in stage.tests.items())
        times = f"{stage.wall_s:>7.1f} s  {stage.cpu_s:>7.1f} s of processors"
        rows.append(f"{stage.target:<18} {verdict:<7} {times}  {tests}".rstrip())
    failed = [stage.target for stage in stages if stage.status]
    rows.append(f"FAILED: {', '.join(failed)}" if failed else "all passed")
    return "\n".join(["", "=== summary", *rows])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
