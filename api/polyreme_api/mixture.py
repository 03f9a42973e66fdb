"""Changes of a spec while its job exists, as an attempt trains by them: recorded once, in its resume point.

``spec.data.schedule`` may get more entries, and the end of the run may move, so two readers of the spec may see
different ones. What an attempt uses is fixed by its leader instead, and each attempt takes over what the one before it
had (ADR 40, ADR 59).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from polyreme_api.fields import STEPS_MAX
from polyreme_api.job.data import SCHEDULE_MAX, SKIP_STEPS_MAX, MixtureChange, SourceWeight
from polyreme_api.job.model import Training

_CONFIG = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class AppendedChange(BaseModel):
    """An entry of the schedule that was appended after the first attempt had begun."""

    model_config = _CONFIG

    from_step: Annotated[int, Field(ge=1, le=STEPS_MAX)]
    """As the entry has it."""
    step: Annotated[int, Field(ge=1)]
    """First step with these weights: the first of a window of the order."""
    weights: tuple[SourceWeight, ...]
    """As the entry has them."""
    skip_steps: Annotated[int, Field(ge=0, le=SKIP_STEPS_MAX)] = 0
    """As the entry has it."""


class MixtureRecord(BaseModel):
    """Changes of the mixture, and the end of the run."""

    model_config = _CONFIG

    base: Annotated[tuple[MixtureChange, ...], Field(max_length=SCHEDULE_MAX)] = ()
    """Entries that the first attempt knew: each takes effect at its very step."""
    changes: Annotated[tuple[AppendedChange, ...], Field(max_length=SCHEDULE_MAX)] = ()
    """Later entries, in their order."""
    read: Annotated[int, Field(ge=0, le=SCHEDULE_MAX)] = 0
    """Entries of the schedule that are accounted for: those above, and those that are ignored for good."""
    training: Training | None = None
    """Steps and learning rates that the attempt trains by; None, of earlier releases: those of the spec."""

    def summary(self) -> dict[str, Any]:
        """Return it without the weights, small enough for every checkpoint."""
        steps = [[change.from_step, change.step] for change in self.changes]
        return {"base": len(self.base), "read": self.read, "changes": steps}
