"""``make soak-tracking``: the real TensorBoard and MLflow show the committed history of a run, each step once.

A rank of a run that both follow is killed. Then MLflow is killed in the middle of an export of many steps, which is
repeated."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from polyreme.run_files.records import read_records
from polyreme.tracking.feed import Feed
from polyreme.tracking.mlflow import Mlflow
from polyreme.tracking.port import Point, TrackedRun
from polyreme_api.errors import PolyremeError
from tests.e2e.polyreme_home import PolyremeHome
from tools.trackers import MlflowServer, installed

HERE = Path(__file__).parent
SENDS_S_MAX = 240.0
"""Longest wait for the first points that are sent."""
STEPS = 20_000
NAMES = 8
DATA = {"sequenceTokens": 160, "seed": 17, "sources": [{"name": "one", "dataset": "sample/digits-1"}]}
EVALUATION = {"sets": [{"name": "one", "dataset": "sample/digits-1-heldout"}], "samplesMax": 16, "answerTokensMax": 4}
READ_TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
read = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
read.Reload()
shown = [(at.step, at.value, at.wall_time) for at in read.Scalars("train/loss")]
print(json.dumps({"shown": shown, "tags": read.Tags(), "plugins": sorted(read.summary_metadata)}))
"""


def main() -> int:
    """Run; 0 when both tools show what was committed."""
    begun_s = time.monotonic()
    tools = {name: installed(name) for name in ("tensorboard", "mlflow")}
    figures: dict[str, float] = {"install_s": round(time.monotonic() - begun_s, 1)}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(tools["mlflow"], Path(folder))
        try:
            server.start()
            figures |= followed(Path(folder), server, tools["tensorboard"])
            figures |= interrupted(server)
        finally:
            server.kill()
    bar = {"doubled": 0, "missing": 0, "wrong": 0, "restarts_shown": 1, "exported_wrong": 0}
    ok = all(figures[name] == value for name, value in bar.items())
    print(json.dumps({"name": "soak-tracking", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def followed(folder: Path, server: Server, python: Path) -> dict[str, float]:
    """Follow a run and kill one of its ranks; compare what both tools show with its records."""
    home = PolyremeHome(folder)
    try:
        job = home.write_job("followed", data=DATA, evaluation=EVALUATION)
        target = folder / "tb"
        targets = ("--track", f"tensorboard:{target}", "--track", f"mlflow:{server.url}")
        ended = home.start(job, *targets, "--inject", "kill-rank=1@12").end()
        assert ended.code == 0, ended.said
    finally:
        home.close()
    history = read_records(folder / "checkpoints/default/followed").history
    read = json.loads(subprocess.check_output([python, "-c", READ_TENSORBOARD, target / "followed"], text=True))
    wanted = [(record.step, record.loss) for record in history]
    shown = [(step, value) for step, value, _ in read["shown"]]
    times = [at_s for _, _, at_s in read["shown"]]
    (run,) = server.runs("polyreme")
    stored = [(each["step"], each["value"]) for each in server.history(run["info"]["run_id"], "train/loss")]
    attempts = {each["value"] for each in server.history(run["info"]["run_id"], "train/attempt")}
    assert "_hparams_/session_start_info" in read["plugins"], read["plugins"]
    assert "eval/exact_match" in read["tags"]["scalars"], read["tags"]
    return {
        "steps": len(wanted),
        "doubled": sum(len(each) - len({step for step, _ in each}) for each in (shown, stored)),
        "missing": sum(len(set(dict(wanted)) - set(dict(each))) for each in (shown, stored)),
        "wrong": sum(abs(dict(wanted)[step] - value) > 1e-6 for step, value in shown)
        + sum(dict(wanted)[step] != value for step, value in stored)
        + (times != [record.ended_at_s for record in history]),
        "restarts_shown": len(attempts) - 1,
    }


def interrupted(server: Server) -> dict[str, float]:
    """Kill the server while many steps are sent, start it again and repeat; compare the steps."""
    run = TrackedRun(
        namespace="default",
        name="long",
        uid="long",
        created_s=1.0,
        parameters={f"p{number}": number for number in range(250)},
        state="Succeeded",
        tags={},
    )
    points = [
        Point(step=step, attempt=1, at_s=float(step), values={f"m/{name}": step / 7 for name in range(NAMES)})
        for step in range(1, STEPS + 1)
    ]

    def kill() -> None:
        limit_s = time.monotonic() + SENDS_S_MAX
        while time.monotonic() < limit_s:
            with contextlib.suppress(OSError, ValueError, KeyError):
                if any(len(found["data"].get("metrics", ())) for found in server.runs("long")):
                    return server.kill()
            time.sleep(0.05)
        return None

    killer = threading.Thread(target=kill)
    killer.start()
    failed = 0
    try:
        Feed(Mlflow(server.url, "long"), time.sleep).send(run, points)
    except PolyremeError:
        failed = 1
    killer.join()
    server.start()
    begun_s = time.monotonic()
    sent = Feed(Mlflow(server.url, "long"), time.sleep).send(run, points)
    wall_s = time.monotonic() - begun_s
    (found,) = server.runs("long")
    wrong = 0
    for name in (0, NAMES - 1):
        stored = server.history(found["info"]["run_id"], f"m/{name}")
        wrong += [(each["step"], each["value"]) for each in stored] != [
            (point.step, point.step / 7) for point in points
        ]
    wrong += len(found["data"]["params"]) != len(run.parameters)
    return {
        "killed_while_sending": failed,
        "sent_after": sent,
        "metrics_per_s": round(sent * NAMES / wall_s),
        "exported_wrong": wrong,
    }


class Server(MlflowServer):
    """MLflow's server, and what it stored."""

    def runs(self, experiment: str) -> list[dict[str, Any]]:
        """Runs of an experiment."""
        of = self._get("experiments/get-by-name", experiment_name=experiment)["experiment"]["experiment_id"]
        body = json.dumps({"experiment_ids": [of]}).encode()
        request = urllib.request.Request(f"{self.url}/api/2.0/mlflow/runs/search", body)
        request.add_header("Content-Type", "application/json")
        found: list[dict[str, Any]] = json.load(urllib.request.urlopen(request)).get("runs", [])
        return found

    def history(self, run: str, name: str) -> list[dict[str, Any]]:
        """Values of a metric, in the order of their steps."""
        return sorted(self._pages(run, name), key=lambda each: int(each["step"]))

    def _pages(self, run: str, name: str) -> Iterator[dict[str, Any]]:
        token: dict[str, str] = {}
        while True:
            page = self._get("metrics/get-history", run_id=run, metric_key=name, max_results="10000", **token)
            yield from page.get("metrics", ())
            if not page.get("next_page_token"):
                return
            token = {"page_token": page["next_page_token"]}

    def _get(self, path: str, **query: str) -> Any:
        return json.load(urllib.request.urlopen(f"{self.url}/api/2.0/mlflow/{path}?{urllib.parse.urlencode(query)}"))


if __name__ == "__main__":
    raise SystemExit(main())
