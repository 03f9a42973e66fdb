"""The same runs in MLflow, and the same steps in TensorBoard.

MLflow's rows go straight into its database: over REST 10,000 runs take longer than everything that is measured.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.console.homes import COMPARED, loss_of, values_of
from benchmarks.step_log.run import record

from polyreme.tracking.port import Point, TrackedRun
from polyreme.tracking.tensorboard import TensorBoard
from tools.trackers import MlflowServer, TensorBoardServer, installed

TAG = "train/loss"
LOAD_S_MAX = 600.0
BATCH = 10_000
TABLE = "/#/experiments/0/runs"
_BEGUN_MS = 1_700_000_000_000
_INSERT_RUN = """
INSERT INTO runs (run_uuid, name, start_time, end_time, source_type, user_id, status, lifecycle_stage, experiment_id)
VALUES (?, ?, ?, ?, 'LOCAL', 'user', 'FINISHED', 'active', 0)
"""
_INSERT_METRICS = (
    "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, 100, 0)",
    "INSERT INTO latest_metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, 100, 0)",
)


@contextlib.contextmanager
def mlflow(folder: Path, runs: int, parameters: int) -> Iterator[str]:
    """Serve the runs of a sweep."""
    server = MlflowServer(installed("mlflow"), folder)
    try:
        server.start()
        with contextlib.closing(sqlite3.connect(server.database, timeout=60)) as database, database:
            for number in range(runs):
                _write_run(database, number, parameters)
        yield server.url
    finally:
        server.kill()


def compare_path() -> str:
    """Return the path of MLflow's comparison of the runs that ours compares."""
    listed = json.dumps([_uid(number) for number in range(COMPARED)]).replace(" ", "")
    return f'/#/compare-runs?runs={listed}&experiments=["0"]'


def _uid(number: int) -> str:
    return f"{number:032x}"


def _write_run(database: sqlite3.Connection, number: int, parameters: int) -> None:
    uid, name, at_ms = _uid(number), f"run-{number}", _BEGUN_MS + 1000 * number
    database.execute(_INSERT_RUN, (uid, name, at_ms, at_ms + 500))
    database.execute("INSERT INTO tags (key, value, run_uuid) VALUES ('mlflow.runName', ?, ?)", (name, uid))
    given = [(f"p{at}", str(value), uid) for at, value in enumerate(values_of(number, parameters))]
    database.executemany("INSERT INTO params (key, value, run_uuid) VALUES (?, ?, ?)", given)
    for statement in _INSERT_METRICS:
        database.execute(statement, (TAG, loss_of(number), at_ms, uid))


def write_events(folder: Path, steps: int) -> None:
    """Write the losses of a long run as event files, by our own tracker."""
    tracker = TensorBoard(str(folder / "events"))
    run = TrackedRun(
        namespace="default", name="long", uid="long", created_s=1.0, parameters={}, state="Succeeded", tags={}
    )
    tracker.open(run)
    for first in range(1, steps + 1, BATCH):
        records = [record(step) for step in range(first, min(steps + 1, first + BATCH))]
        tracker.write([Point(step=of.step, attempt=1, at_s=of.ended_at_s, values={TAG: of.loss}) for of in records])
    tracker.close()


@contextlib.contextmanager
def tensorboard(folder: Path, steps: int) -> Iterator[tuple[str, float]]:
    """Serve a long run; gives the address, and the time until its last step was read [s]."""
    server = TensorBoardServer(installed("tensorboard"), folder)
    try:
        began_s = time.monotonic()
        server.start()
        while _last_step(server) < steps and time.monotonic() - began_s < LOAD_S_MAX:
            time.sleep(0.2)
        yield server.url, time.monotonic() - began_s
    finally:
        server.kill()


def _last_step(server: TensorBoardServer) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=LOAD_S_MAX)
    with contextlib.closing(connection):
        connection.request("GET", f"/data/plugin/scalars/scalars?run=long&tag={TAG}")
        answer = connection.getresponse()
        text = answer.read()
    rows = json.loads(text) if answer.status == http.HTTPStatus.OK else []
    return rows[-1][1] if rows else -math.inf
