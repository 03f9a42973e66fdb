"""A pod of one job changes no other job: by the rights of its token, or, with a shared account, by signatures."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef
from tests.cluster.accounts import FORBIDDEN, Account, paths
from tests.cluster.operators import NAMESPACE, install, replica
from tests.cluster.stage import Stage, condition_of, play

FORGED = 8
"""How often a forged record is written; a leader writes its own five times a second."""
SUCCESS = {"phase": "Done", "outcome": "Succeeded", "step": 100_000}
FAILURE = {"exits": [{"rank": 0, "signal": 9}]}
SHARED = {"serviceAccountName": "shared"}


@dataclass(frozen=True, slots=True)
class Operated:
    """A cluster with an operator, whose metrics are read."""

    kubeconfig: str
    log: Path

    def refused(self) -> dict[str, float]:
        """Return how many records the operator has refused, by fault."""
        port = next(json.loads(line)["port"] for line in self.log.read_text().splitlines() if '"port"' in line)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
        found = re.findall(r'polyreme_progress_records_refused_total\{fault="(\w+)"\} (\S+)', text)
        return {fault: float(count) for fault, count in found}


@pytest.fixture(scope="module")
def operated(kubeconfig: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    folder = tmp_path_factory.mktemp("operator")
    log = folder / "operator.log"
    with replica(install(kubeconfig, folder), log, "--binding", "NodeAffinity"):
        yield Operated(kubeconfig, log)


async def leader_of(stage: Stage, job: str) -> Manifest:
    return (await stage.pods(job))[0]


async def lease_of(stage: Stage, job: str) -> ObjectRef:
    uid = (await stage.cluster.get(stage.ref(job)))["metadata"]["uid"]
    return ObjectRef(kind="Lease", namespace=stage.namespace, name=labels.job_object_name(job, uid))


async def account_of(operated: Operated, stage: Stage, job: str) -> Account:
    """The account of a job's pods, by a token that is bound to its leader's pod."""
    pod = await leader_of(stage, job)
    return Account(operated.kubeconfig, stage.namespace, pod["spec"]["serviceAccountName"], pod=pod)


@pytest.mark.slow
def test_a_leaders_token_reads_its_job_and_patches_its_lease_and_nothing_else(operated: Operated) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=3)
        await stage.queue()
        for name in ("one", "other"):
            await stage.job(name)
            await stage.until_trains(name)
        await stage.kubectl("create", "serviceaccount", "nobody")
        nobody = Account(operated.kubeconfig, stage.namespace, "nobody")
        account = await account_of(operated, stage, "one")
        own, others = (await lease_of(stage, "one")).name, (await lease_of(stage, "other")).name
        job = {(verb, f"{labels.GROUP}/{labels.PLURAL_JOB}", "one") for verb in ("get", "list", "watch")}
        lease = {(verb, "coordination.k8s.io/leases", own) for verb in ("get", "patch")}
        assert account.rights() - nobody.rights() == job | lease
        for namespace in ("default", NAMESPACE):
            assert account.rights(namespace) == nobody.rights(namespace)

        at, system = paths(stage.namespace), paths(NAMESPACE)
        touch = {"metadata": {"annotations": {"example.com/touched": "x"}}}
        assert account.ask("GET", f"{at['trainingjobs']}/one")[0] == 200
        assert account.ask("PATCH", f"{at['leases']}/{own}", touch)[0] == 200
        success = {"metadata": {"annotations": {labels.ANNOTATION_PROGRESS: json.dumps({"attempt": 1, **SUCCESS})}}}
        tries: list[tuple[str, str, Manifest | None]] = [
            ("PATCH", f"{at['leases']}/{others}", success),
            ("GET", f"{at['leases']}/{others}", None),
            ("DELETE", f"{at['leases']}/{own}", None),
            ("GET", at["leases"], None),
            ("GET", f"{at['trainingjobs']}/other", None),
            ("GET", at["trainingjobs"], None),
            ("PATCH", f"{at['trainingjobs']}/one", touch),
            ("PATCH", f"{at['trainingjobs']}/other", touch),
            ("PATCH", f"{at['trainingjobs']}/other/status", {"status": {"step": 1}}),
            ("DELETE", f"{at['trainingjobs']}/other", None),
            ("GET", at["secrets"], None),
            ("GET", f"{at['secrets']}/{own}", None),
            ("GET", at["pods"], None),
            ("POST", at["pods"], {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {}}),
            ("DELETE", f"{at['pods']}/{(await leader_of(stage, 'other'))['metadata']['name']}", None),
            ("GET", f"{system['secrets']}/{labels.INSTALLATION_KEY_NAME}", None),
            ("GET", f"{system['configmaps']}/{labels.INTENTS_NAME}", None),
            ("PATCH", f"{system['leases']}/polyreme-operator", touch),
            ("GET", "/api/v1/nodes", None),
            ("PATCH", f"/api/v1/nodes/{stage.name('n')}", touch),
            ("GET", "/apis/polyreme.dev/v1alpha1/trainingqueues", None),
        ]
        answers = {f"{verb} {path}": account.ask(verb, path, body)[0] for verb, path, body in tries}
        assert answers == dict.fromkeys(answers, FORBIDDEN)
        assert condition_of(await stage.status("other"), "Running")[0] == "True"

    play(operated.kubeconfig, story)


@pytest.mark.slow
def test_what_a_shared_account_writes_on_another_jobs_lease_changes_nothing_and_is_counted(operated: Operated) -> None:
    async def story(stage: Stage) -> None:
        await stage.kubectl("create", "serviceaccount", "shared")
        await stage.node("n", devices=2)
        await stage.queue()
        for name in ("thief", "victim"):
            await stage.job(name, body=SHARED)
            await stage.until_trains(name)
        thief, lease = await account_of(operated, stage, "thief"), await lease_of(stage, "victim")
        path = f"{paths(stage.namespace)['leases']}/{lease.name}"
        old = (await stage.cluster.get(lease))["metadata"]["annotations"]
        before, refused = await stage.status("victim"), operated.refused()

        async def write(metadata: Manifest) -> None:
            for _ in range(FORGED):
                status, answer = await asyncio.to_thread(thief.ask, "PATCH", path, {"metadata": metadata})
                assert status == 200, answer
                await asyncio.sleep(0.1)

        said = json.loads(old[labels.ANNOTATION_PROGRESS])
        for forged in (SUCCESS, FAILURE):
            text = json.dumps({**said, **forged, "sequence": said["sequence"] + 10_000})
            await write({"annotations": {labels.ANNOTATION_PROGRESS: text}})
            await write({"annotations": {labels.ANNOTATION_PROGRESS: text, labels.ANNOTATION_SIGNATURE: None}})
        await write({"annotations": {name: old[name] for name in old if name.startswith(labels.ANNOTATION_PROGRESS)}})
        await write({"annotations": None, "ownerReferences": None, "labels": None})

        async def unchanged() -> bool:
            now = await stage.status("victim")
            return bool(now["attempt"] == before["attempt"] and condition_of(now, "Running")[0] == "True")

        await stage.stays(unchanged, "the job trains on as before")
        assert (await stage.status("victim")).get("restartRecords") is None
        more = {fault: count - refused.get(fault, 0.0) for fault, count in operated.refused().items()}
        assert {fault for fault, count in more.items() if count >= 1} == {"Unsigned", "Forged", "Replayed"}

        async def told() -> bool:
            events = json.loads(await stage.kubectl("get", "events", "-o", "json"))["items"]
            found = [event["message"] for event in events if event["reason"] == "RecordRefused"]
            return len(found) == 3 and all("another account wrote" in message for message in found)

        await stage.until(told, "one event of each fault")
        stage.hollow.order("victim").succeeds = True
        done = await stage.until_job("victim", lambda seen: condition_of(seen, "Succeeded")[0] == "True", "succeeds")
        assert done["attempt"]["number"] == before["attempt"]["number"], done["restartRecords"]

    play(operated.kubeconfig, story)
