"""What becomes of gangs: containers of one's own, lost nodes, pods taken away, namespaces that go; what is shown."""

import json
import re
from collections import Counter
from typing import Any

from polyreme_api import labels
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef
from tests.cluster.operators import until_empty
from tests.cluster.stage import Stage, condition_of, places, play

OWN = {"runtime": {"mode": "Environment"}}
OWNED_KINDS = ("Pod", "Lease", "Secret", "Service", "Role", "RoleBinding")


def variables(pod: Manifest) -> dict[str, str]:
    """Return what a worker's container reads of its environment."""
    return {entry["name"]: entry.get("value", "") for entry in pod["spec"]["containers"][0]["env"]}


async def end_pod(stage: Stage, pod: Manifest, *, code: int) -> None:
    """Have a pod's container end, as a kubelet would say."""
    phase = "Succeeded" if code == 0 else "Failed"
    ended = {"name": "main", "ready": False, "restartCount": 0, "image": "none", "imageID": "none"}
    ended |= {"state": {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}}}
    status = {"phase": phase, "containerStatuses": [ended]}
    await stage.change(ObjectRef.of(pod), {"status": status}, subresource="status")


def test_a_container_of_ones_own_gets_the_contract_and_its_end_is_the_jobs(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=4)
        await stage.queue()
        await stage.job("torch", 2, workers={**OWN, "devices": 2})
        await stage.until_trains("torch")
        pods = await stage.pods("torch")
        for index, pod in enumerate(pods):
            said = variables(pod)
            assert (said["WORLD_SIZE"], said["RANK"], said["PET_NNODES"], said["PET_NODE_RANK"]) == (
                "4",
                str(2 * index),
                "2",
                str(index),
            )
            assert said["PET_MASTER_ADDR"].endswith(f".{stage.namespace}.svc")
        await end_pod(stage, pods[0], code=0)

        async def runs() -> bool:
            return condition_of(await stage.status("torch"), "Succeeded")[0] != "True"

        await stage.stays(runs, "one of two pods is not the job")
        await end_pod(stage, pods[1], code=0)
        status = await stage.until_job("torch", lambda seen: condition_of(seen, "Succeeded")[0] == "True", "succeeds")
        assert condition_of(status, "Succeeded")[1:] == ("Completed", "every pod succeeded")
        assert status["attempt"]["number"] == 1

    play(operated, story)


def test_one_failed_container_restarts_the_whole_gang(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=2)
        await stage.queue()
        await stage.job("torch", 2, workers=OWN)
        await stage.until_trains("torch")
        pods = await stage.pods("torch")
        await end_pod(stage, pods[1], code=17)
        status = await stage.until_trains("torch", attempt=2)
        assert (status["restarts"], status["attempt"]["scope"]) == (1, "RestartGang")
        record = status["restartRecords"][0]
        assert (record["cause"], record["index"]) == ("PodFailed", 1)
        assert "exit code 17" in record["message"]
        after = await stage.pods("torch")
        assert not {pod["metadata"]["uid"] for pod in after} & {pod["metadata"]["uid"] for pod in pods}
        assert {variables(pod)["POLYREME_ATTEMPT"] for pod in after} == {"2"}

    play(operated, story)


def test_no_binding_is_sent_before_the_role_that_it_names(operated: str) -> None:
    jobs = 12

    async def story(stage: Stage) -> None:
        await stage.node("n", devices=jobs)
        await stage.queue(stopPolicy="Hold")
        before = await _answers(stage)
        for at in range(jobs):
            await stage.job(f"j{at}")
        await stage.change_queue("q", stopPolicy="None")
        for at in range(jobs):
            await stage.until_trains(f"j{at}")
        after = await _answers(stage)
        assert after - before == Counter({("roles", "201"): jobs, ("rolebindings", "201"): jobs})

    play(operated, story)


async def _answers(stage: Stage) -> Counter[tuple[str, str]]:
    """Count what the API server has answered so far to those who create Roles and RoleBindings."""
    text = await stage.kubectl("get", "--raw", "/metrics")
    found: Counter[tuple[str, str]] = Counter()
    for line in text.splitlines():
        if line.startswith("apiserver_request_total{") and 'verb="POST"' in line:
            tags = dict(re.findall(r'(\w+)="([^"]*)"', line))
            if tags["resource"] in {"roles", "rolebindings"}:
                found[tags["resource"], tags["code"]] += int(float(line.rsplit(" ", 1)[1]))
    return found


def test_a_lost_nodes_workers_go_elsewhere_and_the_others_stay(operated: str) -> None:
    async def story(stage: Stage) -> None:
        for word in ("a", "b", "c"):
            await stage.node(word)
        await stage.queue()
        await stage.job("runs", 2, health={"nodeLostSeconds": 1})
        await stage.until_trains("runs")
        lost, kept = places(await stage.status("runs"))
        await stage.delete(ObjectRef(kind="Node", name=lost))
        status = await stage.until_trains("runs", attempt=2)
        assert places(status)[1] == kept
        assert places(status)[0] not in {lost, kept}
        assert [record["cause"] for record in status["restartRecords"]] == ["NodeLost"]

    play(operated, story)


def test_a_node_that_is_not_ready_loses_its_workers_and_gets_new_ones_when_it_is_back(operated: str) -> None:
    async def story(stage: Stage) -> None:
        for word in ("a", "b", "c"):
            await stage.node(word)
        await stage.queue()
        await stage.job("runs", 2, health={"nodeLostSeconds": 1})
        await stage.until_trains("runs")
        lost, kept = places(await stage.status("runs"))
        before = {pod["spec"]["nodeName"]: pod["metadata"]["uid"] for pod in await stage.pods("runs")}
        await stage.silence(lost)
        status = await stage.until_trains("runs", attempt=2)
        assert places(status)[1] == kept
        assert places(status)[0] not in {lost, kept}
        assert [record["cause"] for record in status["restartRecords"]] == ["NodeLost"]
        after = {pod["spec"]["nodeName"]: pod["metadata"]["uid"] for pod in await stage.pods("runs")}
        assert after[kept] == before[kept]
        await stage.job("more")
        await stage.until_waits("more", "WaitingForCapacity", "1 node is out of service")
        await stage.wake(lost)
        await stage.until_trains("more")
        assert places(await stage.status("more")) == [lost]
        assert (await stage.status("runs"))["attempt"]["number"] == 2

    play(operated, story)


def test_a_node_that_is_back_in_time_costs_nothing(operated: str) -> None:
    async def story(stage: Stage) -> None:
        for word in ("a", "b"):
            await stage.node(word)
        await stage.queue()
        await stage.job("runs", 1, health={"nodeLostSeconds": 3600})
        await stage.until_trains("runs")
        (node,) = places(await stage.status("runs"))
        await stage.silence(node)

        async def runs() -> bool:
            return bool((await stage.status("runs"))["attempt"]["number"] == 1)

        await stage.stays(runs, "the attempt goes on")
        await stage.wake(node)
        await stage.stays(runs, "the attempt goes on")
        assert (await stage.condition("runs", "Running"))[0] == "True"

    play(operated, story)


def test_a_taint_that_sends_pods_away_sends_them_elsewhere(operated: str) -> None:
    async def story(stage: Stage) -> None:
        for word in ("a", "b", "c"):
            await stage.node(word)
        await stage.queue()
        await stage.job("runs", 2)
        await stage.until_trains("runs")
        left, kept = places(await stage.status("runs"))
        await stage.kubectl("taint", "node", left, "example.com/broken=yes:NoExecute")
        status = await stage.until_trains("runs", attempt=2)
        assert places(status)[1] == kept
        assert places(status)[0] not in {left, kept}
        # At once: no pod was sent to where no pod may go.
        assert [record["cause"] for record in status["restartRecords"]] in (["Evicted"], ["PodLost"])
        assert not [pod for pod in await stage.pods("runs") if pod["spec"].get("nodeName") == left]

    play(operated, story)


def test_without_another_node_the_gang_gives_back_what_it_has_and_waits(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("a")
        await stage.node("b")
        await stage.queue()
        await stage.job("runs", 2, health={"nodeLostSeconds": 1})
        await stage.until_trains("runs")
        lost = places(await stage.status("runs"))[0]
        await stage.delete(ObjectRef(kind="Node", name=lost))
        await stage.until_waits("runs", "WaitingForCapacity", "needs 2 devices; room for 1")

        async def none() -> bool:
            return not await stage.pods("runs")

        await stage.until(none, "no gang is half released")
        await stage.node("c")
        await stage.until_trains("runs", attempt=2)

    play(operated, story)


def test_a_pod_that_another_takes_away_is_replaced(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=2)
        await stage.queue()
        await stage.job("runs", 2)
        await stage.until_trains("runs")
        first, second = await stage.pods("runs")
        await stage.delete(ObjectRef.of(second), grace_s=0)
        status = await stage.until_trains("runs", attempt=2)
        assert status["attempt"]["scope"] == "RestartPod"
        after = await stage.pods("runs")
        assert after[0]["metadata"]["uid"] == first["metadata"]["uid"]
        assert after[1]["metadata"]["uid"] != second["metadata"]["uid"]

    play(operated, story)


def test_a_drained_node_lets_its_workers_go_elsewhere(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("a")
        await stage.node("b")
        await stage.queue()
        await stage.job("runs", 1)
        await stage.until_trains("runs")
        (node,) = places(await stage.status("runs"))
        drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=40s")
        await stage.kubectl(*drain)
        status = await stage.until_trains("runs", attempt=2)
        assert places(status) != [node]
        # KWOK ends a pod at once, so that the mark of the eviction may be gone before anybody reads it.
        assert [record["cause"] for record in status["restartRecords"]] in (["Evicted"], ["PodLost"])

    play(operated, story)


def test_printer_columns_show_ready_and_reason_and_events_are_emitted(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=12)
        await stage.queue()
        await stage.job("large", 12)
        await stage.until_trains("large")
        await stage.job("waits", 2)
        await stage.until_waits("waits", "WaitingForCapacity")
        rows = {line.split()[0]: line.split() for line in (await stage.kubectl("get", "tj")).splitlines()}
        heads = rows["NAME"]
        large, waits = rows["large"], rows["waits"]
        assert large[heads.index("QUEUE")] == stage.name("q")
        assert large[heads.index("READY")] == "12/12"
        assert "Training" in large
        assert "WaitingForCapacity" in waits

        async def events() -> list[dict[str, Any]]:
            items = json.loads(await stage.kubectl("get", "events", "-o", "json"))["items"]
            return [event for event in items if event["involvedObject"].get("name") == "large"]

        async def is_told() -> bool:
            return bool(await events())

        await stage.until(is_told, "large has an event")
        (told,) = await events()
        assert (told["reason"], told["type"], told["message"]) == ("Admitted", "Normal", "12 workers on 1 node")

    play(operated, story)


def test_a_deleted_namespace_leaves_nothing_and_frees_the_quota(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=2)
        await stage.queue(nominal=2)
        other = stage.name("gone")
        await stage.kubectl("create", "namespace", other)
        job = await stage.job("there", 2, namespace=other)
        ref = ObjectRef.of(job)

        async def admitted() -> bool:
            status = (await stage.cluster.get(ref)).get("status") or {}
            return condition_of(status, "PodsReady")[1] != "" and len(await _pods(stage, other)) == 2

        await stage.until(admitted, "it has its pods")
        await stage.job("here", 2)
        await stage.until_waits("here", "ExceedsQuota")
        await stage.kubectl("delete", "namespace", other, "--wait=false")
        await stage.until_trains("here")
        await until_empty(stage.cluster, other, OWNED_KINDS)
        await until_empty(stage.cluster, other, (labels.KIND_JOB,))

    play(operated, story)


async def _pods(stage: Stage, namespace: str) -> list[Manifest]:
    return list((await stage.cluster.list("Pod", namespace=namespace)).items)


def test_a_finished_job_frees_its_room_and_is_removed_in_its_time(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=1)
        await stage.queue()
        await stage.job("done", workers=OWN, ttlSecondsAfterFinished=2)
        await stage.until_trains("done")
        await stage.job("next")
        (pod,) = await stage.pods("done")
        await end_pod(stage, pod, code=0)
        await stage.until_trains("next")

        async def gone() -> bool:
            try:
                await stage.status("done")
            except NotFoundError:
                return True
            return False

        await stage.until(gone, "it is removed")

    play(operated, story)
