"""End of an attempt by a spike of the loss: rank 0 records it, and all ranks end with the same error."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from polyreme_api.errors import PolyremeError, StepFailedError
from polyreme_trainer.parallel import collectives
from polyreme_trainer.train.loss_health import Spike

RollBack = Callable[[Spike], PolyremeError]
"""Records that later attempts resume before a spike, and returns the error with which the attempt ends."""


def no_rollback(spike: Spike) -> PolyremeError:
    """Fail the step, where there is no job whose data could be skipped."""
    return StepFailedError(f"{spike}", field="spec.health.loss")


def rolled_back(spike: Spike, roll_back: RollBack, group: dist.ProcessGroup) -> PolyremeError:
    """Let the group's first rank record a rollback, and return its error on every rank."""
    error: PolyremeError | None = None
    if dist.get_rank(group) == 0:
        try:
            error = roll_back(spike)
        except PolyremeError as failure:
            error = failure
    return collectives.from_first(error, group)
