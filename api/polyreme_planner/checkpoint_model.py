"""Check that a checkpoint holds the model that a run trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyreme_api.commit_marker import CommitMarker
from polyreme_api.errors import RefusedError
from polyreme_planner.plan import shape_digest
from polyreme_planner.shapes import ModelShape, shape_content


def check_model(marker: CommitMarker, shape: ModelShape, *, name: str) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        RefusedError: Naming the first size that differs.
    """
    if marker.model_digest == shape_digest(shape):
        return
    saved, wanted = _leaves(marker.model_shape), _leaves(shape_content(shape))
    for field in sorted(saved.keys() | wanted.keys()):
        if saved.get(field) != wanted.get(field):
            raise RefusedError(
                f"checkpoint belongs to another model: {name} has {field}={saved.get(field)!r}, "
                f"this run has {wanted.get(field)!r}",
                field=f"spec.model ({field})",
            )
    raise RefusedError(
        f"checkpoint belongs to another model: {name} has digest {marker.model_digest!r}", field="spec.model"
    )


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_leaves(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
