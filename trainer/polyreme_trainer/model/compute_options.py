"""Options of computation, which are not part of a model's shape: what layers recompute, which rows they drop."""

from __future__ import annotations

import dataclasses

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.costs import Recompute


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """Chosen by the job, but for what the device needs; not part of a checkpoint."""

    recompute: Recompute = Recompute.NONE
    """What layers recompute in the backward pass; changes no bit."""
    capacity_factor: float | None = None
    """Most rows that each rank may send to an expert, relative to an equal distribution over all experts; None drops no
    row. Changes what is learned."""

    clear_empty: bool = False
    """Whether gradients of experts without rows are set to zero: where the device's product fills them
    (``empty_groups.py``)."""

    def __post_init__(self) -> None:
        """Refuse a capacity that would drop nearly everything.

        Raises:
            InvalidConfigError: Naming the field.
        """
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise InvalidConfigError(
                f"capacity factor too small: {self.capacity_factor}, expected above 0",
                field="spec.training.capacityFactor",
            )


DEFAULT_OPTIONS = ComputeOptions()
"""Everything is kept, nothing is dropped."""
