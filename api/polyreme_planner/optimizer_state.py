"""Sharding of the optimizer's state, by job and model alone, so that every layout of a job agrees."""

from __future__ import annotations

from polyreme_api.job.model import Training
from polyreme_planner.adapters import adapter_counts, adapters_of
from polyreme_planner.hardware import Precision
from polyreme_planner.model_parts import all_parts, part_parameters
from polyreme_planner.shapes import ModelShape

SHARDED_FROM_BYTES = 1 << 30
"""State of a whole model, or of its adapters, above which ranks shard its update by default."""


def state_bytes(precision: Precision) -> int:
    """Bytes of the optimizer's state for one parameter: moments, and the float32 weight if the working one is narrower.

    Muon holds one moment of most parameters (``matrix_state_bytes``), and two of the rest; where the default is chosen
    by the size of the whole, all are counted with two.
    """
    return 8 if precision == "float32" else 12


def matrix_state_bytes(training: Training, precision: Precision) -> int:
    """Bytes of the optimizer's state for one parameter of a layer's matrix."""
    return state_bytes(precision) - (4 if training.optimizer.name == "Muon" else 0)


def divides_update(training: Training, shape: ModelShape, precision: Precision) -> bool:
    """Whether ranks that hold the same weights shard their update (ZeRO-1)."""
    if training.optimizer.state_sharding != "Auto":
        return training.optimizer.state_sharding == "Sharded"
    parameters, adapters = part_parameters(shape), adapters_of(training, shape)
    whole: float = sum(parameters[part].common + parameters[part].routed for part in all_parts(shape))
    if adapters is not None:
        whole = sum(adapter_counts(shape, adapters))
    return whole * state_bytes(precision) > SHARDED_FROM_BYTES
