"""How worker pods come to their nodes, what they may do there, and what their leader may ask of the API server."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from polyreme_operator.reconcile.binding import BindingMode
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.types.actions import (
    Action,
    Bind,
    CreateAccount,
    CreateChild,
    CreatePod,
    Decision,
    WriteStatus,
)
from polyreme_operator.types.parse import OWNED_TAINT
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, node, pod, snapshot

OWNED = {"n0": node(owned=True), "n1": node("n1", owned=True)}
MIXED = {"n0": node(owned=True), "n1": node("n1")}


def templated(template: dict[str, Any] | None = None) -> JobView:
    return job(workers={"replicas": 2, "devices": 1, "template": {"spec": template or {}}})


def decide(seen: JobSnapshot, binding: BindingMode = "GangBinder", **defaults: Any) -> Decision:
    return reconcile(seen, NOW_S, defaults=PodDefaults(binding=binding, **defaults))


def created(binding: BindingMode, template: dict[str, Any] | None = None, **fields: Any) -> list[dict[str, Any]]:
    owner = admitted(templated(template), ("n0", "n1"), replicas=0)
    decision = decide(snapshot(owner, lease=lease(owner, attempt=9), **fields), binding)
    return [action.manifest["spec"] for action in decision.actions if isinstance(action, CreatePod)]


def named_node(spec: dict[str, Any]) -> Any:
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    return [term["matchFields"] for term in required["nodeSelectorTerms"]]


def field(name: str) -> dict[str, Any]:
    return {"key": "metadata.name", "operator": "In", "values": [name]}


def test_without_a_scheduler_a_pod_names_its_node() -> None:
    specs = created("NodeName")
    assert [spec["nodeName"] for spec in specs] == ["n0", "n1"]
    assert not any("affinity" in spec or "schedulerName" in spec for spec in specs)


def test_by_affinity_a_pod_is_held_to_its_node_and_left_to_kube_scheduler() -> None:
    specs = created("NodeAffinity", nodes=OWNED)
    assert [named_node(spec) for spec in specs] == [[[field("n0")]], [[field("n1")]]]
    assert not any("nodeName" in spec or "schedulerName" in spec for spec in specs)


def test_every_term_of_a_templates_affinity_holds_beside_the_node() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    spec = created("NodeAffinity", {"affinity": {"nodeAffinity": required, "podAffinity": {}}})[0]
    held = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert held == [{**term, "matchFields": [field("n0")]} for term in terms]


def test_the_gang_binder_binds_on_its_own_nodes_and_nowhere_else() -> None:
    assert {spec["schedulerName"] for spec in created("GangBinder", nodes=OWNED)} == {"polyreme"}
    mixed = created("GangBinder", nodes=MIXED)
    assert not any("schedulerName" in spec or "nodeName" in spec for spec in mixed)
    assert [named_node(spec) for spec in mixed] == [[[field("n0")]], [[field("n1")]]]


def test_pods_that_wait_are_bound_by_uid_each_to_its_place() -> None:
    owner = admitted(templated(), ("n1", "n0"))
    waits = pod(owner, 0, where="", scheduler="polyreme", phase="Pending")
    bound = pod(owner, 1, where="n0", scheduler="polyreme")
    decision = decide(snapshot(owner, pods=(waits, bound), nodes=OWNED, lease=lease(owner, released=False)))
    assert [action for action in decision.actions if isinstance(action, Bind)] == [
        Bind(ref=waits.ref, uid=waits.uid, node="n1")
    ]


@pytest.mark.parametrize(
    ("fields", "nodes"),
    [
        ({"scheduler": "default-scheduler"}, OWNED),
        ({"scheduler": "polyreme", "deleting": True}, OWNED),
        ({"scheduler": "polyreme", "replacement": 3}, OWNED),
        ({"scheduler": "polyreme"}, MIXED),
    ],
)
def test_no_other_pod_is_bound(fields: dict[str, Any], nodes: Any) -> None:
    owner = admitted(templated(), ("n1", "n0"))
    others = pod(owner, 0, where="", phase="Pending", **fields)
    seen = snapshot(owner, pods=(others, pod(owner, 1)), nodes=nodes, lease=lease(owner, released=False))
    assert not any(isinstance(action, Bind) for action in decide(seen).actions)


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (
            {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "c"}}]},
            "volumes[].persistentVolumeClaim",
        ),
        ({"volumes": [{"name": "data", "ephemeral": {}}]}, "volumes[].ephemeral"),
        ({"resourceClaims": [{"name": "gpu"}]}, "resourceClaims"),
        ({"affinity": {"podAffinity": {"a": []}}}, "affinity.podAffinity"),
        ({"affinity": {"podAntiAffinity": {"a": []}}}, "affinity.podAntiAffinity"),
        ({"topologySpreadConstraints": [{"topologyKey": "zone"}]}, "topologySpreadConstraints"),
        ({"schedulingGates": [{"name": "g"}]}, "schedulingGates"),
        ({"containers": [{"name": "m", "ports": [{"hostPort": 80}]}]}, "containers[].ports[].hostPort"),
        ({"initContainers": [{"name": "m", "ports": [{"hostPort": 80}]}]}, "containers[].ports[].hostPort"),
        (
            {"hostNetwork": True, "containers": [{"name": "m", "ports": [{"containerPort": 80}]}]},
            "containers[].ports[].hostPort",
        ),
    ],
)
def test_the_gang_binder_refuses_what_it_can_not_bind_and_names_the_field(template: dict[str, Any], named: str) -> None:
    owner = templated(template)
    (write,) = (action for action in decide(snapshot(owner)).actions if isinstance(action, WriteStatus))
    failed = write.after.condition("Failed")
    assert failed is not None
    assert failed.reason == "Misconfigured"
    assert f"remove spec.workers.template.spec.{named} or" in failed.message
    other = decide(snapshot(owner), "NodeAffinity")
    assert not any(isinstance(action, WriteStatus) and action.after.finished for action in other.actions)


def test_a_port_that_a_pod_has_for_itself_is_nothing_to_the_gang_binder() -> None:
    owner = templated({"containers": [{"name": "m", "ports": [{"containerPort": 80}]}]})
    assert not any(
        isinstance(action, WriteStatus) and action.after.finished for action in decide(snapshot(owner)).actions
    )


def test_a_job_whose_pods_run_is_not_ended_by_a_change_of_the_installation() -> None:
    owner = admitted(templated({"resourceClaims": [{"name": "gpu"}]}))
    seen = snapshot(owner, pods=(pod(owner, 0), pod(owner, 1)), lease=lease(owner, phase="Training"))
    assert not any(isinstance(action, WriteStatus) and action.after.finished for action in decide(seen).actions)


def test_the_operators_own_taint_is_tolerated_beside_the_templates() -> None:
    given = {"key": "gpu", "operator": "Exists"}
    own = {"key": OWNED_TAINT, "operator": "Exists"}
    for binding in ("NodeName", "NodeAffinity", "GangBinder"):
        assert created(binding, {"tolerations": [given]}, nodes=OWNED)[0]["tolerations"] == [given, own]


def test_other_taints_of_polyreme_are_not_tolerated_for_a_job_that_was_stored_with_such_a_toleration() -> None:
    given = [{"key": f"polyreme.dev/{name}", "operator": "Exists"} for name in ("health", "probation", "owned")]
    for binding in ("NodeName", "NodeAffinity", "GangBinder"):
        assert created(binding, {"tolerations": given}, nodes=OWNED)[0]["tolerations"] == [given[2]]


def test_only_the_leaders_pod_gets_a_token_unless_the_template_says_otherwise() -> None:
    leader, other = created("NodeName")
    assert "automountServiceAccountToken" not in leader
    assert other["automountServiceAccountToken"] is False
    assert created("NodeName", {"automountServiceAccountToken": True})[1]["automountServiceAccountToken"] is True


def signing(template: dict[str, Any] | None = None) -> JobView:
    """A job whose pods sign what they report."""
    return dataclasses.replace(templated(template), key_ids=("0123abcd",))


ACCOUNTS = [({}, "j-uidj"), ({"serviceAccountName": "trainer"}, "trainer"), ({"serviceAccount": "old"}, "old")]


def made(actions: Iterable[Action]) -> dict[str, dict[str, Any]]:
    """Manifests by kind, those that come after another included."""
    children: list[Any] = [action for action in actions if isinstance(action, CreateChild | CreateAccount)]
    children += [child.then for child in children if isinstance(child, CreateChild) and child.then is not None]
    return {child.manifest["kind"]: child.manifest for child in children}


@pytest.mark.parametrize(("template", "account"), ACCOUNTS)
def test_a_leader_may_watch_its_own_job_and_patch_its_own_lease_and_nothing_else(
    template: dict[str, Any], account: str
) -> None:
    owner = admitted(signing(template), replicas=0)
    decision = decide(snapshot(owner), "NodeAffinity", launcher_rbac=True)
    assert "RoleBinding" not in {one.manifest["kind"] for one in decision.actions if isinstance(one, CreateChild)}
    objects, name = made(decision.actions), "j-uidj"
    rules = {rule["resources"][0]: rule for rule in objects["Role"]["rules"]}
    assert rules.keys() == {"trainingjobs", "leases"}
    assert (rules["trainingjobs"]["resourceNames"], rules["leases"]["resourceNames"]) == (["j"], [name])
    assert rules["trainingjobs"]["verbs"] == ["get", "list", "watch"]
    assert rules["leases"]["verbs"] == ["get", "patch"]
    binding = objects["RoleBinding"]
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "default"}]
    assert ("ServiceAccount" in objects) == (account == name), "an account that the template names is its user's"
    for each in objects.values():
        assert each["metadata"]["ownerReferences"][0]["uid"] == owner.uid
    known = frozenset({"Service", "Secret", "ServiceAccount", "Role", "RoleBinding"})
    again = decide(dataclasses.replace(snapshot(owner), children=known), "NodeAffinity", launcher_rbac=True)
    assert made(again.actions).keys() == {"Lease"}
    assert made(decide(snapshot(owner), "NodeAffinity").actions).keys() == {"Lease"}


@pytest.mark.parametrize(("template", "account"), ACCOUNTS)
def test_all_pods_of_a_job_run_as_its_account_and_as_no_other_jobs(template: dict[str, Any], account: str) -> None:
    owner = admitted(signing(template), replicas=0)
    known = frozenset({"Service", "Secret", "ServiceAccount", "Role", "RoleBinding"})
    seen = snapshot(owner, lease=lease(owner, attempt=9), children=known)
    decision = decide(seen, "NodeAffinity", launcher_rbac=True)
    specs = [action.manifest["spec"] for action in decision.actions if isinstance(action, CreatePod)]
    assert [spec.get("serviceAccountName", spec.get("serviceAccount")) for spec in specs] == [account, account]


def test_no_pod_is_created_before_its_account_exists() -> None:
    owner = admitted(signing(), replicas=0)
    known = frozenset({"Service", "Secret", "Role", "RoleBinding"})
    seen = snapshot(owner, lease=lease(owner, attempt=9), children=known)
    assert made(decide(seen, "NodeAffinity", launcher_rbac=True).actions).keys() == {"ServiceAccount"}


def test_pods_of_an_attempt_of_an_older_operator_keep_the_account_of_their_namespace() -> None:
    owner = admitted(templated(), replicas=0)
    known = frozenset({"Service", "Secret", "Role", "RoleBinding"})
    decision = decide(snapshot(owner, lease=lease(owner, attempt=9), children=known), launcher_rbac=True)
    specs = [action.manifest["spec"] for action in decision.actions if isinstance(action, CreatePod)]
    assert [spec.get("serviceAccountName") for spec in specs] == [None, None]
    (subject,) = made(decide(snapshot(owner), launcher_rbac=True).actions)["RoleBinding"]["subjects"]
    assert subject["name"] == "default"


@pytest.mark.parametrize(("nodes", "binds"), [(OWNED, True), (MIXED, False)])
def test_a_pod_of_the_gang_binder_is_bound_by_its_creator(nodes: Any, binds: bool) -> None:
    owner = admitted(templated(), ("n1", "n0"), replicas=0)
    decision = decide(snapshot(owner, lease=lease(owner, attempt=9), nodes=nodes))
    pods = [action for action in decision.actions if isinstance(action, CreatePod)]
    assert [(pod.index, pod.node, pod.binds) for pod in pods] == [(0, "n1", binds), (1, "n0", binds)]
