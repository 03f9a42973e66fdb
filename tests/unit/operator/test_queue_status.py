"""What the statuses of queues and of the topology show, and when it is written."""

import dataclasses

import pytest

from polyreme_api.times import rfc3339
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.cache.usage import UsageLedger
from polyreme_operator.placement.topology import arrange
from polyreme_operator.publishing.pending_reasons import PendingReasons
from polyreme_operator.publishing.queue_status import queue_statuses, topology_status
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.types.actions import WriteQueueStatus
from polyreme_operator.types.inventory import HOST_LEVEL, LevelView
from polyreme_operator.types.queues import QueueView
from polyreme_operator.types.views import TopologyView
from tests.unit.operator.operator_scenes import NOW_S, admitted, job
from tests.unit.operator.queue_scenes import GPU, queue

RACKS = (LevelView(name="rack", node_label="rack"),)


def test_a_topology_says_since_when_it_is_in_order() -> None:
    nodes = {"a": {"rack": "r", HOST_LEVEL: "a"}}
    view = TopologyView(name="default", levels=RACKS)
    (first,) = topology_status(view, arrange(nodes, RACKS), now_s=NOW_S)
    assert first.status["conditions"][0]["lastTransitionTime"] == rfc3339(NOW_S)
    written = dataclasses.replace(view, status=first.status)
    assert topology_status(written, arrange(nodes, RACKS), now_s=NOW_S + 60) == [], "nothing has changed"
    more = arrange({**nodes, "b": {"rack": "r", HOST_LEVEL: "b"}}, RACKS)
    (second,) = topology_status(dataclasses.replace(written, generation=2), more, now_s=NOW_S + 60)
    assert second.status["conditions"][0]["lastTransitionTime"] == rfc3339(NOW_S)
    (broken,) = topology_status(dataclasses.replace(written, generation=3), arrange({}, RACKS), now_s=NOW_S + 90)
    condition = broken.status["conditions"][0]
    assert (condition["status"], condition["lastTransitionTime"]) == ("False", rfc3339(NOW_S + 90))


def test_a_queue_shows_its_running_jobs_and_what_they_use_of_scarce_or_limited_resources() -> None:
    views = {"default": queue("default", 4), "free": queue("free")}
    tree = QueueTree.of(list(views.values()))
    jobs = JobIndex(UsageLedger(NodeTable()))
    jobs.put(admitted(job()))
    used = {("default", GPU): 2, ("default", "cpu"): 500, ("free", "example.com/fpga"): 1, ("free", "cpu"): 500}
    writes = queue_statuses(views, tree, jobs, used, PendingReasons(jobs), now_s=NOW_S)
    found = {write.ref.name: write.status for write in writes}
    assert found["default"]["admitted"] == 1
    assert [(each["resource"], each["used"]) for each in found["default"]["usage"]] == [(GPU, 2)]
    assert [each["resource"] for each in found["free"]["usage"]] == ["example.com/fpga"], "no queue limits it"


@pytest.mark.parametrize(
    ("mine", "offered", "status", "reason", "words"),
    [
        (queue("q", 4), {GPU, "cpu"}, "True", "Named", ""),
        (queue("q", 4), set(), "True", "Named", ""),
        (
            queue("q", 4),
            {GPU, "example.com/fpga"},
            "False",
            "UnnamedUnlimited",
            "jobs may use example.com/fpga without",
        ),
        (queue("q"), {GPU}, "False", "UnnamedUnlimited", f"jobs may use {GPU} without limit"),
        (queue("q", refuses_unnamed=True), {GPU}, "True", "UnnamedRefused", f"jobs that request {GPU} are refused"),
        (queue("q", None, "top"), {GPU}, "True", "Named", ""),
        (queue("q", 4), {"nvidia.com/gpus"}, "False", "UnknownResource", "did you mean nvidia.com/gpus?"),
        (queue("q", 4), {"cpu"}, "False", "UnknownResource", f"no node offers {GPU}, which spec.quotas names"),
    ],
)
def test_a_queue_says_which_devices_it_does_not_limit_and_warns_once(
    mine: QueueView, offered: set[str], status: str, reason: str, words: str
) -> None:
    views = {"q": mine, "top": queue("top", 8)}
    jobs = JobIndex(UsageLedger(NodeTable()))

    def written(seen: dict[str, QueueView]) -> list[WriteQueueStatus]:
        tree = QueueTree.of(list(seen.values()))
        found = queue_statuses(seen, tree, jobs, {}, PendingReasons(jobs), now_s=NOW_S, offered=frozenset(offered))
        return [write for write in found if write.ref.name == "q"]

    (first,) = written(views)
    (condition,) = (each for each in first.status["conditions"] if each["type"] == "ResourcesNamed")
    assert (condition["status"], condition["reason"]) == (status, reason)
    assert words in condition["message"]
    assert [event.reason for event in first.events] == ([reason] if status == "False" else [])
    assert written({**views, "q": dataclasses.replace(mine, status=first.status)}) == []
