"""The recipe of the data plane's benchmarks: six operations, the two cheapest of them declared here."""

import dataclasses
from typing import Any

from polyreme_datahub.operations.declare import operation
from polyreme_datahub.operations.values import Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GradeParameters:
    """How sharpness is graded."""

    step: float = 50.0


@operation("grade", 1, inputs=("blur-filter",), blobs=False, parameters=GradeParameters)
def grade(sharpness: Value, parameters: GradeParameters) -> Value:
    """Round the sharpness of each image down to a grade."""
    return Value.of({"grades": [int(value // parameters.step) for value in sharpness.data["sharpness"]]})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CardParameters:
    """Text of the card."""

    title: str = "photo"


@operation("card", 1, inputs=("grade", "image-hash"), blobs=False, parameters=CardParameters)
def card(graded: Value, hashed: Value, parameters: CardParameters) -> Value:
    """Collect what is known of a sample."""
    return Value.of({"title": parameters.title, "grades": graded.data["grades"], "images": hashed.data["images"]})


STEPS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("decode", ("record",), {}),
    ("resize", ("decode",), {"side_px_max": 512, "quality": 85}),
    ("blur-filter", ("resize",), {"sharpness_min": 1.0}),
    ("image-hash", ("decode",), {}),
    (f"{__name__}:grade", ("blur-filter",), {}),
    (f"{__name__}:card", ("grade", "image-hash"), {}),
)
"""Operation, inputs and parameters of each step. A step is named after its operation."""


def recipe_content(changes: dict[int, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the recipe as its YAML file would hold it.

    Args:
        changes: Parameters to set, by the position of the step.
    """
    entries = [
        {"operation": name, "inputs": list(inputs), "parameters": {**parameters, **(changes or {}).get(at, {})}}
        for at, (name, inputs, parameters) in enumerate(STEPS)
    ]
    return {"version": 1, "operations": entries}
