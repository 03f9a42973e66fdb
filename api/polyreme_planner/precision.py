"""Type of numbers in which a job computes, by the job and the hardware of its workers."""

from __future__ import annotations

from polyreme_api.job.model import Training
from polyreme_planner.hardware import PROCESSOR, Precision


def precision_of(training: Training, hardware: str) -> Precision:
    """Return the type in which a job computes: what it names, or bfloat16 on accelerators and float32 on processors.

    Args:
        training: The job's training.
        hardware: Name of the hardware that the plan is for.
    """
    if training.precision != "Auto":
        return training.precision
    return "float32" if hardware == PROCESSOR else "bfloat16"
