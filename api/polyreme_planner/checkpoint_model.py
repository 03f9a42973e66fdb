"""Check that a checkpoint holds the model, or the adapters, that a run trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyreme_api.commit_marker import CommitMarker, SavedAdapters
from polyreme_api.errors import RefusedError
from polyreme_planner.adapters import FIELD, Adapters
from polyreme_planner.plan import shape_digest
from polyreme_planner.shapes import ModelShape, shape_content


def check_adapters(marker: CommitMarker, wanted: Adapters | None, *, name: str) -> None:
    """Refuse a checkpoint of other adapters, or one of a whole model where adapters are trained, and the reverse.

    Raises:
        RefusedError: Naming what differs.
    """
    saved = marker.adapters
    if saved is None or wanted is None:
        if (saved is None) != (wanted is None):
            holds, trains = ("the whole model", "adapters") if saved is None else ("adapters", "the whole model")
            raise RefusedError(
                f"checkpoint holds something else: {name} holds {holds}, this run trains {trains}", field=FIELD
            )
        return
    ours = saved_adapters(wanted, base=saved.base)
    for field in ("rank", "alpha", "targets"):
        if getattr(saved, field) != getattr(ours, field):
            raise RefusedError(
                f"checkpoint holds other adapters: {name} has {field}={_shown(getattr(saved, field))}, "
                f"this run has {_shown(getattr(ours, field))}",
                field=f"{FIELD}.{field}",
            )


def check_base(marker: CommitMarker, base: str, *, name: str) -> None:
    """Refuse adapters that were trained beside other weights.

    Raises:
        RefusedError: Naming both digests.
    """
    if marker.adapters is not None and marker.adapters.base != base:
        raise RefusedError(
            f"adapters belong to other weights: those of {name} were trained beside weights of digest "
            f"{marker.adapters.base}, this run starts from {base}",
            field="spec.model.weights or spec.training.seed",
        )


def saved_adapters(adapters: Adapters, *, base: str) -> SavedAdapters:
    """Describe adapters for a checkpoint's marker."""
    return SavedAdapters(rank=adapters.rank, alpha=adapters.alpha, targets=tuple(sorted(adapters.targets)), base=base)


def _shown(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


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
