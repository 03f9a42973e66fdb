"""The recipes that ship with polyreme, by name."""

from __future__ import annotations

import importlib.resources

from polyreme_api.errors import NotFoundError

SUFFIX = ".yaml"


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
