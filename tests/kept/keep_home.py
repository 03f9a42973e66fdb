"""Write a small polyreme home to keep: a dataset, a stopped run, a finished run, and an exported model.

The stopped run has two attempts, a checkpoint with sharded optimizer state, and steps left to train.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from polyreme_datahub import hub
from polyreme_datahub.sources.digits import describe
from tests.e2e.polyreme_home import STEPS, PolyremeHome, Serving
from tests.e2e.small_jobs import record, write_jsonl, write_records
from tests.kept.folders import FINISHED, STOPPED
from tests.kept.reading import export_tensors, kept_values, write_values

STOPPED_CODE = 6
SEQUENCE_TOKENS = 96
VOCABULARY = 304
MODEL = {
    "preset": "kimi-vl-nano",
    "overrides": {
        "vision": {"layers": 1, "width": 8, "heads": 1, "ffn_width": 8, "position_rows": 4},
        "decoder": {
            "vocabulary": VOCABULARY,
            "width": 8,
            "layers": 2,
            "dense_ffn_width": 8,
            "expert_ffn_width": 8,
            "experts": 4,
            "heads": 1,
            "kv_rank": 8,
            "nope_dim": 4,
            "rope_dim": 4,
            "value_dim": 4,
        },
    },
}
DROPPED = ("pods", "report", "host.log", "data.log", "cluster.journal.lock")
"""What no later version reads."""


def keep(folder: Path) -> None:
    """Write the home into a new folder, and beside it the values that later versions must read from it."""
    with tempfile.TemporaryDirectory(prefix="polyreme-kept-") as temporary:
        home = PolyremeHome(Path(temporary) / "home", outputs=Path(temporary))
        home.path.mkdir()
        try:
            _make(home, Path(temporary))
        finally:
            home.close()
        for run in (home.path / "runs/default").iterdir():
            for name in DROPPED:
                path = run / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        for path in [home.path / "locks", *home.path.glob("checkpoints/default/*/.tmp")]:
            shutil.rmtree(path, ignore_errors=True)
        for path in home.path.glob("*.yaml"):
            path.unlink()
        shutil.copytree(home.path, folder / "home")
        export = Path(temporary) / "export"
        ended = home.call("checkpoint", "export", FINISHED, "--to", str(export))
        assert ended.code == 0, ended.said
        shutil.rmtree(export / "text")
        shutil.copytree(export, folder / "export")
        values = kept_values(home.path, (STOPPED, FINISHED))
        continued = _continue(home, Path(temporary) / "continued")
        write_values(folder, {**values, "export": export_tensors(export), "continued": continued})


def _continue(home: PolyremeHome, path: Path) -> dict[str, str]:
    """Continue the stopped run in a copy of the home; return the losses of its whole history."""
    shutil.copytree(home.path, path)
    copy = PolyremeHome(path, outputs=path.parent)
    try:
        ended = copy.start(path / "runs/default" / STOPPED / "job.yaml").end()
        assert ended.code == 0, ended.said
        return {str(step): loss for step, loss in copy.losses(STOPPED).items()}
    finally:
        copy.close()


def _make(home: PolyremeHome, outside: Path) -> None:
    _register(home, outside)
    stopped = home.write_job(
        STOPPED,
        **_spec(
            training={"steps": STEPS, "packsPerStep": 4, "seed": 1, "optimizer": {"stateSharding": "Sharded"}},
            parallelism={"mode": "Explicit", "dp": 2, "ep": 2},
            workers={"replicas": 2, "devices": 1},
        ),
    )
    _stop(home.start(stopped, "--inject", "kill-rank=1@5"))
    finished = home.write_job(
        FINISHED,
        **_spec(
            training={"steps": 2, "packsPerStep": 2, "seed": 1, "optimizer": {"name": "Muon"}},
            parallelism={"mode": "Auto"},
            workers={"replicas": 1, "devices": 1},
            checkpoint={"everySteps": 2, "keep": 1},
        ),
    )
    ended = home.start(finished).end()
    assert ended.code == 0, ended.said


def _register(home: PolyremeHome, outside: Path) -> None:
    """Register generated pages, and a dataset of files with one damaged record."""
    registry, objects = f"sqlite:///{home.path}/data/registry.sqlite", f"file://{home.path}/data/objects"
    (home.path / "data/objects").mkdir(parents=True)
    hub.register(registry, objects, "kept/pages", describe(digits=1, pages=24, seed=5, heldout=False))
    hub.register(registry, objects, "kept/heldout", describe(digits=1, pages=4, seed=5, heldout=True))
    folder = outside / "colours"
    lines: list[dict[str, Any] | str] = [*write_records(folder)[:8], record("lost", ["lost.png"], "red")]
    ended = home.call("data", "register", "kept/colours", str(write_jsonl(folder / "colours.jsonl", lines)))
    assert ended.code == 0, ended.said


def _spec(**parts: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "data": {
            "sequenceTokens": SEQUENCE_TOKENS,
            "seed": 3,
            "tokenizer": {"vocabulary": VOCABULARY},
            "sources": [{"name": name, "dataset": f"kept/{name}"} for name in ("pages", "colours")],
        },
        "checkpoint": {"everySteps": 4, "keep": 1},
        "evaluation": {"everySteps": 4, "sets": [{"name": "heldout", "dataset": "kept/heldout"}], "samplesMax": 4},
        "failurePolicy": {"backoff": {"initialSeconds": 1, "maxSeconds": 1}},
        **parts,
    }


def _stop(serving: Serving) -> None:
    """Stop a run with a checkpoint in its second attempt, some steps after that attempt's first checkpoint."""
    with serving.held(attempt=2, steps=6):
        serving.process.send_signal(signal.SIGINT)
    ended = serving.end()
    assert ended.code == STOPPED_CODE, ended.said
