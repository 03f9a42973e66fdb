"""The home and the JSON form of values, which the commands of ``polyreme data`` share."""

from __future__ import annotations

import dataclasses
from typing import Any

import typer
from pydantic.alias_generators import to_camel

from polyreme.run_files.paths import Home


def data_home(context: typer.Context) -> Home:
    """Return the home, with a place for data."""
    home: Home = context.obj
    home.prepare_data()
    return home


def plain(value: Any) -> Any:
    """Return a dataclass as JSON, with the names that all JSON of polyreme has."""
    if dataclasses.is_dataclass(value):
        return {to_camel(field.name): plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value
