"""Exports of models in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from polyreme_planner.shapes import ModelShape
from polyreme_trainer.export.huggingface import export_tensors


def export_model(state: Mapping[str, Tensor], shape: ModelShape, directory: Path, **how: Any) -> None:
    """Write the full state dict of a model, with all experts, on any device."""
    export_tensors(state, state.items(), shape, directory, **how)
