"""Carries out decisions about the health of nodes: charges the breaker, then writes taint, label and record.

One task decides about the nodes that have changed, or whose examination is due. A node is tainted only after the policy
that asks for it has stored the charge, and each node is written in one patch with its resource version, so that a
change by another client is never overwritten.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping

from polyreme_api import labels
from polyreme_api.clock import Clock
from polyreme_cluster.port import (
    STATUS_SUBRESOURCE,
    ClusterPort,
    ConflictError,
    InvalidObjectError,
    Manifest,
    NotFoundError,
    ObjectRef,
    PortError,
)
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.health import breaker, table
from polyreme_operator.health.breaker import BreakerState
from polyreme_operator.health.domains import DomainFaults, DomainKey, idle_rules, keys_of, too_large
from polyreme_operator.health.facts import NodeFacts, Note, Step
from polyreme_operator.health.node import HealthNode, patch_of
from polyreme_operator.health.outage import is_mass_outage
from polyreme_operator.health.policy import PolicyView, judge, overlap_message, policy_of
from polyreme_operator.health.record import NodeState, Record, parse
from polyreme_operator.health.repair_rules import repair_result
from polyreme_operator.health.signs import Reading, read_conditions
from polyreme_operator.health.states import decide
from polyreme_operator.health.status import NodeSummary, StatusFacts, StatusPatches, breaker_of
from polyreme_operator.incident_worker import IncidentWorker
from polyreme_operator.repair_worker import RepairWorker
from polyreme_operator.settings import Settings
from polyreme_operator.types.actions import EmitEvent
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.observer import Observer

DRAIN_LOOK_S = 2.0
"""How often it is checked whether the workers have left a node that drains."""
STATUS_EVERY_S = 1.0
"""Shortest time between two writes of a policy's status that only inform."""
DOMAIN_LOOK_S = 30.0
"""How often it is looked whether there is room to take a faulty domain out of service."""
SILENCE_LOOK_S = 30.0
"""How often it is checked whether an agent has fallen silent on a node that is out of service."""
_log = logging.getLogger(__name__)


class HealthWorker:
    """Task of the operator that keeps the state of every node.

    Args:
        port: The cluster.
        clock: Time of decisions.
        cache: What is known of the cluster.
        settings: Settings of the installation.
        refresh: Reads one object into the cache.
        note: Called with the effects of each change.
        emit: Queues an event.
        observer: Receives reports, for metrics.
        synced: Tells whether every kind has been listed.
        history: Told of every record, and never waited for.
        repairs: Carries out the repairs that records ask for.
    """

    def __init__(
        self,
        port: ClusterPort,
        clock: Clock,
        cache: ClusterCache,
        settings: Settings,
        *,
        refresh: Callable[[ObjectRef], Awaitable[Manifest | None]],
        note: Callable[[Changes], None],
        emit: Callable[[EmitEvent], None],
        observer: Observer,
        synced: Callable[[], bool],
        history: IncidentWorker,
        repairs: RepairWorker,
    ) -> None:
        self._port, self._clock, self._cache, self._settings = port, clock, cache, settings
        self._refresh, self._note, self._emit, self._observer = refresh, note, emit, observer
        self._synced, self._history, self._repairs = synced, history, repairs
        self._writes = asyncio.Semaphore(settings.writes_max)
        self._wake = asyncio.Event()
        self._timers: list[tuple[float, str]] = []
        self._due_s: dict[str, float] = {}
        self._selected: dict[str, set[str]] = defaultdict(set)
        """Nodes by the one policy that selects them."""
        self._policies_of: dict[str, tuple[str, ...]] = {}
        self._decided: dict[str, HealthNode] = {}
        """Nodes of this pass as they were decided about; they may change while charges are stored."""
        self._summaries: dict[str, NodeSummary] = {}
        self._states: dict[str, NodeState] = {}
        self._observed: dict[str, frozenset[str]] = {}
        """By node, the faults that were counted without acting on them."""
        self._domains = DomainFaults()
        self._kept_in: dict[str, set[DomainKey]] = {}
        """By policy, the faulty domains that were reported as too large to be taken out."""
        self._told: dict[str, str] = {}
        """By node, what could not be read and was reported."""
        self._status_at_s: dict[str, float] = {}
        self._patches = StatusPatches()
        self._breakers: dict[str, tuple[Mapping[str, object], BreakerState]] = {}
        """By policy, the status that was read last, and its breaker: reading 2,000 charges takes milliseconds."""

    def look(self) -> None:
        """Note that nodes or policies have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Decide and write until cancelled."""
        failures = 0
        while True:
            self._wake.clear()
            wait_s = self._settings.idle_s
            if self._synced():
                try:
                    await self._pass()
                    failures, wait_s = 0, self._next_s()
                except PortError as error:
                    failures += 1
                    wait_s = self._settings.backoff_s(failures)
                    _log.info("health of nodes is decided again in %.2f s: %s", wait_s, error)
                except Exception:  # noqa: BLE001 - no error of a decision may stop the operator
                    failures += 1
                    wait_s = self._settings.backoff_s(failures)
                    _log.exception("deciding about the health of nodes raised an error")
            if failures:
                await self._clock.sleep(wait_s)
                continue
            await self._clock.sleep(self._settings.health_every_s)
            try:
                async with asyncio.timeout(max(0.0, wait_s)):
                    await self._wake.wait()
            except TimeoutError:
                continue

    # -------------------------------------------------------------------------------------------------------- decide

    async def _pass(self) -> None:
        now_s, index = self._clock.now_s(), self._cache.health
        names = sorted({*index.take_dirty(), *self._due(now_s)})
        try:
            steps = self._decide_all(names, now_s)
            self._hold_fences()
            allowed = await self._charge(steps, now_s)
            await self._write_all(steps, allowed)
        except BaseException:
            index.touch(*names)
            raise
        self._observer.on_node_states(Counter(state.value for state in self._states.values()))

    def _decide_all(self, names: list[str], now_s: float) -> dict[str, Step]:
        index, steps = self._cache.health, {}
        self._decided.clear()
        for name in names:
            self._select(name, index.nodes.get(name))
        for name in self._with_domains(names, now_s):
            node = index.nodes.get(name)
            if node is None:
                self._history.gone(name)
                self._repairs.gone(name)
                for known in (self._summaries, self._states, self._observed, self._told, self._due_s):
                    known.pop(name, None)
                continue
            try:
                steps[name] = self._decide(node, now_s)
                self._decided[name] = node
            except Exception:  # noqa: BLE001 - one node must not stop the others; it is left as it is
                _log.exception("deciding about the health of node %s raised an error", name)
        return steps

    def _select(self, name: str, node: HealthNode | None) -> None:
        """Note which policy a node has."""
        for policy in self._policies_of.pop(name, ()):
            self._selected[policy].discard(name)
        if node is not None:
            _, names = policy_of(dict(node.labels), list(self._cache.health.policies.values()))
            self._policies_of[name] = names
            for policy in names:
                self._selected[policy].add(name)

    def _with_domains(self, names: list[str], now_s: float) -> list[str]:
        """Note what nodes show in their domains; return them with the nodes of those domains that are faulty."""
        levels, found = self._levels(), set(names)
        for name in names:
            node, policy = self._cache.health.nodes.get(name), self._policy(name)
            if node is None:
                found |= self._domains.remove(name)
            elif keys := keys_of(policy, dict(node.labels), levels):
                reading = self._read(node, policy, silent=False, now_s=now_s)
                judged = [judge(sign, policy, now_s) for sign in reading.signs]
                found |= self._domains.put(name, policy, keys, judged)
            else:
                found |= self._domains.remove(name)
        return sorted(found)

    def _levels(self) -> list[tuple[str, str]]:
        """Return name and label of the topology's levels."""
        topology = self._cache.topology
        return [] if topology is None else [(level.name, level.node_label) for level in topology.levels]

    def _breaker(self, policy: PolicyView) -> BreakerState:
        """Return the stored state of a policy's breaker."""
        known = self._breakers.get(policy.name)
        if known is None or known[0] is not policy.status:
            present = self._cache.health.policies
            self._breakers = {name: each for name, each in self._breakers.items() if name in present}
            self._patches.keep_only(present)
            known = self._breakers[policy.name] = (policy.status, breaker_of(policy.status))
        return known[1]

    def _policy(self, name: str) -> PolicyView | None:
        names = self._policies_of.get(name, ())
        return self._cache.health.policies.get(names[0]) if len(names) == 1 else None

    def _decide(self, node: HealthNode, now_s: float) -> Step:
        policy, silent = self._policy(node.name), self._cache.health.is_silent(node.name, now_s)
        record, broken = parse(node.annotation)
        reading = self._read(node, policy, silent=silent, now_s=now_s)
        reading = self._domains.read(node.name, reading, record)
        jobs = list(self._cache.ledger.jobs_on(node.name))
        self._repairs.saw(node, record, policy)
        facts = NodeFacts(
            name=node.name,
            reading=reading,
            record=record,
            broken=broken,
            tainted=node.tainted,
            workers=len(jobs),
            loaded=self._cache.pods.runs_on(node.name, jobs),
            policy=policy,
            latched=policy is not None and self._breaker(policy).latched,
            repairs=self._settings.repairs,
            claimed=node.claimed,
            others=self._repairs.others(node.name),
            job=self._repairs.sight(node.name),
        )
        self._history.saw(node, record)
        step = decide(facts, now_s)
        self._summaries[node.name] = NodeSummary(
            classes=frozenset(each.fault_class for each in step.judged),
            grave=frozenset(each.fault_class for each in step.judged if each.grave),
            out=node.tainted,
            unknown=bool(reading.unknown),
        )
        self._states[node.name] = NodeState.HEALTHY if record is None else record.state
        self._tell(node, broken or "; ".join((*node.problems, *reading.problems)))
        self._count_observed(node, step)
        self._remind(node.name, step, now_s)
        return step

    def _read(self, node: HealthNode, policy: PolicyView | None, *, silent: bool, now_s: float) -> Reading:
        own = {} if policy is None else {kind: status for rule in policy.rules for kind, status in rule.conditions}
        return read_conditions(
            node.conditions,
            decode=table.decode,
            lookup=table.lookup,
            polarity=lambda kind: own.get(kind) or table.polarity(kind),
            is_agents=table.is_agents,
            silent=silent,
            now_s=now_s,
        )

    def _tell(self, node: HealthNode, problem: str) -> None:
        """Report once what can't be read of a node."""
        if self._told.get(node.name, "") == problem:
            return
        self._told[node.name] = problem
        if problem:
            self._emit(_event(node, Note(reason="NodeHealthUnreadable", message=problem, warning=True), "told"))

    def _count_observed(self, node: HealthNode, step: Step) -> None:
        """Count faults that are seen and not acted on, once as long as they are shown."""
        seen = {each.sign.key: each for each in step.judged if not each.enforced}
        for key in sorted(seen.keys() - self._observed.get(node.name, frozenset())):
            self._observer.on_node_fault(seen[key].fault_class, f"Observe{seen[key].answer}")
        if seen or node.name in self._observed:
            self._observed[node.name] = frozenset(seen)

    def _remind(self, name: str, step: Step, now_s: float) -> None:
        at_s = step.wake_at_s
        if step.record is not None and step.record.state is NodeState.DRAINING:
            at_s = min(now_s + DRAIN_LOOK_S, at_s or now_s + DRAIN_LOOK_S)
        if at_s is None:
            self._due_s.pop(name, None)
        else:
            self._due_at(name, at_s)

    def _due_at(self, name: str, at_s: float) -> None:
        self._due_s[name] = at_s
        heapq.heappush(self._timers, (at_s, name))

    def _due(self, now_s: float) -> list[str]:
        found = []
        while self._timers and self._timers[0][0] <= now_s:
            at_s, name = heapq.heappop(self._timers)
            if self._due_s.get(name) == at_s:
                found.append(name)
        return found

    def _next_s(self) -> float:
        now_s = self._clock.now_s()
        times_s = [self._timers[0][0]] if self._timers else []
        times_s += [at_s for at_s in self._status_at_s.values() if at_s > now_s]
        return min([self._settings.idle_s, *(at_s - now_s for at_s in times_s)])

    def _hold_fences(self) -> None:
        """Fence no node during an outage of so many that the view of them has probably failed."""
        index = self._cache.health
        enforced = any(policy.enforce for policy in index.policies.values())
        held = enforced and is_mass_outage(list(index.not_ready_since_s.values()), len(index.nodes))
        if held != self._cache.fences_held:
            _log.warning(
                "%s of %s nodes are not ready: %s",
                len(index.not_ready_since_s),
                len(index.nodes),
                "none of them counts as lost" if held else "nodes count as lost again",
            )
            self._note(self._cache.hold_fences(held))

    # -------------------------------------------------------------------------------------------------------- charge

    async def _charge(self, steps: Mapping[str, Step], now_s: float) -> set[str]:
        """Store the charges of the nodes to take out; return the nodes that may be."""
        allowed: set[str] = set()
        for name, policy in sorted(self._cache.health.policies.items()):
            wanted = {
                node: steps[node].with_domain for node in self._mine(name) if node in steps and steps[node].needs_charge
            }
            allowed |= await self._charge_policy(policy, wanted, now_s)
        return allowed

    def _fitting(
        self, policy: PolicyView, state: BreakerState, asked: Mapping[str, str], out: set[str], limit: int
    ) -> list[str]:
        """Return the nodes to charge: those with a fault of their own, and each faulty domain that fits in whole."""
        chosen, now_s = {node for node, rule in asked.items() if not rule}, self._clock.now_s()
        told = {key for key in self._kept_in.get(policy.name, ()) if self._domains.is_faulty(key)}
        for key, nodes in self._domains.groups({node: rule for node, rule in asked.items() if rule}).items():
            whole = breaker.grant(state, [*chosen, *nodes], out=out, limit=limit, now_s=now_s)
            if state.latched or not whole.state.latched:
                chosen.update(nodes)
                told.discard(key)
                continue
            for node in nodes:
                self._due_at(node, min(now_s + DOMAIN_LOOK_S, self._due_s.get(node, math.inf)))
            if key not in told:
                told.add(key)
                message = too_large(key, nodes, out=len(out), limit=limit)
                self._emit(_policy_event(policy, "DomainTooLarge", message, key=f"{key.slug}-{int(now_s)}"))
        self._kept_in[policy.name] = told
        return sorted(chosen)

    def _mine(self, policy: str) -> set[str]:
        """Return the nodes that a policy selects alone."""
        return {node for node in self._selected[policy] if len(self._policies_of[node]) == 1}

    async def _charge_policy(self, policy: PolicyView, asked: Mapping[str, str], now_s: float) -> set[str]:
        index, selected = self._cache.health, self._selected[policy.name]
        out, limit = selected & index.tainted, breaker.limit_of(len(selected), policy.nodes_percent)
        stored = self._breaker(policy)
        state = breaker.settled(
            stored,
            out=out,
            wanted=asked,
            present=index.nodes,
            reset=policy.reset,
            window_s=policy.window_s,
            now_s=now_s,
        )
        wanted = self._fitting(policy, state, asked, out, limit)
        granted = breaker.grant(state, wanted, out=out, limit=limit, now_s=now_s)
        charges = granted.state.charges != stored.charges or granted.state.latched != stored.latched
        due_s = self._status_at_s.get(policy.name, 0.0)
        if not charges and due_s > now_s:
            return set(granted.nodes)
        overlapping = {node for node in selected if len(self._policies_of[node]) > 1}
        others = {name for node in overlapping for name in self._policies_of[node]}
        facts = StatusFacts(
            policy=policy,
            nodes=tuple(self._summaries[node] for node in sorted(selected) if node in self._summaries),
            breaker=granted.state,
            limit=limit,
            overlap=overlap_message(policy.name, sorted(others), sorted(overlapping)) if overlapping else "",
            idle_rules=idle_rules(policy, [name for name, _ in self._levels()]),
            repairs=self._settings.repairs,
        )
        patch = self._patches.patch_of(facts, now_s)
        if patch and not await self._write_policy(policy, patch):
            index.touch(*asked)
            return set()
        self._status_at_s[policy.name] = now_s + STATUS_EVERY_S
        if granted.state.latched and not stored.latched:
            key = f"latched-{int(granted.state.since_s)}"
            self._emit(_policy_event(policy, "BreakerLatched", granted.state.message, key=key))
        return set(granted.nodes)

    async def _write_policy(self, policy: PolicyView, patch: Manifest) -> bool:
        """Write a policy's status by compare-and-swap; tell whether it was stored."""
        ref = ObjectRef(kind=labels.KIND_FAULT_POLICY, name=policy.name)
        try:
            result = await self._port.patch(
                ref, {"status": patch}, resource_version=policy.resource_version, subresource=STATUS_SUBRESOURCE
            )
        except (ConflictError, NotFoundError):
            await self._refresh(ref)
            self._wake.set()
            return False
        self._note(self._cache.put(result, now_s=self._clock.now_s()))
        return True

    # --------------------------------------------------------------------------------------------------------- write

    async def _write_all(self, steps: Mapping[str, Step], allowed: set[str]) -> None:
        """Write the nodes concurrently.

        Raises:
            PortError: The first that a write met; the others were tried too.
        """
        writes = []
        for name, step in steps.items():
            node = self._cache.health.nodes.get(name)
            if node is None:
                continue
            if node.judged != self._decided[name].judged:
                # It has changed since, such as by a person who released it: decide again.
                self._cache.health.touch(name)
                self._wake.set()
                continue
            record, notes, changed = step.record, step.notes, step.changed
            if step.needs_charge and name not in allowed:
                record, notes, changed = step.refusable, (), step.refusable != parse(node.annotation)[0]
            if changed:
                writes.append(self._write(node, record, notes, step))
        results = await asyncio.gather(*writes, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _write(self, node: HealthNode, record: Record | None, notes: tuple[Note, ...], step: Step) -> None:
        ref, index = ObjectRef(kind="Node", name=node.name), self._cache.health
        shown_s = index.shown_s.get(node.name)
        try:
            async with self._writes:
                result = await self._port.patch(ref, patch_of(node, record), resource_version=node.resource_version)
        except (ConflictError, NotFoundError):
            await self._refresh(ref)
            index.touch(node.name)
            self._wake.set()
            return
        except InvalidObjectError as error:
            self._tell(node, f"the API server refuses the record of its health: {error}")
            return
        now_s = self._clock.now_s()
        self._note(self._cache.put(result, now_s=now_s))
        before = parse(node.annotation)[0]
        self._history.saw(index.nodes.get(node.name, node), record, before=before, notes=notes, step=step)
        worst = step.gravest
        if record is not None and record.state.is_out and not node.tainted and worst is not None:
            self._observer.on_node_fault(worst.fault_class, worst.answer.value)
            if shown_s is not None:
                self._observer.on_node_tainted(now_s - shown_s)
        for note in notes:
            if (ended := repair_result(before, record, note)) is not None:
                self._observer.on_node_repair(*ended)
            self._emit(_event(node, note, str(int(now_s))))


def _policy_event(policy: PolicyView, reason: str, message: str, *, key: str) -> EmitEvent:
    ref = ObjectRef(kind=labels.KIND_FAULT_POLICY, name=policy.name)
    return EmitEvent(ref=ref, uid=policy.uid, reason=reason, message=message, warning=True, key=key)


def _event(node: HealthNode, note: Note, key: str) -> EmitEvent:
    return EmitEvent(
        ref=ObjectRef(kind="Node", name=node.name),
        uid=node.uid,
        reason=note.reason,
        message=note.message,
        warning=note.warning,
        key=f"{note.reason}-{key}".lower(),
    )
