"""The recipes that ship with polyreme, by name."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

from polyreme_api.errors import NotFoundError

SUFFIX = ".yaml"
JOB = "job.json"


def shipped_recipes() -> list[str]:
    """Return the names of the recipes that ship."""
    folder = importlib.resources.files(__package__)
    return sorted(file.name.removesuffix(SUFFIX) for file in folder.iterdir() if file.name.endswith(SUFFIX))


def read_shipped(name: str) -> str:
    """Return the YAML of a shipped recipe.

    Raises:
        NotFoundError: If there is none of that name.
    """
    if name not in shipped_recipes():
        raise NotFoundError(
            f"no recipe {name!r}: it is neither a file nor one of those that ship, {', '.join(shipped_recipes())}",
            field="--recipe",
        )
    return importlib.resources.files(__package__).joinpath(name + SUFFIX).read_text("utf-8")


@functools.cache
def job_recipe() -> Any:
    """Return the content of the recipe that a job's data are processed by."""
    return json.loads(importlib.resources.files(__package__).joinpath(JOB).read_text("utf-8"))


def job_operations() -> tuple[str, ...]:
    """Return the names of its operations, in order."""
    return tuple(job_recipe()["operations"])
