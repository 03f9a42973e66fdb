"""Write docs/reference/python.md: the Python names that users may import, with their signatures."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PUBLIC: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "polyreme.torch_dataset": (
        "The packs of a job as a torch dataset, for a training loop of your own ([how](../how-to/own-data.md)).",
        ("PackedDataset",),
    ),
    "polyreme.reference_scores": (
        "Scores of pairs by any program ([how](../how-to/tune-by-preference.md)).",
        ("write_scores",),
    ),
    "polyreme.job_files": ("Job files.", ("read_job",)),
    "polyreme_api.job": (
        "A TrainingJob as Python objects, with the rules of its fields ([fields](trainingjob.md)).",
        ("TrainingJob", "TrainingJobSpec", "TrainingJobStatus", "parse_job"),
    ),
    "polyreme_datahub.hub": (
        "Client of the data plane: what `polyreme data` does.",
        (
            "check_datasets",
            "estimate_ingest",
            "ingest",
            "link",
            "list_datasets",
            "process",
            "read_image",
            "read_images",
            "read_masks",
            "register",
            "remove_dataset",
            "replay",
            "show_dataset",
            "work",
        ),
    ),
    "polyreme_datahub.operations.declare": (
        "Operations of your own ([how](../how-to/data-operations.md)).",
        ("NoParameters", "Operation", "operation"),
    ),
    "polyreme_datahub.operations.values": ("Inputs and results of operations.", ("Blob", "Dropped", "Value")),
    "polyreme_datahub.errors": ("Errors of the data plane.", ("BadRecordError", "DatasetNotFoundError")),
    "polyreme_api.errors": (
        "Errors, by what a caller does next; each has `message`, `field` and `exit_code`.",
        (
            "DataDamagedError",
            "EnvironmentFailedError",
            "InvalidConfigError",
            "NotFoundError",
            "PolyremeError",
            "RefusedError",
            "RetryableError",
            "RunFailedError",
            "WaitTimeoutError",
        ),
    ),
    "polyreme_api.exit_codes": ("Exit codes of every command ([list](exit-codes.md)).", ("ExitCode",)),
}
"""Public modules: what each is for, and its public names."""
HEAD = """# Python

Written by `make docs` from `tools/python_page.py`. These names may be imported; they change only with a note in the
[changelog](../../CHANGELOG.md). Every other name is internal and may change with any release. A training script of a
job with `runtime.mode: Environment` needs none of them: it reads [environment variables](environment.md).
"""
DEFAULT_OBJECT = re.compile(r"<class '(?:\w+\.)*(\w+)'>|<factory>")


def render() -> str:
    """Return the page."""
    parts = [HEAD]
    for module, (purpose, names) in PUBLIC.items():
        loaded = importlib.import_module(module)
        rows = [
            f"| `{name}{_signature(getattr(loaded, name))}` | {_purpose(getattr(loaded, name))} |" for name in names
        ]
        parts.append("\n".join([f"## `{module}`\n", f"{purpose}\n", "| name | meaning |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _signature(found: Any) -> str:
    """Write a function's parameters, or those that make an object; a job's fields have a page of their own."""
    if inspect.isclass(found) and (issubclass(found, Exception | enum.Enum) or hasattr(found, "model_fields")):
        return ""
    parameters = [one.replace(annotation=one.empty) for one in inspect.signature(found).parameters.values()]
    return DEFAULT_OBJECT.sub(lambda at: at[1] or "...", str(inspect.Signature(parameters)))


def _purpose(found: Any) -> str:
    """Return the first sentence of a docstring."""
    return (inspect.getdoc(found) or "").split("\n\n", maxsplit=1)[0].replace("\n", " ").replace("``", "`")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
