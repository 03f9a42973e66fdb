"""A job that is refused after one change, a home to run it in, and checkpoints that it could have left."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from polyreme.job_files import read_job
from polyreme.main import invoke
from polyreme.run_files.paths import Home
from polyreme_api.commit_marker import CommitMarker, seal
from polyreme_api.exit_codes import ExitCode
from polyreme_api.history import COMMIT_MARKER
from polyreme_planner.plan import shape_digest, shape_of
from polyreme_planner.shapes import shape_content


def registered_home(tmp_path: Path) -> Home:
    """Return a home with a registry, as ``validate`` wants to look datasets up."""
    home = Home(path=tmp_path / "home")
    assert invoke(["--home", str(home.path), "data", "ls"]) == ExitCode.OK
    return home


def manifest() -> dict[str, Any]:
    return {
        "apiVersion": "polyreme.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "refused"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sequenceTokens": 160, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
            "training": {"steps": 2, "packsPerStep": 4},
            "workers": {"replicas": 2, "devices": 2},
        },
    }


def committed(root: Path, job: dict[str, Any], **changes: Any) -> Path:
    """Write the marker of a checkpoint that a job's model could have left; return its path."""
    root.mkdir(parents=True, exist_ok=True)
    source = root / "job.yaml"
    source.write_text(yaml.safe_dump(job))
    shape = shape_of(read_job(source).spec)
    source.unlink()
    marker = CommitMarker(
        attempt=1,
        step=2,
        world=4,
        model_digest=shape_digest(shape),
        model_shape=shape_content(shape),
        plan_hash="0" * 16,
        files={},
        loader={},
        committed_at_s=0.0,
    )
    path = root / "a000001-s00000002" / COMMIT_MARKER
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(seal(marker.model_copy(update=changes)))
    return path


def located(root: Path, **overrides: Any) -> dict[str, Any]:
    """A job whose checkpoints lie at a place of their own."""
    job = copy.deepcopy(manifest())
    job["spec"]["checkpoint"] = {"location": root.as_uri()}
    if overrides:
        job["spec"]["model"]["overrides"] = {"decoder": overrides}
    return job
