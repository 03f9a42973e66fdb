"""One decision about the health of all nodes.

Only nodes that have changed or are due are looked at; what was seen of the others is in the memory of the batch before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from polyreme_cluster.port import ObjectRef
from polyreme_operator.health.domains import Domain, DomainKey, concerned, domains_of, keys_of, with_domains
from polyreme_operator.health.facts import NodeFacts, Note, Step
from polyreme_operator.health.incidents import FAULT_TABLE, Incident
from polyreme_operator.health.node import HealthNode
from polyreme_operator.health.outage import is_mass_outage
from polyreme_operator.health.policy import Judged, judge, policy_of
from polyreme_operator.health.record import NodeState
from polyreme_operator.health.repair_rules import repair_result
from polyreme_operator.health.signs import read_conditions
from polyreme_operator.health.states import next_step
from polyreme_operator.health.status import NodeSummary
from polyreme_operator.health_decision.charges import DOMAIN_LOOK_S, grant
from polyreme_operator.health_decision.history import rooms, with_history, with_jobs
from polyreme_operator.health_decision.repairs import Progress, progress_of
from polyreme_operator.health_decision.snapshot import Batch, Grant, Memory, NodeView, NodeWrite, Said, Seen, Snapshot
from polyreme_operator.types.actions import EmitEvent

DRAIN_LOOK_S = 2.0
"""How often it is checked whether the workers have left a node that drains."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Case:
    """A node in this decision."""

    view: NodeView
    facts: NodeFacts
    step: Step = dataclasses.field(default=Step(record=None))
    progress: Progress = dataclasses.field(default=Progress())
    observed: tuple[Judged, ...] = ()
    events: tuple[EmitEvent, ...] = ()


def decide(snapshot: Snapshot) -> Batch:
    """Decide which nodes leave service, which return, what is repaired, and what their history has to say."""
    memory, policies = snapshot.memory, snapshot.policies
    nodes, cases, failed = dict(memory.nodes), dict[str, _Case](), dict[str, Exception]()

    def each(names: Iterable[str], act: Callable[[str], None]) -> None:
        for name in sorted(names):
            try:
                act(name)
            except Exception as error:  # noqa: BLE001 - one node must not stop the others; it is left as it is
                failed[name] = error
                cases.pop(name, None)

    each(snapshot.due, lambda name: _read(name, nodes, cases, snapshot))
    domains = domains_of(((name, seen.keys, seen.judged) for name, seen in nodes.items() if seen.keys), policies)
    others = concerned(memory.domains, domains) - set(snapshot.due)
    each(others, lambda name: _read(name, nodes, cases, snapshot))
    each(list(cases), lambda name: nodes.update({name: _decide(cases[name], nodes[name], domains, snapshot)}))
    grants = _grants(nodes, cases, domains, snapshot)
    incidents = _histories(nodes, cases, snapshot)
    enforced = any(policy.enforce for policy in policies.values())
    return Batch(
        policies=tuple(grant.write for grant in grants.values() if grant.write is not None),
        nodes=tuple(write for case in cases.values() if (write := _node_write(case, grants, snapshot.now_s))),
        incidents=tuple(rooms(incidents, snapshot)) if incidents else (),
        repairs=tuple(case.progress.write for case in cases.values() if case.progress.write is not None),
        events=tuple(chain(*(case.events for case in cases.values()), *(grant.events for grant in grants.values()))),
        observed=tuple(judged for case in cases.values() for judged in case.observed),
        failed=failed,
        wake_at_s=_wakes(nodes, cases, grants, snapshot),
        fences_held=enforced and is_mass_outage(list(snapshot.not_ready_since_s), len(snapshot.present)),
        memory=Memory(nodes=nodes, domains=domains, grants=grants),
    )


# ------------------------------------------------------------------------------------------------------------ one node


def _read(name: str, nodes: dict[str, Seen], cases: dict[str, _Case], snapshot: Snapshot) -> None:
    """Read what a node shows itself."""
    view, before = snapshot.view(name), nodes.get(name, Seen())
    if view is None:
        # What is left of it is its history.
        nodes[name] = Seen(record=before.record, incidents=before.incidents, history_at_s=before.history_at_s)
        return
    tags = dict(view.node.labels)
    policy, names = policy_of(tags, list(snapshot.policies.values()))
    own = {} if policy is None else {kind: status for rule in policy.rules for kind, status in rule.conditions}
    conditions, now_s = view.node.conditions, snapshot.now_s
    reading = read_conditions(conditions, polarity=own, silent=view.silent, now_s=now_s)
    keys = tuple(keys_of(policy, tags, snapshot.levels))
    judged = tuple(judge(sign, policy, now_s) for sign in reading.signs) if keys else ()
    latched = policy is not None and policy.breaker.latched
    facts = dataclasses.replace(view.facts, policy=policy, reading=reading, latched=latched)
    cases[name] = _Case(view=view, facts=facts)
    nodes[name] = dataclasses.replace(before, policies=names, keys=keys, judged=judged)


def _decide(case: _Case, before: Seen, domains: Mapping[DomainKey, Domain], snapshot: Snapshot) -> Seen:
    node, facts, now_s = case.view.node, case.facts, snapshot.now_s
    record, reading = facts.record, with_domains(node.name, facts.reading, domains, before.keys, facts.record)
    case.progress = progress_of(case.view, facts.policy, limits=snapshot.limits, now_s=now_s)
    facts = dataclasses.replace(facts, reading=reading, job=case.progress.job)
    case.step = step = next_step(facts, now_s)
    if record is not None and (step.record is None or step.record.repair != record.repair):
        # What the repair needed has changed with this decision.
        case.progress = dataclasses.replace(case.progress, write=None)
    problem, blocked = facts.broken or "; ".join((*node.problems, *reading.problems)), case.progress.blocked
    if problem not in {"", before.problem}:
        note = Note(reason="NodeHealthUnreadable", message=problem, warning=True)
        case.events += (_event(node, note, "unreadable"),)
    if blocked not in {"", before.blocked}:
        note = Note(reason="NodeRepairBlocked", message=blocked, warning=True)
        case.events += (_event(node, note, str(int(now_s))),)
    observed = {each.sign.key: each for each in step.judged if not each.enforced}
    case.observed = tuple(observed[key] for key in sorted(observed.keys() - before.observed))
    return dataclasses.replace(
        before,
        summary=NodeSummary(
            classes=frozenset(each.fault_class for each in step.judged),
            grave=frozenset(each.fault_class for each in step.judged if each.grave),
            out=node.tainted,
            unknown=bool(reading.unknown),
        ),
        state=NodeState.HEALTHY if record is None else record.state,
        problem=problem,
        blocked=blocked or before.blocked,
        observed=frozenset(observed),
    )


# --------------------------------------------------------------------------------------------------------- all of them


def _grants(
    nodes: Mapping[str, Seen], cases: Mapping[str, _Case], domains: Mapping[DomainKey, Domain], snapshot: Snapshot
) -> dict[str, Grant]:
    """Return by policy what may be taken out."""
    selected: dict[str, dict[str, Seen]] = {name: {} for name in sorted(snapshot.policies)}
    for name, seen in nodes.items():
        for policy in seen.policies:
            selected.get(policy, {})[name] = seen
    wanted: dict[str, dict[str, DomainKey | None]] = {name: {} for name in selected}
    for name, case in cases.items():
        if case.step.needs_charge and case.facts.policy is not None:
            rule = case.step.with_domain
            wanted[case.facts.policy.name][name] = next((key for key in nodes[name].keys if key.rule == rule), None)
    return {name: grant(snapshot.policies[name], wanted[name], selected[name], domains, snapshot) for name in selected}


def _node_write(case: _Case, grants: Mapping[str, Grant], now_s: float) -> NodeWrite | None:
    step, charge = case.step, ""
    record, notes, changed = step.record, step.notes, step.changed
    if step.needs_charge and case.facts.policy is not None:
        granted = grants[case.facts.policy.name]
        charge = case.facts.policy.name if granted.write is not None else ""
        if case.view.node.name not in granted.nodes:
            record, notes, changed = step.refusable, (), step.refusable != case.facts.record
    if not changed:
        return None
    node, worst = case.view.node, step.gravest
    ended = (repair_result(case.facts.record, record, note) for note in notes)
    out = record is not None and record.state.is_out and not node.tainted
    return NodeWrite(
        node=node,
        record=record,
        charge=charge,
        said=Said(record=record, notes=notes, rule="" if worst is None else worst.rule or FAULT_TABLE),
        events=tuple(_event(node, note, str(int(now_s))) for note in notes),
        repairs=tuple(each for each in ended if each is not None),
        takes_out=worst if out else None,
    )


def _event(node: HealthNode, note: Note, key: str) -> EmitEvent:
    ref, key = ObjectRef(kind="Node", name=node.name), f"{note.reason}-{key}".lower()
    return EmitEvent(ref=ref, uid=node.uid, reason=note.reason, message=note.message, warning=note.warning, key=key)


def _histories(nodes: dict[str, Seen], cases: Mapping[str, _Case], snapshot: Snapshot) -> list[Incident]:
    """Follow the records of the nodes that were read or deleted; return the incidents to store."""
    found = []
    for name in sorted({*snapshot.due, *cases}):
        case = cases.get(name)
        if case is None and name in snapshot.present:
            continue
        view = None if case is None else case.view
        seen = with_history(name, view, nodes[name], snapshot)
        if snapshot.writable and seen.history_at_s is not None and snapshot.now_s >= seen.history_at_s:
            seen, writes = with_jobs(name, view, seen, snapshot)
            found.extend(writes)
        if view is None and not seen.incidents:
            del nodes[name]
            continue
        nodes[name] = seen
    return found


def _wakes(
    nodes: Mapping[str, Seen], cases: Mapping[str, _Case], grants: Mapping[str, Grant], snapshot: Snapshot
) -> dict[str, float]:
    """Return when time alone may change what is decided about a node."""
    now_s, found = snapshot.now_s, dict[str, float]()
    histories = ((name, nodes[name].history_at_s) for name in {*snapshot.due, *cases} if name in nodes)
    # One that is due and can't be written now is decided about again when it can be.
    times_s = [(name, at_s) for name, at_s in histories if at_s is not None and at_s > now_s]
    for name, each in cases.items():
        times_s += [(name, at_s) for at_s in (each.step.wake_at_s, each.progress.wake_at_s) if at_s is not None]
    times_s += [(name, now_s + DRAIN_LOOK_S) for name, each in cases.items() if nodes[name].state == NodeState.DRAINING]
    waiting = (name for grant in grants.values() for group in grant.too_large.values() for name in group)
    times_s += [(name, now_s + DOMAIN_LOOK_S) for name in waiting]
    for name, at_s in times_s:
        found[name] = min(at_s, found.get(name, at_s))
    return found
