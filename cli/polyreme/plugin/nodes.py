"""Nodes as `kubectl polyreme nodes` shows them, and the two changes that people make: quarantine and release."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from polyreme.plugin.reading import list_all
from polyreme_api.errors import InvalidConfigError, NotFoundError, RefusedError
from polyreme_api.times import rfc3339
from polyreme_cluster.port import ClusterPort, ConflictError, Manifest, ObjectRef
from polyreme_cluster.port import NotFoundError as PortNotFoundError
from polyreme_operator.health.incidents import escaped
from polyreme_operator.health.node import HealthNode, patch_of
from polyreme_operator.health.record import Leave, NodeState, Record, parse
from polyreme_operator.health.signs import DOMAIN_FAULT, read_conditions
from polyreme_operator.health.states import quarantined_by, released_by
from polyreme_operator.types.parse_node import OUT_OF_SERVICE, parse_health_node
from polyreme_operator.types.parse_settings import parse_topology
from polyreme_operator.types.timestamps import parse_time_or

TRIES_MAX = 8
"""A patch that meets another version is worked out again this often."""
NOT_READY, OUT, CORDONED = "not-ready", "out-of-service", "cordoned"
"""States that Kubernetes gives a node, beside those of its health."""
WHY_CHARACTERS_MAX = 512
_IN_SERVICE = frozenset({NodeState.HEALTHY.value, NodeState.AT_RISK.value, NodeState.PROBATION.value})
HEADINGS = ("NODE", "STATE", "SINCE", "OWNER", "WHY", "BACK WHEN")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One node, for people and for programs."""

    name: str
    state: str
    since: str = ""
    owner: str = ""
    why: str = ""
    back: str = ""
    """What would bring it back."""
    risk: float = 0.0
    repair_owner: str = ""
    """Who repairs it now: ``polyreme``, or another tool."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of its line."""
        return self.name, self.state, self.since, self.owner, self.why, self.back


async def read_nodes(cluster: ClusterPort) -> list[HealthNode]:
    """Read every node, as its health is decided from."""
    return [parse_health_node(item) for item in await list_all(cluster, "Node")]


def spares_of(topologies: Iterable[Manifest]) -> frozenset[str]:
    """Return the nodes that are kept as spares: the first hundred, as the ClusterTopology names them."""
    parsed = (parse_topology(item) for item in topologies)
    return frozenset(name for view in parsed if view is not None for name in view.status.get("spareNodes") or ())


def rows_of(nodes: Iterable[Manifest], *, everything: bool, spares: Collection[str] = ()) -> list[NodeRow]:
    """Return the nodes that take no new workers, are at risk or kept as spares, or all of them."""
    ordered = sorted(nodes, key=lambda node: str(node["metadata"]["name"]))
    rows = [_with_kubernetes(_row(parse_health_node(node)), node) for node in ordered]
    rows = [
        dataclasses.replace(row, state="spare", back="it is in service for repairs of running jobs only")
        if row.name in spares and row.state == NodeState.HEALTHY
        else row
        for row in rows
    ]
    return [row for row in rows if everything or row.state != NodeState.HEALTHY]


def check_reason(reason: str, what: str) -> None:
    """Refuse a change without a reason.

    Raises:
        InvalidConfigError: If it is empty.
    """
    if not reason.strip():
        raise InvalidConfigError(f"a {what} needs a reason; give one by --reason")


async def quarantine(
    cluster: ClusterPort, name: str, *, who: str, reason: str, for_s: float, evict: bool, now_s: float
) -> None:
    """Take a node out of service for a person.

    Raises:
        InvalidConfigError: Without a reason.
        RefusedError: If the node is out of service already.
    """
    check_reason(reason, "quarantine")

    def change(node: HealthNode, record: Record) -> Record:
        if node.tainted:
            raise RefusedError(f"node {name} is out of service already: {record.owner}, {record.reason}")
        until_s = now_s + for_s if for_s > 0.0 else 0.0
        leave = Leave.EVICT if evict else Leave.DRAIN
        return quarantined_by(record, who=who, reason=reason, until_s=until_s, leave=leave, at_s=now_s)

    await _change(cluster, name, change)


async def release(cluster: ClusterPort, name: str, *, who: str, reason: str, now_s: float) -> None:
    """Return a node to service; the faults that it shows now don't take it out again.

    Raises:
        InvalidConfigError: Without a reason.
        RefusedError: If the node is not out of service.
    """
    check_reason(reason, "release")

    def change(node: HealthNode, record: Record) -> Record:
        if not node.tainted:
            raise RefusedError(f"node {name} is not out of service")
        return released_by(
            record,
            read_conditions(node.conditions, silent=False, now_s=now_s).signs,
            who=who,
            reason=reason,
            at_s=now_s,
        )

    await _change(cluster, name, change)


async def _change(cluster: ClusterPort, name: str, change: Callable[[HealthNode, Record], Record]) -> None:
    """Patch a node as it was seen; if it changed meanwhile, the change is worked out again."""
    ref = ObjectRef(kind="Node", name=name)
    for attempt in range(TRIES_MAX):
        try:
            node = parse_health_node(await cluster.get(ref))
        except PortNotFoundError as error:
            raise NotFoundError(f"there is no node {name!r}", field="NODE") from error
        after = change(node, parse(node.annotation)[0] or Record())
        try:
            await cluster.patch(ref, patch_of(node, after), resource_version=node.resource_version)
        except ConflictError:
            if attempt == TRIES_MAX - 1:
                raise
        else:
            return


def _row(node: HealthNode) -> NodeRow:
    record, broken = parse(node.annotation)
    if broken or (node.tainted and record is None):
        why = broken or "the taint was added by hand, and no operator has seen it yet"
        return NodeRow(name=node.name, state="unknown", why=why, back="the operator examines it")
    record = record or Record()
    why = escaped(", ".join(part for part in (record.fault_class, record.evidence or record.reason) if part))
    return NodeRow(
        name=node.name,
        state=record.state.value,
        since=_time(record.since_s) if record.state is not NodeState.HEALTHY else "",
        owner=escaped(record.owner),
        why=why,
        back=_back(node.name, record, node.claimed),
        risk=record.risk,
        repair_owner=node.claimed or node.repair_owner,
    )


def _with_kubernetes(row: NodeRow, node: Manifest) -> NodeRow:
    """Add what Kubernetes says of a node: it is not ready, or was cordoned or declared out of service."""
    spec, ready = node.get("spec") or {}, _ready_condition(node)
    status, since = ready.get("status") or "Unknown", _time(parse_time_or(ready.get("lastTransitionTime"), 0.0))
    found = []
    if status != "True":
        said = ": ".join(str(ready[key]) for key in ("reason", "message") if ready.get(key))
        why = f"Ready is {status}: {said}" if said else "its kubelet has not reported"
        back = "it takes workers when its kubelet reports that it is ready"
        found.append(NodeRow(name=row.name, state=NOT_READY, since=since, owner="kubelet", why=why, back=back))
    if any(taint.get("key") == OUT_OF_SERVICE for taint in spec.get("taints") or ()):
        back = f"kubectl taint node {row.name} {OUT_OF_SERVICE}-"
        found.append(NodeRow(name=row.name, state=OUT, why=f"taint {OUT_OF_SERVICE}", back=back))
    if spec.get("unschedulable"):
        back = f"kubectl uncordon {row.name}"
        found.append(NodeRow(name=row.name, state=CORDONED, why="spec.unschedulable is true", back=back))
    if not found:
        return row
    worse = [row] if row.state not in _IN_SERVICE else []
    first, *others = [*worse, *found]
    whys = [first.why, *(f"{each.state}: {each.why}" for each in others)]
    backs = [first.back, *(each.back for each in others)]
    return dataclasses.replace(
        first,
        why=escaped("; ".join(filter(None, whys)), WHY_CHARACTERS_MAX),
        back="; then ".join(filter(None, backs)),
        risk=row.risk,
        repair_owner=row.repair_owner,
    )


def _ready_condition(node: Manifest) -> Mapping[str, Any]:
    conditions = (node.get("status") or {}).get("conditions") or ()
    return next((entry for entry in conditions if entry.get("type") == "Ready"), {})


def _back(name: str, record: Record, claimed: str) -> str:
    release_ = f"kubectl polyreme release {name}"
    if record.state is NodeState.RETIRED:
        return f"only a person returns it: {release_}"
    if record.is_persons and not record.until_s:
        return f"{escaped(record.owner)} returns it: {release_}"
    if record.state.is_out:
        by = f" by {escaped(claimed)}" if claimed else ""
        repair = f"after a {record.action}{by}, " if record.action else ""
        if (hook := record.repair) is not None:
            job = f", Job {hook.job}" if hook.job else ""
            repair = f"repair: {hook.action}, attempt {hook.attempt}, {hook.phase}{job}; then "
        fault = f"that {escaped(record.condition)} is clear" if record.condition else "nothing wrong"
        if record.reason == DOMAIN_FAULT:
            fault = f"that fewer nodes of {escaped(record.device)} show a fault"
        return f"{repair}an examination returns it that finds {fault}; the next is at {_time(record.examine_at_s)}"
    if record.state is NodeState.PROBATION and record.opt_in:
        proven = f"after {record.loaded_s / 3_600.0:.1f} h of load"
        return f"it is in service for jobs that accept it, on probation {proven} until {_time(record.examine_at_s)}"
    if record.state is NodeState.PROBATION:
        return f"it is in service, on probation until {_time(record.examine_at_s)}"
    if record.state is NodeState.AT_RISK:
        return "it is in service; its risk falls with time"
    return ""


def _time(at_s: float) -> str:
    return rfc3339(at_s)[:19] + "Z" if at_s else ""


def data_of(row: NodeRow) -> dict[str, Any]:
    """Return a row for programs."""
    return dataclasses.asdict(row)
