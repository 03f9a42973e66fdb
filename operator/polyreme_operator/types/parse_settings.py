"""Parses queues, topologies and policies to views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel

from polyreme_api.fault_policy import NodeFaultPolicySpec
from polyreme_api.queue import TrainingQueueSpec, TrainingQueueStatus
from polyreme_api.topology import DEFAULT_TOPOLOGY, ClusterTopologySpec, ClusterTopologyStatus
from polyreme_cluster.port import Manifest
from polyreme_operator.health.breaker import breaker_of
from polyreme_operator.health.policy import Answer, PolicyView, Rule
from polyreme_operator.types.inventory import LevelView, SparesView
from polyreme_operator.types.label_selector import parse_selector
from polyreme_operator.types.queues import QueueView, Quota, Reclaim, StopPolicy
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import TopologyView


def parse_queue(manifest: Manifest) -> QueueView:
    """Parse a TrainingQueue.

    Raises:
        ValueError: If a field of the spec is not what its definition says.
    """
    _check(manifest, TrainingQueueSpec)
    metadata, spec, status = manifest["metadata"], manifest.get("spec") or {}, _own_word(manifest, TrainingQueueStatus)
    preemption: Mapping[str, Any] = spec.get("preemption") or {}
    unsaid = QueueView(name="")
    return QueueView(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        generation=metadata.get("generation", 0),
        parent=spec.get("parent") or "",
        quotas=tuple(
            Quota(
                resource=quota["resource"],
                nominal=int(quota["nominal"]),
                borrowing_limit=_count(quota.get("borrowingLimit")),
                lending_limit=_count(quota.get("lendingLimit")),
            )
            for quota in spec.get("quotas") or ()
        ),
        weight=int(spec.get("weight", 1)),
        stop_policy=StopPolicy(spec.get("stopPolicy", StopPolicy.NONE)),
        half_life_s=float((spec.get("fairSharing") or {}).get("halfLifeSeconds", unsaid.half_life_s)),
        aging_s=float(spec.get("agingSeconds", unsaid.aging_s)),
        within_queue=Reclaim(preemption.get("withinQueue", unsaid.within_queue)),
        reclaim=Reclaim(preemption.get("reclaim", unsaid.reclaim)),
        min_runtime_s=float(preemption.get("minRuntimeSeconds", unsaid.min_runtime_s)),
        preemptions_max=int(preemption.get("maxPerJob", unsaid.preemptions_max)),
        preemption_window_s=float(preemption.get("windowSeconds", unsaid.preemption_window_s)),
        cooldown_s=float(preemption.get("cooldownSeconds", unsaid.cooldown_s)),
        backfill=(spec.get("backfill") or {}).get("mode", "Conservative") != "Off",
        set_aside_s=float(spec.get("setAsideSeconds", unsaid.set_aside_s)),
        namespaces=parse_selector(spec.get("namespaceSelector")),
        priority_max=_count(spec.get("priorityMax")),
        refuses_unnamed=spec.get("unnamedResources") == "Refuse",
        used_seconds=tuple(
            sorted((entry["resource"], float(entry["seconds"])) for entry in status.get("decayed") or ())
        ),
        used_at_s=parse_time_or(status.get("decayedAt"), 0.0),
        status=status,
    )


def parse_topology(manifest: Manifest) -> TopologyView | None:
    """Parse the ClusterTopology; None for one with another name, which is ignored.

    Raises:
        ValueError: If a field of the spec is not what its definition says.
    """
    metadata = manifest["metadata"]
    if metadata["name"] != DEFAULT_TOPOLOGY:
        return None
    _check(manifest, ClusterTopologySpec)
    return TopologyView(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        generation=metadata.get("generation", 0),
        levels=tuple(
            LevelView(name=level["name"], node_label=level["nodeLabel"], distance=_count(level.get("distance")))
            for level in (manifest.get("spec") or {}).get("levels") or ()
        ),
        spares=_spares((manifest.get("spec") or {}).get("spares")),
        status=_own_word(manifest, ClusterTopologyStatus),
    )


def _spares(given: Mapping[str, Any] | None) -> SparesView | None:
    if given is None:
        return None
    nodes, percent = (_count(given.get(name)) or 0 for name in ("nodes", "percent"))
    return SparesView(level=given["level"], nodes=nodes, percent=percent)


def parse_fault_policy(manifest: Manifest) -> PolicyView:
    """Parse a NodeFaultPolicy.

    Raises:
        ValueError: If a field of the spec is not what its definition says.
    """
    _check(manifest, NodeFaultPolicySpec)
    metadata, status = manifest["metadata"], manifest.get("status") or {}
    fields = {to_camel(name) for name in NodeFaultPolicySpec.model_fields}
    given = {name: value for name, value in (manifest.get("spec") or {}).items() if name in fields}
    spec = NodeFaultPolicySpec.model_validate(given)
    return PolicyView(
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        generation=metadata.get("generation", 0),
        enforce=spec.mode == "Enforce",
        classes=frozenset(spec.classes),
        selector=tuple(sorted(spec.node_selector.items())),
        rules=tuple(
            Rule(
                name=rule.name,
                answer=Answer(rule.action),
                codes=frozenset(f"Xid{xid}" for xid in rule.on_xids),
                conditions=frozenset((match.type, match.status) for match in rule.on_node_conditions),
                count=rule.count,
                window_s=float(rule.window_seconds),
                fault_class=rule.fault_class or "",
            )
            for rule in spec.rules
        ),
        evacuations=tuple(spec.evacuations),
        nodes_percent=spec.breaker.nodes_percent,
        window_s=float(spec.breaker.window_seconds),
        reset=spec.breaker.reset,
        examine_s=float(spec.examine_seconds),
        probation_s=float(spec.probation_seconds),
        loaded_s=float(spec.probation.loaded_seconds),
        probation_max_s=float(spec.probation.max_seconds),
        hooks=tuple(spec.repairs.hooks),
        check=spec.repairs.check,
        settle_s=float(spec.repairs.settle_seconds),
        status=status,
        breaker=breaker_of(status),
    )


def _check(manifest: Manifest, kind: type[BaseModel]) -> None:
    """Validate a spec; unknown fields, which a newer version may have, are ignored."""
    try:
        kind.model_validate(manifest.get("spec") or {})
    except ValidationError as error:
        found = [each for each in error.errors(include_url=False) if each["type"] != "extra_forbidden"]
        if found:
            place = ".".join(("spec", *(str(part) for part in found[0]["loc"])))
            raise ValueError(f"{place}: {found[0]['msg']}") from error


def _own_word(manifest: Manifest, kind: type[BaseModel]) -> Mapping[str, Any]:
    """Return a status that only the operator writes; an invalid one counts as empty and is replaced."""
    status: Mapping[str, Any] = manifest.get("status") or {}
    try:
        kind.model_validate(status)
    except ValidationError:
        return {}
    return status


def _count(value: object) -> int | None:
    return None if value is None else int(str(value))
