"""What a real API server refuses, and what people delete by hand: one job gets the reason, everyone else continues."""

import json
from collections.abc import Callable, Iterator

import pytest

from polyreme_api import labels
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef
from tests.cluster.operators import NAMESPACE, install, replica
from tests.cluster.stage import Stage, condition_of, play

CHILDREN = ("Service", "Secret", "ServiceAccount", "Role", "RoleBinding")
INTENTS = ObjectRef(kind="ConfigMap", namespace=NAMESPACE, name=labels.INTENTS_NAME)


@pytest.fixture(scope="module")
def refusing(kubeconfig: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Path of the kubeconfig of a cluster on which the operator runs; its log may speak of refusals."""
    folder = tmp_path_factory.mktemp("operator")
    with replica(install(kubeconfig, folder), folder / "operator.log", "--binding", "NodeAffinity"):
        yield kubeconfig


def policy(stage: Stage, resource: str, group: str, operation: str, expression: str, sentence: str) -> list[Manifest]:
    """A ValidatingAdmissionPolicy for the story's namespace, and its binding."""
    name = stage.name(f"no-{resource.replace('/', '-')}")
    kind = {"apiVersion": "admissionregistration.k8s.io/v1"}
    rule = {"apiGroups": [group], "apiVersions": ["*"], "operations": [operation], "resources": [resource]}
    here = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": stage.namespace}}}
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [rule], **here},
        "validations": [{"expression": expression, "message": sentence}],
    }
    bound = {"policyName": name, "validationActions": ["Deny"]}
    return [
        {**kind, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": name}, "spec": spec},
        {**kind, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": name}, "spec": bound},
    ]


async def lift(stage: Stage, manifests: list[Manifest]) -> None:
    """Take a policy away."""
    for manifest in manifests:
        await stage.kubectl("delete", manifest["kind"].lower(), manifest["metadata"]["name"])


@pytest.mark.slow
def test_pods_that_a_quota_refuses_are_explained_and_their_nodes_go_to_others(refusing: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("a", devices=2)
        await stage.queue()
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "one-pod"}}
        await stage.apply({**quota, "spec": {"hard": {"pods": "1"}}})
        await stage.job("refused", 2, failurePolicy={"backoff": {"initialSeconds": 2, "maxSeconds": 4}})
        sentence = await stage.until_waits("refused", "CreateRefused", "exceeded quota: one-pod")
        assert "403" in sentence

        async def given_back() -> bool:
            return await stage.running() != {"refused"} and len(await stage.pods("refused")) <= 1

        await stage.until(given_back, "nodes are given back between tries")
        await stage.kubectl("delete", "resourcequota", "one-pod")
        status = await stage.until_trains("refused")
        causes = {record["cause"] for record in status["restartRecords"]}
        assert causes == {"CreateRefused"}

    play(refusing, story)


@pytest.mark.slow
def test_objects_that_a_quota_refuses_are_reported_until_they_are_created(refusing: str) -> None:
    """A RoleBinding to a Role that does not exist is refused otherwise than by the quota."""

    async def story(stage: Stage) -> None:
        await stage.node("a", devices=2)
        await stage.queue()
        head = {"apiVersion": "v1", "kind": "ResourceQuota"}
        quotas = {"services": {"services": "0"}, "roles": {"count/roles.rbac.authorization.k8s.io": "0"}}
        await stage.apply(*({**head, "metadata": {"name": name}, "spec": {"hard": quotas[name]}} for name in quotas))

        async def counted() -> bool:
            found = json.loads(await stage.kubectl("get", "resourcequota", "-o", "json"))["items"]
            return all((quota.get("status") or {}).get("used") for quota in found)

        await stage.until(counted, "the quotas are in force")
        stage.hollow.order("refused").joins = False
        await stage.job("refused", 2)

        def refused(kind: str, quota: str) -> Callable[[Manifest], bool]:
            words = (f"refuses the job's {kind},", f"exceeded quota: {quota}")
            return lambda status: all(word in condition_of(status, "PodsReady")[2] for word in words)

        await stage.until_job("refused", refused("Service", "services"), "its Service is refused")
        await stage.until_job("refused", refused("Role", "roles"), "its Role is refused")
        assert len(await stage.pods("refused")) == 2

        async def told() -> bool:
            events = json.loads(await stage.kubectl("get", "events", "-o", "json"))["items"]
            return any((event["reason"], event["type"]) == ("CreateRefused", "Warning") for event in events)

        await stage.until(told, "an event says so")
        stage.hollow.order("refused").joins = True
        await stage.kubectl("delete", "resourcequota", "roles")
        await stage.until_job("refused", lambda status: not refused("Role", "roles")(status), "its Role is created")
        assert refused("Service", "services")(await stage.status("refused"))
        await stage.kubectl("delete", "resourcequota", "services")
        joined = ("True", "Joined", "")
        status = await stage.until_job("refused", lambda status: condition_of(status, "PodsReady") == joined, "joined")
        assert status["attempt"]["number"] == 1
        uid = (await stage.cluster.get(stage.ref("refused")))["metadata"]["uid"]
        for kind in CHILDREN:
            await stage.cluster.get(
                ObjectRef(kind=kind, namespace=stage.namespace, name=labels.job_object_name("refused", uid))
            )

    play(refusing, story)


@pytest.mark.slow
def test_a_refused_status_write_does_not_block_other_jobs(refusing: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("a", devices=2)
        await stage.queue(stopPolicy="Hold")
        await stage.job("refused")
        await stage.until_waits("refused", "QueueStopped")
        sentence = "this job's status is nobody's to write"
        policies = policy(
            stage,
            f"{labels.PLURAL_JOB}/status",
            labels.GROUP,
            "UPDATE",
            "object.metadata.name != 'refused' || !has(object.status.attempt)",
            sentence,
        )
        await stage.apply(*policies)
        begun = {"status": {"attempt": {"number": 1, "planHash": "x", "replicas": 1, "devices": 1}}}
        probe = ("patch", "tj", "refused", "--subresource=status", "--type=merge", "--dry-run=server")

        async def holds() -> bool:
            try:
                await stage.kubectl(*probe, "-p", json.dumps(begun))
            except AssertionError as error:
                return sentence in str(error)
            return False

        try:
            await stage.until(holds, "the API server knows the policy")
            await stage.change_queue("q", stopPolicy="None")

            async def told() -> bool:
                events = json.loads(await stage.kubectl("get", "events", "-o", "json"))["items"]
                return any(event["reason"] == "StatusRefused" and sentence in event["message"] for event in events)

            await stage.until(told, "an event says that the status is refused")
            await stage.job("other")
            await stage.until_trains("other")
            # Each retry takes the condition away for a moment.
            degraded = ("True", "StatusRefused")
            await stage.until_job("refused", lambda status: condition_of(status, "Degraded")[:2] == degraded, "says so")
        finally:
            await lift(stage, policies)
        await stage.until_trains("refused")

    play(refusing, story)


@pytest.mark.slow
def test_deleted_intents_and_children_are_created_again(refusing: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("a", devices=3)
        await stage.queue()
        await stage.job("first", 2)
        status = await stage.until_trains("first")
        await stage.delete(INTENTS)
        await stage.job("second")
        await stage.until_trains("second")
        assert (await stage.cluster.get(INTENTS))["metadata"]["name"] == INTENTS.name
        assert (await stage.status("first"))["attempt"] == status["attempt"]

        name = labels.job_object_name("first", (await stage.cluster.get(stage.ref("first")))["metadata"]["uid"])
        refs = [ObjectRef(kind=kind, namespace=stage.namespace, name=name) for kind in CHILDREN]
        before = {ref: (await stage.cluster.get(ref))["metadata"]["uid"] for ref in refs}
        for ref in refs:
            await stage.delete(ref)
        await stage.delete(ObjectRef.of((await stage.pods("first"))[1]), grace_s=0)

        async def back() -> bool:
            try:
                now = {ref: (await stage.cluster.get(ref))["metadata"]["uid"] for ref in refs}
            except NotFoundError:
                return False
            return not set(now.values()) & set(before.values())

        await stage.until(back, "every object is there again")

        async def trains() -> bool:
            status = await stage.status("first")
            return condition_of(status, "Running")[0] == "True" and status["attempt"]["scope"] == "RestartPod"

        await stage.until(trains, "the new pod has the same key as the one that stayed")

    play(refusing, story)
