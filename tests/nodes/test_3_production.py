"""The production profile on PostgreSQL, Pulsar and S3: whatever is killed, the losses are those of an embedded run.

One job goes through all tests of this module, in their order.
"""

import json
from collections.abc import Iterator, Mapping

import pytest

from polyreme.plugin.main import invoke
from tests.nodes.cluster import Cluster
from tests.nodes.forgery import forge
from tests.nodes.release import DEVICES, JOBS, SYSTEM, Job, Release, created, inside, is_true, job, kill_rank
from tests.nodes.servers import SECRET_VARIABLES, Outside
from tests.nodes.story import EVERY_STEPS, STEPS, records_of, write_job

NAME = "quickstart"
pytestmark = pytest.mark.slow
ASK = """
import json, ssl, urllib.error, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
context = ssl.create_default_context(cafile=folder + "/ca.crt")
said = {{}}
for call in {calls}:
    method, path = call.split()
    request = urllib.request.Request("https://kubernetes.default.svc" + path, method=method)
    request.add_header("Authorization", "Bearer " + open(folder + "/token").read())
    if method == "PATCH":
        request.data = b"{{}}"
        request.add_header("Content-Type", "application/merge-patch+json")
    try:
        said[call] = urllib.request.urlopen(request, context=context).status
    except urllib.error.HTTPError as error:
        said[call] = error.code
print(json.dumps(said))
"""
"""What a trainer's container does with its token."""


@pytest.fixture(scope="module")
def trained(cluster: Cluster, production: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """The job."""
    manifest = job(cluster, write_job(NAME, tmp_path_factory.mktemp("job")))
    with created(cluster, manifest) as made:
        yield made


def test_a_killed_datahub_worker_and_a_killed_broker_cost_the_data_nothing(
    cluster: Cluster, servers: Outside, trained: Job
) -> None:
    workers = ("--namespace", SYSTEM, "pods", "-l", "app.kubernetes.io/name=polyreme-datahub-workers")
    trained.until(
        lambda status: "DataReady" in {each["type"] for each in status.get("conditions", ())}, "its data is reported"
    )
    (worker,) = cluster.get(*workers)["items"]
    cluster.kubectl(
        *("--namespace", SYSTEM, "delete", "pod", worker["metadata"]["name"], "--force", "--grace-period=0")
    )
    assert not is_true(trained.status, "DataReady"), "killed too late"
    servers.kill_broker()
    trained.until(lambda status: is_true(status, "DataReady"), "its data is ready")
    assert worker["metadata"]["uid"] not in {each["metadata"]["uid"] for each in cluster.get(*workers)["items"]}


def test_a_trainers_token_touches_nothing_but_its_own_job_and_lease(cluster: Cluster, trained: Job) -> None:
    trained.until(lambda status: is_true(status, "Running"), "it trains")
    leader, other = trained.pods
    labels = leader["metadata"]["labels"]
    own = next(volume["secret"]["secretName"] for volume in leader["spec"]["volumes"] if volume["name"] == "polyreme")
    lease, job_path = "coordination.k8s.io/v1/namespaces/default/leases", "polyreme.dev/v1alpha1/namespaces/default"
    expected = {
        f"GET /apis/{lease}/{own}": 200,
        f"PATCH /apis/{lease}/{own}": 200,
        f"GET /apis/{job_path}/trainingjobs/{labels['polyreme.dev/job']}": 200,
        f"GET /apis/{lease}": 403,
        f"GET /apis/{lease}/another": 403,
        f"PATCH /apis/{lease}/another": 403,
        f"DELETE /apis/{lease}/{own}": 403,
        f"PATCH /apis/{job_path}/trainingjobs/{labels['polyreme.dev/job']}": 403,
        f"PATCH /apis/{job_path}/trainingjobs/{labels['polyreme.dev/job']}/status": 403,
        f"GET /apis/{job_path}/trainingjobs": 403,
        f"GET /api/v1/namespaces/default/secrets/{own}": 403,
        "GET /api/v1/namespaces/default/pods": 403,
        "GET /api/v1/nodes": 403,
    }
    said = inside(cluster, leader, ASK.format(calls=list(expected)))
    assert json.loads(said) == expected
    token = "/var/run/secrets/kubernetes.io/serviceaccount/token"
    assert inside(cluster, other, f"import os; print(os.path.exists({token!r}))").strip() == "False"


def test_a_forged_record_ends_no_job_and_is_reported(cluster: Cluster, trained: Job) -> None:
    before = trained.until(lambda status: is_true(status, "Running"), "it trains")
    answers = forge(cluster, trained)
    assert set(answers.own) == {200}
    assert set(answers.others) == {403}
    after = trained.until(lambda status: status["step"] > before["step"], "it continues")
    assert after["attempt"] == before["attempt"]
    assert not is_true(after, "Succeeded")
    words = ("--namespace", JOBS, "events", "--field-selector", "reason=RecordRefused")
    cluster.until(lambda: cluster.get(*words)["items"], "an event reports it")


def test_a_rank_that_is_killed_inside_its_container_comes_back_in_place(cluster: Cluster, trained: Job) -> None:
    trained.until(lambda status: status.get("step", 0) >= 2 * EVERY_STEPS, "it trains")
    before = trained.pods
    assert len({pod["spec"]["nodeName"] for pod in before}) == 2
    kill_rank(cluster, before[1], 2)
    status = trained.until(lambda status: status["attempt"]["number"] == 2, "a second attempt")
    assert status["restartRecords"][-1]["cause"] == "RankKilled"
    trained.until(lambda status: is_true(status, "Running"), "it trains again")
    after = trained.pods
    assert [pod["metadata"]["uid"] for pod in after] == [pod["metadata"]["uid"] for pod in before]
    assert all(each["restartCount"] == 0 for pod in after for each in pod["status"]["containerStatuses"])


def test_a_lost_node_is_replaced_and_what_its_ranks_commit_late_is_no_history(cluster: Cluster, trained: Job) -> None:
    resumed = trained.until(lambda status: is_true(status, "Running"), "it trains")["step"]
    trained.until(lambda status: status["step"] > resumed + EVERY_STEPS, "it goes on")
    lost, kept = (pod["spec"]["nodeName"] for pod in trained.pods)
    # The other node has room for the whole gang from now on.
    cluster.offer(kept, 2 * DEVICES)
    cluster.kill_kubelet(lost)
    cluster.freeze(lost, True)
    try:
        trained.until(lambda status: is_true(status, "Running") and status["attempt"]["number"] > 2, "it trains again")
        alive = [pod for pod in trained.pods if "deletionTimestamp" not in pod["metadata"]]
        assert {pod["spec"]["nodeName"] for pod in alive} == {kept}
    finally:
        # The old ranks continue where they were, perhaps within a commit.
        cluster.freeze(lost, False)
        cluster.start_kubelet(lost)
        cluster.offer(lost, DEVICES)
    status = trained.until_succeeded()
    assert status["step"] == STEPS


def test_the_losses_are_those_of_an_embedded_run(
    trained: Job, servers: Outside, losses: Mapping[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    records = records_of(servers, NAME, monkeypatch)
    assert {record.step: record.loss.hex() for record in records.history} == losses
    assert len(records.history) == len(losses) == STEPS
    assert {record.attempt for record in records.history} >= {1, 2, 3}, "each attempt contributed"
    assert all(entry.committed for entry in records.checkpoints if entry.history)


def test_logs_show_what_ranks_wrote_in_each_attempt_also_of_the_pod_that_is_gone(
    cluster: Cluster,
    servers: Outside,
    trained: Job,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, servers.variables[name])
    # The pod that was never replaced has the lines of all attempts, as kubectl and a log collector read them.
    kept = next(pod for pod in trained.pods if pod["metadata"]["labels"]["polyreme.dev/replacement"] == "0")
    index = int(kept["metadata"]["labels"]["polyreme.dev/index"])
    lines = cluster.kubectl("--namespace", JOBS, "logs", kept["metadata"]["name"]).splitlines()
    for rank in (index * DEVICES, index * DEVICES + 1):
        for attempt in (1, 2, trained.status["attempt"]["number"]):
            assert any(line.startswith(f"[rank {rank} attempt {attempt}] ") for line in lines), (rank, attempt)
    for rank in range(2 * DEVICES):
        words = ("logs", NAME, "--rank", str(rank), "--attempt", "1", "--kubeconfig", str(cluster.kubeconfig))
        assert invoke([*words, "-n", JOBS]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown, rank
        assert all(line.startswith(f"[rank {rank} attempt 1] ") for line in shown)


def test_no_secret_is_found_outside_of_secrets(cluster: Cluster, servers: Outside, trained: Job) -> None:
    assert trained.pods
    hidden = [servers.variables[name] for name in SECRET_VARIABLES]
    shown = {"objects": every_object(cluster), "logs": every_log(cluster)}
    for folder in (servers.folder / "buckets", servers.folder / "s3-attributes"):
        files = [path for path in folder.rglob("*") if path.is_file()]
        shown |= {str(path): path.read_bytes().decode("latin-1") for path in files}
    assert len(shown) > 20
    assert len(shown["logs"]) > 1000
    found = [
        (name, place)
        for name, secret in zip(SECRET_VARIABLES, hidden, strict=True)
        for place in shown
        if secret in shown[place]
    ]
    assert found == []


def every_object(cluster: Cluster) -> str:
    """Every object of every kind but Secrets, and the events."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    assert "secrets" in kinds
    kept = ",".join(kind for kind in kinds if kind != "secrets")
    return cluster.kubectl("get", kept, "--all-namespaces", "-o", "json")


def every_log(cluster: Cluster) -> str:
    """The log of every container, of the one before it too."""
    lines = []
    for namespace in (SYSTEM, JOBS):
        for pod in cluster.get("--namespace", namespace, "pods")["items"]:
            name = pod["metadata"]["name"]
            lines.append(cluster.kubectl("--namespace", namespace, "logs", name, "--all-containers"))
    return "".join(lines)
