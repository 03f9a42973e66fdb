"""Rules for what nodes, queues and domains hold, checked whenever an attempt begins and whenever a pod runs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from polyreme_api import labels
from polyreme_cluster.port import Manifest, WatchEventType
from polyreme_local.api_server.record import Change
from polyreme_simulator.cluster_history import BLIND_S, KNOWN_S, ClusterHistory
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.domains import Domains
from polyreme_simulator.leaders import LeaderFacts
from polyreme_simulator.nodes import devices_of
from polyreme_simulator.observed_state import ObservedState
from polyreme_simulator.ownership import owner_uid


@dataclasses.dataclass(slots=True, eq=False)
class CapacityFacts:
    """The devices that jobs and other pods hold."""

    observed: ObservedState
    leaders: LeaderFacts
    history: ClusterHistory
    _deleted_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """When each job was deleted, by UID."""
    _running: dict[str, tuple[str, str, int]] = dataclasses.field(default_factory=dict)
    """Job, node and devices of our pods that run, by UID."""
    _ended: list[tuple[float, str, str, int]] = dataclasses.field(default_factory=list)
    """Until when others of them ran, with the same."""
    _strays: set[str] = dataclasses.field(default_factory=set)
    """Pods, by UID, whose creation landed after the end of the admission under which it was sent."""

    def changed(self, change: Change, world: ClusterView) -> None:
        """Take a change of a pod of ours or of a job."""
        deleted, record = change.type is WatchEventType.DELETED, change.record
        if record.kind == "Pod" and owner_uid(record.manifest):
            self._note_stray(change, world)
            self._note_end(record.uid, record.manifest, deleted, world)
            if not deleted:
                self._pod_changed(record.manifest, world)
        elif record.kind == "TrainingJob" and deleted:
            self._deleted_s[record.uid] = world.time_s()

    def begun(self, uid: str, world: ClusterView, *, taken: Collection[str]) -> None:
        """Check an attempt that begins; its places only if the last one did not have them all.

        Quotas are lowered, nodes relabelled and filled beneath what runs, and what runs may be restarted where it is.

        ``taken`` has the nodes of workers that the last attempt did not have there.
        """
        on_node, in_queue = self._held()
        self._check_nodes(on_node, world)
        if taken:
            self._check_queues(uid, in_queue, world)
            self._check_domains(uid, world)
            self._check_foreign(taken, on_node, world)

    def held_by_queue(self, *, without: Collection[str] = ()) -> Counter[str]:
        """Return the devices that each queue's jobs hold, some of them aside."""
        return self._held(without=without)[1]

    def held_by_node(self, *, without: Collection[str] = ()) -> Counter[str]:
        """Return the devices of each node that our jobs hold, some of them aside."""
        return self._held(without=without)[0]

    def fits_alone(self, job: Manifest, world: ClusterView) -> bool:
        """Tell whether a job would fit the cluster and its quota if no other job were admitted."""
        spec = job["spec"]
        workers, queue = spec["workers"], spec.get("queueName", "default")
        devices, wanted = workers.get("devices", 1), workers.get("minReplicas") or workers["replicas"]
        if not self.history.queues.in_order(queue) or self.history.queues.held(queue):
            return False
        if not self.history.queues.admits({}, queue, labels.RESOURCE_DEVICE, wanted * devices):
            return False
        taken = Counter[str]()
        for node, count, _ in self.history.foreign.values():
            taken[node] += count
        slots = {
            node.name: (node.devices - taken[node.name]) // devices
            for node in world.nodes.values()
            if node.present and node.up and world.usable(node.name) and self.history.domains.labelled(node.name)
        }
        return self.history.domains.holds(spec.get("topology") or {}, slots, wanted)

    def has_room(
        self, uid: str, *, without: Collection[str], views: Callable[[Iterable[bool]], bool], world: ClusterView
    ) -> bool:
        """Tell whether a job's least size has room, were some jobs not there.

        Args:
            uid: The job.
            without: Those that are not there.
            views: Whether by all that may be known of nodes and pods, or by any. Pods that ended a moment ago may be
                known to run.
            world: The cluster.
        """
        job, since_s = self.observed.jobs[uid], self.history.known_since_s(world)
        topology, workers = job["spec"].get("topology") or {}, job["spec"]["workers"]
        taken = self.held_by_node(without={uid, *without})
        busy = {node for node, count in taken.items() if count}
        for node, count, _ in self.history.foreign.values():
            taken[node] += count
        if views is all:
            for node, count in self.history.foreign_lately(world):
                taken[node] += count
            for until_s, of, node, count in self._ended:
                taken[node] += count if until_s >= since_s and of not in {uid, *without} else 0
            closed = frozenset[str]() if job["spec"].get("acceptProbation") else self.history.opted_in_only
            usable = self.history.usable_always(world) - closed
        else:
            usable = self.history.usable_ever(world)
        devices, least = workers.get("devices", 1), workers.get("minReplicas") or workers["replicas"]
        rooms = {name: (world.nodes[name].devices - taken[name]) // devices for name in sorted(usable)}
        holds = []
        for _, domains in self.history.possible(world):
            shut = self._shut_domains(uid, domains, without=without)
            if level := topology.get("exclusive"):
                shut |= {(level, domains.domain(level, node)) for node in busy}
            slots = {
                name: room
                for name, room in rooms.items()
                if domains.labelled(name) and not any(domains.domain(at, name) == domain for at, domain in shut)
            }
            holds.append(domains.holds(topology, slots, least))
        return views(holds)

    def _shut_domains(self, uid: str, domains: Domains, *, without: Collection[str]) -> set[tuple[str, str | None]]:
        """Return level and domain of what running jobs have for themselves."""
        return {
            (level, domains.domain(level, node))
            for other, job in self.observed.jobs.items()
            if other not in {uid, *without} and self.observed.true(other, "Admitted")
            for level in [(job["spec"].get("topology") or {}).get("exclusive")]
            if level is not None
            for node in self.nodes_of(other)
        }

    # -------------------------------------------------------------------------------------------------------- changes

    def _pod_changed(self, pod: Manifest, world: ClusterView) -> None:
        if pod["spec"].get("nodeName") and (pod.get("status") or {}).get("phase") == "Running":
            self._check_nodes(self._held(aside=self._strays)[0], world)

    def _note_end(self, uid: str, pod: Manifest, deleted: bool, world: ClusterView) -> None:
        """Remember for a while that a pod of ours ran until now."""
        if not deleted and (pod.get("status") or {}).get("phase") == "Running":
            self._running[uid] = (
                pod["metadata"]["labels"][labels.LABEL_JOB_UID],
                pod["spec"]["nodeName"],
                devices_of(pod),
            )
        elif (ran := self._running.pop(uid, None)) is not None:
            now_s = world.time_s()
            self._ended = [entry for entry in self._ended if now_s - entry[0] < BLIND_S]
            self._ended.append((now_s, *ran))

    def _note_stray(self, change: Change, world: ClusterView) -> None:
        """Remember a pod that comes when its job is admitted no longer, or is gone, while writes may be late.

        No operator knows of it before it exists. It holds a place until it is deleted; those to whom the place was
        given meanwhile wait for it, as kube-scheduler and kubelets see to: no node holds more than it can.
        """
        record = change.record
        if change.type is WatchEventType.DELETED:
            self._strays.discard(record.uid)
        elif change.type is WatchEventType.ADDED and self.history.blind(world):
            job = record.manifest["metadata"]["labels"][labels.LABEL_JOB_UID]
            if job not in self.observed.jobs or not self.observed.true(job, "Admitted"):
                self._strays.add(record.uid)

    # --------------------------------------------------------------------------------------------------------- checks

    def _held(self, *, without: Collection[str] = (), aside: Collection[str] = ()) -> tuple[Counter[str], Counter[str]]:
        """Return the devices that admitted placements and pods that run hold, by node and by queue.

        A node holds each place once. A queue is charged for each worker once, also while its old pod leaves a node.

        Args:
            without: Jobs that do not count.
            aside: Pods that do not count.
        """
        places: dict[tuple[str, int, str], tuple[int, str]] = {}
        for uid, job in self.observed.jobs.items():
            if uid in without or not self.observed.true(uid, "Admitted"):
                continue
            fact = self.observed.attempts[uid, job["status"]["attempt"]["number"]]
            queue = job["spec"].get("queueName", "default")
            for index, node in enumerate(fact.nodes):
                places[uid, index, node] = (fact.devices, queue)
        for pod in self.observed.pods.values():
            if (pod.get("status") or {}).get("phase") != "Running" or pod["metadata"]["uid"] in aside:
                continue
            tags = pod["metadata"]["labels"]
            if tags[labels.LABEL_JOB_UID] in without:
                continue
            key = (tags[labels.LABEL_JOB_UID], int(tags[labels.LABEL_INDEX]), pod["spec"]["nodeName"])
            places.setdefault(key, (devices_of(pod), tags[labels.LABEL_QUEUE]))
        on_node: Counter[str] = Counter()
        in_queue: Counter[str] = Counter()
        workers: set[tuple[str, int]] = set()
        for (uid, index, node), (devices, queue) in places.items():
            on_node[node] += devices
            if self._charges_quota(uid) and (uid, index) not in workers:
                workers.add((uid, index))
                in_queue[queue] += devices
        return on_node, in_queue

    def _charges_quota(self, uid: str) -> bool:
        """Tell whether pods of a job take quota.

        Those of a deleted job do while a leader rules that has seen the job. To a later one they are pods that name an
        owner which is not there, as anybody's may: they take room of their node, and of no queue that they name.
        """
        return self._deleted_s.get(uid, float("inf")) > self.leaders.rules_since_s

    def _check_nodes(self, on_node: Counter[str], world: ClusterView) -> None:
        for name, taken in on_node.items():
            node = world.nodes[name]
            if node.present and taken > node.devices:
                self.observed.broke("nodes hold what they can", f"{name} has {taken} of {node.devices}", world)

    def _check_queues(self, uid: str, in_queue: Counter[str], world: ClusterView) -> None:
        """Check against the quotas that the decision may have seen: one of them must allow it."""
        queue = self.observed.jobs[uid]["spec"].get("queueName", "default")
        before = self.held_by_queue(without={uid})
        problem: str | None = None
        for queues, _ in self.history.possible(world):
            problem = queues.excess(in_queue, queue, before, labels.RESOURCE_DEVICE)
            if problem is None:
                return
        self.observed.broke("queues keep their quota", problem or "", world)

    def _check_domains(self, uid: str, world: ClusterView) -> None:
        job = self.observed.jobs[uid]
        topology = job["spec"].get("topology") or {}
        nodes = self.nodes_of(uid)
        name, possible = job["metadata"]["name"], [domains for _, domains in self.history.possible(world)]
        if not any(domains.keeps(topology, nodes) for domains in possible):
            self.observed.broke("what topology requires is kept", f"{name} on {nodes}: {topology}", world)
        for other in self.observed.jobs:
            if other == uid or not self.observed.true(other, "Admitted"):
                continue
            wish = self.observed.jobs[other]["spec"].get("topology") or {}
            theirs = self.nodes_of(other)
            if not any(domains.apart(topology, nodes, wish, theirs) for domains in possible):
                what = f"{name} on {nodes} beside {self.observed.jobs[other]['metadata']['name']} on {theirs}"
                self.observed.broke("exclusive domains are not shared", what, world)

    def _check_foreign(self, nodes: Collection[str], on_node: Counter[str], world: ClusterView) -> None:
        """Once the faults are over, no worker is put where others' pods have been for a while."""
        now_s = world.time_s()
        if self.history.blind(world):
            return
        taken = on_node.copy()
        for node, devices, since_s in self.history.foreign.values():
            taken[node] += devices if now_s - since_s > KNOWN_S else 0
        for node in nodes:
            if world.nodes[node].present and taken[node] > world.nodes[node].devices:
                what = f"{node} has {taken[node]} of {world.nodes[node].devices}"
                self.observed.broke("others' pods count", what, world)

    def nodes_of(self, uid: str) -> list[str]:
        """Return the node of each worker of a job's newest attempt."""
        attempt = (self.observed.jobs[uid].get("status") or {}).get("attempt") or {}
        return self.observed.attempts[uid, attempt["number"]].nodes if attempt else []
