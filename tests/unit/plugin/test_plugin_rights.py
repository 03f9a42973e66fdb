"""What `kubectl polyreme` reads for a user who may not read everything, who acts, and whether an operator works."""

from __future__ import annotations

import asyncio
import getpass
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from polyreme.plugin.identity import who_acts
from polyreme.plugin.main import COMMANDS
from polyreme.plugin.operator_lease import SILENT_S, doubt_of, doubts_of, silence
from polyreme.plugin.reading import NotAllowedError, Sight, list_all, look, read_job
from polyreme_api.errors import NotFoundError
from polyreme_api.labels import KIND_JOB
from polyreme_api.times import rfc3339
from polyreme_cluster.forwarding_port import Call, ForwardingPort
from polyreme_cluster.port import ForbiddenError, Manifest
from polyreme_cluster.port import NotFoundError as PortNotFoundError
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from tests.unit.plugin.plugin_scenes import NOW_S, condition, job, node, runs, snapshot

_Answer = TypeVar("_Answer")
LEASE = ("Lease", "polyreme-system")
ANYWHERE: tuple[str | None, ...] = (None, "team", "other", "polyreme-system")


class Limited(ForwardingPort):
    """A cluster whose user may list only some kinds, in some namespaces."""

    def __init__(self, *allowed: tuple[str, str | None]) -> None:
        numbers = iter(range(1_000))
        self.store = Store(new_uid=lambda: f"{next(numbers):08x}", now_s=lambda: NOW_S)
        super().__init__(EmbeddedCluster(self.store))
        self.allowed = set(allowed)
        self.calls: list[tuple[str, str | None]] = []

    async def list(self, kind: str, *, namespace: str | None = None, **options: Any) -> Any:
        self.calls.append((kind, namespace))
        self._check(kind, namespace)
        return await super().list(kind, namespace=namespace, **options)

    async def _forward(self, call: Call, act: Callable[[], Awaitable[_Answer]]) -> _Answer:
        if call.verb == "get":
            self._check(call.ref.kind, call.ref.namespace)
        return await act()

    def _check(self, kind: str, namespace: str | None) -> None:
        if (kind, namespace) not in self.allowed:
            raise ForbiddenError(f"list of {kind} refused: 403 Forbidden")

    def add(self, manifest: Manifest) -> None:
        self.store.create(manifest)


def stage(*allowed: tuple[str, str | None]) -> Limited:
    cluster = Limited(*allowed)
    for name, namespace in (("big", "team"), ("far", "other")):
        manifest = job(name)
        cluster.add({**manifest, "metadata": {"name": name, "namespace": namespace}, "status": {}})
    cluster.add({"apiVersion": "v1", "kind": "Node", **node("n0"), "metadata": {"name": "n0"}})
    return cluster


def seen_by(cluster: Limited, **options: Any) -> Sight:
    wanted = dict.fromkeys((KIND_JOB, "TrainingQueue", "Node"))
    return asyncio.run(look(cluster, wanted, now_s=NOW_S, **options))


def test_the_page_says_of_every_verb_who_may_use_it() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/kubectl-plugin.md").read_text()
    named = re.findall(r"^\| `(\w+)` (?:\| (?:yes|partly|no) ){5}\|$", page, re.MULTILINE)
    # A console shows what the other verbs show, each part with the rights of that verb.
    assert sorted(named) == sorted(command.name for command in COMMANDS if command.name != "console")


def test_kinds_that_may_not_be_listed_are_left_out_and_named() -> None:
    sight = seen_by(stage((KIND_JOB, "team")), home="team")
    assert [each.name for each in sight.seen.jobs] == ["big"]
    assert sight.left_out("its place is not shown", KIND_JOB, "TrainingQueue", "Node") == [
        "its place is not shown: you may not list nodes and trainingqueues, and trainingjobs in all namespaces"
    ]
    assert sight.left_out("nodes are not shown", "Node") == ["nodes are not shown: you may not list nodes"]
    whole = seen_by(stage(*((kind, None) for kind in (KIND_JOB, "TrainingQueue", "Node"))), home="team")
    assert [each.name for each in whole.seen.jobs] == ["far", "big"]
    assert whole.hidden == ()
    assert whole.left_out("anything", KIND_JOB) == []


def test_what_a_command_needs_is_refused_with_the_role_that_allows_it() -> None:
    for needed, words in (
        (KIND_JOB, "trainingjobs in all namespaces; ask for one namespace, or the ClusterRole polyreme-viewer"),
        ("Node", "you may not list nodes; ask for the ClusterRole polyreme-cluster-viewer"),
    ):
        with pytest.raises(NotAllowedError, match=words):
            seen_by(stage((KIND_JOB, "team")), home="team", needed=(needed,))
    with pytest.raises(NotAllowedError, match="pods in namespace other; ask for another namespace, or"):
        asyncio.run(list_all(stage(), "Pod", namespace="other"))


def test_one_job_is_read_by_its_name_and_asks_for_no_list() -> None:
    cluster = stage((KIND_JOB, "team"))
    assert asyncio.run(read_job(cluster, "team", "big"))["metadata"]["name"] == "big"
    assert cluster.calls == []
    with pytest.raises(NotFoundError, match="no job 'bag' in namespace 'team': did you mean 'big'"):
        asyncio.run(read_job(cluster, "team", "bag"))


def lease(renewed_s: float) -> Manifest:
    spec = {"holderIdentity": "a", "renewTime": rfc3339(renewed_s), "leaseDurationSeconds": 15}
    metadata = {"name": "polyreme-operator", "namespace": "polyreme-system"}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


async def at_once(seconds: float) -> None:
    assert seconds > 0


async def test_an_operator_works_while_its_lease_is_renewed_whatever_the_clocks_say() -> None:
    cluster = stage(LEASE)
    assert await silence(cluster, NOW_S, sleep=at_once) == "no Lease polyreme-operator in namespace polyreme-system"
    cluster.add(lease(NOW_S - SILENT_S + 1))
    assert await silence(cluster, NOW_S, sleep=at_once) == ""
    late_s = NOW_S + SILENT_S
    why = await silence(cluster, late_s, sleep=at_once)
    assert why == "Lease polyreme-operator in namespace polyreme-system was renewed 1 min 59 s ago"

    async def renewed(_: float) -> None:
        ref = {"kind": "Lease", "metadata": lease(0)["metadata"]}
        patch = {"spec": {"renewTime": rfc3339(NOW_S - 1)}}
        await EmbeddedCluster(cluster.store).patch(_ref(ref), patch)

    assert await silence(cluster, late_s, sleep=renewed) == "", "its clock is behind ours"
    assert await silence(stage(), NOW_S, sleep=at_once) is None


def _ref(manifest: Manifest) -> Any:
    from polyreme_cluster.port import ObjectRef

    return ObjectRef.of(manifest)


GONE = "no Lease polyreme-operator in namespace polyreme-system"


@pytest.mark.parametrize(
    ("status", "why", "words"),
    [
        ({}, GONE, f"no operator has looked at this job: is one installed? ({GONE})"),
        ({}, None, "is one installed? (you may not get the Lease polyreme-operator in namespace polyreme-system)"),
        ({}, "", ""),
        (runs("n0") | {"observedGeneration": 1}, GONE, f"no operator works now, so this state may be old ({GONE})"),
        (runs("n0") | {"observedGeneration": 1}, None, ""),
        ({"conditions": [condition("Succeeded", "Completed")]}, GONE, ""),
    ],
)
def test_a_job_is_doubted_when_no_operator_looks_at_it(status: Manifest, why: str | None, words: str) -> None:
    (view,) = snapshot(job("big", status=status)).jobs
    said = doubt_of(view, why, NOW_S)
    assert words in said
    assert bool(said) is bool(words)
    assert bool(doubts_of([view], why, NOW_S)) is bool(words)


def test_the_actor_is_the_api_servers_user_or_a_marked_local_name() -> None:
    class Reviewing(Limited):
        username = "jo@example.com"

        async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
            assert manifest["kind"] == "SelfSubjectReview"
            if not self.username:
                raise PortNotFoundError("404")
            return {**manifest, "status": {"userInfo": {"username": self.username}}}

    cluster = Reviewing()
    assert asyncio.run(who_acts(cluster)) == "jo@example.com"
    cluster.username = "x" * 300
    assert len(asyncio.run(who_acts(cluster))) == 246, "a record holds so much of it"
    cluster.username = ""
    assert asyncio.run(who_acts(cluster)) == f"{getpass.getuser()} (unverified)"
