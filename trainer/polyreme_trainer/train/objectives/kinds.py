"""The objectives that a stage may have, by the name in the job; text needs none: its tokens all weigh one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from polyreme_api.job.objective import Objective as Field
from polyreme_trainer.train.objectives.group_relative import GroupRelative
from polyreme_trainer.train.objectives.objective import Objective
from polyreme_trainer.train.objectives.preference import Preference

KINDS: Mapping[str, Callable[[Field], Objective]] = {
    "Preference": Preference.of,
    "GroupRelative": GroupRelative.of,
}


def objective_of(field: Field) -> Objective | None:
    """Return a stage's objective; None: cross-entropy of every token."""
    return KINDS[field.kind](field) if field.kind in KINDS else None
