"""``make quickstart``: the main job with one injected failure, checked against a run without one.

Ends with one line of JSON. The second run trains the first ``REFERENCE_STEPS`` steps without a failure; every loss that
the first run trained after its restart, as far as the second one goes, must equal it bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from polyreme.job_files import read_job
from polyreme.report.write import REPORT_NAME
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.run_files.records import RunRecords, read_records
from polyreme.views.formatting import duration
from polyreme.views.output import note
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import TrainingJob
from polyreme_system.files import read_json, write_atomically

SAMPLE = Path("manifests/samples/quickstart.yaml")
SETUP_TIMES_VARIABLE = "POLYREME_SETUP_TIMES"
"""Path of a JSON file with ``download_s`` and ``install_s``, when the environment was made just now."""
KILL_RANK = 1
KILL_STEP = 70
REFERENCE_STEPS = 100
MEMORY_SAMPLE_S = 2.0
BAR: Mapping[str, Any] = {
    "attempts": ">= 2",
    "resumed_identical": "== 1",
    "heldout_exact_match_ratio": ">= 0.8",
    "loss_last": "< loss_first / 3",
    "restart_s": "target < 3 s, not enforced: timings vary between machines",
}


def main() -> int:
    """Run, compare, print the figures; return an exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path, nargs="?", default=SAMPLE)
    arguments = parser.parse_args()
    home = Home.locate()
    job = read_job(arguments.job)
    began_s = time.monotonic()
    with MemorySampler() as memory:
        code = _polyreme("run", str(arguments.job), "--fresh", "--inject", f"kill-rank={KILL_RANK}@{KILL_STEP}")
        if code != ExitCode.OK:
            return code
        note(f"quickstart: now running {REFERENCE_STEPS} steps without a failure, to compare every loss")
        reference = _reference(job)
        reference_file = home.path / "quickstart-reference.yaml"
        write_atomically(reference_file, json.dumps(_manifest(reference)))
        code = _polyreme("run", str(reference_file), "--fresh")
        if code != ExitCode.OK:
            return code
    run = home.run(job.metadata.namespace, job.metadata.name)
    figures = {
        **_figures(run, read_records(home.run(reference.metadata.namespace, reference.metadata.name).checkpoints)),
        "wall_s": round(time.monotonic() - began_s, 1),
        "memory_peak_mib": memory.peak_bytes // 2**20,
        **_setup_times(os.environ.get(SETUP_TIMES_VARIABLE)),
        "report": str(run.report / REPORT_NAME),
    }
    for words in sentences(figures):
        note(f"quickstart: {words}")
    good = _holds(figures)
    sys.stdout.write(json.dumps({"name": "quickstart", "figures": figures, "bar": BAR, "ok": good}) + "\n")
    return ExitCode.OK if good else ExitCode.RUN_FAILED


class MemorySampler:
    """Samples the memory of this process and all below it, shared pages counted once (PSS) where the system tells."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        """Begin to sample."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        root = psutil.Process()
        while not self._stop.wait(MEMORY_SAMPLE_S):
            total = 0
            for process in (root, *root.children(recursive=True)):
                try:
                    info = process.memory_full_info()
                    total += getattr(info, "pss", info.uss)
                except psutil.Error:
                    continue
            self.peak_bytes = max(self.peak_bytes, total)


def identical_losses(records: RunRecords, reference: RunRecords) -> tuple[int, int]:
    """Count the steps trained after the first restart that both runs hold, and those whose losses are equal.

    Equal means bit for bit.
    """
    undisturbed = {record.step: record.loss for record in reference.history}
    compared = [record for record in records.history if record.attempt > 1 and record.step in undisturbed]
    equal = sum(record.loss.hex() == undisturbed[record.step].hex() for record in compared)
    return len(compared), equal


def _figures(run: RunDirectory, reference: RunRecords) -> dict[str, Any]:
    records = read_records(run.checkpoints)
    history = records.history
    compared, equal = identical_losses(records, reference)
    state = read_json(run.state_file) or {}
    return {
        "attempts": len(records.points),
        "resumed_identical": int(compared > 0 and compared == equal),
        "compared_steps": compared,
        "heldout_exact_match_ratio": state.get("heldoutExactMatchRatio"),
        "heldout_pages": state.get("heldoutSamples"),
        "loss_first": history[0].loss,
        "loss_last": history[-1].loss,
        "restart_s": state.get("restartSeconds"),
        "goodput_ratio": state.get("goodputRatio"),
    }


def sentences(figures: Mapping[str, Any]) -> list[str]:
    """Say what happened, for a person who reads no JSON."""
    pages, ratio = figures["heldout_pages"] or 0, figures["heldout_exact_match_ratio"] or 0.0
    came_back = f"the job came back as attempt {figures['attempts']}"
    restart_s = figures["restart_s"]
    if restart_s is not None:
        came_back += f", and its next step was done {duration(restart_s)} later"
    compared = f"{figures['compared_steps']} losses that were compared"
    same = f"all {compared} are the same, bit for bit, as in an undisturbed run"
    if not figures["resumed_identical"]:
        same = f"of the {compared} some differ from those of an undisturbed run"
    answered = f"{round(pages * ratio)} of {pages} held-out pages are answered exactly"
    return [
        f"rank {KILL_RANK} was killed at step {KILL_STEP}; {came_back}",
        same,
        f"{answered}; the loss fell from {figures['loss_first']:.3f} to {figures['loss_last']:.3f}",
        f"open the report: {Path(figures['report']).as_uri()}",
    ]


def _holds(figures: Mapping[str, Any]) -> bool:
    return bool(
        figures["attempts"] >= 2
        and figures["resumed_identical"] == 1
        and (figures["heldout_exact_match_ratio"] or 0) >= 0.8
        and figures["loss_last"] < figures["loss_first"] / 3
    )


def _reference(job: TrainingJob) -> TrainingJob:
    spec = job.spec
    optimizer = spec.training.optimizer.model_copy(update={"decay_steps": 0})
    training = spec.training.model_copy(update={"steps": REFERENCE_STEPS, "optimizer": optimizer})
    changed = spec.model_copy(update={"training": training, "evaluation": None, "export": None})
    metadata = job.metadata.model_copy(update={"name": f"{job.metadata.name}-reference"})
    return job.model_copy(update={"spec": changed, "metadata": metadata})


def _manifest(job: TrainingJob) -> dict[str, Any]:
    manifest = job.to_object()
    manifest.pop("status", None)
    return manifest


def _setup_times(path: str | None) -> dict[str, Any]:
    times = (read_json(Path(path)) if path else None) or {}
    return {name: times[name] for name in ("download_s", "install_s") if name in times}


def _polyreme(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "polyreme.main", *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
