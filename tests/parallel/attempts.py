"""Attempts of four ranks on one checkpoint root, each begun as its leader begins it, and the losses that they leave."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyreme_api.history import committed_steps
from polyreme_api.progress import StepRecord
from polyreme_launcher import resume
from tests.roots import read_resume_points, store_at

LAYOUT = (4, 2)
STEPS = 12
WAIT_S_MAX = 60.0


def fix_resume(root: Path, attempt: int) -> str | None:
    """Choose where an attempt begins, once, by the code of the leading launcher."""
    root.mkdir(parents=True, exist_ok=True)
    point = resume.fix_resume(store_at(root), attempt=attempt, by="one", now_s=0.0)
    assert point is not None
    return point.resume_from


def begin(start: Any, root: Path, attempt: int, **request: Any) -> Any:
    """Start the ranks of an attempt where its leader says that they begin."""
    resume_from = fix_resume(root, attempt)
    request = {"steps": STEPS, **request}
    return start("train", layout=LAYOUT, root=root, attempt=attempt, resume_from=resume_from, **request)


def history(root: Path) -> dict[int, float]:
    """Loss of every step of the committed history."""
    records = {
        int(path.stem[1:]): [StepRecord.model_validate_json(line) for line in path.read_text().splitlines()]
        for path in (root / "steps").glob("a*.jsonl")
    }
    return {record.step: record.loss for record in committed_steps(read_resume_points(root), records)}


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that another process does."""
    limit = time.monotonic() + WAIT_S_MAX
    while not holds():
        assert time.monotonic() < limit, f"waited {WAIT_S_MAX} s: {what}"
        time.sleep(0.01)


def stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
