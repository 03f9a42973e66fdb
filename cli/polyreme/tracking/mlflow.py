"""Tracker: MLflow, over REST. The run is found by a tag with its uid, so that a second export continues the first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyreme.tracking.mlflow_client import MlflowClient
from polyreme.tracking.port import Parameter, Point, TrackedRun
from polyreme_api.errors import NotFoundError, RefusedError

METRICS_PER_REQUEST = 1000
PARAMETERS_PER_REQUEST = 100
NAME_MAX = 250
VALUE_MAX = 500
"""Characters of a parameter that servers of all versions take."""
TAG_MAX = 5000
UID_TAG = "polyreme.uid"
STATUS = {"Succeeded": "FINISHED", "Failed": "FAILED", "Stopped": "KILLED"}
"""Others are ``RUNNING``."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. /]+")


class Mlflow:
    """One run of an experiment."""

    def __init__(self, where: str, experiment: str) -> None:
        """Name the server and the experiment, which is created where it is missing.

        Raises:
            InvalidConfigError: If the URL is none.
        """
        self._client = MlflowClient(where)
        self._experiment = experiment
        self._experiment_id = self._run_id = ""
        self._last_s = 0.0

    def open(self, run: TrackedRun) -> Mapping[str, int]:
        """Find the run or create it; send the parameters that it lacks."""
        self._experiment_id = self._find_experiment()
        self._run_id = self._find_run(run) or self._create_run(run)
        data = self._client.get("runs/get", {"run_id": self._run_id}, part="run").get("data", {})
        self._send_parameters(run, {each["key"]: each["value"] for each in data.get("params", ())})
        return {str(each["key"]): int(each.get("step", 0)) for each in data.get("metrics", ())}

    def write(self, points: Sequence[Point]) -> None:
        """Send the metrics, oldest first: what a request that failed midway has stored is then known by name."""
        metrics = [
            {"key": name, "value": _number(value), "timestamp": int(point.at_s * 1000), "step": point.step}
            for point in points
            for name, value in point.values.items()
        ]
        for batch in _batches(metrics, METRICS_PER_REQUEST):
            self._client.post("runs/log-batch", {"run_id": self._run_id, "metrics": batch})
        self._last_s = points[-1].at_s

    def describe(self, run: TrackedRun) -> None:
        """Set tags, and the state with the time of the last step."""
        tags = [{"key": f"polyreme.{name}", "value": value[:TAG_MAX]} for name, value in run.tags.items()]
        self._client.post("runs/log-batch", {"run_id": self._run_id, "tags": tags})
        status = STATUS.get(run.state, "RUNNING")
        ended = {} if status == "RUNNING" or not self._last_s else {"end_time": int(self._last_s * 1000)}
        self._client.post("runs/update", {"run_id": self._run_id, "status": status, **ended})

    def close(self) -> None:
        """Keep nothing open."""

    def shown_at(self) -> str:
        """URL of the run's page."""
        return f"{self._client.url}/#/experiments/{self._experiment_id}/runs/{self._run_id}"

    def _find_experiment(self) -> str:
        query = {"experiment_name": self._experiment}
        try:
            return str(self._client.get("experiments/get-by-name", query, part="experiment")["experiment_id"])
        except NotFoundError:
            pass
        try:
            return str(self._client.post("experiments/create", {"name": self._experiment})["experiment_id"])
        except RefusedError:
            # Another export may have created it meanwhile.
            return str(self._client.get("experiments/get-by-name", query, part="experiment")["experiment_id"])

    def _find_run(self, run: TrackedRun) -> str:
        found = self._client.post(
            "runs/search",
            {
                "experiment_ids": [self._experiment_id],
                "filter": f"tags.`{UID_TAG}` = '{run.uid}'",
                "order_by": ["attributes.start_time ASC"],
                "max_results": 1,
            },
        ).get("runs", ())
        return str(found[0]["info"]["run_id"]) if found else ""

    def _create_run(self, run: TrackedRun) -> str:
        tags = {UID_TAG: run.uid, "mlflow.runName": run.title, "mlflow.source.name": "polyreme"}
        created = self._client.post(
            "runs/create",
            {
                "experiment_id": self._experiment_id,
                "run_name": run.title,
                "start_time": int(run.created_s * 1000),
                "tags": [{"key": key, "value": value} for key, value in tags.items()],
            },
            part="run",
        )
        return str(created["info"]["run_id"])

    def _send_parameters(self, run: TrackedRun, stored: Mapping[str, str]) -> None:
        """Send the parameters that the run lacks; one that has changed since is a tag, for MLflow changes none."""
        wanted = {_name(name): _text(value) for name, value in run.parameters.items()}
        missing = [{"key": name, "value": value} for name, value in wanted.items() if name not in stored]
        for batch in _batches(missing, PARAMETERS_PER_REQUEST):
            self._client.post("runs/log-batch", {"run_id": self._run_id, "params": batch})
        changed = [
            {"key": f"polyreme.changed.{name}"[:NAME_MAX], "value": value}
            for name, value in wanted.items()
            if stored.get(name, value) != value
        ]
        for batch in _batches(changed, PARAMETERS_PER_REQUEST):
            self._client.post("runs/log-batch", {"run_id": self._run_id, "tags": batch})


def _batches(rows: Sequence[dict[str, Any]], most: int) -> Iterator[Sequence[dict[str, Any]]]:
    for first in range(0, len(rows), most):
        yield rows[first : first + most]


def _name(name: str) -> str:
    """Write a field with the characters that MLflow takes: ``stages[0].steps`` becomes ``stages.0.steps``."""
    plain = name.replace("[", ".").replace("]", "")
    return _NOT_IN_NAMES.sub("_", plain)[:NAME_MAX]


def _text(value: Parameter) -> str:
    words = str(value).lower() if isinstance(value, bool) else str(value)
    return words if len(words) <= VALUE_MAX else words[: VALUE_MAX - 1] + "…"


def _number(value: float) -> float | str:
    """Write a number as JSON of protocol buffers does."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
