"""``make soak-bench`` knows every benchmark, and what an end means."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.soak import bench

RESULT = '{"name": "bench-x", "figures": {}, "bar": {}, "ok": false}\n'


def test_every_benchmark_has_a_smoke_form_and_no_other_has() -> None:
    folders = {path.parent.name.replace("_", "-") for path in (bench.ROOT / "benchmarks").glob("*/run.py")}
    assert set(bench.SMOKE) == folders


@pytest.mark.parametrize(
    ("code", "output", "ended"),
    [
        (0, RESULT, "ran"),
        (1, f"words\n{RESULT}", "ran"),
        (1, "Traceback\n", "failed"),
        (0, "[1, 2]\n", "failed"),
        (7, "no server\n", "not_run"),
    ],
)
def test_a_benchmark_that_ends_without_its_line_has_failed(
    monkeypatch: pytest.MonkeyPatch, code: int, output: str, ended: str
) -> None:
    asked: list[list[str]] = []

    def done(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, code, output, "")

    monkeypatch.setattr(subprocess, "run", done)
    assert bench.run("packing") == ended
    assert asked == [[sys.executable, str(bench.ROOT / "benchmarks/packing/run.py"), "--steps", "8", "--seeds", "1"]]
