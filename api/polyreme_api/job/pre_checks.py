"""Checks of the nodes before the ranks of an attempt are released."""

from typing import Annotated, Literal

from pydantic import Field

from polyreme_api.fields import Part, Seconds

TIMEOUT_SECONDS_MIN = 20
"""Five seconds for each of the rounds."""


RATE_MAX = 1_000_000_000
"""Bound of a minimum, in its own unit: a thousand times what a device of today does."""


class PreCheckMinimums(Part):
    """Least rates of a healthy device; a worker below one of them fails, however fast the others are."""

    compute_gflops: Annotated[int, Field(ge=1, le=RATE_MAX)] | None = None
    """Floating-point operations of a matrix product [1e9/s]."""
    memory_mb_per_second: Annotated[int, Field(ge=1, le=RATE_MAX)] | None = None
    """Copies within a device's memory [1e6 bytes/s]."""
    disk_mb_per_second: Annotated[int, Field(ge=1, le=RATE_MAX)] | None = None
    """Writing and reading a file on the checkpoint volume, or in the pod's folder if checkpoints are in a bucket."""
    all_reduce_mb_per_second: Annotated[int, Field(ge=1, le=RATE_MAX)] | None = None
    """All-reduce between two workers [1e6 bytes/s]."""


class PreChecks(Part):
    """Checks of each worker's node before training: compute, memory, disk and all-reduce in pairs.

    A worker that fails gets another node before the first step.
    """

    enabled: bool = False
    """Whether the nodes are checked before each attempt."""
    max_age_seconds: Seconds = 86_400
    """A node that has passed is not checked again for so long, unless others need it as a partner."""
    timeout_seconds: Annotated[int, Field(ge=TIMEOUT_SECONDS_MIN, le=3600)] = 240
    """Longest time of all checks, beside a minute in which their processes start; a quarter of it for each of their
    rounds. ``health.startTimeoutSeconds`` is extended by both."""
    min_percent_of_median: Annotated[int, Field(ge=1, le=99)] = 50
    """A worker whose rate is below this share of the gang's median is slow, and fails."""
    minimums: PreCheckMinimums = Field(default_factory=PreCheckMinimums)
    """Least rates, beside the comparison with the median."""
    max_moves: Annotated[int, Field(ge=0, le=20)] = 3
    """How many times in a row workers are moved because of the checks."""
    when_exhausted: Literal["Train", "Fail"] = "Train"
    """What happens when a check fails after that many moves: the job trains with a warning, or fails."""
