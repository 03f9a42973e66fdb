"""`kubectl polyreme incidents` and `incident`, on the embedded cluster."""

from __future__ import annotations

import pytest

from polyreme.plugin import incidents as views
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.incident import IncidentJob, NodeIncidentSpec
from polyreme_api.times import rfc3339
from polyreme_cluster.port import STATUS_SUBRESOURCE, ObjectRef
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.health.incidents import Incident, name_of, with_jobs, with_step

NOW_S = 1_800_000_000.0
DAY_S = 86_400.0


def _incident(node: str, since_s: float, **status: str) -> Incident:
    spec = NodeIncidentSpec(
        node=node,
        hardware="4c4c4544",
        device="GPU-1",
        since=rfc3339(since_s),
        fault_class="gpu-lost",
        reason="Xid79",
        evidence="Xid79: GPU has fallen off the bus",
        condition="polyreme.dev/GPU",
        owner="policy/gpus",
        rule="fault table",
    )
    found = Incident(name=name_of(node, since_s), spec=spec)
    found = with_step(found, "Quarantined", since_s, "quarantined by policy gpus (the fault table): gpu-lost, Xid79")
    job = IncidentJob(
        uid="u",
        namespace="a",
        name="b",
        devices=64,
        stopped_at=rfc3339(since_s + 1.0),
        resumed_at=rfc3339(since_s + 46.0),
        repeated_steps=3,
        outcome="Resumed",
        lost_seconds=3_600,
    )
    return with_jobs(found, [job]).with_status(state="repairing", **status)


async def _cluster(*incidents: Incident) -> EmbeddedCluster:
    numbers = iter(range(1000))
    cluster = EmbeddedCluster(Store(new_uid=lambda: f"{next(numbers):08x}", now_s=lambda: NOW_S))
    for each in incidents:
        await cluster.create(each.manifest())
        ref = ObjectRef(kind="NodeIncident", name=each.name)
        await cluster.patch(ref, each.status_patch(), subresource=STATUS_SUBRESOURCE)
    return cluster


async def test_incidents_are_listed_and_one_is_described_in_sentences() -> None:
    old = _incident("a", NOW_S - 5 * DAY_S, ended_at=rfc3339(NOW_S - 4 * DAY_S), ended="Healthy").with_status(
        state="ended"
    )
    new = _incident("a.example.com", NOW_S - 1_800.0)
    cluster = await _cluster(new, old)
    found = await views.read_incidents(cluster)
    assert [each.name for each in found] == [old.name, new.name]
    assert views.chosen(found, node="a", since_s=None, now_s=NOW_S) == [found[0]]
    assert views.chosen(found, node="4c4c4544", since_s=DAY_S, now_s=NOW_S) == [found[1]]
    assert views.row_of(found[1], NOW_S)[1:] == (
        "a.example.com", "gpu-lost", "Xid79", "repairing", "2027-01-15T07:30:00Z", "30 min 00 s", "1.00",
    )  # fmt: skip
    told = views.story_of(await views.read_incident(cluster, new.name), NOW_S)
    text = "\n".join([*told.head, *(" ".join(step) for step in told.steps), *told.jobs, told.end])
    assert (
        text
        == """\
Node a.example.com left service at 2027-01-15T07:30:00Z; the incident has lasted 30 min 00 s and is open.
Cause: gpu-lost, Xid79, on device GPU-1, shown by the condition polyreme.dev/GPU.
Evidence: Xid79: GPU has fallen off the bus
Taken out by policy/gpus (rule: fault table). Machine: 4c4c4544.
2027-01-15T07:30:00Z Quarantined quarantined by policy gpus (the fault table): gpu-lost, Xid79
a/b: stopped at 2027-01-15T07:30:01Z, trained again after 45 s; 3 steps were repeated; 1.00 device-hours on 64 devices
It is open: kubectl polyreme nodes says what would bring a.example.com back."""
    )
    assert views.story_of(found[0], NOW_S).end == "The node was healthy again at 2027-01-11T08:00:00Z."
    with pytest.raises(NotFoundError, match=r"no incident .*did you mean"):
        await views.read_incident(cluster, f"{new.name}x")


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("30m", 1_800.0), ("24h", DAY_S), ("7d", 7 * DAY_S)])
def test_lengths_of_time_are_read(text: str, seconds: float) -> None:
    assert views.seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "1.5h", "-1h", "9999999999h", "999999d", "1\u0662h"])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfigError, match="--since is refused"):
        views.seconds_of(text)
