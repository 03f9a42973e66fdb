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

ROLLBACKS_MAX = 1024
"""Rollbacks of one run that its mixture has room for."""
_CONFIG = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class Rejection(BaseModel):
    """``rejected/a<attempt>.json``: a spike of the loss ended an attempt, and what it trained last is not history.

    Written once, by the attempt's rank 0. The leader of the next attempt turns it into a change of the mixture.
    """

    model_config = _CONFIG

    attempt: Annotated[int, Field(ge=1)]
    """The attempt that the spike ended."""
    spike_step: Annotated[int, Field(ge=1)]
    after_step: Annotated[int, Field(ge=0)]
    """No later attempt resumes from a checkpoint after this step."""
    from_step: Annotated[int, Field(ge=2)]
    """First step whose data are skipped: the first of a window of the order."""
    skip_steps: Annotated[int, Field(ge=1, le=SKIP_STEPS_MAX)]
    why: str = ""
    """The spike, for people."""


class AppendedChange(BaseModel):
    """An entry of the schedule that was appended after the first attempt had begun, or the answer to a spike."""

    model_config = _CONFIG

    from_step: Annotated[int, Field(ge=1, le=STEPS_MAX)]
    """As the entry has it."""
    step: Annotated[int, Field(ge=1)]
    """First step with these weights: the first of a window of the order."""
    weights: tuple[SourceWeight, ...]
    """As the entry has them."""
    skip_steps: Annotated[int, Field(ge=0, le=SKIP_STEPS_MAX)] = 0
    """As the entry has it."""
    rejection: Rejection | None = None
    """The spike that it answers; None: it is an entry of the schedule."""


class MixtureRecord(BaseModel):
    """Changes of the mixture, and the end of the run."""

    model_config = _CONFIG

    base: Annotated[tuple[MixtureChange, ...], Field(max_length=SCHEDULE_MAX)] = ()
    """Entries that the first attempt knew: each takes effect at its very step."""
    changes: Annotated[tuple[AppendedChange, ...], Field(max_length=SCHEDULE_MAX + ROLLBACKS_MAX)] = ()
    """Later entries in their order, and answers to spikes, by the step at which they take effect."""
    read: Annotated[int, Field(ge=0, le=SCHEDULE_MAX)] = 0
    """Entries of the schedule that are accounted for: those above, and those that are ignored for good."""
    training: Training | None = None
    """Steps and learning rates that the attempt trains by; None, of earlier releases: those of the spec."""

    def summary(self) -> dict[str, Any]:
        """Return it without the weights, small enough for every checkpoint. Rejections have records of their own."""
        steps = [[change.from_step, change.step] for change in self.changes if change.rejection is None]
        return {"base": len(self.base), "read": self.read, "changes": steps}

    @property
    def rejections(self) -> list[Rejection]:
        """The spikes that were answered."""
        return [change.rejection for change in self.changes if change.rejection is not None]
