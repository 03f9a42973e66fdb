"""The states of a node, and their transitions: one pure function of record, signs, policy and time.

A taint is lifted only by an examination that finds the fault gone, or by a person. Time alone never lifts one: what
can't be examined stays out, and is examined again.
"""

from __future__ import annotations

import dataclasses

from polyreme_operator.health import escalation, probation, repair, repair_rules
from polyreme_operator.health.facts import NodeFacts, Note, Step, gravest
from polyreme_operator.health.policy import GRAVITY, Answer, Judged, PolicyView, judge
from polyreme_operator.health.record import (
    CODES_MAX,
    EVIDENCE_CHARACTERS_MAX,
    OPERATOR,
    PERSON,
    SHOWN_TIMES,
    Leave,
    NodeState,
    Record,
    Release,
    RepairPhase,
    Seen,
)
from polyreme_operator.health.risk import AT_RISK, HALF_LIFE_S, PROBATION_RISK, decayed, raised, risk_of
from polyreme_operator.health.signs import DOMAIN_FAULT, Sign

EXAMINE_S = 300.0
EXAMINE_MAX_S = 3_600.0
"""Longest time between two examinations; it doubles with each that leaves the taint."""
PERSONS_EXAMINE_S = 86_400.0
"""Time between two examinations of a person's taint, which only that person lifts."""
FORGET_S = 7 * 86_400.0
"""A record without a state to keep is removed so long after its last change."""
RISK_LOOK_S = HALF_LIFE_S / 8.0
REPAIRS = frozenset({"Reset", "Reboot", "Replace", "Support"})
"""Actions for which an empty node waits in state ``repairing``."""
_LEAVE = {Answer.TAINT: Leave.STAY, Answer.DRAIN: Leave.DRAIN, Answer.EVICT: Leave.EVICT}
_LEAVES = tuple(Leave)
"""Each is graver than the one before it."""


def next_step(facts: NodeFacts, now_s: float) -> Step:
    """Decide the next state of a node."""
    now_s = round(now_s, 3)
    facts = dataclasses.replace(facts, reading=repair_rules.without_cured(facts.reading, facts.record))
    judged = tuple(judge(sign, facts.policy, now_s) for sign in facts.reading.signs)
    record = facts.record or Record()
    if facts.tainted and not record.state.is_out:
        after, notes = _with_owner(facts, record, now_s)
    elif record.state.is_out and not facts.tainted:
        after = released_by(record, facts.reading.signs, who="", reason="the taint was removed", at_s=now_s)
        said = f"a person removed the taint of {record.owner or 'an unknown owner'} ({record.reason}); it is not set "
        notes = (Note(reason="NodeReleased", message=f"{said}again unless the node shows a new fault"),)
    elif record.state.is_out:
        after, notes = _out_of_service(facts, record, judged, now_s)
    else:
        return _in_service(facts, record, judged, now_s)
    return _step(facts, after, judged, notes, now_s)


def taint_value(record: Record) -> str:
    """Return the value of the taint: the class of the fault."""
    return record.fault_class or "unknown"


def quarantined_by(record: Record, *, who: str, reason: str, until_s: float, leave: Leave, at_s: float) -> Record:
    """Return the record of a node that a person takes out of service."""
    owner, evidence = f"{PERSON}/{who}" if who else PERSON, reason[:EVIDENCE_CHARACTERS_MAX]
    examine_at_s = until_s or at_s + PERSONS_EXAMINE_S
    after = _taken_out(record, owner, at_s, examine_at_s=examine_at_s, leave=leave, until_s=until_s)
    return after.but(fault_class="planned", reason="Manual", evidence=evidence)


def released_by(record: Record, signs: tuple[Sign, ...], *, who: str, reason: str, at_s: float) -> Record:
    """Return the record of a node that a person returns to service: what it shows now does not take it out again."""
    release = Release(by=f"{PERSON}/{who}" if who else PERSON, reason=reason[:EVIDENCE_CHARACTERS_MAX], at_s=at_s)
    seen = _with_seen(record.seen, signs, at_s)
    if record.reason == DOMAIN_FAULT:
        # Who releases it sees the node's own conditions only.
        seen[f"{DOMAIN_FAULT}/{record.device}"] = Seen(count=1, at_s=at_s)
    after = _returned(record, NodeState.HEALTHY, at_s)
    return after.but(released=release, seen=seen, recurrences=0, repairs_s=())


# ------------------------------------------------------------------------------------------------------- out of service


def _with_owner(facts: NodeFacts, record: Record, now_s: float) -> tuple[Record, tuple[Note, ...]]:
    """Give an owner to a taint that has none on record."""
    if facts.broken:
        after = _taken_out(record, OPERATOR, now_s, examine_at_s=now_s + EXAMINE_S, evidence=facts.broken)
        after = after.but(fault_class="unknown", reason="RecordUnreadable")
        return after, (Note(reason="NodeHealthUnreadable", message=facts.broken, warning=True),)
    evidence = "the taint was added by hand"
    after = _taken_out(record, PERSON, now_s, examine_at_s=now_s + PERSONS_EXAMINE_S, evidence=evidence)
    after = after.but(fault_class="planned", reason="Manual")
    return after, (Note(reason="NodeQuarantined", message="a person added the taint; a person lifts it"),)


def _out_of_service(
    facts: NodeFacts, record: Record, judged: tuple[Judged, ...], now_s: float
) -> tuple[Record, tuple[Note, ...]]:
    after = repair.advanced(record, facts.policy, facts.job, node=facts.name, now_s=now_s)
    new = [each for each in judged if each.grave and each.enforced and _new_count(record, each.sign)]
    worst = gravest(new)
    if worst is not None:
        after = _counted(after, [each.sign for each in new], now_s)
        if not record.is_persons:
            after = _escalated(after, worst, now_s)
    if record.is_persons and not (record.until_s and now_s >= record.until_s):
        if now_s >= record.examine_at_s:
            after = after.but(examine_at_s=record.until_s or now_s + PERSONS_EXAMINE_S)
    elif repair_rules.is_due(after, now_s):
        if _is_well(facts, after, judged):
            message = f"examined: {after.reason or 'the fault'} is gone; the taint is lifted"
            return _examined(facts, after, now_s), (Note(reason="NodeReturned", message=message),)
        # After a repair every report is looked at; only an examination that was due counts and moves the next one.
        if now_s >= after.examine_at_s:
            times, first_s = after.examinations + 1, EXAMINE_S if facts.policy is None else facts.policy.examine_s
            wait_s = min(EXAMINE_MAX_S, first_s * 2.0 ** min(times, 12))
            after = after.but(examinations=times, examine_at_s=now_s + wait_s)
    after = _with_workers(facts, repair.settled(after, facts.policy, now_s))
    if repair_rules.may_begin(facts, after) and facts.policy is not None:
        after = repair.begun(after, facts.policy, node=facts.name, now_s=now_s)
    return after, repair_rules.notes_of(record, after)


def _is_well(facts: NodeFacts, record: Record, judged: tuple[Judged, ...]) -> bool:
    """Tell whether an examination finds the fault gone; it does not if that can't be seen."""
    if record.state is NodeState.RETIRED or any(each.grave for each in judged):
        return False
    if record.condition:
        return record.condition in facts.reading.clear
    return not (facts.reading.unknown or facts.reading.absent)


def _examined(facts: NodeFacts, record: Record, now_s: float) -> Record:
    """Return the record of a node that an examination returns to service."""
    if record.is_persons or record.reason == DOMAIN_FAULT:
        return _returned(record, NodeState.HEALTHY, now_s)
    repairs_s = escalation.with_repair(record.repairs_s, now_s)
    after = _returned(record, NodeState.PROBATION, now_s).but(repairs_s=repairs_s, condition=record.condition)
    return probation.begun(after, facts.policy, now_s)


def _with_workers(facts: NodeFacts, record: Record) -> Record:
    """Follow what still runs on a tainted node."""
    if record.state is NodeState.RETIRED:
        return record
    if record.repair is not None and record.repair.phase is not RepairPhase.WAIT:
        return record
    if record.leave is not Leave.STAY and facts.workers:
        return record.but(state=NodeState.DRAINING)
    waits = record.state is NodeState.REPAIRING or (record.action in REPAIRS and not facts.latched)
    return record.but(state=NodeState.REPAIRING if waits and not facts.workers else NodeState.QUARANTINED)


def _escalated(record: Record, worst: Judged, now_s: float) -> Record:
    """Escalate a taint to a graver fault, or to a replacement if the device is worn out."""
    leave = max(record.leave, _LEAVE[worst.answer], key=_LEAVES.index)
    after = record.but(leave=leave, examine_at_s=max(record.examine_at_s, _sticky_until_s(worst.sign, now_s)))
    if not worst.sign.rule:
        after = after.but(condition=worst.sign.condition)
        if leave is not record.leave or record.reason in {"", DOMAIN_FAULT}:
            after = after.but(**_cause(worst))
    return _worn_out(after, worst.sign, now_s)


# ----------------------------------------------------------------------------------------------------------- in service


def _in_service(facts: NodeFacts, record: Record, judged: tuple[Judged, ...], now_s: float) -> Step:
    kept = repair.advanced(_forgotten(facts, record), facts.policy, facts.job, node=facts.name, now_s=now_s)
    enforced = [each for each in judged if each.enforced and _new_count(kept, each.sign)]
    watched = [each for each in enforced if GRAVITY[each.answer] >= GRAVITY[Answer.WATCH]]
    calm, notes = _in_probation(facts, kept, judged, now_s)
    calm = _with_risk(calm, [each for each in watched if not each.grave], now_s)
    worst = gravest(each for each in enforced if each.grave)
    if worst is None or facts.policy is None:
        return _step(facts, calm, judged, notes, now_s)
    after, note = _quarantined(facts, facts.policy, _with_risk(calm, watched, now_s), worst, now_s)
    step = _step(facts, after, judged, (note,), now_s)
    return dataclasses.replace(step, needs_charge=True, refusable=_kept(calm, now_s), with_domain=worst.sign.rule)


def _quarantined(
    facts: NodeFacts, policy: PolicyView, record: Record, worst: Judged, now_s: float
) -> tuple[Record, Note]:
    sign = worst.sign
    own = not sign.rule
    recurrences = record.recurrences + (own and record.state is NodeState.PROBATION)
    examine_at_s = max(now_s + policy.examine_s, _sticky_until_s(sign, now_s))
    after = _taken_out(record, f"policy/{policy.name}", now_s, examine_at_s=examine_at_s, leave=_LEAVE[worst.answer])
    after = after.but(**_cause(worst), recurrences=recurrences, condition=sign.condition)
    after = _with_workers(facts, _worn_out(after, sign, now_s))
    retires = own and escalation.retires(record.repairs_s, recurrences, now_s)
    if retires:
        why = f"{recurrences} recurrences in probation, {len(record.repairs_s)} returns to service"
        after = after.but(state=NodeState.RETIRED, evidence=f"{why}; last: {after.evidence}"[:EVIDENCE_CHARACTERS_MAX])
    word = "retired" if retires else "quarantined"
    decided = f"rule {worst.rule}" if worst.rule else "the fault table"
    message = f"{word} by policy {policy.name} ({decided}): {worst.fault_class}, {_named(sign)}"
    return after, Note(reason="NodeRetired" if retires else "NodeQuarantined", message=message, warning=True)


def _in_probation(
    facts: NodeFacts, record: Record, judged: tuple[Judged, ...], now_s: float
) -> tuple[Record, tuple[Note, ...]]:
    """Count the load of a probation, and end one that is over."""
    if record.state is not NodeState.PROBATION:
        return record, ()
    record = probation.counted(record, loaded=facts.loaded, now_s=now_s)
    if not probation.is_over(record, facts.policy, now_s) or any(each.grave and each.enforced for each in judged):
        return record, ()
    proven = not facts.reading.unknown and (not record.condition or record.condition in facts.reading.clear)
    if record.opt_in and not proven:
        return record.but(examine_at_s=max(record.examine_at_s, now_s + EXAMINE_S)), ()
    after = _returned(record, NodeState.HEALTHY, now_s)
    return after, (Note(reason="NodeHealthy", message="its probation is over without a fault"),)


def _with_risk(record: Record, watched: list[Judged], now_s: float) -> Record:
    """Count new events, and follow the decay of the old ones."""
    score = decayed(record.score, record.score_at_s, now_s)
    for each in watched:
        if not each.sign.rule:
            score = raised(score, each.fault_class, _new_count(record, each.sign))
    record = _counted(record, [each.sign for each in watched], now_s)
    risk, state = risk_of(score), record.state
    if state is NodeState.PROBATION:
        risk = max(risk, PROBATION_RISK)
    if not watched and risk == record.risk:
        return record
    if state in {NodeState.HEALTHY, NodeState.AT_RISK}:
        state = NodeState.AT_RISK if risk >= AT_RISK else NodeState.HEALTHY
    since_s = record.since_s if state is record.state else now_s
    return record.but(score=round(score, 6), score_at_s=now_s, risk=risk, state=state, since_s=since_s)


def _forgotten(facts: NodeFacts, record: Record) -> Record:
    """Forget what was counted of faults that were examined and are gone: when they come again, they are new."""
    if facts.reading.unknown or not facts.reading.clear:
        return record
    shown = {sign.key for sign in facts.reading.signs}
    left = {key: seen for key, seen in record.seen.items() if key in shown}
    # A repair is forgotten once no event from before it is shown any more.
    repaired_at_s = record.repaired_at_s if facts.reading.cured else 0.0
    return record.but(seen=left, repaired_at_s=repaired_at_s)


# ---------------------------------------------------------------------------------------------------------------- parts


def _step(facts: NodeFacts, after: Record, judged: tuple[Judged, ...], notes: tuple[Note, ...], now_s: float) -> Step:
    after = after.but(**{name: round(getattr(after, name), 3) for name in SHOWN_TIMES})
    stored = _kept(after, now_s)
    changed = stored != facts.record or (stored is not None and stored.state.is_out) != facts.tainted
    changed = changed or (bool(facts.broken) and facts.tainted)
    wake_at_s: float | None = None
    if stored is not None:
        timed = stored.state.is_out or stored.state is NodeState.PROBATION
        wake_at_s = stored.examine_at_s if timed else now_s + RISK_LOOK_S
        if stored.repair is not None:
            wake_at_s = max(now_s + 1.0, min(wake_at_s, repair.look_at_s(stored.repair, now_s)))
        if stored.state is NodeState.PROBATION and stored.opt_in:
            wake_at_s = probation.look_at_s(stored, facts.policy, now_s)
    return Step(record=stored, changed=changed, judged=judged, notes=notes, wake_at_s=wake_at_s)


def _kept(record: Record, now_s: float) -> Record | None:
    """Drop a record that says nothing any more."""
    if record.state is not NodeState.HEALTHY or record.risk > 0.0 or record.seen:
        return record
    if record.repair is not None or record.repaired_at_s:
        return record
    touched_s = max(record.since_s, 0.0 if record.released is None else record.released.at_s)
    return record if touched_s > 0.0 and now_s - touched_s < FORGET_S else None


def _taken_out(
    record: Record,
    owner: str,
    now_s: float,
    *,
    examine_at_s: float,
    leave: Leave = Leave.STAY,
    until_s: float = 0.0,
    evidence: str = "",
) -> Record:
    """Return the record of a node that leaves service."""
    after = record.in_state(NodeState.QUARANTINED, now_s)
    evidence = evidence[:EVIDENCE_CHARACTERS_MAX]
    return after.but(owner=owner, examine_at_s=examine_at_s, leave=leave, until_s=until_s, evidence=evidence)


def _returned(record: Record, state: NodeState, now_s: float) -> Record:
    """Return the record of a node that comes back into service."""
    return record.in_state(state, now_s).but(repair=repair.ended(record.repair, now_s))


def _sticky_until_s(sign: Sign, now_s: float) -> float:
    return (sign.last_s or now_s) + sign.row.sticky_s


def _cause(worst: Judged) -> dict[str, object]:
    sign = worst.sign
    return {
        "fault_class": worst.fault_class,
        "reason": sign.row.code[:128],
        "device": sign.device,
        "action": sign.row.action if sign.row.action in REPAIRS else "",
        "evidence": _named(sign)[:EVIDENCE_CHARACTERS_MAX],
    }


def _named(sign: Sign) -> str:
    device = f" on {sign.device}" if sign.device else ""
    times = f", {sign.count} times" if sign.count > 1 else ""
    return f"{sign.row.code}{device}{times}: {sign.message}" if sign.message else f"{sign.row.code}{device}{times}"


def _worn_out(record: Record, sign: Sign, now_s: float) -> Record:
    """Ask for a replacement if the device had so many fatal errors that nothing else helps."""
    if not (sign.row.fatal and escalation.is_worn_out(record.fatal_s, sign.device, now_s)):
        return record
    evidence = f"{escalation.FATAL_MAX} fatal errors of {sign.device or 'one device'} in 24 h; last: {sign.row.code}"
    return record.but(action=escalation.REPLACE, evidence=evidence)


def _new_count(record: Record, sign: Sign) -> int:
    """Return how many events of a sign have not been counted."""
    known = record.seen.get(sign.key)
    if known is None or known.boot != sign.boot:
        return sign.count
    return max(0, sign.count - known.count)


def _counted(record: Record, signs: list[Sign], now_s: float) -> Record:
    """Note that signs were counted, and the fatal ones by device."""
    fatal_s = record.fatal_s
    for sign in signs:
        if sign.row.fatal:
            fatal_s = escalation.with_fatal(fatal_s, sign.device, _new_count(record, sign), now_s)
    return record.but(seen=_with_seen(record.seen, tuple(signs), now_s), fatal_s=fatal_s) if signs else record


def _with_seen(seen: dict[str, Seen], signs: tuple[Sign, ...], now_s: float) -> dict[str, Seen]:
    after = dict(seen)
    for sign in signs:
        after[sign.key] = Seen(boot=sign.boot, count=sign.count, at_s=now_s)
    while len(after) > CODES_MAX:
        del after[min(after, key=lambda key: (after[key].at_s, key))]
    return after
