"""Arguments that commands about a job share: its files, and values that replace what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_JOB = typer.Argument(
    help="YAML file with one TrainingJob; - reads standard input. Of several, each is merged over the one before.",
    metavar="JOB",
)
JobFiles = Annotated[list[Path], _JOB]
OptionalJobFiles = Annotated[list[Path] | None, _JOB]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Give a field below spec another value, as training.optimizer.learningRate=3e-4; null removes it; may "
        "be repeated.",
    ),
]
