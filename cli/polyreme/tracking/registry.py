"""The trackers by name: a new one is a file beside this one, and a line here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from polyreme.tracking.csv_file import CsvFile
from polyreme.tracking.mlflow import Mlflow
from polyreme.tracking.port import Tracker
from polyreme.tracking.tensorboard import TensorBoard
from polyreme_api.errors import InvalidConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A tracker that a person named, checked as far as that needs no server."""

    kind: str
    tracker: Tracker


EXPERIMENT_VARIABLE, EXPERIMENT = "MLFLOW_EXPERIMENT_NAME", "polyreme"
TRACKERS: dict[str, Callable[[str, str], Tracker]] = {
    "tensorboard": lambda where, _: TensorBoard(where),
    "mlflow": Mlflow,
    "csv": lambda where, _: CsvFile(where),
}
"""Makes a tracker of where it writes, and the name of the experiment."""
LIVE = ("tensorboard", "mlflow")
"""Those that can follow a run; a CSV file is written as a whole."""


def live_target(text: str) -> Target:
    """Read ``KIND:WHERE`` as ``--track`` takes it.

    Raises:
        InvalidConfigError: If it is none.
    """
    kind, _, where = text.partition(":")
    if kind not in LIVE or not where:
        forms = " or ".join(f"{name}:{example}" for name, example in zip(LIVE, ("DIR", "URL"), strict=True))
        raise InvalidConfigError(f"not a tracker: {text!r}, expected {forms}", field="--track")
    return Target(kind=kind, tracker=TRACKERS[kind](where, os.environ.get(EXPERIMENT_VARIABLE) or EXPERIMENT))
