"""The installed operator when its connections, its API server or its leader go: nothing is lost, nothing doubled."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyreme_api import labels
from polyreme_api.times import parse_rfc3339
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.election import LEASE_NAME, LEASE_S
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef
from tests.cluster.kube import api_client, kubectl, new_namespace, until
from tests.cluster.operators import (
    NAMESPACE,
    PATIENCE_S,
    POLL_S,
    Replica,
    gang,
    install,
    nodes,
    pods_of,
    replica,
    until_bound,
)
from tests.cluster.outages import OwnCluster, line_to, own_cluster
from tests.cluster.stage import Stage, condition_of, play

WORKERS = 60
LEASE = ObjectRef(kind="Lease", namespace=NAMESPACE, name=LEASE_NAME)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnCluster]:
    """A cluster that no other test uses."""
    with own_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def test_an_operator_without_its_namespace_names_it_and_leads_once_it_is_there(own: OwnCluster, tmp_path: Path) -> None:
    log = tmp_path / "operator.log"
    with replica(Path(own.kubeconfig), log, "--namespace", "not-yet") as started:
        until(lambda: "kubectl create namespace not-yet" in started.said(), "the word of the missing namespace")
        assert "leading" not in started.said()
        kubectl(own.kubeconfig, "create", "namespace", "not-yet")
        until(lambda: "leading as" in started.said(), "a leader")


@pytest.mark.slow
@pytest.mark.parametrize("forgets", [False, True], ids=["the history is kept", "the history is gone"])
def test_what_happens_while_every_watch_is_broken_is_found_when_they_are_back(
    own: OwnCluster, tmp_path: Path, forgets: bool
) -> None:
    log = tmp_path / "operator.log"
    account = install(own.kubeconfig, tmp_path)
    with line_to(account) as line, replica(account, log, "--log-level", "debug"):

        async def story(stage: Stage) -> None:
            await stage.node("n", devices=7)
            await stage.queue(nominal=6)
            for name in ("keeps", "hurt", "goes"):
                await stage.job(name, 2)
                await stage.until_trains(name)
            await stage.job("waits", 2)
            await stage.until_waits("waits", "ExceedsQuota")
            before = {name: _places(await stage.pods(name)) for name in ("keeps", "hurt")}
            line.cut()
            await stage.delete(ObjectRef.of((await stage.pods("hurt"))[1]), grace_s=0)
            await stage.end("goes")
            await stage.job("goes", 1)
            await stage.change_queue("q", quotas=[{"resource": stage.resource, "nominal": 7}])
            if forgets:
                await asyncio.to_thread(own.forget_history)
            line.mend()
            status = await stage.until_trains("hurt", attempt=2)
            assert [record["cause"] for record in status["restartRecords"]] == ["PodLost"]
            for name in ("waits", "goes"):
                status = await stage.until_trains(name)
                assert (status["attempt"]["number"], status.get("restarts", 0)) == (1, 0)
            assert (await stage.status("keeps"))["attempt"]["number"] == 1
            after = {name: _places(await stage.pods(name)) for name in ("keeps", "hurt", "waits", "goes")}
            assert after["keeps"] == before["keeps"]
            assert (after["hurt"]["0"], list(after["hurt"])) == (before["hurt"]["0"], ["0", "1"])
            assert after["hurt"]["1"] != before["hurt"]["1"]
            assert [len(after[name]) for name in ("waits", "goes")] == [2, 1]
            assert len(await pods_of(stage.cluster, stage.namespace)) == 7

        play(own.kubeconfig, story)
    said = log.read_text()
    # kopf tells of every request that it sends again as of an error.
    wrong = [line for line in said.splitlines() if '"level": "error"' in line and "will retry" not in line]
    assert not wrong, wrong[:3]
    if forgets:
        assert all(f"listing {kind} again" in said for kind in ("Pod", "Node"))


def _places(pods: list[Manifest]) -> dict[str, str]:
    """Return the UID of the one pod of each place."""
    found: dict[str, str] = {}
    for pod in pods:
        index = pod["metadata"]["labels"][labels.LABEL_INDEX]
        assert index not in found, f"two pods of place {index}"
        found[index] = pod["metadata"]["uid"]
    return found


@pytest.mark.slow
def test_an_api_server_that_dies_in_the_middle_of_a_launch_loses_and_doubles_nothing(
    own: OwnCluster, tmp_path: Path
) -> None:
    async def story(namespace: str) -> None:
        async with (
            KubernetesCluster(from_kubeconfig(own.kubeconfig)) as cluster,
            nodes(cluster, namespace, 20, devices=3) as resource,
        ):
            patient = {"nodeLostSeconds": 3600, "startTimeoutSeconds": 3600}
            await cluster.create(gang("large", namespace, resource, WORKERS, health=patient))
            async with asyncio.timeout(PATIENCE_S):
                while not await pods_of(cluster, namespace):
                    await asyncio.sleep(0.01)
            command = await asyncio.to_thread(own.kill_api_server)
            await asyncio.to_thread(own.start_api_server, command)
            await until_bound(cluster, namespace, WORKERS)
            ref = ObjectRef(kind=labels.KIND_JOB, namespace=namespace, name="large")
            async with asyncio.timeout(PATIENCE_S):
                while condition_of((await cluster.get(ref)).get("status") or {}, "Running")[0] != "True":
                    await asyncio.sleep(POLL_S)
            places = Counter(
                tuple(pod["metadata"]["labels"][tag] for tag in (labels.LABEL_INDEX, labels.LABEL_REPLACEMENT))
                for pod in await pods_of(cluster, namespace)
            )
            assert places == {(str(index), "0"): 1 for index in range(WORKERS)}
            status = (await cluster.get(ref))["status"]
            assert (status["attempt"]["number"], status.get("restarts", 0)) == (1, 0)

    account = install(own.kubeconfig, tmp_path)
    with replica(account, tmp_path / "operator.log"), api_client(own.kubeconfig) as api, new_namespace(api) as name:
        asyncio.run(story(name))


async def test_a_leader_that_is_asked_to_end_gives_the_lease_back_and_the_other_replica_takes_it(
    kubeconfig: str, tmp_path: Path
) -> None:
    async with KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster:
        account = install(kubeconfig, tmp_path)
        replicas = [Replica(account, tmp_path / f"replica-{at}.log") for at in range(2)]
        try:
            leader, before = await _leader(cluster, replicas)
            (other,) = (each for each in replicas if each is not leader)
            # From the version at which it leads: what it writes as it ends is surely after it.
            listed = await cluster.list("Lease", namespace=NAMESPACE, limit=1)
            watching = asyncio.ensure_future(_until_taken(cluster, before, since=listed.resource_version))
            assert await asyncio.to_thread(leader.stop) == 0, leader.said()
            released, taken = await asyncio.wait_for(watching, PATIENCE_S)
            # The Lease was seen to be released: it did not run out.
            assert released["leaseTransitions"] == before["leaseTransitions"]
            assert taken["leaseTransitions"] == before["leaseTransitions"] + 1
            words = f"leading as {taken['holderIdentity']}"
            await asyncio.to_thread(until, lambda: words in other.log.read_text(), "the other says that it leads")
            waited_s = parse_rfc3339(taken["acquireTime"]) - parse_rfc3339(released["renewTime"])
            assert waited_s < LEASE_S, "a released Lease is taken before it would expire"
        finally:
            for process in replicas:
                if process.runs:
                    process.stop()


async def _leader(cluster: KubernetesCluster, replicas: list[Replica]) -> tuple[Replica, Manifest]:
    """Wait until one leads, and return it and what the Lease says."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            # On a new cluster there is no Lease before the first replica makes it.
            with contextlib.suppress(StopIteration, NotFoundError):
                spec: Manifest = (await cluster.get(LEASE))["spec"]
                words = f"leading as {spec.get('holderIdentity') or 'nobody'}"
                return next(each for each in replicas if words in each.log.read_text()), spec
            await asyncio.sleep(POLL_S)


async def _until_taken(cluster: KubernetesCluster, before: Manifest, *, since: str) -> tuple[Manifest, Manifest]:
    """Follow the Lease until another has it; return its content when it was released, and when it was taken."""
    released: list[Manifest] = []
    async for event in cluster.watch("Lease", resource_version=since, namespace=NAMESPACE):
        spec: Manifest = event.object.get("spec") or {}
        if event.type == "BOOKMARK" or event.object["metadata"]["name"] != LEASE_NAME:
            continue
        holder = spec.get("holderIdentity") or ""
        if not holder:
            released.append(spec)
        elif holder != before["holderIdentity"]:
            assert released, "another took the Lease before it was given back"
            return released[0], spec
    raise AssertionError("the watch ended")
