"""The states of a node, and their transitions: one pure function of record, signs, policy and time.

A taint is lifted only by an examination that finds the fault gone, or by a person. Time alone never lifts one: what
can't be examined stays out, and is examined again.
"""

from __future__ import annotations

import dataclasses

from polyreme_operator.health import escalation, probation, repair, repaired
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
from polyreme_operator.health.repair_rules import is_due, may_begin, notes_of
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
_GRAVER_LEAVE = (Leave.STAY, Leave.DRAIN, Leave.EVICT)


def decide(facts: NodeFacts, now_s: float) -> Step:
    """Decide the next state of a node."""
    now_s = round(now_s, 3)
    facts = dataclasses.replace(facts, reading=repaired.read(facts.reading, facts.record))
    judged = tuple(judge(sign, facts.policy, now_s) for sign in facts.reading.signs)
    record = facts.record or Record()
    if facts.tainted and not record.state.is_out:
        after, notes = _adopted(facts, record, now_s)
    elif record.state.is_out and not facts.tainted:
        after, notes = _released(facts, record, now_s)
    elif record.state.is_out:
        after, notes = _out(facts, record, judged, now_s)
    else:
        return _in_service(facts, record, judged, now_s)
    return _step(facts, after, judged, notes, now_s)


def taint_value(record: Record) -> str:
    """Return the value of the taint: the class of the fault."""
    return record.fault_class or "unknown"


def quarantined_by(record: Record, *, who: str, reason: str, until_s: float, leave: Leave, at_s: float) -> Record:
    """Return the record of a node that a person takes out of service."""
    return record.model_copy(
        update={
            "state": NodeState.QUARANTINED,
            "owner": f"{PERSON}/{who}" if who else PERSON,
            "fault_class": "planned",
            "reason": "Manual",
            "evidence": reason[:EVIDENCE_CHARACTERS_MAX],
            "condition": "",
            "device": "",
            "action": "",
            "leave": leave,
            "since_s": at_s,
            "until_s": until_s,
            "examine_at_s": until_s or at_s + PERSONS_EXAMINE_S,
            "examinations": 0,
        }
    )


def released_by(record: Record, signs: tuple[Sign, ...], *, who: str, reason: str, at_s: float) -> Record:
    """Return the record of a node that a person returns to service: what it shows now does not take it out again."""
    release = Release(by=f"{PERSON}/{who}" if who else PERSON, reason=reason[:EVIDENCE_CHARACTERS_MAX], at_s=at_s)
    seen = _with_seen(record.seen, signs, at_s)
    if record.reason == DOMAIN_FAULT:
        # Who releases it sees the node's own conditions only.
        seen[f"{DOMAIN_FAULT}/{record.device}"] = Seen(count=1, at_s=at_s)
    return _in(record, NodeState.HEALTHY, at_s).model_copy(
        update={"released": release, "seen": seen, "recurrences": 0, "repairs_s": ()}
    )


# ------------------------------------------------------------------------------------------------------- out of service


def _adopted(facts: NodeFacts, record: Record, now_s: float) -> tuple[Record, tuple[Note, ...]]:
    """Give an owner to a taint that has none on record."""
    if facts.broken:
        after = _out_record(record, OPERATOR, now_s, examine_at_s=now_s + EXAMINE_S).model_copy(
            update={
                "fault_class": "unknown",
                "reason": "RecordUnreadable",
                "evidence": facts.broken[:EVIDENCE_CHARACTERS_MAX],
            }
        )
        return after, (Note(reason="NodeHealthUnreadable", message=facts.broken, warning=True),)
    after = _out_record(record, PERSON, now_s, examine_at_s=now_s + PERSONS_EXAMINE_S).model_copy(
        update={"fault_class": "planned", "reason": "Manual", "evidence": "the taint was added by hand"}
    )
    return after, (Note(reason="NodeQuarantined", message="a person added the taint; a person lifts it"),)


def _released(facts: NodeFacts, record: Record, now_s: float) -> tuple[Record, tuple[Note, ...]]:
    """Record that a person removed the taint."""
    after = released_by(record, facts.reading.signs, who="", reason="the taint was removed", at_s=now_s)
    said = f"a person removed the taint of {record.owner or 'nobody'} ({record.reason}); it is not set again "
    return after, (Note(reason="NodeReleased", message=f"{said}unless the node shows a new fault"),)


def _out(facts: NodeFacts, record: Record, judged: tuple[Judged, ...], now_s: float) -> tuple[Record, tuple[Note, ...]]:
    after = repair.advanced(record, facts.policy, facts.job, node=facts.name, now_s=now_s)
    new = [each for each in judged if each.grave and each.enforced and _new_count(record, each.sign)]
    if new:
        after = _counted(after, [each.sign for each in new], now_s)
        worst = gravest(new)
        assert worst is not None, "there is at least one"
        if not record.is_persons:
            after = _graver(after, worst, now_s)
    if record.is_persons and not (record.until_s and now_s >= record.until_s):
        if now_s >= record.examine_at_s:
            after = after.model_copy(update={"examine_at_s": record.until_s or now_s + PERSONS_EXAMINE_S})
    elif is_due(after, now_s):
        lifted = _examined(facts, after, judged, now_s)
        if lifted is not None:
            return lifted
        # After a repair every report is looked at; only an examination that was due counts and moves the next one.
        if now_s >= after.examine_at_s:
            after = _renewed(after, EXAMINE_S if facts.policy is None else facts.policy.examine_s, now_s)
    after = repair.settled(after, facts.policy, now_s)
    after = _emptied(facts, after)
    if may_begin(facts, after) and facts.policy is not None:
        after = repair.begun(after, facts.policy, node=facts.name, now_s=now_s)
    return after, notes_of(record, after)


def _examined(
    facts: NodeFacts, record: Record, judged: tuple[Judged, ...], now_s: float
) -> tuple[Record, tuple[Note, ...]] | None:
    """Lift the taint if the fault is gone; None if it is not, or that can't be told."""
    if record.state is NodeState.RETIRED or any(each.grave for each in judged):
        return None
    if record.condition and record.condition not in facts.reading.clear:
        return None
    if not record.condition and (facts.reading.unknown or facts.reading.absent):
        return None
    planned = record.is_persons or record.reason == DOMAIN_FAULT
    after = _in(record, NodeState.HEALTHY if planned else NodeState.PROBATION, now_s)
    if not planned:
        repairs_s = escalation.with_repair(record.repairs_s, now_s)
        update = {"repairs_s": repairs_s, "condition": record.condition}
        after = probation.begun(after.model_copy(update=update), facts.policy, now_s)
    message = f"examined: {record.reason or 'the fault'} is gone; the taint is lifted"
    return after, (Note(reason="NodeReturned", message=message),)


def _renewed(record: Record, first_s: float, now_s: float) -> Record:
    times = record.examinations + 1
    update = {"examinations": times, "examine_at_s": now_s + min(EXAMINE_MAX_S, first_s * 2.0 ** min(times, 12))}
    return record.model_copy(update=update)


def _emptied(facts: NodeFacts, record: Record) -> Record:
    """Follow what still runs on a tainted node."""
    if record.state is NodeState.RETIRED:
        return record
    if record.repair is not None and record.repair.phase is not RepairPhase.WAIT:
        return record
    state = NodeState.QUARANTINED
    if record.leave is not Leave.STAY and facts.workers:
        state = NodeState.DRAINING
    elif not facts.workers and record.action in REPAIRS and not facts.latched:
        state = NodeState.REPAIRING
    elif record.state is NodeState.REPAIRING and not facts.workers:
        state = record.state
    return record if record.state is state else record.model_copy(update={"state": state})


def _graver(record: Record, worst: Judged, now_s: float) -> Record:
    """Escalate a taint to a graver fault, or to a replacement if the device is worn out."""
    leave = max(record.leave, _LEAVE[worst.answer], key=_GRAVER_LEAVE.index)
    update: dict[str, object] = {"leave": leave}
    if not worst.sign.rule:
        update["condition"] = worst.sign.condition
        if leave is not record.leave or record.reason in {"", DOMAIN_FAULT}:
            update |= _cause(worst)
    if worst.sign.row.fatal and escalation.is_worn_out(record.fatal_s, worst.sign.device, now_s):
        update |= {"action": escalation.REPLACE, "evidence": _worn_out(worst.sign)}
    return record.model_copy(
        update={**update, "examine_at_s": max(record.examine_at_s, _sticky_until_s(worst.sign, now_s))}
    )


# ----------------------------------------------------------------------------------------------------------- in service


def _in_service(facts: NodeFacts, record: Record, judged: tuple[Judged, ...], now_s: float) -> Step:
    kept = repair.advanced(_forgotten(facts, record), facts.policy, facts.job, node=facts.name, now_s=now_s)
    kept = repaired.forgotten(kept, facts.reading)
    enforced = [each for each in judged if each.enforced and _new_count(kept, each.sign)]
    watched = [each for each in enforced if GRAVITY[each.answer] >= GRAVITY[Answer.WATCH]]
    calm, notes = _aged(facts, kept, judged, now_s)
    calm = _with_risk(calm, [each for each in watched if not each.grave], now_s)
    worst = gravest(each for each in enforced if each.grave)
    if worst is None or facts.policy is None:
        return _step(facts, calm, judged, notes, now_s)
    refusable = _settled(calm, now_s)
    counted = _with_risk(calm, watched, now_s)
    after, note = _quarantined(facts, facts.policy, counted, worst, now_s)
    step = _step(facts, after, judged, (note,), now_s)
    return dataclasses.replace(step, needs_charge=True, refusable=refusable, with_domain=worst.sign.rule)


def _quarantined(
    facts: NodeFacts, policy: PolicyView, record: Record, worst: Judged, now_s: float
) -> tuple[Record, Note]:
    sign = worst.sign
    own = not sign.rule
    recurrences = record.recurrences + (own and record.state is NodeState.PROBATION)
    retires = own and escalation.retires(record.repairs_s, recurrences, now_s)
    fatal_s = record.fatal_s
    after = _out_record(
        record,
        f"policy/{policy.name}",
        now_s,
        examine_at_s=max(now_s + policy.examine_s, _sticky_until_s(sign, now_s)),
    ).model_copy(update={**_cause(worst), "leave": _LEAVE[worst.answer], "recurrences": recurrences})
    after = after.model_copy(update={"condition": sign.condition})
    if sign.row.fatal and escalation.is_worn_out(fatal_s, sign.device, now_s):
        after = after.model_copy(update={"action": escalation.REPLACE, "evidence": _worn_out(sign)})
    after = _emptied(facts, after)
    if retires:
        why = f"{recurrences} recurrences in probation, {len(record.repairs_s)} returns to service"
        after = after.model_copy(
            update={"state": NodeState.RETIRED, "evidence": f"{why}; last: {after.evidence}"[:EVIDENCE_CHARACTERS_MAX]}
        )
    word = "retired" if retires else "quarantined"
    decided = f"rule {worst.rule}" if worst.rule else "the fault table"
    message = f"{word} by policy {policy.name} ({decided}): {worst.fault_class}, {_named(sign)}"
    return after, Note(reason="NodeRetired" if retires else "NodeQuarantined", message=message, warning=True)


def _aged(
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
        return record.model_copy(update={"examine_at_s": max(record.examine_at_s, now_s + EXAMINE_S)}), ()
    after = _in(record, NodeState.HEALTHY, now_s)
    return after, (Note(reason="NodeHealthy", message="its probation is over without a fault"),)


def _with_risk(record: Record, watched: list[Judged], now_s: float) -> Record:
    """Count new events, and follow the decay of the old ones."""
    score = decayed(record.score, record.score_at_s, now_s)
    for each in watched:
        if not each.sign.rule:
            score = raised(score, each.fault_class, _new_count(record, each.sign))
    if watched:
        record = _counted(record, [each.sign for each in watched], now_s)
    risk = risk_of(score)
    if record.state is NodeState.PROBATION:
        risk = max(risk, PROBATION_RISK)
    if not watched and risk == record.risk:
        return record
    state = record.state
    if state in {NodeState.HEALTHY, NodeState.AT_RISK}:
        state = NodeState.AT_RISK if risk >= AT_RISK else NodeState.HEALTHY
    update: dict[str, object] = {"score": round(score, 6), "score_at_s": now_s, "risk": risk, "state": state}
    if state is not record.state:
        update["since_s"] = now_s
    return record.model_copy(update=update)


def _forgotten(facts: NodeFacts, record: Record) -> Record:
    """Forget what was counted of faults that were examined and are gone: when they come again, they are new."""
    if not record.seen or facts.reading.unknown or not facts.reading.clear:
        return record
    shown = {sign.key for sign in facts.reading.signs}
    left = {key: seen for key, seen in record.seen.items() if key in shown}
    return record if len(left) == len(record.seen) else record.model_copy(update={"seen": left})


# ---------------------------------------------------------------------------------------------------------------- parts


def _step(facts: NodeFacts, after: Record, judged: tuple[Judged, ...], notes: tuple[Note, ...], now_s: float) -> Step:
    after = after.model_copy(update={name: round(getattr(after, name), 3) for name in SHOWN_TIMES})
    stored = _settled(after, now_s)
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


def _settled(record: Record, now_s: float) -> Record | None:
    """Drop a record that says nothing any more."""
    if record.state is not NodeState.HEALTHY or record.risk > 0.0 or record.seen:
        return record
    if record.repair is not None or record.repaired_at_s:
        return record
    touched_s = max(record.since_s, 0.0 if record.released is None else record.released.at_s)
    lately = touched_s > 0.0 and now_s - touched_s < FORGET_S
    return record if lately else None


def _out_record(record: Record, owner: str, now_s: float, *, examine_at_s: float) -> Record:
    update = {
        "state": NodeState.QUARANTINED,
        "owner": owner,
        "since_s": now_s,
        "examine_at_s": examine_at_s,
        "examinations": 0,
        "until_s": 0.0,
        "condition": "",
        "device": "",
        "action": "",
        "leave": Leave.STAY,
    }
    return record.model_copy(update=update)


def _in(record: Record, state: NodeState, now_s: float) -> Record:
    """Return a record of a node that comes back into service."""
    update = {
        "state": state,
        "owner": "",
        "fault_class": "",
        "reason": "",
        "device": "",
        "action": "",
        "leave": Leave.STAY,
        "evidence": "",
        "condition": "",
        "since_s": now_s,
        "examine_at_s": 0.0,
        "examinations": 0,
        "until_s": 0.0,
        "repair": repair.ended(record.repair, now_s),
        "opt_in": False,
        "loaded_s": 0.0,
        "loaded_at_s": 0.0,
    }
    return record.model_copy(update=update)


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


def _worn_out(sign: Sign) -> str:
    return f"{escalation.FATAL_MAX} fatal errors of {sign.device or 'one device'} in 24 h; last: {sign.row.code}"


def _new_count(record: Record, sign: Sign) -> int:
    """Return how many events of a sign have not been counted."""
    known = record.seen.get(sign.key)
    if known is None or known.boot != sign.boot:
        return sign.count
    return max(0, sign.count - known.count)


def _counted(record: Record, signs: list[Sign], now_s: float) -> Record:
    """Note that signs were counted, and the fatal ones by device."""
    if not signs:
        return record
    fatal_s = record.fatal_s
    for sign in signs:
        if sign.row.fatal:
            fatal_s = escalation.with_fatal(fatal_s, sign.device, _new_count(record, sign), now_s)
    return record.model_copy(update={"seen": _with_seen(record.seen, tuple(signs), now_s), "fatal_s": fatal_s})


def _with_seen(seen: dict[str, Seen], signs: tuple[Sign, ...], now_s: float) -> dict[str, Seen]:
    after = dict(seen)
    for sign in signs:
        after[sign.key] = Seen(boot=sign.boot, count=sign.count, at_s=now_s)
    while len(after) > CODES_MAX:
        del after[min(after, key=lambda key: (after[key].at_s, key))]
    return after
