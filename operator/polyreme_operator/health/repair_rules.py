"""When a repair may begin, when a node is examined beside it, and what is reported of it."""

from __future__ import annotations

from polyreme_operator.health.facts import NodeFacts, Note
from polyreme_operator.health.record import NodeState, Record, RepairPhase


def is_due(record: Record, now_s: float) -> bool:
    """Tell whether a taint is to be examined: not while a Job may run on the node, at once after a repair."""
    phase = None if record.repair is None else record.repair.phase
    if phase in {RepairPhase.REPAIR, RepairPhase.CHECK, RepairPhase.STOP}:
        return False
    return phase is RepairPhase.SETTLE or now_s >= record.examine_at_s


def may_begin(facts: NodeFacts, record: Record) -> bool:
    """Tell whether a hook may start: it is ours alone, empty, and the breaker is not latched."""
    policy = facts.policy
    return (
        facts.repairs
        and policy is not None
        and policy.enforce
        and not facts.latched
        and not facts.claimed
        and not facts.workers
        and facts.others == 0
        and record.state is NodeState.REPAIRING
        and record.owner == f"policy/{policy.name}"
    )


def notes_of(before: Record, after: Record) -> tuple[Note, ...]:
    """Report that a repair begins, ends or fails."""
    old, new = before.repair, after.repair
    if after.state is NodeState.RETIRED and before.state is not NodeState.RETIRED:
        return (Note(reason="NodeRetired", message=after.evidence, warning=True),)
    if new is None or (old is not None and (old.phase, old.job) == (new.phase, new.job)):
        return ()
    what = f"{new.action}, attempt {new.attempt}"
    match new.phase:
        case RepairPhase.REPAIR:
            return (Note(reason="NodeRepairStarted", message=f"{what}: Job {new.job}"),)
        case RepairPhase.SETTLE:
            return (Note(reason="NodeRepaired", message=f"{what}: the hook succeeded; it is examined now"),)
        case RepairPhase.STOP:
            return (Note(reason="NodeRepairFailed", message=f"{what}: {new.why or 'stopped'}", warning=True),)
        case RepairPhase.WAIT if old is not None and old.phase is not RepairPhase.STOP:
            return (Note(reason="NodeRepairFailed", message=f"{old.action}, next is {what}", warning=True),)
        case _:
            return ()
