"""How the layers of a model compute, which is no part of its shape: what they hold, which rows they drop."""

from __future__ import annotations

import dataclasses

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.costs import Recompute


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOptions:
    """Chosen by the job; a checkpoint knows nothing of it."""

    recompute: Recompute = Recompute.NONE
    """What layers make anew in the backward pass; changes no bit."""
    capacity_factor: float | None = None
    """Rows that each rank may send to an expert, in shares of what it would send if all experts got as many; None drops
    no row. Changes what is learned."""

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
"""Everything is held, nothing is dropped."""
