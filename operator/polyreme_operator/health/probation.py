"""Probation: a node that is back in service proves itself under the load of jobs that accept it.

Time counts only while workers run on the node. A node that no job uses does not stay in probation forever: after the
policy's longest time it is examined, and returns if no fault is found.
"""

from __future__ import annotations

from polyreme_operator.health.policy import PolicyView
from polyreme_operator.health.record import Record

LOOK_S = 300.0
"""How often the load of a node in probation is looked at; a gap counts for no more, since the operator may have been
away."""
SOONEST_S = 1.0
DEFAULT_S = 3_600.0
"""Length of a probation if the policy is gone."""


def begun(record: Record, policy: PolicyView | None, now_s: float) -> Record:
    """Return the record of a node whose probation begins."""
    opt_in = policy is not None and policy.loaded_s > 0.0
    lasts_s = DEFAULT_S if policy is None else policy.probation_max_s if opt_in else policy.probation_s
    return record.but(opt_in=opt_in, loaded_s=0.0, loaded_at_s=0.0, examine_at_s=now_s + lasts_s)


def counted(record: Record, *, loaded: bool, now_s: float) -> Record:
    """Count the time since the last look if workers ran then and run now."""
    if not record.opt_in or (not loaded and not record.loaded_at_s):
        return record
    passed_s = min(LOOK_S, max(0.0, now_s - record.loaded_at_s)) if loaded and record.loaded_at_s else 0.0
    if loaded and record.loaded_at_s and passed_s < SOONEST_S:
        return record
    return record.but(loaded_s=round(record.loaded_s + passed_s, 3), loaded_at_s=now_s if loaded else 0.0)


def is_over(record: Record, policy: PolicyView | None, now_s: float) -> bool:
    """Tell whether the node has proven itself, or has waited long enough to be examined instead."""
    if now_s >= record.examine_at_s:
        return True
    return record.opt_in and policy is not None and record.loaded_s >= policy.loaded_s


def look_at_s(record: Record, policy: PolicyView | None, now_s: float) -> float:
    """Return when its load is looked at next."""
    left_s = LOOK_S if policy is None else policy.loaded_s - record.loaded_s
    look_s = LOOK_S if left_s <= 0.0 else min(LOOK_S, max(SOONEST_S, left_s))
    return min(record.examine_at_s, now_s + look_s)
