"""Rules of repairs: when one may begin, when a node is examined beside it, what it cures, and what is reported of it.

The agent shows an XID until the node boots, also if a reset has cured it. States, such as a missing GPU, are shown only
while they last, so they count whatever a hook reports.
"""

from __future__ import annotations

import dataclasses

from polyreme_api.node_report import STATES
from polyreme_operator.health.facts import NodeFacts, Note
from polyreme_operator.health.record import NodeState, Record, RepairPhase
from polyreme_operator.health.signs import Reading, Sign


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


def without_cured(reading: Reading, record: Record | None) -> Reading:
    """Return a reading without the events from before a repair that succeeded."""
    if record is None or not record.repaired_at_s:
        return reading
    left = tuple(sign for sign in reading.signs if not _is_cured(sign, record))
    cured = {sign.condition for sign in reading.signs} - {sign.condition for sign in left}
    return dataclasses.replace(reading, signs=left, clear=reading.clear | cured, cured=bool(cured) or reading.cured)


def _is_cured(sign: Sign, record: Record) -> bool:
    return sign.known and bool(sign.boot) and sign.row.code not in STATES and 0.0 < sign.last_s <= record.repaired_at_s


_RESULTS = {"NodeRepairStarted": "Started", "NodeRepaired": "Succeeded", "NodeRepairFailed": "Failed"}
_ENDS = {"NodeReturned": "Succeeded", "NodeRetired": "Failed"}
"""What it says of a hook that ran until then."""


def repair_result(before: Record | None, after: Record | None, note: Note) -> tuple[str, str] | None:
    """Return action and result of the repair that a note reports; None if it reports none."""
    old, new = (None if record is None else record.repair for record in (before, after))
    if note.reason in _ENDS:
        ran = old is not None and old.phase in {RepairPhase.REPAIR, RepairPhase.CHECK}
        return (old.action, _ENDS[note.reason]) if old is not None and ran else None
    repair = new if note.reason == "NodeRepairStarted" else old
    return (repair.action, _RESULTS[note.reason]) if repair is not None and note.reason in _RESULTS else None


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
            started = Note(reason="NodeRepairStarted", message=f"{what}: Job {new.job}")
            if old is None or old.phase in {RepairPhase.WAIT, RepairPhase.STOP}:
                return (started,)
            failed = f"{old.action}, attempt {old.attempt}, next is {what}"
            return Note(reason="NodeRepairFailed", message=failed, warning=True), started
        case RepairPhase.SETTLE:
            return (Note(reason="NodeRepaired", message=f"{what}: the hook succeeded; it is examined now"),)
        case RepairPhase.STOP:
            return (Note(reason="NodeRepairFailed", message=f"{what}: {new.why or 'stopped'}", warning=True),)
        case RepairPhase.WAIT if old is not None and old.phase is not RepairPhase.STOP:
            return (Note(reason="NodeRepairFailed", message=f"{old.action}, next is {what}", warning=True),)
        case _:
            return ()
