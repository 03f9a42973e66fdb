"""Rows of docs/threat-model.md, "Who is trusted with what": each account tries what it must not, by real tokens.

Pods of jobs are in ``test_job_accounts.py``, the operator in ``test_operator_rbac.py``.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef
from tests.cluster.accounts import FORBIDDEN, Account, paths
from tests.cluster.kube import kubectl
from tests.cluster.operators import NAMESPACE
from tests.cluster.stage import Stage, condition_of, play
from tools.charts.render import EXAMPLES, rendered

PRODUCTION = next(path for path in EXAMPLES if path.stem == "production")
RIGHTS = {"Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
WORKERS = "polyreme-datahub-workers"
BOTH_POOLS = ("datahub.workers.gpu.maxReplicas=1",)
NOBODY = "nobody"
QUEUES = "/apis/polyreme.dev/v1alpha1/trainingqueues"
GROUP = f"{labels.GROUP}/"
JOBS = f"{GROUP}{labels.PLURAL_JOB}"
TOUCH = {"metadata": {"annotations": {"example.com/touched": "x"}}}
POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": []}}
PRIORITY_MAX = 1_000_000_000
"""Largest ``spec.priority``."""
Tries = list[tuple[str, str, Manifest | None]]


def refused(account: Account, tries: Tries) -> list[str]:
    """Return the tries that the API server did not refuse."""
    answers = {f"{verb} {path}": account.ask(verb, path, body)[0] for verb, path, body in tries}
    return [f"{what}: {status}" for what, status in answers.items() if status != FORBIDDEN]


@pytest.fixture(scope="module")
def installed(kubeconfig: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Path of the kubeconfig of a cluster with the rights that the chart gives in production, and no more."""
    documents = [each for each in yaml.safe_load_all(rendered(PRODUCTION, settings=BOTH_POOLS)) if each]
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NOBODY, "namespace": NAMESPACE}}
    path: Path = tmp_path_factory.mktemp("rights") / "rights.yaml"
    rights = [namespace, account, *(each for each in documents if each["kind"] in RIGHTS)]
    path.write_text(yaml.safe_dump_all(rights))
    kubectl(kubeconfig, "apply", "-f", str(path))
    yield kubeconfig
    kubectl(kubeconfig, "--namespace", NAMESPACE, "delete", "serviceaccount", NOBODY)


@pytest.mark.slow
def test_a_user_changes_no_other_namespace_and_no_queue_and_exceeds_no_quota(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=4)
        await stage.queue(nominal=1)
        other = stage.name("other")
        await stage.kubectl("create", "namespace", other)
        try:
            victim = await stage.job("victim", namespace=other, suspend=True)
            await stage.kubectl("create", "serviceaccount", "user")
            words = ("--clusterrole=edit", f"--serviceaccount={stage.namespace}:user")
            await stage.kubectl("create", "rolebinding", "user", *words)
            user = Account(operated, stage.namespace, "user")

            async def holds() -> bool:
                return {(verb, JOBS, "") for verb in ("create", "patch", "delete")} <= user.rights()

            await stage.until(holds, "the right of jobs is part of the role edit")
            assert [right for right in user.rights(other) if right[1].startswith(GROUP)] == []
            own, theirs = paths(stage.namespace), paths(other)
            tries: Tries = [
                ("PATCH", f"{theirs['trainingjobs']}/victim", {"spec": {"suspend": False}}),
                ("DELETE", f"{theirs['trainingjobs']}/victim", None),
                ("GET", f"{theirs['trainingjobs']}/victim", None),
                ("POST", theirs["trainingjobs"], stage.job_manifest("elsewhere", namespace=other)),
                ("GET", theirs["secrets"], None),
                ("POST", theirs["pods"], POD),
                ("PATCH", f"{QUEUES}/{stage.name('q')}", {"spec": {"quotas": []}}),
                ("DELETE", f"{QUEUES}/{stage.name('q')}", None),
                ("GET", f"{paths(NAMESPACE)['secrets']}/{labels.INSTALLATION_KEY_NAME}", None),
            ]
            assert refused(user, tries) == []

            # Templates that pretend to be another job's, in another namespace.
            tags = {labels.LABEL_JOB: "victim", labels.LABEL_JOB_UID: victim["metadata"]["uid"]}
            for name, replicas in (("greedy", 2), ("mine", 1)):
                manifest = stage.job_manifest(name, replicas)
                manifest["spec"]["workers"]["template"]["metadata"] = {"namespace": other, "labels": tags}
                status, answer = user.ask("POST", own["trainingjobs"], manifest)
                assert status == 201, answer
            assert user.ask("PATCH", f"{own['trainingjobs']}/mine/status", {"status": {"step": 1}})[0] == FORBIDDEN
            await stage.until_waits("greedy", "ExceedsQuota")
            await stage.until_trains("mine")
            (pod,) = await stage.pods("mine")
            assert pod["metadata"]["namespace"] == stage.namespace
            assert pod["metadata"]["labels"][labels.LABEL_JOB_UID] != victim["metadata"]["uid"]
            assert (await stage.cluster.list("Pod", namespace=other)).items == []
            assert (await stage.cluster.get(ObjectRef.of(victim)))["spec"] == victim["spec"]
        finally:
            await stage.kubectl("delete", "namespace", other, "--wait=false")

    play(operated, story)


@pytest.mark.slow
def test_a_user_of_a_namespace_that_a_queue_does_not_select_preempts_no_one_and_holds_nothing(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=2)
        other, selector = stage.name("other"), {"matchLabels": {"kubernetes.io/metadata.name": stage.namespace}}
        await stage.queue(nominal=2, namespaceSelector=selector, priorityMax=100, preemption={"cooldownSeconds": 0})
        await stage.kubectl("create", "namespace", other)
        try:
            await stage.job("victim", 2)
            attempt = (await stage.until_trains("victim"))["attempt"]["number"]
            await stage.kubectl("create", "serviceaccount", "thief", "-n", other)
            words = ("--clusterrole=edit", f"--serviceaccount={other}:thief", "-n", other)
            await stage.kubectl("create", "rolebinding", "thief", *words)
            thief = Account(operated, other, "thief")

            async def holds() -> bool:
                return ("create", JOBS, "") in thief.rights()

            await stage.until(holds, "the right of jobs is part of the role edit")
            itself = f"/api/v1/namespaces/{other}"
            label = {"metadata": {"labels": {"kubernetes.io/metadata.name": stage.namespace}}}
            widened = {"spec": {"namespaceSelector": None, "priorityMax": None}}
            tries: Tries = [("PATCH", itself, label), ("PATCH", f"{QUEUES}/{stage.name('q')}", widened)]
            assert refused(thief, tries) == []

            never = {"nodeSelector": {"example.com/none": "true"}}
            manifest = stage.job_manifest("thief", 2, namespace=other, body=never, priority=PRIORITY_MAX)
            status, answer = thief.ask("POST", paths(other)["trainingjobs"], manifest)
            assert status == 201, answer
            # A job of the queue's own namespace at this priority is refused too.
            await stage.job("urgent", 2, priority=PRIORITY_MAX)
            await stage.until_waits("urgent", "QueueRefused", f"priority {PRIORITY_MAX}", "its priorityMax is 100")

            async def is_told() -> bool:
                found = thief.ask("GET", f"{paths(other)['trainingjobs']}/thief")[1]
                said = condition_of(found.get("status") or {}, "Queued")
                return said[:2] == ("True", "QueueRefused") and f"jobs of namespace {other}" in said[2]

            await stage.until(is_told, "the thief's job says that the queue refuses it")
            await stage.until_queue("q", lambda seen: seen.get("refused") == 2, "it counts what it refuses")
            found = await stage.status("victim")
            assert (found["attempt"]["number"], found["attempt"]["desired"]) == (attempt, "Run")
            assert condition_of(found, "Preempted")[0] != "True"
            assert (await stage.cluster.list("Pod", namespace=other)).items == []
            queue = await stage.queue_status()
            assert (queue["admitted"], queue["pending"], queue["reserving"]) == (1, 0, 0)
        finally:
            await stage.kubectl("delete", "namespace", other, "--wait=false")

    play(operated, story)


def test_the_datahubs_controller_may_do_what_its_role_says_and_nothing_else(installed: str) -> None:
    nobody, account = (Account(installed, NAMESPACE, name) for name in (NOBODY, "polyreme-datahub"))
    leases, scale = "coordination.k8s.io/leases", "apps/deployments/scale"
    everywhere = {(verb, JOBS, "") for verb in ("get", "list", "watch", "patch")}
    everywhere |= {("create", "authentication.k8s.io/tokenreviews", "")}
    everywhere |= {("create", "authorization.k8s.io/subjectaccessreviews", "")}
    here = {("create", leases, "")} | {(verb, leases, "polyreme-datahub") for verb in ("get", "patch")}
    here |= {("patch", scale, name) for name in (WORKERS, f"{WORKERS}-gpu")}
    assert account.rights("default") - nobody.rights("default") == everywhere
    assert account.rights() - nobody.rights() == everywhere | here
    at, system = paths("default"), paths(NAMESPACE)
    tries: Tries = [
        ("POST", at["trainingjobs"], {}),
        ("DELETE", f"{at['trainingjobs']}/any", None),
        ("PATCH", f"{at['trainingjobs']}/any/status", {"status": {"step": 1}}),
        ("GET", at["secrets"], None),
        ("GET", f"{system['secrets']}/{labels.INSTALLATION_KEY_NAME}", None),
        ("GET", at["pods"], None),
        ("POST", at["pods"], POD),
        ("PATCH", f"{system['leases']}/polyreme-operator", TOUCH),
        ("PATCH", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{WORKERS}", TOUCH),
        ("GET", QUEUES, None),
        ("GET", "/api/v1/nodes", None),
    ]
    assert refused(account, tries) == []


def test_the_account_of_the_datahubs_workers_has_no_right_and_their_pods_have_no_token(installed: str) -> None:
    nobody, account = (Account(installed, NAMESPACE, name) for name in (NOBODY, WORKERS))
    for namespace in (NAMESPACE, "default"):
        assert account.rights(namespace) == nobody.rights(namespace)
    at, system = paths("default"), paths(NAMESPACE)
    tries: Tries = [("GET", path, None) for path in (*at.values(), *system.values(), QUEUES, "/api/v1/nodes")]
    assert refused(account, tries) == []
    documents = yaml.safe_load_all(rendered(PRODUCTION, settings=BOTH_POOLS))
    pods = [each["spec"]["template"]["spec"] for each in documents if is_workers(each)]
    assert len(pods) == 2
    for pod in pods:
        assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (WORKERS, False)
        assert not any("serviceAccountToken" in str(volume) for volume in pod.get("volumes") or ())


def is_workers(document: Manifest | None) -> bool:
    if document is None or document["kind"] != "Deployment":
        return False
    return str(document["metadata"]["name"]).startswith(WORKERS)


def test_a_metrics_reader_can_read_nothing_else(installed: str) -> None:
    words = ("create", "clusterrolebinding", NOBODY, "--clusterrole=polyreme-metrics-reader")
    reader = Account(installed, NAMESPACE, NOBODY)
    before = {namespace: reader.rights(namespace) for namespace in (NAMESPACE, "default")}
    kubectl(installed, *words, f"--serviceaccount={NAMESPACE}:{NOBODY}")
    try:
        assert {namespace: reader.rights(namespace) for namespace in before} == before
        tries: Tries = [("GET", path, None) for path in (*paths("default").values(), QUEUES, "/api/v1/nodes")]
        assert refused(reader, tries) == []
    finally:
        kubectl(installed, "delete", "clusterrolebinding", NOBODY)


@pytest.mark.parametrize(
    "hook",
    [
        {"image": "mine.example/root:1"},
        {"command": ["sh", "-c", "id"]},
        {"securityContext": {"privileged": True}},
        {"podSpec": {"hostPID": True}},
        {"namespace": "default"},
        {"template": "default/mine"},
        {"template": "../mine"},
    ],
    ids=lambda hook: next(iter(hook)),
)
def test_a_policy_names_a_pod_template_and_nothing_of_a_pod(installed: str, tmp_path: Path, hook: Manifest) -> None:
    repairs = {"hooks": [{"action": "Reboot", "template": "reboot", **hook}]}
    spec = {"mode": "Observe", "classes": ["gpu-lost"], "repairs": repairs}
    policy = {"apiVersion": labels.API_VERSION, "kind": "NodeFaultPolicy", "metadata": {"name": "own-code"}}
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(policy | {"spec": spec}))
    with pytest.raises(AssertionError, match=r"unknown field|Invalid value"):
        kubectl(installed, "create", "-f", str(path))
    if "template" in hook:
        return
    # What is not validated on the way is not stored.
    kubectl(installed, "create", "--validate=false", "-f", str(path))
    try:
        words = ("get", "nodefaultpolicy", "own-code", "--output=jsonpath={.spec.repairs.hooks[0]}")
        stored = yaml.safe_load(kubectl(installed, *words))
        assert not stored.keys() & hook.keys()
        assert stored["template"] == "reboot"
    finally:
        kubectl(installed, "delete", "nodefaultpolicy", "own-code")
