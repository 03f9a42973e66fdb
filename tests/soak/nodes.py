"""``make soak-nodes``: jobs on real nodes in the production profile, with everything killed at random, again and again.

``ROUNDS=`` rounds, 10 by default, each with every kind of disturbance in an order that ``SEED=`` draws; as root, on
nodes of its own. A job that ends before it has met all of a round leaves the others to the next job. The losses of each
must be those of an undisturbed one, bit for bit. Workers run the trainer's
whole image, which takes ten minutes to build the first time.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.nodes.agents import agents, lose_gpu, repair, values_with_agents
from tests.nodes.broken_nodes import REQUEST_M, rejecting, starting_nothing
from tests.nodes.cluster import Cluster, cluster_for_tests
from tests.nodes.forgery import forge
from tests.nodes.release import DEVICES, SYSTEM, Job, Release, created, is_true, job, kill_rank, prepare, state
from tests.nodes.rights import FORBIDDEN, PRODUCTION, REFUSED, UNUSED, given, has_statuses, read_metrics, seen
from tests.nodes.servers import Outside, outside
from tests.nodes.story import EVERY_STEPS, STEPS, in_production, losses_of_embedded, records_of, write_job
from tools.cluster.binaries import program_path
from tools.cluster.servers import ServerError

ROUNDS = 10
TTL_S = 60
"""How long a finished job stays: long enough to be seen."""
START_TIMEOUT_S = 60
BAR = {
    "resumed_identical": 1,
    "zombie_commits": 0,
    "forgeries_believed": 0,
    "upgrade_restarts": 0,
    "rbac_unused": 0,
    "rbac_refused": 0,
}


class Disturbances:
    """Everything that happens to a job while it trains.

    Args:
        cluster: Where.
        release: Of the chart.
        servers: Outside of the cluster.
        rng: Draws victims.
    """

    def __init__(self, cluster: Cluster, release: Release, servers: Outside, rng: random.Random) -> None:
        self._cluster, self._release, self._servers, self._rng = cluster, release, servers, rng
        self.done, self.upgrades, self.upgrades_seen, self.upgrade_restarts = 0, 0, 0, 0
        self.forgeries, self.forgeries_believed = 0, 0
        self.left, self.left_remembered = 0, 0
        """Nodes that failed pods, and those that the job remembers for it."""
        self.kinds: dict[str, Callable[[Job], None]] = {
            "rank": self.rank,
            "pod": self.pod,
            "kubelet": self.kubelet,
            "kubelet that rejects": self.rejecting_kubelet,
            "runtime that starts nothing": self.hung_runtime,
            "operator": lambda _: self.pods_of("polyreme-operator"),
            "datahub": lambda _: self.pods_of("polyreme-datahub"),
            "broker": lambda _: servers.kill_broker(),
            "control plane": lambda _: cluster.restart_control_plane(),
            "forged Lease": self.forged_lease,
            "upgrade": self.upgrade,
        }

    def rank(self, training: Job) -> None:
        """Kill a rank inside its container."""
        at = self._rng.randrange(2 * DEVICES)
        kill_rank(self._cluster, training.pods[at // DEVICES], at)

    def pod(self, training: Job) -> None:
        """Delete a pod of the job, without grace."""
        name = self._rng.choice(training.pods)["metadata"]["name"]
        self._cluster.kubectl("--namespace", "default", "delete", "pod", name, "--force", "--grace-period=0")

    def kubelet(self, training: Job) -> None:
        """Kill a node's kubelet and freeze its containers; they wake up after the job trains elsewhere."""
        cluster, lost = self._cluster, self._with_room_elsewhere(training)
        before = training.status["attempt"]["number"]
        cluster.kill_kubelet(lost)
        cluster.freeze(lost, True)
        try:
            self._until_trains_elsewhere(training, before)
        finally:
            cluster.freeze(lost, False)
            cluster.start_kubelet(lost)

    def rejecting_kubelet(self, training: Job) -> None:
        """Have a node's kubelet reject the pods of the job; they cost no budget and train elsewhere."""
        node = self._with_room_elsewhere(training)
        before = training.status["attempt"]["number"]
        with rejecting(self._cluster, node, training.name):
            self._delete_pod_on(node, training)
            self._until_trains_elsewhere(training, before)
        self._note_failed(training, node, "PodRejected")

    def hung_runtime(self, training: Job) -> None:
        """Have a node start no pod; the worker trains elsewhere after its start has timed out."""
        node = self._with_room_elsewhere(training)
        before = training.status["attempt"]["number"]
        with starting_nothing(self._cluster, node):
            self._delete_pod_on(node, training)
            self._until_trains_elsewhere(training, before)
        self._note_failed(training, node, "StartTimedOut")

    def _with_room_elsewhere(self, training: Job) -> str:
        """Draw a node of the job, and have room for all of its workers on each node."""
        for node in self._cluster.get("nodes")["items"]:
            self._cluster.offer(node["metadata"]["name"], 2 * DEVICES)
        return str(self._rng.choice(training.pods)["spec"]["nodeName"])

    def _delete_pod_on(self, node: str, training: Job) -> None:
        for pod in training.pods:
            if pod["spec"].get("nodeName") == node:
                words = ("--namespace", "default", "delete", "pod", pod["metadata"]["name"], "--force")
                self._cluster.kubectl(*words, "--grace-period=0", "--ignore-not-found")

    def _until_trains_elsewhere(self, training: Job, before: int) -> None:
        # So late in its training it may succeed before anyone looks, elsewhere or as the node is lost.
        training.until(
            lambda status: (
                is_true(status, "Succeeded") or (is_true(status, "Running") and status["attempt"]["number"] > before)
            ),
            "it trains elsewhere",
        )

    def _note_failed(self, training: Job, node: str, cause: str) -> None:
        """Count nodes that the job left, and those that it remembers for it."""
        self.left += 1
        failed = training.status.get("failedNodes") or ()
        self.left_remembered += any((each["node"], each["cause"]) == (node, cause) for each in failed)

    def forged_lease(self, training: Job) -> None:
        """Have the leader's container write on Leases what no leader said; it may not touch those of others."""
        before = training.status["attempt"]
        answers = forge(self._cluster, training)
        self.forgeries += len(answers.own) + len(answers.others)
        self.forgeries_believed += sum(status != FORBIDDEN for status in answers.others)
        after = training.until(lambda status: is_true(status, "Running") or is_true(status, "Succeeded"), "it trains")
        # Its last step comes seldom so soon; then it has trained as many as it was to.
        wrong = after["attempt"]["number"] != before["number"] or after["step"] > STEPS
        self.forgeries_believed += int(wrong)

    def pods_of(self, component: str) -> None:
        """Delete every pod of a component, without grace."""
        words = ("--namespace", SYSTEM, "delete", "pods", "-l", f"app.kubernetes.io/name={component}")
        self._cluster.kubectl(*words, "--force", "--grace-period=0")

    def upgrade(self, training: Job) -> None:
        """Roll out other pods of operator and datahub; the job's own must not notice."""
        before = state(self._cluster, training)
        self.upgrades += 1
        self._release.install(wanted(self._cluster, self._servers, {"round": str(self.upgrades)}))
        try:
            after = state(self._cluster, training)
        except ServerError:
            # Pods of a job that has succeeded meanwhile say no more which ranks they had.
            if not is_true(training.status, "Succeeded"):
                raise
            return
        self.upgrade_restarts += int(after != before)
        self.upgrades_seen += 1


def wanted(cluster: Cluster, servers: Outside, annotations: Mapping[str, str]) -> dict[str, Any]:
    """Values of the release, with agents."""
    found = values_with_agents(cluster, servers)
    for part in (found["operator"], found["datahub"]["controller"]):
        part["podAnnotations"] = dict(annotations)
    return found


def main() -> int:
    """Run; 0 when every bar is held."""
    rounds, seed = int(os.environ.get("ROUNDS") or ROUNDS), int(os.environ.get("SEED") or 1)
    began_s, rng = time.monotonic(), random.Random(seed)
    jobs, identical, zombies = 0, 0, 0
    with (
        tempfile.TemporaryDirectory(prefix="polyreme-soak-", dir=os.environ.get("TMPDIR") or "/var/tmp") as name,
        pytest.MonkeyPatch.context() as patch,
        prepared_cluster() as cluster,
        outside(cluster, Path(name, "servers")) as servers,
        in_production(cluster, servers) as release,
    ):
        folder = Path(name)
        embedded = folder / "embedded"
        embedded.mkdir()
        losses = losses_of_embedded(embedded)
        disturbances = Disturbances(cluster, release, servers, rng)
        with agents(cluster, release, servers) as hosts:
            with created(cluster, job(cluster, write_job("faulty", folder), whole=True)) as training:
                faulty = lose_gpu(cluster, hosts, training)
            repair(cluster, hosts, faulty)
            for number in range(rounds):
                order = rng.sample(sorted(disturbances.kinds), len(disturbances.kinds))
                print(f"round {number + 1}: {', '.join(order)}", file=sys.stderr, flush=True)
                for part in range(len(order)):
                    called = f"round-{number}-{part}"
                    records = one_job(cluster, servers, called, order, disturbances, folder, patch)
                    jobs += 1
                    identical += int({each.step: each.loss.hex() for each in records.history} == losses)
                    zombies += sum(not entry.committed for entry in records.checkpoints if entry.history)
                    zombies += len(records.history) - len({each.step for each in records.history})
                    if not order:
                        break
            has_statuses(cluster)
            read_metrics(cluster)
            rights = {
                str(right)
                for right in given(program_path("helm", os.environ), [{**PRODUCTION, "agent": {"enabled": True}}])
            }
        assert cluster.folder is not None
        used, refused = ({*map(str, found)} for found in seen(cluster.folder))
        for right in sorted(refused - REFUSED.keys()):
            print(f"refused: {right}", file=sys.stderr, flush=True)
    figures = {
        "rounds": rounds,
        "seed": seed,
        "jobs": jobs,
        "disturbances": disturbances.done,
        "upgrades": disturbances.upgrades,
        "forgeries": disturbances.forgeries,
        "forgeries_believed": disturbances.forgeries_believed,
        "nodes_left": disturbances.left,
        "nodes_left_remembered": disturbances.left_remembered,
        "upgrades_seen": disturbances.upgrades_seen,
        "resumed_identical": round(identical / jobs, 3),
        "zombie_commits": zombies,
        "upgrade_restarts": disturbances.upgrade_restarts,
        "rbac_unused": len(rights - used - UNUSED.keys()),
        "rbac_refused": len(refused - REFUSED.keys()),
        "wall_s": round(time.monotonic() - began_s),
    }
    ok = all(figures[name] == value for name, value in BAR.items())
    sys.stdout.write(json.dumps({"name": "soak-nodes", "figures": figures, "bar": BAR, "ok": ok}) + "\n")
    return 0 if ok else 1


@contextlib.contextmanager
def prepared_cluster() -> Iterator[Cluster]:
    """The cluster, with our images and what pods mount."""
    with cluster_for_tests() as cluster:
        prepare(cluster, whole=["trainer"])
        yield cluster


def one_job(
    cluster: Cluster,
    servers: Outside,
    name: str,
    order: list[str],
    disturbances: Disturbances,
    folder: Path,
    patch: pytest.MonkeyPatch,
) -> Any:
    """Train one job, with what is left of a round happening to it, and return its records.

    Args:
        cluster: Where.
        servers: Outside of the cluster.
        name: Of the job.
        order: Kinds of disturbances; those that it met are taken out.
        disturbances: What they do.
        folder: For its file.
        patch: For the environment of what reads its records.
    """
    for node in cluster.get("nodes")["items"]:
        cluster.offer(node["metadata"]["name"], DEVICES)
    manifest = job(cluster, write_job(name, folder, failurePolicy={"maxRestarts": 50, "noProgressMax": 20}), whole=True)
    # The first round ends the probation of the node that was repaired.
    manifest["spec"] |= {"ttlSecondsAfterFinished": TTL_S, "acceptProbation": True}
    manifest["spec"].setdefault("health", {})["startTimeoutSeconds"] = START_TIMEOUT_S
    container = {"name": "trainer", "resources": {"requests": {"cpu": f"{REQUEST_M}m"}}}
    manifest["spec"]["workers"]["template"] = {"spec": {"containers": [container]}}
    with created(cluster, manifest) as training:
        while order:
            status = training.until(
                lambda status: is_true(status, "Running") or is_true(status, "Succeeded"), "it trains"
            )
            step = status.get("step", 0)
            if step >= STEPS - EVERY_STEPS:
                break
            training.until(lambda status, step=step: status.get("step", 0) > step, f"a step before {order[0]}")
            disturbances.kinds[order[0]](training)
            disturbances.done += 1
            print(f"{name}: {order.pop(0)}", file=sys.stderr, flush=True)
        training.until_succeeded()
        words = ("--namespace", "default", "get", "trainingjobs", "--output=name")
        cluster.until(lambda: name not in cluster.kubectl(*words), "the job is deleted after its time")
    return records_of(servers, name, patch)


if __name__ == "__main__":
    raise SystemExit(main())
