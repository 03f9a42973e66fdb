"""Rules for what nodes, queues and domains hold, checked whenever an attempt begins and whenever a pod runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from polyreme_api import labels
from polyreme_cluster.port import Manifest, WatchEventType
from polyreme_local.api_server.record import Change
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.domains import Domains
from polyreme_simulator.leaders import LeaderFacts
from polyreme_simulator.nodes import devices_of, opted_in_only, takes_pods
from polyreme_simulator.observed_state import ObservedState
from polyreme_simulator.ownership import owner_uid
from polyreme_simulator.quotas import Queues

BLIND_S = 60.0
"""How stale the operator's view may be when its write lands, while faults last and shortly after."""
SETTLED_S = 45.0
"""Time after the last fault from which on the operator's view is current."""
KNOWN_S = 3.0
"""How stale its view may be then."""
ENDED = frozenset({"Succeeded", "Failed"})


class CapacityFacts:
    """The devices that jobs and other pods hold.

    Args:
        observed: What the store's log showed; a broken rule is noted there.
        leaders: Which replica leads, and since when.
    """

    def __init__(self, observed: ObservedState, *, leaders: LeaderFacts) -> None:
        self._observed = observed
        self._leaders = leaders
        self._deleted_s: dict[str, float] = {}
        """When each job was deleted, by UID."""
        self.queues = Queues({})
        self._past: list[tuple[float, Queues, Domains]] = []
        """Queues and domains of the past, with the time until which they applied."""
        self.domains = Domains({}, [])
        self._usable: frozenset[str] = frozenset()
        """Nodes to which new pods may go."""
        self.opted_in_only: frozenset[str] = frozenset()
        """Nodes that only jobs with ``acceptProbation`` use."""
        self._usable_past: list[tuple[float, frozenset[str]]] = []
        """The same until when."""
        self.foreign: dict[str, tuple[str, int, float]] = {}
        """Node, devices and time of binding of pods that are none of ours, by UID."""
        self._foreign_past: list[tuple[float, str, int]] = []
        """Until when such pods were there, where, and with how many devices."""
        self._running: dict[str, tuple[str, str, int]] = {}
        """Job, node and devices of our pods that run, by UID."""
        self._ended: list[tuple[float, str, str, int]] = []
        """Until when others of them ran, with the same."""
        self._strays: set[str] = set()
        """Pods, by UID, whose creation landed after the end of the admission under which it was sent."""
        self.changed_s = 0.0
        """When last something changed that decides who waits, and why."""

    def changed(self, change: Change, world: ClusterView) -> None:
        """Take a change of the store."""
        deleted, record = change.type is WatchEventType.DELETED, change.record
        match record.kind:
            case "Pod" if owner_uid(record.manifest):
                self._note_stray(change, world)
                self._note_end(record.uid, record.manifest, deleted, world)
                if not deleted:
                    self._pod_changed(record.manifest, world)
            case "Pod":
                self._foreign_changed(record.uid, record.manifest, deleted, world)
            case "TrainingJob" if deleted:
                self._deleted_s[record.uid] = world.time_s()
            case "TrainingQueue":
                specs = {name: spec for name, spec in self.queues.specs.items() if name != record.name}
                if not deleted:
                    specs[record.name] = record.manifest["spec"]
                if specs != self.queues.specs:
                    self._keep(world)
                    self.queues = Queues(specs)
            case "Node" | "ClusterTopology":
                domains = self.domains.after(record.kind, record.manifest, deleted=deleted)
                if domains != self.domains:
                    self._keep(world)
                    self.domains = domains
                if record.kind == "Node":
                    self._node_changed(record.name, usable=not deleted and takes_pods(record.manifest), world=world)
                    self._probation_changed(record.name, not deleted and opted_in_only(record.manifest), world)
            case _:
                pass

    def begun(self, uid: str, world: ClusterView, *, takes: bool) -> None:
        """Check an attempt that begins; what it takes only if the last one did not have all its places.

        Quotas are lowered, nodes relabelled and filled beneath what runs, and what runs may be restarted where it is.
        """
        on_node, in_queue = self._held()
        self._check_nodes(on_node, world)
        if takes:
            self._check_queues(uid, in_queue, world)
            self._check_domains(uid, world)
            self._check_foreign(uid, on_node, world)

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
        if not self.queues.in_order(queue) or self.queues.held(queue):
            return False
        if not self.queues.admits({}, queue, labels.RESOURCE_DEVICE, wanted * devices):
            return False
        taken = Counter[str]()
        for node, count, _ in self.foreign.values():
            taken[node] += count
        slots = {
            node.name: (node.devices - taken[node.name]) // devices
            for node in world.nodes.values()
            if node.present and node.up and world.usable(node.name) and self.domains.labelled(node.name)
        }
        return self.domains.holds(spec.get("topology") or {}, slots, wanted)

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
        job, since_s = self._observed.jobs[uid], self.known_since_s(world)
        topology, workers = job["spec"].get("topology") or {}, job["spec"]["workers"]
        taken = self.held_by_node(without={uid, *without})
        busy = {node for node, count in taken.items() if count}
        for node, count, _ in self.foreign.values():
            taken[node] += count
        usable_before = [names for until_s, names in self._usable_past if until_s >= since_s]
        if views is all:
            for until_s, node, count in self._foreign_past:
                taken[node] += count if until_s >= since_s else 0
            for until_s, of, node, count in self._ended:
                taken[node] += count if until_s >= since_s and of not in {uid, *without} else 0
            closed = frozenset[str]() if job["spec"].get("acceptProbation") else self.opted_in_only
            usable = self._usable.intersection(*usable_before) - closed
        else:
            usable = self._usable.union(*usable_before)
        devices, least = workers.get("devices", 1), workers.get("minReplicas") or workers["replicas"]
        rooms = {name: (world.nodes[name].devices - taken[name]) // devices for name in sorted(usable)}
        holds = []
        for _, domains in self.possible(world):
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
            for other, job in self._observed.jobs.items()
            if other not in {uid, *without} and self._observed.true(other, "Admitted")
            for level in [(job["spec"].get("topology") or {}).get("exclusive")]
            if level is not None
            for node in self.nodes_of(other)
        }

    # -------------------------------------------------------------------------------------------------------- changes

    def _keep(self, world: ClusterView) -> None:
        """Remember the queues and domains of until now."""
        now_s = world.time_s()
        self._past = [entry for entry in self._past if now_s - entry[0] < BLIND_S]
        if now_s > 0.0:
            # While the cluster is made there is no operator yet. Later ones see of many changes at once each by itself.
            self._past.append((now_s, self.queues, self.domains))
        self.changed_s = now_s

    def _node_changed(self, name: str, *, usable: bool, world: ClusterView) -> None:
        names = self._usable | {name} if usable else self._usable - {name}
        if names != self._usable:
            now_s = world.time_s()
            self._usable_past = [entry for entry in self._usable_past if now_s - entry[0] < BLIND_S]
            if now_s > 0.0:
                self._usable_past.append((now_s, self._usable))
            self._usable, self.changed_s = names, now_s

    def _probation_changed(self, name: str, only: bool, world: ClusterView) -> None:
        names = self.opted_in_only | {name} if only else self.opted_in_only - {name}
        if names != self.opted_in_only:
            self.opted_in_only, self.changed_s = names, world.time_s()

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
        elif change.type is WatchEventType.ADDED and self.blind(world):
            job = record.manifest["metadata"]["labels"][labels.LABEL_JOB_UID]
            if job not in self._observed.jobs or not self._observed.true(job, "Admitted"):
                self._strays.add(record.uid)

    def _foreign_changed(self, uid: str, pod: Manifest, deleted: bool, world: ClusterView) -> None:
        node = pod["spec"].get("nodeName")
        if deleted or not node or (pod.get("status") or {}).get("phase") in ENDED:
            gone = self.foreign.pop(uid, None)
            if gone is not None:
                self.changed_s = now_s = world.time_s()
                self._foreign_past = [entry for entry in self._foreign_past if now_s - entry[0] < BLIND_S]
                self._foreign_past.append((now_s, gone[0], gone[1]))
        elif uid not in self.foreign:
            self.foreign[uid] = (node, devices_of(pod), world.time_s())
            self.changed_s = world.time_s()

    # --------------------------------------------------------------------------------------------------------- checks

    def _held(self, *, without: Collection[str] = (), aside: Collection[str] = ()) -> tuple[Counter[str], Counter[str]]:
        """Return the devices that admitted placements and pods that run hold, by node and by queue.

        A node holds each place once. A queue is charged for each worker once, also while its old pod leaves a node.

        Args:
            without: Jobs that do not count.
            aside: Pods that do not count.
        """
        places: dict[tuple[str, int, str], tuple[int, str]] = {}
        for uid, job in self._observed.jobs.items():
            if uid in without or not self._observed.true(uid, "Admitted"):
                continue
            fact = self._observed.attempts[uid, job["status"]["attempt"]["number"]]
            queue = job["spec"].get("queueName", "default")
            for index, node in enumerate(fact.nodes):
                places[uid, index, node] = (fact.devices, queue)
        for pod in self._observed.pods.values():
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
        return self._deleted_s.get(uid, float("inf")) > self._leaders.rules_since_s

    def _check_nodes(self, on_node: Counter[str], world: ClusterView) -> None:
        for name, taken in on_node.items():
            node = world.nodes[name]
            if node.present and taken > node.devices:
                self._observed.broke("nodes hold what they can", f"{name} has {taken} of {node.devices}", world)

    def _check_queues(self, uid: str, in_queue: Counter[str], world: ClusterView) -> None:
        """Check against the quotas that the decision may have seen: one of them must allow it."""
        queue = self._observed.jobs[uid]["spec"].get("queueName", "default")
        before = self.held_by_queue(without={uid})
        problem: str | None = None
        for queues, _ in self.possible(world):
            problem = queues.excess(in_queue, queue, before, labels.RESOURCE_DEVICE)
            if problem is None:
                return
        self._observed.broke("queues keep their quota", problem or "", world)

    def _check_domains(self, uid: str, world: ClusterView) -> None:
        job = self._observed.jobs[uid]
        topology = job["spec"].get("topology") or {}
        nodes = self.nodes_of(uid)
        name, possible = job["metadata"]["name"], [domains for _, domains in self.possible(world)]
        if not any(domains.keeps(topology, nodes) for domains in possible):
            self._observed.broke("what topology requires is kept", f"{name} on {nodes}: {topology}", world)
        for other in self._observed.jobs:
            if other == uid or not self._observed.true(other, "Admitted"):
                continue
            wish = self._observed.jobs[other]["spec"].get("topology") or {}
            theirs = self.nodes_of(other)
            if not any(domains.apart(topology, nodes, wish, theirs) for domains in possible):
                what = f"{name} on {nodes} beside {self._observed.jobs[other]['metadata']['name']} on {theirs}"
                self._observed.broke("exclusive domains are not shared", what, world)

    def _check_foreign(self, uid: str, on_node: Counter[str], world: ClusterView) -> None:
        """Once the faults are over, no gang is put where others' pods have been for a while."""
        now_s = world.time_s()
        if self.blind(world):
            return
        taken = on_node.copy()
        for node, devices, since_s in self.foreign.values():
            taken[node] += devices if now_s - since_s > KNOWN_S else 0
        for node in set(self.nodes_of(uid)):
            if world.nodes[node].present and taken[node] > world.nodes[node].devices:
                what = f"{node} has {taken[node]} of {world.nodes[node].devices}"
                self._observed.broke("others' pods count", what, world)

    def nodes_of(self, uid: str) -> list[str]:
        """Return the node of each worker of a job's newest attempt."""
        attempt = (self._observed.jobs[uid].get("status") or {}).get("attempt") or {}
        return self._observed.attempts[uid, attempt["number"]].nodes if attempt else []

    def blind(self, world: ClusterView) -> bool:
        """Tell whether faults last, or ended so lately that what the operator knows may be old."""
        return world.faulty or world.time_s() - world.calm_since_s < SETTLED_S

    def possible(self, world: ClusterView) -> list[tuple[Queues, Domains]]:
        """Return the queues and domains that the operator's decision may rest on."""
        since_s = self.known_since_s(world)
        past = [(queues, domains) for until_s, queues, domains in self._past if until_s >= since_s]
        return [(self.queues, self.domains), *past]

    def known_since_s(self, world: ClusterView) -> float:
        """Return the time since which what the operator knows may not have changed."""
        return world.time_s() - (BLIND_S if self.blind(world) else KNOWN_S)
